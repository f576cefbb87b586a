"""Reads: the user reads the state of an operator between two batches.

The rows of its slices are captured while the stream is held. The answer names the captured files.
While the agent of a node is being replaced, the read waits and the stream runs. Whoever reads the
files gives the command up afterwards, and they are deleted. It can be given up before as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from anabranch.protocols.events import Done, Failed, ReadState
from anabranch.protocols.model import Change, serving
from anabranch.protocols.orders import (
    SECOND,
    Capture,
    Captured,
    CaptureWanted,
    CommandId,
    Drop,
    Wake,
)
from anabranch.protocols.query import Outstanding, Owner, Query
from anabranch.protocols.turn import Turn

_PATIENCE = 60 * SECOND
"""How long a read is tried again, or waits for agents, since it could not be executed."""
_PAUSE = SECOND // 2


@dataclass(frozen=True, slots=True)
class Read:
    """A read that waits or is in progress."""

    command: CommandId
    operator: str
    since: int = 0
    failing_since: int | None = None
    """When it could not be executed for the first time."""
    not_before: int = 0
    under_way: bool = False
    handed_out: bool = False
    """Whether the files are being read."""
    captured: tuple[Captured, ...] = ()
    failure: str | None = None
    """Why it was not executed the last time."""

    @property
    def change(self) -> Change:
        """What is done now, why, and since when."""
        step = "capturing between two batches" if self.under_way else "waiting until no batch runs"
        return Change("read", self.operator, "a command", step, self.since)


def want(turn: Turn, event: ReadState) -> None:
    """Read an operator as soon as no batch runs and all of its state is there."""
    turn.change(reads=(*turn.query.reads, Read(event.command, event.operator, turn.query.now)))


def give_up(turn: Turn, command: CommandId) -> None:
    """Nobody reads any more what was, or would be, captured for a command."""
    each = _find(turn.query, command)
    if each is not None:
        _drop(turn, each)
        _remove(turn, each)
        if not each.handed_out:
            turn.forget(Owner.READ, command=command)
            turn.end(command, "the command was given up by whoever gave it")


def holds(query: Query) -> bool:
    """Whether the stream is held for a read."""
    return any(
        not each.handed_out and (each.under_way or _can_begin(query, each)) for each in query.reads
    )


def look(turn: Turn) -> None:
    """Capture for the waiting reads, if no batch runs and all state is there."""
    query = turn.query
    if query.running or query.suspects or query.recovery or query.restart or query.stopped:
        return
    for each in query.reads:
        if each.under_way or each.handed_out or query.now < each.not_before:
            continue
        if not _can_begin(query, each):
            silent = ", ".join(sorted(_nodes_of(query, each) - query.ready))
            _later(turn, replace(each, failure=f"the agents of {silent} do not answer"))
            continue
        _put(turn, replace(each, under_way=True, failure=None, captured=()))
        fence = turn.fence()
        for serves in serving(query.slices.values(), each.operator):
            wanted = CaptureWanted(serves.id, serves.groups, None, clean=False)
            order = Capture(wanted, serves, query.committed, fence, query.size(serves))
            turn.order(order, Owner.READ, each.command)


def answer(turn: Turn, waiting: Outstanding, event: Done | Failed) -> None:
    """The answer to an order of a read."""
    each = None if waiting.command is None else _find(turn.query, waiting.command)
    if each is None:
        return  # it was given up
    match event:
        case Done(answer=Captured() as captured):
            each = replace(each, captured=(*each.captured, captured))
        case Failed(reason=reason):
            each = replace(each, failure=reason)
    _put(turn, each)
    if any(w.command == each.command for w in turn.query.outstanding.values()):
        return
    if each.failure is None:
        _end(turn, each, None)
    else:
        _drop(turn, each)
        _later(turn, replace(each, under_way=False, captured=()))


def _can_begin(query: Query, each: Read) -> bool:
    return query.now >= each.not_before and _nodes_of(query, each) <= query.ready


def _nodes_of(query: Query, each: Read) -> set[str]:
    return {serves.node for serves in serving(query.slices.values(), each.operator)}


def _later(turn: Turn, each: Read) -> None:
    """Try a read again later, or end it if it has failed for too long."""
    now = turn.query.now
    since = now if each.failing_since is None else each.failing_since
    if now >= since + _PATIENCE:
        _end(turn, each, each.failure)
        return
    _put(turn, replace(each, failing_since=since, not_before=now + _PAUSE))
    turn.send(Wake(now + _PAUSE))


def _drop(turn: Turn, each: Read) -> None:
    for captured in each.captured:
        if captured.node in turn.query.nodes:
            turn.send(Drop(captured.node, files=(captured.file,)))


def _end(turn: Turn, each: Read, error: str | None) -> None:
    if error is None:
        _put(turn, replace(each, handed_out=True))
    else:
        _remove(turn, each)
    turn.end(each.command, error, each.captured if error is None else None)


def _find(query: Query, command: CommandId) -> Read | None:
    return next((each for each in query.reads if each.command == command), None)


def _remove(turn: Turn, each: Read) -> None:
    turn.change(reads=tuple(r for r in turn.query.reads if r.command != each.command))


def _put(turn: Turn, each: Read) -> None:
    others = tuple(r if r.command != each.command else each for r in turn.query.reads)
    turn.change(reads=others)
