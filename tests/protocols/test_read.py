"""Reads: the state of an operator between two batches, as soon as it can be had."""

from anabranch.protocols import orders as o
from anabranch.protocols.events import Cause, GiveUp, Inspected, ReadState
from protocols.played import Play

GIVEN_UP = "the command was given up by whoever gave it"


def silent(play: Play, host: str) -> o.Prepare:
    """The agent of a node does not answer, and is being replaced."""
    play.hold(o.Prepare)
    before = len(play.given(o.Prepare))
    capture = play.waiting(o.Capture)[0]
    assert capture.slice.node == host
    play.fail(capture, f"{host} is silent", unreachable=host)
    (prepare,) = play.given(o.Prepare)[before:]
    return prepare


def test_a_read_waits_for_an_agent_that_is_being_replaced() -> None:
    play = Play.started(hosts="ab")
    play.batches(2)
    play.hold(o.Capture)
    read = play.command(ReadState, "op")
    assert play.ask() is None, "the stream waits while rows are captured"
    prepare = silent(play, "a")
    play.let_go(o.Capture)
    play.wait(20)
    assert read not in play.ended
    assert play.query.running, "the stream goes on while an agent is waited for"
    play.commit(play.last(o.RunBatch))
    play.finish(prepare, Inspected({each.id: frozenset() for each in play.at("a")}))
    play.wait(1)
    end = play.ended[read]
    assert end.error is None
    assert isinstance(end.result, tuple)
    assert [each.version for each in end.result] == [2, 2]
    assert len({each.file for each in end.result}) == 2


def test_a_read_fails_when_the_agent_does_not_come_back() -> None:
    play = Play.started(hosts="ab")
    play.batches(2)
    play.hold(o.Capture)
    read = play.command(ReadState, "op")
    silent(play, "a")
    play.let_go(o.Capture)
    play.kinds.discard(o.Capture)
    play.wait(55)
    assert read not in play.ended
    play.wait(10)
    assert play.ended[read].error == "the agents of a do not answer"
    assert play.query.reads == ()


def test_nothing_is_left_of_a_read_that_is_given_up() -> None:
    play = Play.started(hosts="ab")
    play.batches(2)
    play.hold(o.Capture)
    read = play.command(ReadState, "op")
    first, second = play.waiting(o.Capture)
    play.finish(first)
    (captured,) = play.query.reads[0].captured
    play.happen(GiveUp(read))
    assert play.ended[read].error == GIVEN_UP
    late = play.captured(second.wanted, second.slice, second.version)
    play.finish(second, late)
    files = {name for each in play.given(o.Drop) for name in each.files}
    assert files == {captured.file, late.file}
    assert play.ask() is not None
    play.happen(GiveUp(read))
    assert list(play.ended) == [read]


def test_a_read_that_waits_ends_with_the_query() -> None:
    play = Play.started(hosts="ab", tolerate=0)
    order = play.ask()
    assert order is not None
    read = play.command(ReadState, "op")
    play.break_off(order, Cause.FENCED, "another driver")
    end = play.ended[read].error
    assert end is not None
    assert end.startswith("the query stopped")
