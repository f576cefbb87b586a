"""Strings and bytes of a table, in a ring buffer that is cleaned from its oldest end."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import StateError
from anabranch.kernels import heap as kernels
from anabranch.state.files import Arena, Region
from anabranch.state.header import HeapCounters
from anabranch.state.strings import MAX_BYTES, Strings, frozen, offset_bytes

Array = npt.NDArray[Any]

RING_BYTES = 1 << 37
_CLEAN_FROM = 1 << 18
"""A heap smaller than this is left alone."""


class Owner(NamedTuple):
    """The words with the positions of the rows' records."""

    words: Array
    stride: int
    at: int
    """The place of row r's record is at ``r * stride + at``, its length + 1 in the next word."""
    keys: bool
    """Whether every row has a record, dead ones too, as long as it is not free."""

    def positions(self, rows: Array) -> Array:
        """Where in ``words`` the word of each row is."""
        return rows * self.stride + self.at


class Heap:
    """One ring of records; its counters are kept by the table and handed in."""

    def __init__(self, arena: Arena, name: str, owner: Owner, ring: int = RING_BYTES) -> None:
        self._arena, self._name, self._ring = arena, name, ring
        self.owner = owner
        self.data = arena.array(name)
        self.words = self.data.view(np.uint64)

    @staticmethod
    def region(name: str, ring: int = RING_BYTES) -> Region:
        """The array of a heap."""
        return Region(name, np.dtype(np.uint8), ring)

    def reserve(self, counters: HeapCounters, size: int) -> int:
        """Allocate contiguous bytes behind the tail. Returns their start."""
        left = self._ring - counters.tail % self._ring
        if size > left:
            self._arena.ensure_ring(self._name, counters.tail + left + size)
            place = counters.tail % self._ring >> 3
            self.words[place] = np.uint64((left - 8) << 32 | kernels.NOBODY)
            counters.tail += left
        self._arena.ensure_ring(self._name, counters.tail + size)
        return counters.tail % self._ring

    def append(self, counters: HeapCounters, rows: Array, strings: Strings) -> int:
        """Store a value for each row; returns how many bytes were added."""
        size = record_bytes(strings.lens)
        place = self.reserve(counters, size)
        counters.live += kernels.append(
            self.data,
            self.words,
            place,
            self.owner.words,
            rows,
            frozen(strings.starts),
            frozen(strings.lens),
            frozen(strings.data),
        )
        counters.tail += size
        return size

    def get(self, rows: Array, kind: pa.DataType) -> pa.Array:
        """The values of rows as an Arrow array of this type."""
        at = np.empty(len(rows) + 1, np.int64)
        valid = np.empty(len(rows), np.bool_)
        kernels.offsets(self.owner.words, rows, at, valid)
        if at[-1] > MAX_BYTES:
            raise StateError(
                f"{len(rows)} values of {at[-1]} bytes are too many for one Arrow array; "
                "ask for fewer rows at a time"
            )
        data = np.empty(at[-1], np.uint8)
        kernels.gather(self.data, self.owner.words, rows, at, data)
        validity = None if valid.all() else pa.array(valid).buffers()[1]
        buffers = [validity, offset_bytes(kind, at), pa.py_buffer(data)]
        return pa.Array.from_buffers(kind, len(rows), buffers)

    def lengths(self, rows: Array) -> Array:
        """The length of the value of each row; 0 for a null."""
        found: Array = np.maximum(self.owner.words[2 * rows + 1].astype(np.int64) - 1, 0)
        return found

    def drop(self, counters: HeapCounters, rows: Array) -> None:
        """Make the values of rows null."""
        counters.live -= kernels.in_use(self.owner.words, rows)
        self.owner.words[2 * rows + 1] = 0

    def drop_records(self, counters: HeapCounters, rows: Array) -> None:
        """Count the records of rows as no longer in use."""
        some = rows[self.has_record(rows)]
        lengths = self.words[self.record_words(some)] >> np.uint64(32)
        counters.live -= record_bytes(lengths.astype(np.int64))

    def has_record(self, rows: Array) -> Array:
        """Which of the rows have a record here."""
        if self.owner.keys:
            return np.full(len(rows), self.owner.stride > 0)
        words = self.owner.words
        return np.asarray(words[self.owner.positions(rows) + 1] > 0)

    def record_words(self, rows: Array) -> Array:
        """Where the first word of each row's record is."""
        return self.owner.words[self.owner.positions(rows)].astype(np.int64) >> 3

    def needs_cleaning(self, counters: HeapCounters) -> bool:
        """Whether most of its memory is not in use."""
        used = counters.tail - counters.head
        return used > _CLEAN_FROM and 2 * counters.live < used

    def survey(
        self, counters: HeapCounters, head: Array, width: int, most: int
    ) -> tuple[Array, int, int]:
        """Look at the oldest records, up to ``most`` bytes.

        Returns the rows whose records are in use, the bytes of these, and the bytes looked at.
        """
        start = counters.head % self._ring
        end = min(start + min(most, counters.tail - counters.head), self._ring)
        rows = np.empty((end - start) // 8, np.int64)
        stop, count, size = kernels.survey(
            self.words, start, end, *self.owner[:3], head, width, self.owner.keys, rows
        )
        return rows[:count], size, stop - start

    def move(self, counters: HeapCounters, rows: Array, size: int) -> None:
        """Append the records of rows again, and use these from now on."""
        place = self.reserve(counters, size)
        kernels.move(self.words, place, *self.owner[:3], rows)
        counters.tail += size

    def release(self, counters: HeapCounters) -> None:
        """Free the memory behind the head."""
        self._arena.release_ring(self._name, counters.head)


def record_bytes(lens: Array) -> int:
    """The bytes of records with these lengths; those below 0 have none."""
    sizes = 8 + ((lens.astype(np.int64) + 7) & ~7)
    return int(sizes.sum(where=lens >= 0))
