"""The hash index: from keys to row numbers.

Open addressing with linear probing, cut into segments by the top bits of a 32-bit tag that is
derived from the hash. A slot is ``tag << 32 | row + 1``, 0 when empty. The low bits of the tag are
the position, so a segment is copied into a larger one without looking at any row. Each segment
grows on its own, at a load that differs from segment to segment: a growing table rehashes a few
segments in every batch and never many at once.

``directory`` holds one word per segment (offset of its first slot << 8 | log2 of its slots, 0 if it
has none), then the number of entries of each, then the two words of :data:`TAIL` and
:data:`REHASHED`. ``head`` is the row records, ``width`` words each:
``hash, group << 2 | state, words..., start of the key's record in the heap, lengths + 1...``
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel
from anabranch.kernels._prefetch import prefetch

Array = npt.NDArray[Any]

_int: Any = np.int64  # as Any, so that its results count as int for the type checker

SEGMENT_BITS = 10
SEGMENTS = 1 << SEGMENT_BITS
TAIL = 2 * SEGMENTS
REHASHED = TAIL + 1
DIRECTORY_WORDS = TAIL + 2

FREE, LIVE, DEAD = 0, 1, 2

_SHIFT = np.uint64(32 - SEGMENT_BITS)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LEAST_LOG = 3
_PAGE_SLOTS = 512
_BLOCK = 32
_LOADS = 0.375 * 2.0 ** (np.arange(SEGMENTS) / SEGMENTS)


@kernel
def tag_of(hash_: Any) -> Any:
    """The tag of a hash. Key groups are a remainder of the hash, so its own low bits do not do:
    all keys of one group share them."""
    return (hash_ * _GOLDEN) >> _HALF


@kernel
def _equal(
    head: Array,
    at: int,
    heap: Array,
    hash_: Any,
    words: Array,
    starts: Array,
    lens: Array,
    data: Array,
    i: int,
) -> bool:
    """Whether the row record at this word of ``head`` has key i of the batch."""
    if head[at] != hash_:
        return False
    count = words.shape[1]
    for w in range(count):
        if head[at + 2 + w] != words[i, w]:
            return False
    parts = lens.shape[1]
    if parts == 0:
        return True
    at += 2 + count
    here = _int(head[at]) + 8
    for k in range(parts):
        length = _int(lens[i, k])
        if _int(head[at + 1 + k]) != length + 1:
            return False
        start = starts[i, k]
        differ = np.uint8(0)
        for b in range(length):
            differ |= heap[here + b] ^ data[start + b]
        if differ != 0:
            return False
        here += max(length, 0)
    return True


@kernel
def find(
    slots: Array,
    directory: Array,
    head: Array,
    width: int,
    heap: Array,
    hashes: Array,
    words: Array,
    starts: Array,
    lens: Array,
    data: Array,
    out: Array,
    missing: Array,
) -> int:
    """Look up a batch: row or -1 into ``out``, positions of the -1 into ``missing``.

    Works in small blocks, each in steps, so that the cache misses of a block overlap.
    """
    found = 0
    tags = np.empty(_BLOCK, np.uint64)
    bases = np.empty(_BLOCK, np.int64)
    masks = np.empty(_BLOCK, np.int64)
    places = np.empty(_BLOCK, np.int64)
    parts = lens.shape[1]
    start_at = 2 + words.shape[1]
    for low in range(0, hashes.shape[0], _BLOCK):
        size = min(_BLOCK, hashes.shape[0] - low)
        for j in range(size):
            tag = tag_of(hashes[low + j])
            tags[j] = tag
            entry = directory[_int(tag >> _SHIFT)]
            bases[j] = entry >> 8
            masks[j] = (1 << (entry & 255)) - 1
            places[j] = -1
            if entry != 0:
                places[j] = _int(tag) & masks[j]
                prefetch(slots, bases[j] + places[j])
        for j in range(size):
            place = places[j]
            while place >= 0:
                slot = slots[bases[j] + place]
                if slot == 0:
                    place = -1
                elif slot >> _HALF == tags[j]:
                    prefetch(head, (_int(slot & _LOW) - 1) * width)
                    break
                else:
                    place = (place + 1) & masks[j]
            places[j] = place
        if parts > 0:
            for j in range(size):
                if places[j] >= 0:
                    row = _int(slots[bases[j] + places[j]] & _LOW) - 1
                    prefetch(heap, _int(head[row * width + start_at]) + 8)
        for j in range(size):
            place = places[j]
            row = -1
            while place >= 0:
                slot = slots[bases[j] + place]
                if slot == 0:
                    break
                if slot >> _HALF == tags[j]:
                    here = _int(slot & _LOW) - 1
                    if _equal(
                        head,
                        here * width,
                        heap,
                        hashes[low + j],
                        words,
                        starts,
                        lens,
                        data,
                        low + j,
                    ):
                        if head[here * width + 1] & np.uint64(3) == LIVE:
                            row = here
                        break
                place = (place + 1) & masks[j]
            out[low + j] = row
            if row < 0:
                missing[found] = low + j
                found += 1
    return found


@kernel
def _resize(slots: Array, directory: Array, segment: int, log: int) -> None:
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
                place = _int(slot >> _HALF) & (size - 1)
                while slots[base + place] != 0:
                    place = (place + 1) & (size - 1)
                slots[base + place] = slot
        directory[REHASHED] += directory[SEGMENTS + segment]
    directory[segment] = (base << 8) | log


@kernel
def insert(
    slots: Array,
    slot_limit: int,
    directory: Array,
    head: Array,
    width: int,
    heap: Array,
    heap_words: Array,
    free: Array,
    hashes: Array,
    groups: Array,
    words: Array,
    starts: Array,
    lens: Array,
    data: Array,
    missing: Array,
    cursor: Array,
    out: Array,
    born: Array,
    revived: Array,
    outgrown: Array,
) -> bool:
    """Give rows to the keys at ``missing``, from where ``cursor`` stands.

    ``cursor`` is: next position in missing, rows, free rows, place in the key heap, count of
    ``born`` rows, count of ``revived`` rows (dead ones whose key came again), count of pairs in
    ``outgrown`` (slots left behind). False when the index needs more than ``slot_limit`` slots.
    """
    count = words.shape[1]
    parts = lens.shape[1]
    total = missing.shape[0]
    for m in range(cursor[0], total):
        if m + 8 < total:
            ahead = tag_of(hashes[missing[m + 8]])
            entry = directory[_int(ahead >> _SHIFT)]
            prefetch(slots, (entry >> 8) + (_int(ahead) & ((1 << (entry & 255)) - 1)))
        i = missing[m]
        tag = tag_of(hashes[i])
        segment = _int(tag >> _SHIFT)
        entry = directory[segment]
        log = entry & 255
        size = 1 << log
        if entry == 0 or directory[SEGMENTS + segment] + 1 > _LOADS[segment] * size:
            log = max(log + 1, _LEAST_LOG)
            if directory[TAIL] + (2 << log) > slot_limit:
                cursor[0] = m
                return False
            if entry != 0:
                outgrown[cursor[6], 0] = entry >> 8
                outgrown[cursor[6], 1] = (entry >> 8) + size
                cursor[6] += 1
            _resize(slots, directory, segment, log)
            entry = directory[segment]
            size = 1 << log
        base = entry >> 8
        place = _int(tag) & (size - 1)
        row = -1
        while True:
            slot = slots[base + place]
            if slot == 0:
                break
            if slot >> _HALF == tag:
                here = _int(slot & _LOW) - 1
                if _equal(head, here * width, heap, hashes[i], words, starts, lens, data, i):
                    row = here
                    break
            place = (place + 1) & (size - 1)
        if row >= 0:
            if head[row * width + 1] & np.uint64(3) == DEAD:
                revived[cursor[5]] = row
                cursor[5] += 1
        else:
            if cursor[2] > 0:
                cursor[2] -= 1
                row = free[cursor[2]]
            else:
                row = cursor[1]
                cursor[1] += 1
            at = row * width
            head[at] = hashes[i]
            head[at + 1] = (np.uint64(groups[i]) << np.uint64(2)) | np.uint64(LIVE)
            for w in range(count):
                head[at + 2 + w] = words[i, w]
            if parts > 0:
                here = cursor[3]
                head[at + 2 + count] = np.uint64(here)
                length = 0
                for k in range(parts):
                    part = _int(lens[i, k])
                    head[at + 3 + count + k] = np.uint64(part + 1)
                    for b in range(part):
                        heap[here + 8 + length + b] = data[starts[i, k] + b]
                    length += max(part, 0)
                heap_words[here >> 3] = (np.uint64(length) << _HALF) | np.uint64(row)
                cursor[3] = here + 8 + ((length + 7) & ~7)
            slots[base + place] = (tag << _HALF) | np.uint64(row + 1)
            directory[SEGMENTS + segment] += 1
            born[cursor[4]] = row
            cursor[4] += 1
        out[i] = row
    cursor[0] = total
    return True


@kernel
def _slot_of(slots: Array, directory: Array, tag: Any, row: int) -> Any:
    """The position of a row's slot in its segment, -1 if it has none."""
    entry = directory[_int(tag >> _SHIFT)]
    if entry == 0:
        return -1
    mask = (1 << (entry & 255)) - 1
    place = _int(tag) & mask
    wanted = (tag << _HALF) | np.uint64(row + 1)
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
    for i in range(rows.shape[0]):
        tag = tag_of(head[rows[i] * width])
        hole = _slot_of(slots, directory, tag, rows[i])
        if hole < 0:
            continue
        removed += 1
        segment = _int(tag >> _SHIFT)
        base = directory[segment] >> 8
        mask = (1 << (directory[segment] & 255)) - 1
        place = (hole + 1) & mask
        while slots[base + place] != 0:
            slot = slots[base + place]
            home = _int(slot >> _HALF) & mask
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
            base = directory[_int(tag >> _SHIFT)] >> 8
            slots[base + place] = (tag << _HALF) | np.uint64(target[i] + 1)
            found += 1
    return found


