"""The error of a local cluster."""

from anabranch.errors import AnabranchError


class ClusterFailed(AnabranchError):
    """A process of a local cluster did not start, is gone, or does not do what it was asked."""
