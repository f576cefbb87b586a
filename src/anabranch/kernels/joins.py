"""Pairs of rows whose times are close, and dense numbering of what is buffered for a key.

A *bucket* is one side of one key: bucket ``2 * key + side``.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel

Array = npt.NDArray[Any]


@kernel
def next_slots(buckets: Array, counts: Array) -> Array:
    """Give each row the next free slot of its bucket; ``counts`` goes up with them."""
    slots = np.empty(buckets.shape[0], np.int64)
    for i in range(buckets.shape[0]):
        slots[i] = counts[buckets[i]]
        counts[buckets[i]] += 1
    return slots


@kernel
def arrange(buckets: Array, values: Array, count: int) -> tuple[Array, Array]:
    """Entries sorted by bucket, then value, then number; and where each bucket starts."""
    starts = np.zeros(count + 1, np.int64)
    for i in range(buckets.shape[0]):
        starts[buckets[i] + 1] += 1
    for bucket in range(count):
        starts[bucket + 1] += starts[bucket]
    ends = starts[:-1].copy()
    entries = np.empty(buckets.shape[0], np.int64)
    for i in range(buckets.shape[0]):
        entries[ends[buckets[i]]] = i
        ends[buckets[i]] += 1
    for bucket in range(count):
        start, end = starts[bucket], starts[bucket + 1]
        if end - start > 32:
            mine = entries[start:end].copy()
            entries[start:end] = mine[np.argsort(values[mine], kind="mergesort")]
            continue
        for at in range(start + 1, end):
            entry, place = entries[at], at
            while place > start and values[entries[place - 1]] > values[entry]:
                entries[place] = entries[place - 1]
                place -= 1
            entries[place] = entry
    return entries, starts


@kernel
def _first_from(times: Array, low: int, high: int, bound: int) -> int:
    while low < high:
        middle = (low + high) // 2
        if times[middle] < bound:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def match(
    times: Array, entries: Array, starts: Array, buckets: Array, lows: Array, highs: Array, old: int
) -> tuple[Array, Array]:
    """The pairs that new rows make with entries that came before them.

    Entries are numbered in order of arrival: ``old`` buffered ones, then the new rows themselves.
    ``entries`` holds their numbers sorted by bucket and time, ``times`` their times in that order,
    ``starts`` where each bucket begins. New row i looks into ``buckets[i]`` for times from
    ``lows[i]`` to ``highs[i]``. Returns the new row and the entry of each pair, by new row and then
    by time.
    """
    total = 0
    for turn in range(2):
        rows = np.empty(total, np.int64)
        partners = np.empty(total, np.int64)
        pairs = 0
        for i in range(buckets.shape[0]):
            end = starts[buckets[i] + 1]
            at = _first_from(times, starts[buckets[i]], end, lows[i])
            while at < end and times[at] <= highs[i]:
                if entries[at] < old + i:
                    if turn == 1:
                        rows[pairs] = i
                        partners[pairs] = entries[at]
                    pairs += 1
                at += 1
        total = pairs
    return rows, partners


@kernel
def close_gaps(slots: Array, starts: Array, counts: Array) -> tuple[Array, Array, Array]:
    """What to move so that each bucket is dense again once some of its slots are given up.

    The slots to give up are sorted inside each bucket, whose share of them begins at ``starts``.
    ``counts`` goes down to what is left. Returns three arrays: for each move its bucket, the slot
    to move, and the position in ``slots`` of the gap to move it into. What is not filled lies
    behind the last slot that is left.
    """
    buckets = np.empty(slots.shape[0], np.int64)
    sources = np.empty(slots.shape[0], np.int64)
    gaps = np.empty(slots.shape[0], np.int64)
    moves = 0
    for bucket in range(counts.shape[0]):
        start, end = starts[bucket], starts[bucket + 1]
        last = counts[bucket] - 1
        counts[bucket] -= end - start
        given_up = end - 1
        for gap in range(start, end):
            if slots[gap] >= counts[bucket]:
                break
            while given_up >= start and slots[given_up] == last:
                given_up -= 1
                last -= 1
            buckets[moves] = bucket
            sources[moves] = last
            gaps[moves] = gap
            moves += 1
            last -= 1
    return buckets[:moves].copy(), sources[:moves].copy(), gaps[:moves].copy()
