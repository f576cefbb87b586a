"""The routing table of a node: for each prefix of its id, nodes that go on with another digit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from anabranch.ring.ids import COLUMNS, DIGITS, NodeId, digit, shared_digits


class RoutingTable:
    """Rows by the number of digits that a node has in common with the owner, columns by the next.

    A place keeps the node that was there first, until it is removed: this costs no messages, and
    every node that fits is one digit closer.

    >>> table = RoutingTable(NodeId(0xAB << 120), [NodeId(0xAC << 120), NodeId(0x12 << 120)])
    >>> table.toward(0xAC5 << 116) == 0xAC << 120
    True
    >>> table.toward(0xA5 << 120) is None
    True
    """

    __slots__ = ("_nodes", "_owner")

    def __init__(self, owner: NodeId, ids: Iterable[NodeId] = ()) -> None:
        self._owner = owner
        self._nodes: dict[int, NodeId] = {}
        for id in ids:
            self.add(id)

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._nodes.values())

    def __contains__(self, id: int) -> bool:
        return id != self._owner and self._nodes.get(self._place(id)) == id

    @property
    def places(self) -> set[tuple[int, int]]:
        """The rows and columns where a node is."""
        return {divmod(place, COLUMNS) for place in self._nodes}

    def wants(self, id: int) -> bool:
        """Whether the place of a node is free."""
        return id != self._owner and self._place(id) not in self._nodes

    def add(self, id: NodeId) -> bool:
        """Add a node if its place is free. Return whether it was."""
        if not self.wants(id):
            return False
        self._nodes[self._place(id)] = id
        return True

    def remove(self, id: int) -> bool:
        """Remove a node. Return whether it was here."""
        if id not in self:
            return False
        del self._nodes[self._place(id)]
        return True

    def row(self, row: int) -> list[NodeId]:
        """The nodes with this number of digits in common with the owner."""
        return [
            self._nodes[place]
            for place in range(row * COLUMNS, (row + 1) * COLUMNS)
            if place in self._nodes
        ]

    def rows(self) -> list[int]:
        """The rows that are in use."""
        return sorted({place // COLUMNS for place in self._nodes})

    def toward(self, key: int) -> NodeId | None:
        """The node with at least one digit more in common with a key than the owner."""
        return self._nodes.get(self._place(key)) if key != self._owner else None

    def _place(self, id: int) -> int:
        row = shared_digits(self._owner, id)
        assert row < DIGITS, "the owner has no place in its own table"
        return row * COLUMNS + digit(id, row)