@kernel
def plan(directory: Array, head: Array, width: int, rows: int) -> int:
    """Lay out an empty index with room for all rows that are not free. Returns its slots."""
    directory[:] = 0
    for row in range(rows):
        if head[row * width + 1] & np.uint64(3) != FREE:
            directory[SEGMENTS + _int(tag_of(head[row * width]) >> _SHIFT)] += 1
    for wide in (True, False):  # segments of a page and more first: they start at a page
        for segment in range(SEGMENTS):
            count = directory[SEGMENTS + segment]
            log = _LEAST_LOG
            while count > _LOADS[segment] * (1 << log):
                log += 1
            if count > 0 and ((1 << log) >= _PAGE_SLOTS) == wide:
                directory[segment] = (directory[TAIL] << 8) | log
                directory[TAIL] += 1 << log
    return int(directory[TAIL])


@kernel
def fill(slots: Array, directory: Array, head: Array, width: int, rows: int) -> None:
    """Enter all rows that are not free into the index that :func:`plan` laid out."""
    for row in range(rows):
        if head[row * width + 1] & np.uint64(3) != FREE:
            tag = tag_of(head[row * width])
            entry = directory[_int(tag >> _SHIFT)]
            mask = (1 << (entry & 255)) - 1
            place = _int(tag) & mask
            while slots[(entry >> 8) + place] != 0:
                place = (place + 1) & mask
            slots[(entry >> 8) + place] = (tag << _HALF) | np.uint64(row + 1)


@kernel
def shrink(
    slots: Array, slot_limit: int, directory: Array, first: int, last: int, outgrown: Array
) -> int:
    """Halve the sparse ones among some segments. Returns the pairs written to ``outgrown``."""
    count = 0
    for segment in range(first, last):
        entry = directory[segment]
        log = entry & 255
        sparse = directory[SEGMENTS + segment] < 0.25 * _LOADS[segment] * (1 << log)
        if log > _LEAST_LOG and sparse and directory[TAIL] + (2 << log) <= slot_limit:
            _resize(slots, directory, segment, log - 1)
            outgrown[count, 0] = entry >> 8
            outgrown[count, 1] = (entry >> 8) + (1 << log)
            count += 1
    return count
