"""Notes: the arrangement of slices is written to the checkpoint folder.

A driver that takes the query over begins with the arrangement that was noted last. So a command
that changes the arrangement ends only once this is written, and a note that fails is written again.
Batches do not wait for it: if one is committed before its arrangement is noted, a restart restores
all slices from a checkpoint instead of using the tables in place.
"""

from __future__ import annotations

from anabranch.protocols.events import Done, Failed
from anabranch.protocols.model import serving
from anabranch.protocols.orders import SECOND, CommandId, Note, Wake
from anabranch.protocols.query import Outstanding, Owner, Unnoted
from anabranch.protocols.turn import Turn

_FIRST_PAUSE, _LONGEST_PAUSE = SECOND // 2, 15 * SECOND


def look(turn: Turn) -> None:
    """Note the arrangement if that was not ordered yet."""
    query = turn.query
    if query.noted == query.arrangement or query.restart or query.now < query.note_after:
        return
    ordered = [w.order.arrangement for w in query.outstanding.values() if isinstance(w.order, Note)]
    if query.arrangement not in ordered:
        slices = tuple(serving(query.slices.values()))
        turn.order(Note(query.arrangement, query.routed, slices), Owner.NOTE)


def answer(turn: Turn, waiting: Outstanding, event: Done | Failed) -> None:
    """The answer to an order to note an arrangement."""
    match waiting.order, event:
        case Note(arrangement), Done():
            noted = max(arrangement, turn.query.noted)
            turn.change(noted=noted, note_failures=0)
            for each in turn.query.unnoted:
                if each.arrangement <= noted:
                    turn.end(each.command)
            left = tuple(each for each in turn.query.unnoted if each.arrangement > noted)
            turn.change(unnoted=left)
        case Note(), Failed(reason=reason):
            failures = turn.query.note_failures + 1
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE << min(failures - 1, 10))
            turn.tell("note failed", reason=reason, pause=pause / SECOND)
            turn.change(note_after=turn.query.now + pause, note_failures=failures)
            turn.send(Wake(turn.query.note_after))


def end(turn: Turn, command: CommandId) -> None:
    """End a command that was executed, once the arrangement that it made is noted."""
    query = turn.query
    if query.noted == query.arrangement:
        turn.end(command)
    else:
        unnoted = Unnoted(command, query.arrangement, query.now)
        turn.change(unnoted=(*query.unnoted, unnoted))


def give_up(turn: Turn, command: CommandId) -> None:
    """Nobody waits for a command any more, which was executed."""
    left = tuple(each for each in turn.query.unnoted if each.command != command)
    if left != turn.query.unnoted:
        turn.change(unnoted=left)
        turn.end(command)
