"""Backups at the nodes upstream: who keeps the state of whom."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import xxhash


@dataclass(frozen=True)
class Upstream:
    """Keep the backup of every instance at a node that sends rows to it.

    Which one is decided by a hash, so the load is spread. A cluster with at least two nodes is
    needed; the loss of one node at a time is survived. Backups stay on the disks of their nodes
    when the query stops.
    """


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
