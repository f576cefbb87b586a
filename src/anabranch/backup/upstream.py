"""Backups at the nodes upstream: who keeps the state of whom."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import xxhash

from anabranch.backup.policy import NodeLimits
from anabranch.errors import PlanError
from anabranch.state.part import Part
from anabranch.stores.address import StoreAddress
from anabranch.stores.peers import AT_PEERS
from anabranch.units import Duration, Size, byte_count, microseconds


@dataclass(frozen=True)
class Upstream:
    """Keep the backup of every instance at a node that sends rows to it.

    Which one is decided by a hash, so the load is spread. A cluster with at least two nodes is
    needed; the loss of one node at a time is survived. Backups stay on the disks of their nodes
    when the query stops.
    """

    capacity: Size | None = None
    """The most that one node keeps for others, such as ``"64 GiB"``. None: what its disk has free,
    less a reserve of a twentieth of the disk."""
    timeout: Duration = "30 seconds"
    """How long a node may be silent, or a transfer stand still, before it counts as failed."""

    def __post_init__(self) -> None:
        if not 0.1 <= self.limits.silence <= 3600:
            raise PlanError(
                f"Upstream: timeout={self.timeout!r}: it must be from 0.1 seconds to 1 hour"
            )

    def holders(
        self, owner: str, key: str, nodes: Collection[str], senders: Collection[str]
    ) -> tuple[str, ...]:
        """One of the nodes that send rows to the owner of a slice, or else any other node."""
        upstream = senders if len(set(senders)) > 1 else nodes
        return (holder(key, owner, upstream),)

    def available(self, part: Part, nodes: Collection[str]) -> bool:
        """Whether one of the nodes has it."""
        return any(host in nodes for host in part.holders)

    @property
    def where(self) -> StoreAddress:
        """The nodes of the query."""
        return AT_PEERS

    @property
    def limits(self) -> NodeLimits:
        """As the user has said."""
        capacity = self.capacity
        return NodeLimits(
            None if capacity is None else byte_count(capacity, what="Upstream: capacity"),
            microseconds(self.timeout, what="Upstream: timeout") / 1e6,
        )


def holder(key: str, own: str, upstream: Collection[str]) -> str:
    """The host that keeps the backups of a slice: never its own, unless there is no other.

    Of all hosts the one whose hash with the slice's key is greatest, so that only the backups of a
    host that goes have to move.

    >>> holder("counter/1-7", "a", ["a", "b"])
    'b'
    """
    others = sorted(set(upstream) - {own}) or [own]
    text = f"{key}@"
    return max(others, key=lambda host: xxhash.xxh3_64_intdigest((text + host).encode()))
