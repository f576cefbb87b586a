"""The slots of the hash index, and their upkeep.

Open addressing with linear probing, cut into segments by the top bits of a 32-bit tag that is
derived from the hash. A slot is ``tag << 32 | row + 1``, 0 when empty. The low bits of the tag are
the position, so a segment is copied into a larger one without looking at any row. Each segment
grows on its own, at a load that differs from segment to segment: a growing table rehashes a few
segments in every batch and never many at once.

``directory`` holds one word per segment (offset of its first slot << 8 | log2 of its slots; a
segment that has none reads as slot 0 alone, which stays empty), then the number of entries of
each, then the words of :data:`TAIL` and :data:`REHASHED`. ``head`` is the row records, ``width``
words each: ``hash, group << 2 | state, words..., start of the key's record in the heap,
lengths + 1...``
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel
from anabranch.kernels._prefetch import prefetch

Array = npt.NDArray[Any]

_uint: Any = np.uint64
_int: Any = np.int64  # as Any, so that its results count as int for the type checker

SEGMENT_BITS = 10
SEGMENTS = 1 << SEGMENT_BITS
TAIL = 2 * SEGMENTS
REHASHED = TAIL + 1
DIRECTORY_WORDS = TAIL + 2

FREE, LIVE, DEAD = 0, 1, 2

SHIFT = np.uint64(32 - SEGMENT_BITS)
HALF = np.uint64(32)
LOW = np.uint64(0xFFFFFFFF)
STATE = np.uint64(3)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LEAST_LOG = 3
_PAGE_SLOTS = 512
FIRST_SLOT = _PAGE_SLOTS
_AHEAD = 8
LOADS = 0.375 * 2.0 ** (np.arange(SEGMENTS) / SEGMENTS)


@kernel
def tag_of(hash_: Any) -> Any:
    """The tag of a hash. Key groups are a remainder of the hash, so its own low bits do not do:
    all keys of one group share them."""
    return (hash_ * _GOLDEN) >> HALF


@kernel
def resize(slots: Array, directory: Array, segment: int, log: int) -> None:
    """Move a segment to 2**log fresh slots at the tail, which are allocated and zero."""
    size = 1 << log
    step = min(size, _PAGE_SLOTS)
    base = (directory[TAIL] + step - 1) // step * step
    directory[TAIL] = base + size
    entry = directory[segment]
    if entry != 0:
        old = entry >> 8
        for i in range(old, old + (1 << (entry & 255))):
            slot = slots[i]
            if slot != 0:
                place = _int(slot >> HALF) & (size - 1)
                while slots[base + place] != 0:
                    place = (place + 1) & (size - 1)
                slots[base + place] = slot
        directory[REHASHED] += directory[SEGMENTS + segment]
    directory[segment] = (base << 8) | log


@kernel
def _fetch(slots: Array, directory: Array, hash_: Any) -> None:
    """Bring the slot near where a search for this hash would start."""
    tag = tag_of(hash_)
    entry = directory[_int(tag >> SHIFT)]
    prefetch(slots, (entry >> 8) + (_int(tag) & ((1 << (entry & 255)) - 1)))


@kernel
def _slot_of(slots: Array, directory: Array, tag: Any, row: int) -> Any:
    """The position of a row's slot in its segment, -1 if it has none."""
    entry = directory[_int(tag >> SHIFT)]
    if entry == 0:
        return -1
    mask = (1 << (entry & 255)) - 1
    place = _int(tag) & mask
    wanted = (tag << HALF) | np.uint64(row + 1)
    for _ in range(mask + 1):
        slot = slots[(entry >> 8) + place]
        if slot == wanted:
            return place
        if slot == 0:
            return -1
        place = (place + 1) & mask
    return -1


