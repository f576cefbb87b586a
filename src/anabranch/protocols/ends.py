"""How a move ends: done, given up, or begun again.

The query is unchanged until rows are routed to the new slices. So whatever fails before, all that
there is to do is to drop what the move has made. It begins again after a pause, a few times.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.protocols import notes
from anabranch.protocols.events import Rebalance
from anabranch.protocols.model import Host
from anabranch.protocols.moving import MergeSlices, Move, put
from anabranch.protocols.orders import SECOND, CommandId, Drop, Store, Wake
from anabranch.protocols.query import Owner
from anabranch.protocols.turn import Turn

ATTEMPTS = 5
_PAUSE = SECOND // 2
_MERGE_PAUSE = 60 * SECOND
"""The pause after a failed merge of slices."""


def give_up(turn: Turn, which: CommandId) -> None:
    """Cancel a command. The query is unchanged."""
    waiting = tuple(each for each in turn.query.waiting if each.command != which)
    if waiting != turn.query.waiting:
        turn.change(waiting=waiting)
        turn.end(which, "the command was cancelled by its caller")
    elif which in turn.query.moves:
        moving = turn.query.moves[which]
        _clear(turn, moving)
        end(turn, moving, "the command was cancelled by its caller")


def abandon(turn: Turn, reason: str) -> None:
    """The query is rolled back: cancel all moves."""
    for moving in list(turn.query.moves.values()):
        _clear(turn, moving)
        end(turn, moving, reason)


def node_lost(turn: Turn, host: Host) -> None:
    """A node was lost: start the moves again that need it."""
    for moving in list(turn.query.moves.values()):
        sources = {turn.query.slices[source].node for source in moving.moved}
        if host in sources or any(each.node == host for each in moving.targets):
            again(turn, moving, f"node {host} was lost")


def interrupt(turn: Turn) -> None:
    """Slices were lost, and recovery replaces them: start the moves again that need them."""
    for moving in list(turn.query.moves.values()):
        if moving.moved.keys() & turn.query.suspects:
            again(turn, moving, "slices that it moves groups from were lost")


def again(turn: Turn, moving: Move, reason: str) -> None:
    """Start a move again, or give it up after the last attempt."""
    kind = "merge failed" if isinstance(moving.event, MergeSlices) else "scale failed"
    turn.tell(kind, operator=moving.operator, attempt=moving.attempts, reason=reason)
    _clear(turn, moving)
    if moving.attempts >= ATTEMPTS:
        end(turn, moving, reason)
        return
    later, attempts = turn.query.now + _PAUSE, moving.attempts + 1
    turn.send(Wake(later))
    anew = Move(moving.event, moving.operator, moving.since, turn.query.committed)
    put(turn, replace(anew, attempts=attempts, phase_since=later, not_before=later))


def _clear(turn: Turn, moving: Move) -> None:
    """Drop everything that a move has made."""
    for waiting in turn.forget(Owner.MOVE, command=moving.command):
        if isinstance(waiting.order, Store) and waiting.order.captured.node in turn.query.nodes:
            captured = waiting.order.captured
            turn.send(Drop(captured.node, files=(captured.file,)))
    turn.remove(frozenset(each.id for each in moving.targets))


def end(turn: Turn, moving: Move, error: str | None) -> None:
    """End a move, and its command once the arrangement is noted."""
    moves = {c: m for c, m in turn.query.moves.items() if c != moving.command}
    turn.change(moves=moves)
    if error is None and isinstance(moving.event, Rebalance):
        turn.change(waiting=(moving.event, *turn.query.waiting))  # there may be other operators
        return
    if error is not None and isinstance(moving.event, MergeSlices):
        turn.change(merge_after=turn.query.now + _MERGE_PAUSE)
        turn.send(Wake(turn.query.now + _MERGE_PAUSE))
    if error is None:
        notes.end(turn, moving.command)
    else:
        turn.end(moving.command, error)
