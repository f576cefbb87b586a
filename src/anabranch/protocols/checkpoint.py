"""Checkpoints: captured with a batch, stored asynchronously, published when they are complete.

A checkpoint covers some operators or all. Each stored part can serve to recover or move its slice.
Once the parts make all operators at one version, the manifest of that version is published, and a
restart can begin from it.

:mod:`~anabranch.protocols.due` says what the next batch captures, and why;
:mod:`~anabranch.protocols.retention` what is kept of older checkpoints;
:mod:`~anabranch.protocols.offsets` when the stream waits for one.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.protocols import (
    adaptation,
    coverage,
    due,
    holders,
    offsets,
    pending,
    protect,
    retention,
)
from anabranch.protocols.events import BatchCommitted, Done, Failed, SliceReport
from anabranch.protocols.model import Published, serving
from anabranch.protocols.orders import (
    SECOND,
    Capture,
    Captured,
    CommandId,
    Drop,
    Publish,
    Store,
    Wake,
)
from anabranch.protocols.pending import PATIENCE, SHORT, Checkpoints, Current
from anabranch.protocols.query import Outstanding, Owner, Query
from anabranch.protocols.turn import Turn
from anabranch.state.part import Part
from anabranch.units import NO_VERSION, Version

_LONGEST_PAUSE = 30
"""The longest pause after failed checkpoints, in seconds. It grows with each failure in a row."""
_ATTEMPTS = 3
"""The attempts of a checkpoint by command."""


def commit(turn: Turn, event: BatchCommitted) -> None:
    """A batch is committed: store what it captured."""
    reports = event.reports
    mine, version = pending.of(turn.query), turn.query.committed
    names = tuple(turn.query.operators) or (due.NOTHING,)
    batches = {name: mine.batches.get(name, 0) + 1 for name in names}
    last = dict(mine.last)
    for name in mine.ordered:
        last[name], batches[name] = turn.query.now, 0
    changed = due.shares_changed(turn.query, reports)
    pending.change(
        turn,
        batches=batches,
        last=last,
        changed=changed,
        loads=event.loads,
        ordered=frozenset(),
    )
    told = {i: r for i, r in reports.items() if _is_mine(r)}
    if not (told or due.NOTHING in mine.ordered) or mine.current is not None:
        return
    operators = {turn.query.slices[i].operator for i in told}
    commands = mine.commands if operators == set(turn.query.operators) else ()
    pending.change(
        turn,
        current=Current(version, commands, turn.query.now, frozenset(operators)),
        wanted=mine.wanted - operators,
        commands=() if commands else mine.commands,
    )
    adaptation.captured(turn)
    for report in told.values():
        if report.captured is not None:
            _store(turn, report.captured)
        else:
            _fail(turn, report.not_captured or "there was no room for a capture")
    _go_on(turn)


def give_up(turn: Turn, command: CommandId) -> None:
    """Cancel the command for a checkpoint. The checkpoint may be taken all the same."""
    mine = pending.of(turn.query)
    if command not in mine.open:
        return
    pending.change(turn, commands=tuple(each for each in mine.commands if each != command))
    if mine.current is not None:
        left = tuple(each for each in mine.current.commands if each != command)
        pending.change(turn, current=replace(mine.current, commands=left))
    turn.end(command, "the command was cancelled by its caller")


def batch_failed(turn: Turn) -> None:
    """A batch failed: its captures do not count."""
    pending.change(turn, ordered=frozenset())


def look(turn: Turn) -> None:
    """Capture between two batches, if a checkpoint is wanted and no batch comes."""
    offsets.look(turn)
    query = turn.query
    mine, exhausted = pending.of(query), offsets.exhausted(query)
    everything = frozenset(query.operators if mine.commands or exhausted else ())
    wanted = mine.wanted | everything
    asked = wanted or mine.commands or exhausted  # a query may have no operators
    if not asked or mine.current is not None or query.running or query.suspects:
        return
    if query.recovery or query.restart or query.stopped or (query.moves and not exhausted):
        return
    if query.committed == NO_VERSION:
        for command in mine.commands:
            turn.end(command, result=NO_VERSION)
        pending.change(turn, wanted=frozenset(), commands=())
        return
    patience = SHORT if mine.commands and query.batch is None else PATIENCE
    if query.now < mine.not_before or not (exhausted or query.now >= mine.wanted_since + patience):
        return
    pending.change(
        turn,
        current=Current(query.committed, mine.commands, query.now, wanted, at_rest=True),
        wanted=frozenset(),
        commands=(),
    )
    _capture_at_rest(turn, wanted)
    _go_on(turn)


def _capture_at_rest(turn: Turn, operators: frozenset[str]) -> None:
    adaptation.adapt(turn)
    fence, query = turn.fence(), turn.query
    for each in serving(query.slices.values()):
        wanted = due.capture(query, each, due.LEAST)
        if each.operator in operators and wanted.base != query.committed:
            # At rest a table is not marked clean, so what it knows of changes stays as it is.
            wanted = replace(wanted, clean=False)
            order = Capture(wanted, each, query.committed, fence, query.size(each))
            turn.order(order, Owner.CHECKPOINT)
    if _capturing(turn.query):
        adaptation.captured(turn)


def answer(turn: Turn, waiting: Outstanding, event: Done | Failed) -> None:
    """The answer to an order of a checkpoint."""
    match waiting.order, event:
        case Capture(), Done(answer=Captured() as captured):
            _store(turn, captured)
        case Store(captured), Done(answer=Part() as part):
            holders.add_part(turn, part)
            current = pending.of(turn.query).current
            if current is not None:
                pending.change(turn, current=replace(current, bytes=current.bytes + part.bytes))
        case Store(captured), Failed(reason=reason):
            if captured.node in turn.query.nodes:
                turn.send(Drop(captured.node, files=(captured.file,)))
            _fail(turn, reason)
        case Publish(published), Done():
            _published(turn, published.version)
        case _, Failed(reason=reason):
            _fail(turn, reason)
    _go_on(turn)


def interrupt(turn: Turn) -> None:
    """State was lost: captures that are in progress between two batches fail."""
    current = pending.of(turn.query).current
    if current is not None and current.at_rest:
        turn.forget(Owner.CHECKPOINT)
        _fail(turn, "state was lost, and is recovered first")
        _go_on(turn)


def abandon(turn: Turn, reason: str) -> None:
    """The query is rolled back: cancel the checkpoint in progress.

    A version that is just being published is waited for, as nobody knows yet whether it exists.
    """
    mine = pending.of(turn.query)
    publishing = {
        number: waiting
        for number, waiting in turn.query.outstanding.items()
        if isinstance(waiting.order, Publish)
    }
    turn.forget(Owner.CHECKPOINT)
    turn.change(outstanding={**turn.query.outstanding, **publishing})
    if mine.current is not None:
        turn.tell("checkpoint failed", version=mine.current.version, reason=reason)
    # What a command asked for is begun again once the query runs.
    tries = {command: mine.tries.get(command, 0) + 1 for command in mine.open}
    for command in mine.open:
        if tries[command] >= _ATTEMPTS:
            turn.end(command, reason)
    kept = {command: failed for command, failed in tries.items() if failed < _ATTEMPTS}
    turn.change(
        checkpoints=Checkpoints(
            last=mine.last,
            wanted_since=turn.query.now,
            commands=tuple(kept),
            tries=kept,
            failures=mine.failures,
        )
    )


def holds(query: Query) -> bool:
    """Whether the stream is held: for captures, or because Spark's log would lose offsets."""
    return offsets.exhausted(query) or _capturing(query)


