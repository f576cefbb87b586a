"""The hash index of a table: from keys to rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels import index as kernels
from anabranch.kernels import segments
from anabranch.state.files import Arena, Region
from anabranch.state.heap import Heap
from anabranch.state.keys import KeyBatch

Array = npt.NDArray[Any]

FREE, LIVE, DEAD = segments.FREE, segments.LIVE, segments.DEAD
"""States of a row. A dead row still has its key, and keeps it in the index, until the end of the
row is in a checkpoint: a key that comes again gets its row back."""

_SLOTS, _DIRECTORY = "index slots", "index directory"
_SHRINK_AT_ONCE = 64
_REBUILD_ROWS = 1 << 17
"""An index of at most this many rows is rebuilt in a few milliseconds."""
_SPARSE_SLOTS = 1 << 16
"""A smaller index is left as it is."""


class Index:
    """Finds and makes rows by key. It is derived from the row records and can be rebuilt."""

    def __init__(self, arena: Arena, head: Array, width: int, heap: Heap) -> None:
        self._arena = arena
        self._head, self._width, self._heap = head, width, heap
        self._slots = arena.array(_SLOTS)
        self._directory = arena.array(_DIRECTORY)

    @staticmethod
    def regions(max_rows: int) -> list[Region]:
        """The arrays of an index for a number of rows."""
        return [
            Region(_SLOTS, np.dtype(np.uint64), 16 * max_rows + 32 * segments.SEGMENTS),
            Region(_DIRECTORY, np.dtype(np.int64), segments.DIRECTORY_WORDS),
        ]

    def allocate(self) -> None:
        """Allocate the memory of an empty index."""
        self._arena.ensure(_DIRECTORY, segments.DIRECTORY_WORDS)
        self._arena.ensure(_SLOTS, segments.FIRST_SLOT)
        segments.clear(self._directory)

    @property
    def rehashed(self) -> int:
        """How many entries growing has moved since the index was made."""
        return int(self._directory[segments.REHASHED])

    def find(self, keys: KeyBatch, out: Array) -> Array:
        """Put the row of each key, or -1, into ``out``; returns the positions of the -1."""
        missing = np.empty(len(out), np.int64)
        count = kernels.find(
            self._slots,
            self._directory,
            self._head,
            self._width,
            self._heap.data,
            keys.hashes,
            keys.words,
            keys.starts,
            keys.lens,
            keys.data,
            out,
            missing,
        )
        return missing[:count]

    def insert(
        self, keys: KeyBatch, missing: Array, out: Array, free: Array, cursor: Array
    ) -> tuple[Array, Array]:
        """Give rows to the keys at ``missing``; returns rows that were made, and dead ones found.

        ``cursor`` holds the count of rows, of free rows, and the place in the key heap, and is
        moved on. Room for all of them must be there.
        """
        state = np.array([0, *cursor, 0, 0, 0], np.int64)
        born, revived = np.empty((2, len(missing)), np.int64)
        outgrown = np.empty((32 * segments.SEGMENTS, 2), np.int64)
        while not kernels.insert(
            self._slots,
            self._arena.allocated(_SLOTS),
            self._directory,
            self._head,
            self._width,
            self._heap.data,
            self._heap.words,
            free,
            keys.hashes,
            keys.groups,
            keys.words,
            keys.starts,
            keys.lens,
            keys.data,
            missing,
            state,
            out,
            born,
            revived,
            outgrown,
        ):
            self._make_room(int(state[1]))
        self._forget(outgrown[: state[6]])
        cursor[:] = state[1:4]
        return born[: state[4]], revived[: state[5]]

    def append(self, keys: KeyBatch, row: int, place: int) -> int:
        """Write the records of keys from a row and a place in the key heap on, out of the index.

        Returns the place behind them. Only :meth:`rebuild` enters them.
        """
        return kernels.append(
            self._head,
            self._width,
            self._heap.data,
            self._heap.words,
            keys.hashes,
            keys.groups,
            keys.words,
            keys.starts,
            keys.lens,
            keys.data,
            row,
            place,
        )

    def remove(self, rows: Array) -> None:
        """Take rows out; their records must still be as they were."""
        segments.remove(self._slots, self._directory, self._head, self._width, rows)

    def retarget(self, source: Array, target: Array) -> None:
        """Let the keys of source rows lead to target rows."""
        segments.retarget(self._slots, self._directory, self._head, self._width, source, target)

    def rebuild(self, rows: int) -> None:
        """Rebuild the index from the records of all rows that are not free."""
        self._arena.clear(_SLOTS)
        slots = segments.plan(self._directory, self._head, self._width, rows)
        self._arena.ensure(_SLOTS, slots)
        segments.fill(self._slots, self._directory, self._head, self._width, rows)

    def is_sparse(self, entries: int) -> bool:
        """Whether it has many more slots than it needs."""
        return self._size() > max(_SPARSE_SLOTS, 16 * entries)

    def shrink(self, turn: int, entries: int, rows: int) -> None:
        """Shrink the index, or some segments of a large one, chosen by ``turn``."""
        if max(entries, rows) < _REBUILD_ROWS:
            self.rebuild(rows)
            return
        first = turn * _SHRINK_AT_ONCE % segments.SEGMENTS
        last = first + _SHRINK_AT_ONCE
        self._make_room_for(int(self._sizes()[first:last].sum()))
        outgrown = np.empty((_SHRINK_AT_ONCE, 2), np.int64)
        limit = self._arena.allocated(_SLOTS)
        count = segments.shrink(self._slots, limit, self._directory, first, last, outgrown)
        self._forget(outgrown[:count])

    def entries(self) -> Array:
        """All rows in the index, sorted. For checks: looks at every slot."""
        found = []
        for entry in self._directory[: segments.SEGMENTS].tolist():
            if entry:
                slots = self._slots[entry >> 8 : (entry >> 8) + (1 << (entry & 255))]
                found.append((slots[slots != 0] & np.uint64(0xFFFFFFFF)).astype(np.int64) - 1)
        return np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)

    def _sizes(self) -> Array:
        entries = self._directory[: segments.SEGMENTS]
        return np.where(entries != 0, np.int64(1) << (entries & 255), 0)

    def _size(self) -> int:
        return int(self._sizes().sum())

    def _make_room(self, rows: int) -> None:
        if not self._make_room_for(4 * int(self._sizes().max(initial=16))):
            self.rebuild(rows)

    def _make_room_for(self, slots: int) -> bool:
        """Allocate slots behind those in use; False if the array was used up to its end."""
        goal = int(self._directory[segments.TAIL]) + slots
        if goal > self._arena.regions[_SLOTS].items:
            return False
        self._arena.ensure(_SLOTS, goal)
        return True

    def _forget(self, outgrown: Array) -> None:
        pages = outgrown[outgrown[:, 1] - outgrown[:, 0] >= segments.FIRST_SLOT]
        for first, last in pages.tolist():
            self._arena.forget(_SLOTS, first, last)
