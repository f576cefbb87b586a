"""The backup axis: which nodes hold the parts of which slice, and which store has their bytes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from anabranch.state.part import Part
from anabranch.stores.address import StoreAddress


@dataclass(frozen=True)
class NodeLimits:
    """What a node may keep for others, and how long it may be silent."""

    capacity: int | None = None
    """The most bytes that one node keeps for others. None: what its disk has free, less a reserve
    of a twentieth of the disk."""
    silence: float = 30.0
    """Seconds for which a node may be silent, or a transfer stand still, before it has failed."""


class Backup(Protocol):
    """A backup policy: a plain value that says where the parts of a query are stored."""

    @property
    def where(self) -> StoreAddress:
        """The store that has the parts; every process of the query can open it."""
        ...

    @property
    def limits(self) -> NodeLimits:
        """What is asked of the nodes; ``NodeLimits()`` suits a store that is elsewhere."""
        ...

    def holders(
        self, owner: str, key: str, nodes: Collection[str], senders: Collection[str]
    ) -> tuple[str, ...]:
        """The nodes that store a part of a slice. Empty for a store that survives all nodes.

        ``key`` identifies the slice, and ``owner`` is its node. ``nodes`` are all nodes, and
        ``senders`` are those that send rows to the slice.
        """
        ...

    def available(self, part: Part, nodes: Collection[str]) -> bool:
        """Whether a part can be read while only these nodes are alive."""
        ...