def _capturing(query: Query) -> bool:
    return any(isinstance(waiting.order, Capture) for waiting in query.outstanding.values())


def _is_mine(report: SliceReport) -> bool:
    return report.not_captured is not None or (
        report.captured is not None and report.captured.clean
    )


def _store(turn: Turn, captured: Captured) -> None:
    query = turn.query
    each = query.slices.get(captured.slice)
    if each is None or captured.node not in query.nodes:
        _fail(turn, f"the node of slice {captured.slice} was lost")
        return
    if not _at_rest(query):
        turn.put(replace(each, base=captured.version))
    turn.order(holders.store(query, captured, each), Owner.CHECKPOINT)


def _at_rest(query: Query) -> bool:
    current = pending.of(query).current
    return current is not None and current.at_rest


def _fail(turn: Turn, reason: str) -> None:
    current = pending.of(turn.query).current
    if current is not None and current.failure is None:
        pending.change(turn, current=replace(current, failure=reason))


def _go_on(turn: Turn) -> None:
    """Take the next step of the checkpoint, once all orders of the last step are answered."""
    query = turn.query
    current = pending.of(query).current
    left = [w.order for w in query.outstanding.values() if w.owner is Owner.CHECKPOINT]
    if current is None:
        return
    if current.at_rest and not any(isinstance(order, Capture) for order in left):
        current = replace(current, at_rest=False)
        pending.change(turn, current=current)
    if left:
        return
    whole = coverage.whole(query, current.version)
    if current.failure is None and whole is not None and not current.publishing:
        _publish(turn, current, whole)
        return
    if whole is None and current.failure is None and current.operators == set(query.operators):
        current = replace(current, failure="some of its parts were lost before it was published")
    _finish(turn, current)


