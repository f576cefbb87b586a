"""The protocol of backup policies: where parts are stored, and which nodes hold each part."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from anabranch.state.part import Part
from anabranch.stores.address import StoreAddress


@dataclass(frozen=True)
class AtNodes:
    """The nodes of the query keep the parts of each other. This needs a cluster."""

    capacity: int | None = None
    """The most bytes that one node keeps for others. None: what its disk has free, less a reserve
    of a twentieth of the disk."""
    silence: float = 30.0
    """Seconds for which a node may be silent, or a transfer stand still, before it has failed."""


class Backup(Protocol):
    """A backup policy: a plain value that says where the parts of a query are stored."""

    @property
    def where(self) -> StoreAddress | AtNodes:
        """The address of the store of the parts, which every process can open, or the nodes."""
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
