"""The invariants of a table, for tests and diagnosis."""

from __future__ import annotations

import numpy as np

from anabranch.kernels.heap import NOBODY
from anabranch.state.header import Counters
from anabranch.state.heap import record_bytes
from anabranch.state.index import DEAD, FREE, LIVE
from anabranch.state.storage import Storage
from anabranch.state.timers import NEVER


def validate(storage: Storage, counters: Counters) -> None:
    """Raise AssertionError, with details, if an invariant is violated."""
    live = storage.in_state(LIVE, 0, counters.rows)
    dead = storage.in_state(DEAD, 0, counters.rows)
    free = storage.in_state(FREE, 0, counters.rows)
    for name, rows in (("live", live), ("dead", dead), ("free", free)):
        counted = getattr(counters, name)
        assert len(rows) == counted, f"{len(rows)} rows are {name}, the counter says {counted}"
    stack = np.sort(storage.free.rows[: counters.free])
    assert np.array_equal(stack, free), f"the free stack has {stack}, the free rows are {free}"
    places = storage.head[storage.free.rows[: counters.free].astype(np.int64) * storage.width]
    assert np.array_equal(places, np.arange(counters.free)), "free rows do not know their place"
    kept = np.sort(np.concatenate([live, dead]))
    entries = storage.index.entries()
    assert np.array_equal(entries, kept), f"the index has {entries}, the rows are {kept}"
    _validate_marks(storage, counters, dead)
    _validate_heaps(storage, counters)
    if storage.timers is not None:
        timed = live[storage.timers.times[live] != NEVER]
        listed = storage.timers.listed()
        assert np.array_equal(listed, timed), f"timer lists have {listed}, timers have {timed}"


def _validate_marks(storage: Storage, counters: Counters, dead: np.ndarray) -> None:
    dirty = np.sort(storage.dirty.rows[counters.dirty_from : counters.dirty_to])
    assert len(np.unique(dirty)) == len(dirty), "a row is twice in the list of changed rows"
    marked = np.flatnonzero(storage.marks[: counters.rows] > counters.clean)
    assert np.array_equal(dirty, marked), f"changed rows are {dirty}, marked are {marked}"
    waiting = storage.queue.rows[counters.queue_from : counters.queue_to]
    waiting = np.where(waiting < 0, -1 - waiting, waiting)
    shed = np.count_nonzero(storage.states(dirty.astype(np.int64)) == FREE)
    assert shed <= counters.shed, f"{shed} changed rows are free, {counters.shed} were shed"
    lost = np.setdiff1d(dead, np.concatenate([waiting, dirty]))
    assert len(lost) == 0, f"dead rows {lost} would never be freed"


def _validate_heaps(storage: Storage, counters: Counters) -> None:
    for which, (heap, its) in enumerate(zip(storage.heaps, counters.heaps, strict=True)):
        assert 0 <= its.live <= its.tail - its.head, f"heap {which}: {its}"
        at, live = its.head, 0
        while at < its.tail:
            rows, size, looked_at = heap.survey(its, storage.head, storage.width, its.tail - at)
            live += size
            words = heap.words[heap.record_words(rows)]
            named = (words & np.uint64(NOBODY)).astype(np.int64)
            assert np.array_equal(named, rows), f"heap {which}: records name {named}, not {rows}"
            at += looked_at
            its = type(its)(at, its.tail, its.live)
        assert live == its.live, f"heap {which} has {live} bytes in use, the counter says {its}"
        owners = storage.in_state(LIVE, 0, counters.rows)
        if heap.owner.keys:
            owners = np.concatenate([owners, storage.in_state(DEAD, 0, counters.rows)])
        owners = owners[heap.has_record(owners)]
        lengths = heap.words[heap.record_words(owners)] >> np.uint64(32)
        counted = record_bytes(lengths.astype(np.int64))
        assert counted == live, f"heap {which}: rows have {counted} bytes, records {live}"
