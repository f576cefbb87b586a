"""The neighbours of a node on the ring: half of them on each side."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator

from anabranch.ring.ids import NodeId, clockwise, closest


class LeafSet:
    """The nodes that are next to a node, clockwise and counter-clockwise.

    In a ring of at most ``size`` other nodes these are all nodes, and each is on both sides.

    >>> leaves = LeafSet(NodeId(100), 4, map(NodeId, [90, 95, 101, 110, 150, 80]))
    >>> [int(id) for id in leaves.clockwise], [int(id) for id in leaves.counter_clockwise]
    ([101, 110], [95, 90])
    >>> leaves.covers(105), leaves.covers(111)
    (True, False)
    """

    __slots__ = ("_half", "_ids", "_offsets", "center", "size")

    def __init__(self, center: NodeId, size: int, ids: Iterable[NodeId] = ()) -> None:
        self.center, self.size = center, size
        self._half = size // 2
        # Clockwise from the center: the first half is one side, and the last half the other.
        self._offsets: list[int] = []
        self._ids: dict[int, NodeId] = {}
        for id in ids:
            self.add(id)

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[NodeId]:
        return (self._ids[offset] for offset in self._offsets)

    def __contains__(self, id: int) -> bool:
        return clockwise(self.center, id) in self._ids

    @property
    def clockwise(self) -> list[NodeId]:
        """The nodes with larger ids, nearest first."""
        return [self._ids[offset] for offset in self._offsets[: self._half]]

    @property
    def counter_clockwise(self) -> list[NodeId]:
        """The nodes with smaller ids, nearest first."""
        return [self._ids[offset] for offset in self._offsets[: -self._half - 1 : -1]]

    def wants(self, id: int) -> bool:
        """Whether a node belongs here and is not here."""
        offset = clockwise(self.center, id)
        if offset == 0 or offset in self._ids:
            return False
        if len(self._offsets) < self.size:
            return True
        return offset < self._offsets[self._half - 1] or offset > self._offsets[self._half]

    def best(self, ids: Iterable[NodeId]) -> set[NodeId]:
        """Those of some nodes that would be here if all of them were added.

        >>> leaves = LeafSet(NodeId(100), 2, [NodeId(90), NodeId(110)])
        >>> [int(id) for id in leaves.best([NodeId(105), NodeId(107), NodeId(120)])]
        [105]
        """
        wanted = {clockwise(self.center, id): id for id in ids if self.wants(id)}
        offsets = sorted([*self._offsets, *wanted])
        out = offsets[self._half : -self._half] if len(offsets) > self.size else ()
        return set(wanted.values()) - {wanted[offset] for offset in out if offset in wanted}

    def add(self, id: NodeId) -> NodeId | None:
        """Add a node if it belongs here. Return the one that does not belong here any more."""
        if not self.wants(id):
            return None
        offset = clockwise(self.center, id)
        insort(self._offsets, offset)
        self._ids[offset] = id
        if len(self._offsets) <= self.size:
            return None
        return self._ids.pop(self._offsets.pop(self._half))

    def remove(self, id: int) -> bool:
        """Remove a node. Return whether it was here."""
        offset = clockwise(self.center, id)
        if self._ids.pop(offset, None) is None:
            return False
        del self._offsets[bisect_left(self._offsets, offset)]
        return True

    def covers(self, key: int) -> bool:
        """Whether the node that is closest to a key is here, or is the center."""
        if len(self._offsets) < self.size:
            return True
        offset = clockwise(self.center, key)
        return offset <= self._offsets[self._half - 1] or offset >= self._offsets[self._half]

    def closest(self, key: int, avoid: Collection[int] = ()) -> NodeId:
        """The closest of these nodes and the center to a key. The center is never avoided."""
        if avoid:
            return closest(key, [self.center, *(id for id in self if id not in avoid)])
        at = bisect_left(self._offsets, clockwise(self.center, key))
        before = self._ids[self._offsets[at - 1]] if at else self.center
        after = self._ids[self._offsets[at]] if at < len(self._offsets) else self.center
        return closest(key, (before, after))
