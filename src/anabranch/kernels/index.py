"""The hash index: from keys to row numbers.

Open addressing with linear probing, cut into segments by the top bits of a 32-bit tag that is
derived from the hash. A slot is ``tag << 32 | row + 1``, 0 when empty. The low bits of the tag are
the position, so a segment is copied into a larger one without looking at any row. Each segment
grows on its own, at a load that differs from segment to segment: a growing table rehashes a few
segments in every batch and never many at once.

``directory`` holds one word per segment (offset of its first slot << 8 | log2 of its slots; a
segment that has none reads as slot 0 alone, which stays empty), then the number of entries of
each, then the words of :data:`TAIL` and :data:`REHASHED`. ``head`` is the row
records, ``width`` words each:
``hash, group << 2 | state, words..., start of the key's record in the heap, lengths + 1...``
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

_SHIFT = np.uint64(32 - SEGMENT_BITS)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_NONE, _ONE = np.uint64(0), np.uint64(1)
_LIVE = np.uint64(LIVE)
_STATE = np.uint64(3)
_OFFSET, _LOG = np.uint64(8), np.uint64(255)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LEAST_LOG = 3
_PAGE_SLOTS = 512
FIRST_SLOT = _PAGE_SLOTS
_BLOCK = 32
_LOADS = 0.375 * 2.0 ** (np.arange(SEGMENTS) / SEGMENTS)


@kernel
def tag_of(hash_: Any) -> Any:
    """The tag of a hash. Key groups are a remainder of the hash, so its own low bits do not do:
    all keys of one group share them."""
    return (hash_ * _GOLDEN) >> _HALF


@kernel
def _equal_words(head: Array, at: Any, hashes: Array, words: Array, i: Any) -> Any:
    """Whether the row record at this word of ``head`` has hash and words of key i of the batch."""
    equal = head[at] == hashes[i]
    for w in range(words.shape[1]):
        equal &= head[at + _uint(2 + w)] == words[i, w]
    return equal


@kernel
def _equal_parts(
    head: Array, at: Any, heap: Array, starts: Array, lens: Array, data: Array, i: Any
) -> bool:
    """Whether the parts that the record describes from this word on are those of key i.

    Apart from :func:`_equal_words`, which is short enough to be inlined where this is not.
    """
    here = head[at] + _uint(8)
    for k in range(lens.shape[1]):
        length = _uint(lens[i, k] + 1)
        if head[at + _uint(1 + k)] != length:
            return False
        length -= _uint(length > 0)
        start = _uint(starts[i, k])
        differ = np.uint8(0)
        for b in range(length):
            differ |= heap[here + b] ^ data[start + b]
        if differ != 0:
            return False
        here += length
    return True


@kernel
def _probe(
    slots: Array,
    base: Any,
    mask: Any,
    place: Any,
    tag: Any,
    head: Array,
    width: Any,
    heap: Array,
    hashes: Array,
    words: Array,
    starts: Array,
    lens: Array,
    data: Array,
    i: Any,
) -> tuple[Any, Any]:
    """From this place on: the first empty slot, or the one with key i; and its row + 1, or 0."""
    parts_at = _uint(2 + words.shape[1])
    while True:
        slot = slots[base + place]
        if slot == _NONE:
            return place, slot
        row = slot & _LOW
        at = (row - _ONE) * width
        if (
            slot >> _HALF == tag
            and _equal_words(head, at, hashes, words, i)
            and (
                lens.shape[1] == 0 or _equal_parts(head, at + parts_at, heap, starts, lens, data, i)
            )
        ):
            return place, row
        place = (place + _ONE) & mask


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

    Works in small blocks, each in steps, so that the cache misses of a block overlap. Indices are
    unsigned throughout: signed ones may count from the end, and finding out costs time.
    """
    found = before = 0
    doubtful = False
    tags = np.empty(_BLOCK, np.uint64)
    bases = np.empty(_BLOCK, np.uint64)
    masks = np.empty(_BLOCK, np.uint64)
    places = np.empty(_BLOCK, np.uint64)
    rows = np.empty(_BLOCK, np.uint64)
    step = _uint(width)
    parts_at = _uint(2 + words.shape[1])
    total = _uint(hashes.shape[0])
    low = _uint(0)
    while low < total:
        size = min(_uint(_BLOCK), total - low)
        for j in range(size):
            tag = tag_of(hashes[low + j])
            entry = _uint(directory[tag >> _SHIFT])
            mask = (_ONE << (entry & _LOG)) - _ONE
            tags[j], bases[j], masks[j], places[j] = tag, entry >> _OFFSET, mask, tag & mask
            prefetch(slots, _int((entry >> _OFFSET) + (tag & mask)))
        for j in range(size):
            base, mask, place, tag = bases[j], masks[j], places[j], tags[j]
            slot = slots[base + place]
            while slot != _NONE and slot >> _HALF != tag:
                place = (place + _ONE) & mask
                slot = slots[base + place]
            places[j] = place
            rows[j] = slot & _LOW
            prefetch(head, _int(((slot & _LOW) - _ONE) * step))
        if lens.shape[1] > 0:
            for j in range(size):
                if rows[j] != _NONE:
                    prefetch(heap, _int(head[(rows[j] - _ONE) * step + parts_at]) + 8)
        for j in range(size):
            i = low + j
            at = (rows[j] - _ONE) * step
            if (
                rows[j] != _NONE
                and _equal_words(head, at, hashes, words, i)
                and (
                    lens.shape[1] == 0
                    or _equal_parts(head, at + parts_at, heap, starts, lens, data, i)
                )
                and head[at + _ONE] & _STATE == _LIVE
            ):
                out[i] = _int(rows[j]) - 1
            else:
                out[i] = -1
                missing[found] = i
                found += 1
                if rows[j] != _NONE:
                    doubtful = True
        if doubtful:
            # The first key with this tag was another, or it is dead: look on behind it.
            found = before
            doubtful = False
            for j in range(size):
                i = low + j
                if out[i] < 0 and rows[j] != _NONE:
                    _, row = _probe(
                        slots, bases[j], masks[j], places[j], tags[j],
                        head, step, heap, hashes, words, starts, lens, data, i,
                    )  # fmt: skip
                    if row != _NONE and head[(row - _ONE) * step + _ONE] & _STATE == _LIVE:
                        out[i] = _int(row) - 1
                if out[i] < 0:
                    missing[found] = i
                    found += 1
        before = found
        low += size
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
        spot, hit = _probe(
            slots, _uint(base), _uint(size - 1), tag & _uint(size - 1), tag,
            head, _uint(width), heap, hashes, words, starts, lens, data, _uint(i),
        )  # fmt: skip
        place, row = _int(spot), _int(hit) - 1
        if row >= 0:
            if head[row * width + 1] & _STATE == DEAD:
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
def clear(directory: Array) -> None:
    """Make an empty index. Segments without slots share the first one, which stays empty."""
    directory[:] = 0
    directory[TAIL] = FIRST_SLOT


@kernel
def plan(directory: Array, head: Array, width: int, rows: int) -> int:
    """Lay out an empty index with room for all rows that are not free. Returns its slots."""
    clear(directory)
    for row in range(rows):
        if head[row * width + 1] & _STATE != FREE:
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
        if head[row * width + 1] & _STATE != FREE:
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
    """Give fewer slots to the sparse ones among some segments of more than a page.

    Returns the pairs written to ``outgrown``.
    """
    count = 0
    for segment in range(first, last):
        entry = directory[segment]
        old = entry & 255
        log = old
        while (1 << log) > _PAGE_SLOTS and directory[SEGMENTS + segment] < 0.4 * _LOADS[segment] * (
            1 << log
        ):
            log -= 1
        if log < old and directory[TAIL] + (2 << log) <= slot_limit:
            _resize(slots, directory, segment, log)
            outgrown[count, 0] = entry >> 8
            outgrown[count, 1] = (entry >> 8) + (1 << old)
            count += 1
    return count
