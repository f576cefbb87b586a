"""The arrangement of slices is noted before a command that changed it ends."""

from anabranch.protocols import orders as o
from anabranch.protocols.events import Cause, GiveUp, Scale
from anabranch.protocols.model import Change
from anabranch.protocols.orders import SECOND, CommandId
from protocols.played import Play


def scaled() -> tuple[Play, CommandId]:
    """A query that was scaled from 2 instances to 4, while notes are not answered."""
    play = Play.started()
    play.batches(4)
    play.now = 5 * SECOND
    play.hold(o.Note)
    command = play.command(Scale, "op", 4)
    for _ in range(4):
        play.batch()
    assert play.query.routed["op"].routing.instances == 4
    return play, command


def test_a_scale_has_ended_once_its_arrangement_is_noted() -> None:
    play, command = scaled()
    assert command not in play.ended
    assert [each for each in play.query.changes if each.kind == "note"] == [
        Change(
            "note",
            "arrangement",
            "a command has changed it",
            "writing it to the checkpoint folder",
            5 * SECOND,
        )
    ]
    play.let_go(o.Note)
    assert play.ended[command].error is None
    assert not play.query.changes


def test_a_note_that_failed_is_written_again() -> None:
    play, command = scaled()
    for pause in (0.5, 1, 2):
        (note,) = play.waiting(o.Note)
        play.fail(note, "the store does not answer")
        told = play.told("note failed")[-1]
        assert told == {"reason": "the store does not answer", "pause": pause}
        assert not play.waiting(o.Note)
        play.wait(pause)
    assert command not in play.ended
    (note,) = play.waiting(o.Note)
    assert (note.arrangement, note.routed) == (play.query.arrangement, play.query.routed)
    play.let_go(o.Note)
    assert play.ended[command].error is None


def test_a_note_that_is_not_answered_is_written_again() -> None:
    play, _ = scaled()
    play.wait(61)
    assert "not answered within 60 s" in play.told("note failed")[0]["reason"]
    assert len(play.waiting(o.Note)) == 1


def test_the_stream_does_not_wait_for_a_note() -> None:
    play, _ = scaled()
    order = play.batch()
    assert order.arrangement == play.query.arrangement != play.query.noted


def test_what_is_noted_is_the_arrangement_of_now() -> None:
    """A note of an arrangement that is over ends only what was executed before it."""
    play, first = scaled()
    second = play.command(Scale, "op", 1)
    for _ in range(6):
        play.batch()
    assert play.query.routed["op"].routing.instances == 1
    before, now = play.waiting(o.Note)
    play.finish(before)
    assert first in play.ended
    assert second not in play.ended
    play.finish(now)
    assert play.ended[second].error is None


def test_whoever_gives_up_does_not_wait_for_the_note() -> None:
    play, command = scaled()
    play.happen(GiveUp(command))
    assert play.ended[command].error is None  # it was executed, and cannot be undone
    play.let_go(o.Note)
    assert play.query.noted == play.query.arrangement


def test_a_query_that_stops_says_what_it_did_not_note() -> None:
    play, command = scaled()
    order = play.ask()
    assert order is not None
    play.break_off(order, Cause.ERROR, "it does not work")
    assert play.given(o.Stop)
    assert "the query stopped" in (play.ended[command].error or "")
