"""Backups at upstream nodes: which node keeps the backups of which slice."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import xxhash

from anabranch.backup.policy import NodeLimits, limits_of
from anabranch.state.part import COPIES, Part, Shape
from anabranch.stores.address import StoreAddress
from anabranch.stores.peers import AT_PEERS
from anabranch.units import Duration, Size


@dataclass(frozen=True)
class Upstream:
    """Keep the backup of every instance at a node that sends rows to it.

    A hash chooses the node, which spreads the load. This needs a cluster of at least two nodes, and
    survives the loss of one node at a time. Backups stay on the disks of their nodes when the
    query stops.
    """

    capacity: Size | None = None
    """How much one node keeps for others at most, such as ``"64 GiB"``. None: the free space of its
    disk, minus 5 % of the disk."""
    timeout: Duration = "30 seconds"
    """How long a node may be silent, or a transfer stall, before the request counts as failed."""

    def __post_init__(self) -> None:
        limits_of("Upstream", self.capacity, self.timeout)

    def holders(
        self, owner: str, key: str, nodes: Collection[str], senders: Collection[str]
    ) -> tuple[str, ...]:
        """A node that sends rows to the owner, or any other node if fewer than two do."""
        upstream = senders if len(set(senders)) > 1 else nodes
        return (holder(key, owner, upstream),)

    @property
    def coding(self) -> None:
        """Nothing is coded."""
        return None

    def shape(self, holders: int) -> Shape:
        """Each has a copy."""
        return COPIES

    def survives(self, part: Part, owner: str, nodes: Collection[str]) -> bool:
        """Whether another node has it."""
        return part.available(set(nodes) - {owner})

    def substitutes(
        self, part: Part, owners: Collection[str], nodes: Collection[str]
    ) -> tuple[str, ...]:
        """None: what a node held is captured again."""
        return ()

    @property
    def where(self) -> StoreAddress:
        """The nodes of the query."""
        return AT_PEERS

    @property
    def limits(self) -> NodeLimits:
        """As the user has said."""
        return limits_of("Upstream", self.capacity, self.timeout)


def holder(key: str, own: str, upstream: Collection[str]) -> str:
    """The host that keeps the backups of a slice: never its own, unless there is no other.

    It is the host whose hash with the slice's key is the greatest. If a host is lost, only the
    backups that it kept move.

    >>> holder("counter/1-7", "a", ["a", "b"])
    'b'
    """
    others = sorted(set(upstream) - {own}) or [own]
    text = f"{key}@"
    return max(others, key=lambda host: xxhash.xxh3_64_intdigest((text + host).encode()))
