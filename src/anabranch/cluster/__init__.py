"""A Spark cluster on one machine, for tests, demonstrations and benchmarks."""

from anabranch.cluster.local import LocalCluster as LocalCluster
from anabranch.errors import ClusterFailed as ClusterFailed
