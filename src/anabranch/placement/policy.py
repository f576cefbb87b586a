"""The placement axis: which instance runs on which node, and how many nodes are kept for later."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from anabranch.errors import AnabranchError

Placed = Mapping[str, Sequence[str]]
"""The hosts of each operator's instances."""


class NoNodes(AnabranchError):
    """There is no node to place an instance on."""


class Placement(Protocol):
    """A placement policy: a plain value that says where instances run.

    It is asked when the query starts, when an operator is scaled or rebalanced, and when nodes are
    lost. The same question must have the same answer.
    """

    def place(
        self, instances: Mapping[str, int], alive: Collection[str], before: Placed
    ) -> Mapping[str, Sequence[str]]:
        """The hosts of all instances, each on a node that is alive; :class:`NoNodes` without any.

        ``before`` are the hosts until now. Every instance that goes elsewhere has its state moved.
        """
        ...

    def missing(self, alive: Collection[str], placed: Placed) -> int:
        """How many nodes the cluster manager is to be asked for."""
        ...
