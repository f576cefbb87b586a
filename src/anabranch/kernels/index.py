"""Lookups in the hash index: from a batch of keys to row numbers.

The layout of slots, directory and row records is described in :mod:`anabranch.kernels.segments`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel
from anabranch.kernels._prefetch import prefetch
from anabranch.kernels.segments import (
    DEAD,
    HALF,
    LEAST_LOG,
    LIVE,
    LOADS,
    LOW,
    SEGMENTS,
    SHIFT,
    STATE,
    TAIL,
    resize,
    tag_of,
)

Array = npt.NDArray[Any]

_uint: Any = np.uint64
_int: Any = np.int64  # as Any, so that its results count as int for the type checker

_NONE, _ONE = np.uint64(0), np.uint64(1)
_LIVE, _DEAD = np.uint64(LIVE), np.uint64(DEAD)
_OFFSET, _LOG = np.uint64(8), np.uint64(255)
_BLOCK = 32
_AHEAD = 8


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
        row = slot & LOW
        at = (row - _ONE) * width
        if (
            slot >> HALF == tag
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
            entry = _uint(directory[tag >> SHIFT])
            mask = (_ONE << (entry & _LOG)) - _ONE
            tags[j], bases[j], masks[j], places[j] = tag, entry >> _OFFSET, mask, tag & mask
            prefetch(slots, _int((entry >> _OFFSET) + (tag & mask)))
        for j in range(size):
            base, mask, place, tag = bases[j], masks[j], places[j], tags[j]
            slot = slots[base + place]
            while slot != _NONE and slot >> HALF != tag:
                place = (place + _ONE) & mask
                slot = slots[base + place]
            places[j] = place
            rows[j] = slot & LOW
            prefetch(head, _int(((slot & LOW) - _ONE) * step))
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
                and head[at + _ONE] & STATE == _LIVE
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
                    if row != _NONE and head[(row - _ONE) * step + _ONE] & STATE == _LIVE:
                        out[i] = _int(row) - 1
                if out[i] < 0:
                    missing[found] = i
                    found += 1
        before = found
        low += size
    return found


@kernel
def _write(
    head: Array,
    width: Any,
    row: Any,
    heap: Array,
    heap_words: Array,
    here: Any,
    hashes: Array,
    groups: Array,
    words: Array,
    starts: Array,
    lens: Array,
    data: Array,
    i: Any,
) -> Any:
    """Write the record of key i as that of a row; returns the place behind it in the heap."""
    at = row * width
    head[at] = hashes[i]
    head[at + _ONE] = (_uint(groups[i]) << _uint(2)) | _LIVE
    for w in range(words.shape[1]):
        head[at + _uint(2 + w)] = words[i, w]
    if lens.shape[1] == 0:
        return here
    at += _uint(2 + words.shape[1])
    head[at] = _uint(here)
    length = 0
    for k in range(lens.shape[1]):
        part = _int(lens[i, k])
        head[at + _uint(1 + k)] = _uint(part + 1)
        start = starts[i, k]
        for b in range(part):
            heap[here + 8 + length + b] = data[start + b]
        length += max(part, 0)
    heap_words[here >> 3] = (_uint(length) << HALF) | row
    return here + 8 + ((length + 7) & ~7)


@kernel
def append(
    head: Array,
    width: int,
    heap: Array,
    heap_words: Array,
    hashes: Array,
    groups: Array,
    words: Array,
    starts: Array,
    lens: Array,
    data: Array,
    row: int,
    here: int,
) -> int:
    """Write records one after the other; returns the place in the heap behind them."""
    for i in range(hashes.shape[0]):
        here = _write(
            head, _uint(width), _uint(row + i), heap, heap_words, here,
            hashes, groups, words, starts, lens, data, _uint(i),
        )  # fmt: skip
    return here


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
    first, rows, unused, here, births, revivals, moves = cursor[:7]
    step = _uint(width)
    total = missing.shape[0]
    complete = True
    for m in range(first, total):
        first = m
        if m + _AHEAD < total:
            ahead = tag_of(hashes[missing[m + _AHEAD]])
            entry = _uint(directory[ahead >> SHIFT])
            mask = (_ONE << (entry & _LOG)) - _ONE
            prefetch(slots, _int((entry >> _OFFSET) + (ahead & mask)))
            if unused > _AHEAD:
                prefetch(head, free[unused - _AHEAD] * width)
        i = _uint(missing[m])
        tag = tag_of(hashes[i])
        segment = _int(tag >> SHIFT)
        entry = _uint(directory[segment])
        log = _int(entry & _LOG)
        if directory[SEGMENTS + segment] + 1 > LOADS[segment] * (1 << log) or log < LEAST_LOG:
            grown = max(log + 1, LEAST_LOG)
            if directory[TAIL] + (2 << grown) > slot_limit:
                complete = False
                break
            outgrown[moves, 0] = _int(entry >> _OFFSET)
            outgrown[moves, 1] = outgrown[moves, 0] + ((1 << log) if log > 0 else 0)
            moves += 1
            resize(slots, directory, segment, grown)
            entry = _uint(directory[segment])
        base = entry >> _OFFSET
        mask = (_ONE << (entry & _LOG)) - _ONE
        place = tag & mask
        slot = slots[base + place]
        while slot != _NONE and slot >> HALF != tag:
            place = (place + _ONE) & mask
            slot = slots[base + place]
        if slot != _NONE:
            place, slot = _probe(
                slots, base, mask, place, tag,
                head, step, heap, hashes, words, starts, lens, data, i,
            )  # fmt: skip
        if slot != _NONE:
            row = slot - _ONE
            if head[row * step + _ONE] & STATE == _DEAD:
                revived[revivals] = row
                revivals += 1
        else:
            if unused > 0:
                unused -= 1
                row = _uint(free[unused])
            else:
                row = _uint(rows)
                rows += 1
            here = _write(
                head, step, row, heap, heap_words, here,
                hashes, groups, words, starts, lens, data, i,
            )  # fmt: skip
            slots[base + place] = (tag << HALF) | (row + _ONE)
            directory[SEGMENTS + segment] += 1
            born[births] = row
            births += 1
        out[i] = row
        first = m + 1
    cursor[0], cursor[1], cursor[2], cursor[3] = first, rows, unused, here
    cursor[4], cursor[5], cursor[6] = births, revivals, moves
    return complete
