"""A Spark cluster on one machine, for tests, demonstrations and benchmarks."""

from anabranch.cluster.errors import ClusterFailed as ClusterFailed
from anabranch.cluster.local import LocalCluster as LocalCluster
