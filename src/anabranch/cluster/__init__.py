"""A Spark cluster on one machine, for tests, demonstrations and benchmarks."""

from anabranch.cluster.agents import LocalAgents as LocalAgents
from anabranch.cluster.local import LocalCluster as LocalCluster
from anabranch.errors import ClusterFailed as ClusterFailed
