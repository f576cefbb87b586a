"""Reads: the user reads the state of an operator between two batches.

The rows of its slices are captured while the stream is held. The answer names the captured files.
Whoever reads them gives the command up afterwards, and the files are deleted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from anabranch.protocols.events import Done, Failed, ReadState
from anabranch.protocols.model import Change, serving
from anabranch.protocols.orders import Capture, Captured, CaptureWanted, CommandId, Drop
from anabranch.protocols.query import Outstanding, Owner, Query, Turn

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Read:
    """A read that waits or is in progress."""

    command: CommandId
    operator: str
    since: int = 0
    attempts: int = 0
    under_way: bool = False
    handed_out: bool = False
    """Whether the files are being read."""
    captured: tuple[Captured, ...] = ()
    failure: str | None = None

    @property
    def change(self) -> Change:
        """What is done now, why, and since when."""
        step = "capturing between two batches" if self.under_way else "waiting until no batch runs"
        return Change("read", self.operator, "a command", step, self.since)


def want(turn: Turn, event: ReadState) -> None:
    """Read an operator as soon as no batch runs and all of its state is there."""
    turn.change(reads=(*turn.query.reads, Read(event.command, event.operator, turn.query.now)))


def holds(query: Query) -> bool:
    """Whether the stream is held for a read."""
    return any(not each.handed_out for each in query.reads)


def look(turn: Turn) -> None:
    """Capture for the waiting reads, if no batch runs and all state is there."""
    query = turn.query
    if query.running or query.suspects or query.recovery or query.restart or query.stopped:
        return
    for each in query.reads:
        if each.under_way or each.handed_out:
            continue
        _put(turn, replace(each, under_way=True, attempts=each.attempts + 1, captured=()))
        fence = turn.fence()
        for serves in serving(query.slices.values(), each.operator):
            wanted = CaptureWanted(serves.id, serves.groups, None, clean=False)
            order = Capture(wanted, serves, query.committed, fence, query.size(serves))
            turn.order(order, Owner.READ, each.command)


def answer(turn: Turn, waiting: Outstanding, event: Done | Failed) -> None:
    """The answer to an order of a read."""
    each = next((r for r in turn.query.reads if r.command == waiting.command), None)
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
        _end(turn, each)
    elif each.attempts < _ATTEMPTS:
        _drop(turn, each)
        _put(turn, replace(each, under_way=False, failure=None))
    else:
        _drop(turn, each)
        _end(turn, each)


def _drop(turn: Turn, each: Read) -> None:
    for captured in each.captured:
        if captured.node in turn.query.nodes:
            turn.send(Drop(captured.node, files=(captured.file,)))


def give_up(turn: Turn, command: CommandId) -> None:
    """Nobody reads any more what was, or would be, captured for a command."""
    for each in turn.query.reads:
        if each.command == command:
            _drop(turn, each)
            _remove(turn, each)
            if not each.handed_out:
                turn.forget(Owner.READ, command=command)
                turn.end(command, "the command was given up by whoever gave it")


def _end(turn: Turn, each: Read) -> None:
    if each.failure is None:
        _put(turn, replace(each, handed_out=True))
    else:
        _remove(turn, each)
    turn.end(each.command, each.failure, each.captured)


def _remove(turn: Turn, each: Read) -> None:
    turn.change(reads=tuple(r for r in turn.query.reads if r.command != each.command))


def _put(turn: Turn, each: Read) -> None:
    others = tuple(r if r.command != each.command else each for r in turn.query.reads)
    turn.change(reads=others)
