"""Batches: when a batch may run, with which slices, and what follows from its end.

A batch runs only if every group is served, and no operation needs the state between two batches. A
batch that failed because a process or state was lost runs again after a pause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from anabranch.protocols import catch_up, checkpoint, coverage, due, moving, offsets, read
from anabranch.protocols.events import BatchCommitted, BatchFailed, Cause
from anabranch.protocols.model import SliceId, serving
from anabranch.protocols.orders import SECOND, CancelBatch, RunBatch, Trim, Wake
from anabranch.protocols.query import Batch, Query
from anabranch.protocols.turn import Turn
from anabranch.state.groups import KeyGroups
from anabranch.units import NO_VERSION, Version

ATTEMPTS = 8
_FIRST_PAUSE, _LONGEST_PAUSE = SECOND // 10, 3 * SECOND
_MOST_KEPT = 200
"""The greatest number of batches whose sent rows are kept."""


def ask(turn: Turn, version: Version) -> None:
    """Spark wants to run a batch."""
    if version == turn.query.committed + 1:
        turn.change(batch=Batch(version))


def leave(turn: Turn, version: Version) -> None:
    """Spark does not want a batch any more."""
    if turn.query.batch is not None and turn.query.batch.version == version:
        if turn.query.running:
            catch_up.batch_failed(turn)
            checkpoint.batch_failed(turn)
        turn.change(batch=None, idle_since=turn.query.now)


def run(turn: Turn) -> None:
    """Run the batch that Spark asked for, if it may run now. Cancel one that cannot succeed."""
    query = turn.query
    batch = query.batch
    if batch is None:
        return
    if batch.fence is not None:
        if query.suspects and not batch.cancelled:
            turn.change(batch=replace(batch, cancelled=True))
            turn.send(CancelBatch(batch.version, batch.fence))
        return
    if held(query) or batch.not_before > query.now:
        return
    fence = turn.fence()
    if offsets.urgent(query) or not moving.postpones_checkpoints(query):
        captures = due.captures(turn)
    else:
        captures = catch_up.captures(turn)
    attempts = batch.attempts + 1
    batch = replace(batch, fence=fence, begun=query.now, attempts=attempts, cancelled=False)
    turn.change(batch=batch)
    turn.probe_soon()
    turn.send(
        RunBatch(
            batch.version,
            fence,
            query.arrangement,
            query.routed,
            tuple(serving(query.slices.values())),
            captures,
            deliver=batch.version > query.delivered,
        )
    )


def held(query: Query) -> bool:
    """Whether the stream is held, so that no batch may begin."""
    return bool(
        query.stopped
        or query.restart
        or query.recovery
        or query.suspects
        or checkpoint.holds(query)
        or read.holds(query)
        or moving.holds(query)
    )


def commit(turn: Turn, event: BatchCommitted) -> None:
    """A batch was committed."""
    batch = turn.query.batch
    if batch is None or batch.fence != event.fence or batch.version != event.version:
        return
    slices, sizes = dict(turn.query.slices), dict[SliceId, int]()
    for each in serving(turn.query.slices.values()):
        report = event.reports.get(each.id)
        if report is not None:
            sizes[each.id] = report.bytes
        if report is not None and each.leaving and report.left_to_shed == 0:
            slices[each.id] = replace(each, leaving=KeyGroups())
    turn.change(
        batch=None,
        idle_since=turn.query.now,
        committed=event.version,
        slices=slices,
        sizes=sizes,
    )
    _trim(turn, event.obsolete)
    catch_up.commit(turn, event.reports)
    checkpoint.commit(turn, event)


def fail(turn: Turn, event: BatchFailed) -> None:
    """A batch was not committed: run it again, if that may help."""
    batch = turn.query.batch
    if batch is None or batch.fence != event.fence:
        return
    if event.cause in (Cause.FENCED, Cause.ERROR):
        turn.stop(event.reason or event.cause.value)
        return
    turn.tell("batch failed", version=batch.version, attempt=batch.attempts, reason=event.reason)
    catch_up.batch_failed(turn)
    checkpoint.batch_failed(turn)
    attempts = batch.attempts
    if turn.query.suspects:
        attempts = 0  # it is known what was lost; the batch is not to blame
    elif attempts >= ATTEMPTS:
        turn.stop(f"batch {batch.version} failed {attempts} times: {event.reason}")
        return
    if event.cause is Cause.STATE_MISSING:
        serve = frozenset(each.id for each in serving(turn.query.slices.values()))
        named = serve.intersection(event.missing)
        turn.change(suspects=turn.query.suspects | (named or serve))
    later = turn.query.now + min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempts)
    turn.change(batch=Batch(batch.version, attempts, not_before=later))
    turn.send(Wake(later))


def trim(turn: Turn) -> None:
    """Trim the output buffers: drop sent rows that no slice needs any more."""
    query = turn.query
    trimmed: dict[str, Version] = {}
    anchors = coverage.anchors(query, {name: query.usable(name) for name in query.operators})
    for name in query.operators:
        oldest = min([min(anchors[name]), *moving.needs(query, name)])
        upto = Version(max(oldest, query.committed - _MOST_KEPT))
        trimmed[name] = upto
    _trim(turn, trimmed)


def _trim(turn: Turn, upto: Mapping[str, Version]) -> None:
    trimmed = dict(turn.query.trimmed)
    for name, version in upto.items():
        if version > trimmed.get(name, NO_VERSION):
            trimmed[name] = version
            turn.send(Trim(name, version))
    turn.change(trimmed=trimmed)