def _publish(turn: Turn, current: Current, whole: Published) -> None:
    pending.change(turn, current=replace(current, publishing=True))
    # If that fails it may have been written all the same, and be the only one that is whole.
    others = (p for p in turn.query.doubtful if p.version != whole.version)
    turn.change(doubtful=(*others, whole))
    turn.order(Publish(whole), Owner.CHECKPOINT)


def _finish(turn: Turn, current: Current) -> None:
    """The checkpoint is published, covers some operators, or has failed."""
    query, mine = turn.query, pending.of(turn.query)
    failures = 0 if current.failure is None else mine.failures + 1
    pause = query.now + min(failures, _LONGEST_PAUSE) * SECOND
    held = mine.held_since is not None and current.since >= mine.held_since
    pending.change(
        turn,
        current=None,
        failures=failures,
        held_failures=mine.held_failures + (held and current.failure is not None),
        not_before=pause,
    )
    turn.send(Wake(pause))
    _tell(turn, current, failures)
    if failures > query.policies.tolerate:
        for command in current.commands:
            turn.end(command, current.failure)
        turn.stop(f"{failures} checkpoints in a row failed: {current.failure}")
        return
    for command in current.commands:
        _end(turn, command, current)
    if current.failure is None:
        retention.tidy(turn)
    protect.review(turn)


def _tell(turn: Turn, current: Current, failures: int) -> None:
    seconds = (turn.query.now - current.since) / SECOND
    if current.failure is None:
        turn.tell("checkpoint", seconds=seconds, version=current.version, bytes=current.bytes)
    else:
        turn.tell(
            "checkpoint failed",
            seconds=seconds,
            version=current.version,
            reason=current.failure,
            failures=failures,
            tolerate=turn.query.policies.tolerate,
        )


def _end(turn: Turn, command: CommandId, done: Current) -> None:
    """Answer a command. If its checkpoint failed, try another one first."""
    mine = pending.of(turn.query)
    tries = {each: count for each, count in mine.tries.items() if each != command}
    failed = mine.tries.get(command, 0) + 1
    if done.failure is None or failed >= _ATTEMPTS:
        pending.change(turn, tries=tries)
        turn.end(command, done.failure, done.version)
    else:
        pending.change(turn, tries={**tries, command: failed}, commands=(*mine.commands, command))


def _published(turn: Turn, version: Version) -> None:
    query = turn.query
    found = [p for p in query.doubtful if p.version == version]
    if not found:
        _fail(turn, "some of its parts were lost while it was published")
        return
    others = (p for p in query.published if p.version != version)
    doubtful = tuple(p for p in query.doubtful if p.version != version)
    unreadable = tuple(v for v in query.unreadable if v != version)
    turn.change(published=(*others, *found), doubtful=doubtful, unreadable=unreadable)
