"""Backups at the nodes upstream: who keeps the state of whom."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import xxhash

from anabranch.errors import PlanError
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
        if self.capacity is not None:
            byte_count(self.capacity, what="Upstream: capacity")
        if not 0.1 <= self.timeout_seconds <= 3600:
            raise PlanError(
                f"Upstream: timeout={self.timeout!r}: it must be from 0.1 seconds to 1 hour"
            )

    @property
    def capacity_bytes(self) -> int | None:
        """The capacity in bytes."""
        return None if self.capacity is None else byte_count(self.capacity)

    @property
    def timeout_seconds(self) -> float:
        """The timeout in seconds."""
        return microseconds(self.timeout, what="Upstream: timeout") / 1e6


def holder(operator: str, instance: int, own: str, upstream: Collection[str]) -> str:
    """The host that keeps the backup of an instance: never its own, unless there is no other.

    Of all hosts the one whose hash with the instance is greatest, so that only the backups of a
    host that goes have to move.

    >>> holder("counter", 0, "a", ["a", "b"])
    'b'
    """
    others = sorted(set(upstream) - {own}) or [own]
    text = f"{operator}/{instance}@"
    return max(others, key=lambda host: xxhash.xxh3_64_intdigest((text + host).encode()))