@kernel
def remove(slots: Array, directory: Array, head: Array, width: int, rows: Array) -> int:
    """Take rows out of the index, closing the gaps. Returns how many were there."""
    removed = 0
    count = rows.shape[0]
    for i in range(count):
        if i + 2 * _AHEAD < count:
            prefetch(head, rows[i + 2 * _AHEAD] * width)
            _fetch(slots, directory, head[rows[i + _AHEAD] * width])
        tag = tag_of(head[rows[i] * width])
        hole = _slot_of(slots, directory, tag, rows[i])
        if hole < 0:
            continue
        removed += 1
        segment = _int(tag >> SHIFT)
        base = directory[segment] >> 8
        mask = (1 << (directory[segment] & 255)) - 1
        place = (hole + 1) & mask
        while slots[base + place] != 0:
            slot = slots[base + place]
            home = _int(slot >> HALF) & mask
            if ((place - home) & mask) >= ((place - hole) & mask):
                slots[base + hole] = slot
                hole = place
            place = (place + 1) & mask
        slots[base + hole] = 0
        directory[SEGMENTS + segment] -= 1
    return removed


@kernel
def retarget(
    slots: Array, directory: Array, head: Array, width: int, source: Array, target: Array
) -> int:
    """Let the slots of source rows point to target rows. Returns how many were found."""
    found = 0
    for i in range(source.shape[0]):
        tag = tag_of(head[source[i] * width])
        place = _slot_of(slots, directory, tag, source[i])
        if place >= 0:
            base = directory[_int(tag >> SHIFT)] >> 8
            slots[base + place] = (tag << HALF) | np.uint64(target[i] + 1)
            found += 1
    return found


@kernel
def clear(directory: Array) -> None:
    """Make an empty index. Segments without slots share the first one, which stays empty."""
    directory[:] = 0
    directory[TAIL] = FIRST_SLOT


@kernel
def plan(directory: Array, head: Array, width: int, rows: int) -> int:
    """Lay out an empty index with room for all rows that are not free. Returns its slots."""
    clear(directory)
    for row in range(rows):
        if head[row * width + 1] & STATE != FREE:
            directory[SEGMENTS + _int(tag_of(head[row * width]) >> SHIFT)] += 1
    for wide in (True, False):  # segments of a page and more first: they start at a page
        for segment in range(SEGMENTS):
            count = directory[SEGMENTS + segment]
            log = LEAST_LOG
            while count > LOADS[segment] * (1 << log):
                log += 1
            if count > 0 and ((1 << log) >= _PAGE_SLOTS) == wide:
                directory[segment] = (directory[TAIL] << 8) | log
                directory[TAIL] += 1 << log
    return int(directory[TAIL])


@kernel
def fill(slots: Array, directory: Array, head: Array, width: int, rows: int) -> None:
    """Enter all rows that are not free into the index that :func:`plan` laid out."""
    for row in range(rows):
        if row + _AHEAD < rows:
            _fetch(slots, directory, head[(row + _AHEAD) * width])
        if head[row * width + 1] & STATE != FREE:
            tag = tag_of(head[row * width])
            entry = directory[_int(tag >> SHIFT)]
            mask = (1 << (entry & 255)) - 1
            place = _int(tag) & mask
            while slots[(entry >> 8) + place] != 0:
                place = (place + 1) & mask
            slots[(entry >> 8) + place] = (tag << HALF) | np.uint64(row + 1)


@kernel
def shrink(
    slots: Array, slot_limit: int, directory: Array, first: int, last: int, outgrown: Array
) -> int:
    """Give fewer slots to the sparse ones among some segments of more than a page.

    Returns the pairs written to ``outgrown``.
    """
    count = 0
    for segment in range(first, last):
        entry = directory[segment]
        old = entry & 255
        log = old
        while (1 << log) > _PAGE_SLOTS and directory[SEGMENTS + segment] < 0.4 * LOADS[segment] * (
            1 << log
        ):
            log -= 1
        if log < old and directory[TAIL] + (2 << log) <= slot_limit:
            resize(slots, directory, segment, log)
            outgrown[count, 0] = entry >> 8
            outgrown[count, 1] = (entry >> 8) + (1 << old)
            count += 1
    return count
