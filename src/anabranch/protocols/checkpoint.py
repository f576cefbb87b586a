"""Checkpoints: captured with a batch, stored asynchronously, published when they are complete.

A checkpoint covers some operators or all. Each stored part can serve to recover or move its slice.
Once the parts make all operators at one version, the manifest of that version is published, and a
restart can begin from it. :mod:`anabranch.protocols.retention` says what is kept of older ones.

A backup that is lost with its holder is made again: an operator with a slice that would not survive
the loss of its node is captured with the next batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from anabranch.checkpointing.policy import Kind, Situation
from anabranch.protocols import adaptation, retention
from anabranch.protocols.events import BatchCommitted, Done, Failed, SliceReport
from anabranch.protocols.model import Change, Published, Slice, SliceId, serving
from anabranch.protocols.orders import (
    SECOND,
    Capture,
    Captured,
    CaptureWanted,
    CommandId,
    Drop,
    Publish,
    Store,
    Wake,
)
from anabranch.protocols.query import Outstanding, Owner, Query, Turn
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.units import NO_VERSION, Version

_LONGEST_PAUSE = 30
"""The longest pause after failed checkpoints, in seconds. It grows with each failure in a row."""
_PATIENCE = 5 * SECOND
"""How long a wanted checkpoint waits for a batch."""
_ATTEMPTS = 3
"""The attempts of a checkpoint by command, and of one for which the stream waits."""
_NOTHING = ""
"""Stands for the state of a query without operators, whose versions record its progress alone."""
_SHORT = SECOND // 5
"""The same where a user waits for the checkpoint, and Spark has no batch to run."""
_LEAST: Kind = "delta"
"""What is captured where no policy says it; all rows where the changes are not known."""


@dataclass(frozen=True, slots=True)
class Current:
    """A checkpoint in progress."""

    version: Version
    commands: tuple[CommandId, ...] = ()
    since: int = 0
    operators: frozenset[str] = frozenset()
    at_rest: bool = False
    """Whether captures are being taken between two batches; the stream waits for them."""
    failure: str | None = None
    publishing: bool = False
    bytes: int = 0
    """Of the parts that are stored."""
    late: bool = False
    """Whether the next one is due by the number of batches, and waits for this one."""

    @property
    def change(self) -> Change:
        """The present step, the reason, and the start."""
        what = ", ".join(sorted(self.operators))
        why = "a command" if self.commands else f"due with batch {self.version}"
        step = "storing what was captured"
        if self.at_rest:
            step = "capturing between two batches"
        elif self.publishing:
            step = f"publishing version {self.version}"
        return Change("checkpoint", what, why, step, self.since)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Which checkpoints are due, and the one in progress."""

    last: Mapping[str, int] = field(default_factory=dict)
    """When the policy's last checkpoint of each operator was begun."""
    batches: Mapping[str, int] = field(default_factory=dict)
    """Batches committed since."""
    changed: Mapping[str, float] = field(default_factory=dict)
    """The share of each operator's rows that have changed, as the last batch reported it."""
    loads: Mapping[str, float] = field(default_factory=dict)
    """How much of a core each operator's busiest instance used, as the last batch reported it."""
    wanted: frozenset[str] = frozenset()
    """Operators to capture with the next batch, whatever the policy says."""
    wanted_since: int = 0
    commands: tuple[CommandId, ...] = ()
    """Commands that wait for a checkpoint of all operators."""
    tries: Mapping[CommandId, int] = field(default_factory=dict)
    """How many checkpoints have failed for each command."""
    ordered: frozenset[str] = frozenset()
    """Operators that the batch which runs was told to capture because they are due."""
    failures: int = 0
    """Checkpoints that failed in a row."""
    not_before: int = 0
    """After one that failed there is a pause."""
    current: Current | None = None
    held_since: int | None = None
    """Since when the stream waits because a restart would not find its offsets otherwise."""
    held_failures: int = 0
    """Checkpoints that were begun since then, and failed."""

    @property
    def open(self) -> tuple[CommandId, ...]:
        """The commands that have not ended."""
        return self.commands if self.current is None else (*self.current.commands, *self.commands)


def want(turn: Turn, *operators: str, command: CommandId | None = None) -> None:
    """Capture operators with the next batch, or between two batches if none comes for a while."""
    mine = _mine(turn.query)
    since = mine.wanted_since if mine.wanted else turn.query.now
    commands = mine.commands if command is None else (*mine.commands, command)
    _change(turn, wanted=mine.wanted | set(operators), wanted_since=since, commands=commands)
    turn.send(Wake(since + _PATIENCE))
    if command is not None:
        turn.send(Wake(since + _SHORT))


