"""Maintenance of a table: a bounded amount of work at the beginning of every version.

It changes committed state, which has no journal any more, so every changed word is written to an
undo log first. Index, timer lists and the free stack are derived and need no log.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from anabranch.kernels import rows as kernels
from anabranch.state.header import Counters
from anabranch.state.index import DEAD, FREE, LIVE
from anabranch.state.storage import Storage

_RELEASE_ROWS = 1 << 16
_COMPACT_FROM = 1 << 16
_COMPACT_ROWS = 1 << 15
_CLEAN_BYTES = 1 << 20
_LAST_TICK = (1 << 31) - 16

_HEAD = 0
"""Arrays in the undo log: the owners of the heaps, the first of which is the row records, then
the heaps themselves."""


class Upkeep(NamedTuple):
    """What was done at the beginning of a version."""

    compacted_rows: int = 0
    """By how many rows the table was made shorter."""
    cleaned_bytes: int = 0
    """How many bytes of heaps were looked through, and are free now."""


NO_UPKEEP = Upkeep()


def needed(storage: Storage, counters: Counters) -> bool:
    """Whether there is anything to do."""
    return (
        counters.queue_from < counters.queue_to
        or _can_compact(counters)
        or counters.tick > _LAST_TICK
        or storage.index.is_sparse(counters.live + counters.dead)
        or any(
            heap.needs_cleaning(its)
            for heap, its in zip(storage.heaps, counters.heaps, strict=True)
        )
    )


def run(storage: Storage, counters: Counters) -> Upkeep:
    """Do a bounded amount of it. The changed counters apply when the caller commits them."""
    storage.undo.clear()
    compacted = cleaned = 0
    if counters.tick > _LAST_TICK:
        _renumber(storage, counters)
    # Rows move before others are released, and so never into one whose release may be undone: its
    # key would be lost.
    if _can_compact(counters):
        before = counters.rows
        compact(storage, counters, _COMPACT_ROWS)
        compacted = before - counters.rows
    release(storage, counters, _RELEASE_ROWS + 2 * counters.changed)
    for which in range(len(storage.heaps)):
        if storage.heaps[which].needs_cleaning(counters.heaps[which]):
            head = counters.heaps[which].head
            clean(storage, counters, which, _CLEAN_BYTES + 4 * counters.appended)
            cleaned += counters.heaps[which].head - head
    entries = counters.live + counters.dead
    if storage.index.is_sparse(entries):
        storage.index.shrink(counters.version, entries, counters.rows)
    return Upkeep(compacted, cleaned)


def give_back(storage: Storage, counters: Counters, changed: int) -> None:
    """Free memory that the committed counters no longer cover.

    Lists keep room for as many rows as the last version ``changed``.
    """
    for heap, its in zip(storage.heaps, counters.heaps, strict=True):
        heap.release(its)
    if storage.capacity() > 2 * counters.rows + _COMPACT_FROM:
        storage.shrink_rows(counters.rows + counters.rows // 4)
    storage.free.trim(counters.free)
    storage.dirty.trim(max(counters.dirty_to, changed))
    storage.queue.trim(max(counters.queue_to, changed))


def move_lists_down(storage: Storage, counters: Counters) -> None:
    """Let the lists start at the beginning of their arrays again where nothing is overwritten."""
    dirty = storage.dirty.rows[counters.dirty_from : counters.dirty_to]
    if len(dirty) <= counters.dirty_from:
        counters.dirty_from, counters.dirty_to = 0, storage.dirty.write(0, dirty)
    queue = storage.queue.rows[counters.queue_from : counters.queue_to]
    if len(queue) <= counters.queue_from:
        counters.queue_from, counters.queue_to = 0, storage.queue.write(0, queue)


def release(storage: Storage, counters: Counters, most: int) -> None:
    """Free deleted rows whose deletion is in a checkpoint."""
    stop = min(counters.queue_to, counters.queue_from + most)
    queue = storage.queue.rows[counters.queue_from : stop]
    rows = np.empty(len(queue), np.int64)
    count = kernels.release(
        storage.head, storage.width, storage.marks, counters.clean, counters.rows, queue, rows
    )
    at = rows[:count] * storage.width
    storage.undo.keep(_HEAD, np.concatenate([at, at + 1]))
    freed = storage.change(rows[:count], DEAD, FREE)
    storage.heaps[0].drop_records(counters.heaps[0], freed)
    storage.index.remove(freed)
    kernels.place(storage.head, storage.width, freed, counters.free)
    counters.free = storage.free.write(counters.free, freed)
    counters.dead -= len(freed)
    counters.queue_from = stop


def _can_compact(counters: Counters) -> bool:
    # Lists of rows would have to follow the rows, so they must be empty.
    return (
        counters.free > max(_COMPACT_FROM, counters.rows // 2)
        and counters.dead == 0
        and counters.dirty_from == counters.dirty_to
    )


def compact(storage: Storage, counters: Counters, most: int) -> None:
    """Move the last rows into free ones before them, so that there are fewer rows."""
    width = storage.width
    first = max(counters.rows - most, counters.live)
    source = storage.in_state(LIVE, first, counters.rows)
    left = kernels.evict(
        storage.free.rows, counters.free, storage.head, width, first, counters.rows
    )
    target = storage.free.rows[left - len(source) : left].astype(np.int64)
    storage.undo.keep(_HEAD, target * width + 1)
    for which, heap in enumerate(storage.heaps):
        # Records name their row.
        some = heap.has_record(source)
        words = heap.record_words(source[some])
        storage.undo.keep(len(storage.heaps) + which, words)
        lengths = heap.words[words] & np.uint64(0xFFFFFFFF00000000)
        heap.words[words] = lengths | target[some].astype(np.uint64)
    storage.copy_rows(source, target)
    storage.index.retarget(source, target)
    if storage.timers is not None:
        storage.timers.replace(source, target)
    counters.rows = first
    counters.free = left - len(source)


def clean(storage: Storage, counters: Counters, which: int, most: int) -> None:
    """Append the oldest records of a heap that are in use again, and leave the others behind."""
    heap, its = storage.heaps[which], counters.heaps[which]
    rows, size, looked_at = heap.survey(its, storage.head, storage.width, most)
    storage.undo.keep(which, heap.owner.positions(rows))
    heap.move(its, rows, size)
    its.head += looked_at


def _renumber(storage: Storage, counters: Counters) -> None:
    """Start ticks from the beginning again, before they are too large for the marks."""
    storage.marks[: counters.rows] = 0
    storage.marks[storage.dirty.rows[counters.dirty_from : counters.dirty_to]] = 1
    counters.clean, counters.tick = 0, 1
