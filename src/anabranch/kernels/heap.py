"""Records of variable length in a ring of bytes.

A record is one word, ``length << 32 | row``, then its bytes, padded to whole words. The place of a
row's record is a word of another array, its *owner*: that word is at ``row * stride + at``, and the
record is in use exactly when the word points to it and the row's state says so. A cell of a value
column is two words: the place, and the length + 1 (0 for null).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel
from anabranch.kernels._prefetch import prefetch

Array = npt.NDArray[Any]

_int: Any = np.int64  # as Any, so that its results count as int for the type checker

NOBODY = 0xFFFFFFFF
"""The row of a record that only fills the ring up to its end."""

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@kernel
def append(
    heap: Array,
    heap_words: Array,
    place: int,
    cells: Array,
    rows: Array,
    starts: Array,
    lens: Array,
    data: Array,
) -> int:
    """Store values for rows from this place on. Returns by how much the bytes in use grew.

    A row named twice gets the last value.
    """
    grown = 0
    for i in range(rows.shape[0]):
        cell = 2 * rows[i]
        if cells[cell + 1] > 0:
            grown -= 8 + ((_int(cells[cell + 1]) + 6) & ~7)
        length = _int(lens[i])
        cells[cell + 1] = np.uint64(length + 1)
        if length < 0:
            continue
        cells[cell] = np.uint64(place)
        heap_words[place >> 3] = (np.uint64(length) << _HALF) | np.uint64(rows[i])
        for b in range(length):
            heap[place + 8 + b] = data[starts[i] + b]
        place += 8 + ((length + 7) & ~7)
        grown += 8 + ((length + 7) & ~7)
    return grown


@kernel
def in_use(cells: Array, rows: Array) -> int:
    """Bytes that the values of these rows take."""
    total = 0
    for i in range(rows.shape[0]):
        length = _int(cells[2 * rows[i] + 1]) - 1
        if length >= 0:
            total += 8 + ((length + 7) & ~7)
    return total


@kernel
def offsets(cells: Array, rows: Array, out: Array, valid: Array) -> None:
    """Where each value begins when they are put one after the other, and which are not null."""
    total = 0
    for i in range(rows.shape[0]):
        out[i] = total
        length = _int(cells[2 * rows[i] + 1]) - 1
        valid[i] = length >= 0
        total += max(length, 0)
    out[rows.shape[0]] = total


@kernel
def gather(heap: Array, cells: Array, rows: Array, at: Array, out: Array) -> None:
    """Copy the values of rows to the positions that :func:`offsets` gave."""
    count = rows.shape[0]
    for i in range(count):
        if i + 16 < count:
            prefetch(heap, _int(cells[2 * rows[i + 16]]) + 8)
        here = _int(cells[2 * rows[i]]) + 8
        start = at[i]
        for b in range(at[i + 1] - start):
            out[start + b] = heap[here + b]


@kernel
def survey(
    heap_words: Array,
    place: int,
    limit: int,
    owner: Array,
    stride: int,
    at: int,
    head: Array,
    width: int,
    keys: bool,
    rows: Array,
) -> tuple[int, int, int]:
    """Walk the records from one place to the first at or after a limit, and list those in use.

    Returns where it stopped, how many rows were listed, and the bytes of their records.
    """
    count = 0
    size = 0
    while place < limit:
        word = heap_words[place >> 3]
        row = _int(word & _LOW)
        step = 8 + ((_int(word >> _HALF) + 7) & ~7)
        if row != NOBODY:
            state = _int(head[row * width + 1] & np.uint64(3))
            word_at = row * stride + at
            # A null value keeps the place of the value before it.
            counts = state == 1 and owner[word_at + 1] > 0
            if keys:
                counts = state != 0
            if counts and _int(owner[word_at]) == place:
                rows[count] = row
                count += 1
                size += step
        place += step
    return place, count, size


@kernel
def move(heap_words: Array, place: int, owner: Array, stride: int, at: int, rows: Array) -> None:
    """Copy the records of rows to this place and on, and point their owners there."""
    for i in range(rows.shape[0]):
        old = _int(owner[rows[i] * stride + at]) >> 3
        words = 1 + ((_int(heap_words[old] >> _HALF) + 7) >> 3)
        new = place >> 3
        for w in range(words):
            heap_words[new + w] = heap_words[old + w]
        owner[rows[i] * stride + at] = np.uint64(place)
        place += words << 3