def give_up(turn: Turn, command: CommandId) -> None:
    """Cancel the command for a checkpoint. The checkpoint may be taken all the same."""
    mine = _mine(turn.query)
    if command not in mine.open:
        return
    _change(turn, commands=tuple(each for each in mine.commands if each != command))
    if mine.current is not None:
        left = tuple(each for each in mine.current.commands if each != command)
        _change(turn, current=replace(mine.current, commands=left))
    turn.end(command, "the command was cancelled by its caller")


def holds(query: Query) -> bool:
    """Whether the stream is held: for captures, or because Spark's log would lose offsets."""
    return _behind(query) >= query.policies.retained_offsets or any(
        isinstance(waiting.order, Capture) for waiting in query.outstanding.values()
    )


def urgent(query: Query) -> bool:
    """Whether a checkpoint must not be postponed: half of Spark's offset log is used up."""
    return 2 * _behind(query) >= query.policies.retained_offsets


def _behind(query: Query) -> int:
    """The number of batches that a restart would run again."""
    if not query.policies.checkpointing.backs_up:
        return 0
    return query.committed - _restartable(query)


def captures(turn: Turn) -> tuple[CaptureWanted, ...]:
    """The captures for the batch that is about to run."""
    query = turn.query
    mine = _mine(query)
    if query.batch is None or query.batch.version <= query.delivered:
        return ()
    if mine.current is not None:
        _tell_if_late(turn, mine.current)
        return ()
    if query.now < mine.not_before:
        return ()
    due: dict[str, Kind] = {}
    for name in tuple(query.operators) or (_NOTHING,):
        kind = query.policies.checkpointing.decide(_situation(query, mine, name))
        if kind is not None or urgent(query):
            due[name] = kind or _LEAST
    _change(turn, ordered=frozenset(due))
    wanted = dict.fromkeys(mine.wanted, _LEAST) | due
    if wanted:
        adaptation.adapt(turn)
        query = turn.query
    return tuple(
        _capture(query, each, wanted[each.operator])
        for each in serving(query.slices.values())
        if each.operator in wanted
    )


def _tell_if_late(turn: Turn, current: Current) -> None:
    """Let the user know if a checkpoint is due by the number of batches, and waits for another."""
    query, mine = turn.query, _mine(turn.query)
    if current.late:
        return
    for name in query.operators:
        by_time = _situation(query, mine, name)
        by_batches = replace(by_time, now=by_time.last)
        if query.policies.checkpointing.decide(by_batches) is not None:
            _change(turn, current=replace(current, late=True))
            turn.tell(
                "checkpoint late",
                seconds=(query.now - current.since) / SECOND,
                version=current.version,
                committed=query.committed,
                batches=by_batches.batches,
            )
            return


