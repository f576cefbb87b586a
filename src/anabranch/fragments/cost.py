"""What it took to store parts, and to read them: sent along with the answer of whoever did it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transferred:
    """Bytes that went between a node and others, and for how many seconds some were on the way."""

    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Coded:
    """Bytes of states that were coded into fragments, or computed from them, in so many seconds."""

    data: int
    parity: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Standing:
    """What a save found of the nodes that take fragments and do not belong to the query."""

    nodes: int
    """How many could take a fragment of this owner,"""
    near: int
    """and how many there are beside its place."""
    data: int
    """The m with which the state was coded, which is less than was asked for on few nodes,"""
    parity: int
    """and the k."""
    repair: float
    """After so many seconds the fragments of a failed one are made again."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one request to a node took."""

    sent: Transferred = Transferred()
    received: Transferred = Transferred()
    encoded: tuple[Coded, ...] = ()
    recomputed: tuple[Coded, ...] = ()
    standing: Standing | None = None


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much time is in some of these spans, from one moment to another.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (7.0, 8.0)])
    4.0
    """
    total, upto = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, upto))
        upto = max(upto, end)
    return total