def commit(turn: Turn, event: BatchCommitted) -> None:
    """A batch is committed: store what it captured."""
    reports = event.reports
    mine, version = _mine(turn.query), turn.query.committed
    names = tuple(turn.query.operators) or (_NOTHING,)
    batches = {name: mine.batches.get(name, 0) + 1 for name in names}
    last = dict(mine.last)
    for name in mine.ordered:
        last[name], batches[name] = turn.query.now, 0
    changed = _shares_changed(turn.query, reports)
    _change(
        turn,
        batches=batches,
        last=last,
        changed=changed,
        loads=event.loads,
        ordered=frozenset(),
    )
    told = {i: r for i, r in reports.items() if _is_mine(r)}
    if not (told or _NOTHING in mine.ordered) or mine.current is not None:
        return
    operators = {turn.query.slices[i].operator for i in told}
    commands = mine.commands if operators == set(turn.query.operators) else ()
    _change(
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


def batch_failed(turn: Turn) -> None:
    """A batch failed: its captures do not count."""
    _change(turn, ordered=frozenset())


def look(turn: Turn) -> None:
    """Capture between two batches, if a checkpoint is wanted and no batch comes."""
    query = turn.query
    mine = _mine(query)
    exhausted = _behind(query) >= query.policies.retained_offsets
    if exhausted != (mine.held_since is not None):
        _hold(turn, exhausted)
        mine = _mine(turn.query)
    if exhausted and mine.held_failures >= _ATTEMPTS and not query.policies.hold:
        turn.stop(
            f"checkpoints fail; the newest one is of version {_restartable(query)}, and Spark's "
            f"log of offsets will not reach back to it after batch {query.committed}. Check the "
            "backup store, then start the query again"
        )
        return
    everything = frozenset(query.operators if mine.commands or exhausted else ())
    wanted = mine.wanted | everything
    asked = wanted or mine.commands  # a query may have no operators
    if not asked or mine.current is not None or query.running or query.suspects:
        return
    if query.recovery or query.restart or query.stopped or (query.moves and not exhausted):
        return
    if query.committed == NO_VERSION:
        for command in mine.commands:
            turn.end(command, result=NO_VERSION)
        _change(turn, wanted=frozenset(), commands=())
        return
    patience = _SHORT if mine.commands and query.batch is None else _PATIENCE
    if query.now < mine.not_before or not (exhausted or query.now >= mine.wanted_since + patience):
        return
    _change(
        turn,
        current=Current(query.committed, mine.commands, query.now, wanted, at_rest=True),
        wanted=frozenset(),
        commands=(),
    )
    adaptation.adapt(turn)
    fence, query = turn.fence(), turn.query
    for each in serving(query.slices.values()):
        wanted_capture = _capture(query, each, _LEAST)
        if each.operator in wanted and wanted_capture.base != query.committed:
            # At rest a table is not marked clean, so what it knows of changes stays as it is.
            wanted_capture = replace(wanted_capture, clean=False)
            order = Capture(wanted_capture, each, query.committed, fence, query.size(each))
            turn.order(order, Owner.CHECKPOINT)
    if any(isinstance(waiting.order, Capture) for waiting in turn.query.outstanding.values()):
        adaptation.captured(turn)
    _go_on(turn)


def _hold(turn: Turn, exhausted: bool) -> None:
    """Hold the stream before Spark's log loses offsets that a restart needs, or resume it."""
    published, committed = _restartable(turn.query), turn.query.committed
    kind = "stream held" if exhausted else "stream goes on"
    turn.tell(kind, published=published, committed=committed)
    _change(turn, held_since=turn.query.now if exhausted else None, held_failures=0)


def answer(turn: Turn, waiting: Outstanding, event: Done | Failed) -> None:
    """The answer to an order of a checkpoint."""
    match waiting.order, event:
        case Capture(), Done(answer=Captured() as captured):
            _store(turn, captured)
        case Store(captured), Done(answer=Part() as part):
            turn.add_part(part)
            current = _mine(turn.query).current
            if current is not None:
                _change(turn, current=replace(current, bytes=current.bytes + part.bytes))
        case Store(captured), Failed(reason=reason):
            if captured.node in turn.query.nodes:
                turn.send(Drop(captured.node, files=(captured.file,)))
            _fail(turn, reason)
        case Publish(published), Done():
            _published(turn, published.version)
        case _, Failed(reason=reason):
            _fail(turn, reason)
    _go_on(turn)


def review(turn: Turn) -> None:
    """Order a capture of every slice whose backup was lost, or is on its own node."""
    query = turn.query
    mine = _mine(query)
    if not query.policies.checkpointing.backs_up or query.committed == NO_VERSION:
        return
    if mine.current is not None:
        return  # looked at again when it is done
    for each in serving(query.slices.values()):
        if each.operator not in mine.wanted and not _is_protected(query, each):
            want(turn, each.operator)


def sent_is_lost(turn: Turn, senders: frozenset[str]) -> None:
    """Rows that operators sent were lost with a node: capture the operators that received them."""
    query = turn.query
    if query.policies.checkpointing.backs_up and query.committed != NO_VERSION:
        behind = [n for n, plan in query.operators.items() if senders.intersection(plan.before)]
        if behind:
            want(turn, *behind)


def _is_protected(query: Query, each: Slice) -> bool:
    """Whether a slice survives the loss of its node, or no better backup is possible."""
    safe = query.protected(each)
    if safe is not None and safe >= query.trimmed.get(each.operator, NO_VERSION):
        return True
    return each.node not in query.nodes or not _can_be_protected(query, each)


def _can_be_protected(query: Query, each: Slice) -> bool:
    """Whether the next backup of a slice would survive the loss of its node."""
    holders = query.holders(each)
    shape = query.policies.backup.shape(len(holders))
    version, groups = query.committed, each.groups
    needed, parity = shape.needed, shape.parity
    next_part = Part("", each.operator, version, None, groups, holders, needed, parity=parity)
    return query.policies.backup.survives(next_part, each.node, query.nodes.keys())


def interrupt(turn: Turn) -> None:
    """State was lost: captures that are in progress between two batches fail."""
    current = _mine(turn.query).current
    if current is not None and current.at_rest:
        turn.forget(Owner.CHECKPOINT)
        _fail(turn, "state was lost, and is recovered first")
        _go_on(turn)


def abandon(turn: Turn, reason: str) -> None:
    """The query is rolled back: cancel the checkpoint in progress.

    A version that is just being published is waited for, as nobody knows yet whether it exists.
    """
    mine = _mine(turn.query)
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


def _capture(query: Query, each: Slice, kind: Kind) -> CaptureWanted:
    # Changes are of no use if the node of the slice has what they follow on.
    inventory = query.inventory[each.operator]
    usable = query.usable(each.operator)
    if _can_be_protected(query, each):
        usable = query.surviving(each)
    known = (
        kind == "delta"
        and query.policies.checkpointing.tracks_changes
        and each.base is not None
        and each.groups <= inventory.reach(usable).get(each.base, KeyGroups())
    )
    return CaptureWanted(each.id, each.groups, each.base if known else None, clean=True)


def _shares_changed(query: Query, reports: Mapping[SliceId, SliceReport]) -> dict[str, float]:
    rows = dict.fromkeys(query.operators, 0)
    changed = dict.fromkeys(query.operators, 0)
    for which, report in reports.items():
        if which in query.slices:
            rows[query.slices[which].operator] += report.rows
            changed[query.slices[which].operator] += report.changed
    return {name: changed[name] / rows[name] if rows[name] else 1.0 for name in query.operators}


def _situation(query: Query, mine: Checkpoints, name: str) -> Situation:
    began = query.taken_over or 0
    last, batches = mine.last.get(name, began), mine.batches.get(name, 0)
    changed, load = mine.changed.get(name, 1.0), mine.loads.get(name, 0.0)
    return Situation(query.now, last, batches, name, changed, load)


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
    turn.order(query.store(captured, each), Owner.CHECKPOINT)


def _at_rest(query: Query) -> bool:
    current = _mine(query).current
    return current is not None and current.at_rest


def _fail(turn: Turn, reason: str) -> None:
    current = _mine(turn.query).current
    if current is not None and current.failure is None:
        _change(turn, current=replace(current, failure=reason))


def _go_on(turn: Turn) -> None:
    """Take the next step of the checkpoint, once all orders of the last step are answered."""
    query = turn.query
    mine = _mine(query)
    current = mine.current
    pending = [w.order for w in query.outstanding.values() if w.owner is Owner.CHECKPOINT]
    if current is None:
        return
    if current.at_rest and not any(isinstance(order, Capture) for order in pending):
        current = replace(current, at_rest=False)
        _change(turn, current=current)
    if pending:
        return
    whole = _whole(query, current.version)
    if current.failure is None and whole is not None and not current.publishing:
        _change(turn, current=replace(current, publishing=True))
        # If that fails it may have been written all the same, and be the only one that is whole.
        others = (p for p in query.doubtful if p.version != whole.version)
        turn.change(doubtful=(*others, whole))
        turn.order(Publish(whole), Owner.CHECKPOINT)
        return
    if whole is None and current.failure is None and current.operators == set(query.operators):
        current = replace(current, failure="some of its parts were lost before it was published")
    failures = 0 if current.failure is None else mine.failures + 1
    pause = query.now + min(failures, _LONGEST_PAUSE) * SECOND
    held = mine.held_since is not None and current.since >= mine.held_since
    _change(
        turn,
        current=None,
        failures=failures,
        held_failures=mine.held_failures + (held and current.failure is not None),
        not_before=pause,
    )
    turn.send(Wake(pause))
    seconds = (query.now - current.since) / SECOND
    if current.failure is None:
        turn.tell("checkpoint", seconds=seconds, version=current.version, bytes=current.bytes)
    else:
        reason = current.failure
        tolerate = query.policies.tolerate
        turn.tell(
            "checkpoint failed",
            seconds=seconds,
            version=current.version,
            reason=reason,
            failures=failures,
            tolerate=tolerate,
        )
        if failures > tolerate:
            turn.stop(f"{failures} checkpoints in a row failed: {reason}")
    for command in current.commands:
        _end(turn, command, current)
    if current.failure is None:
        retention.tidy(turn)
    review(turn)


def _end(turn: Turn, command: CommandId, done: Current) -> None:
    """Answer a command. If its checkpoint failed, try another one first."""
    mine = _mine(turn.query)
    tries = {each: count for each, count in mine.tries.items() if each != command}
    failed = mine.tries.get(command, 0) + 1
    if done.failure is None or failed >= _ATTEMPTS:
        _change(turn, tries=tries)
        turn.end(command, done.failure, done.version)
    else:
        _change(turn, tries={**tries, command: failed}, commands=(*mine.commands, command))


def _whole(query: Query, version: Version) -> Published | None:
    """The manifest of a version, if all operators can be restored at it from readable parts."""
    parts = {}
    for name, plan in query.operators.items():
        usable, everything = query.usable(name), KeyGroups.all(plan.key_groups)
        inventory = query.inventory[name]
        if not everything <= inventory.reach(usable).get(version, KeyGroups()):
            return None
        parts[name] = inventory.recipe(everything, version, usable)
    return Published(version, parts)


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


def _restartable(query: Query) -> Version:
    return query.published[-1].version if query.published else Version(query.oldest_offsets - 1)


def _mine(query: Query) -> Checkpoints:
    return query.checkpoints or Checkpoints()


def _change(turn: Turn, **fields: object) -> None:
    turn.change(checkpoints=replace(_mine(turn.query), **fields))  # type: ignore[arg-type]
