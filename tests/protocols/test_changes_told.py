"""What is under way, as ``query.changes`` tells it: whoever waits for the stream sees why."""

from anabranch.checkpointing.policy import Periodic
from anabranch.protocols import orders as o
from anabranch.protocols.events import ReadState
from anabranch.protocols.model import Change
from anabranch.protocols.orders import SECOND
from protocols.played import Play


def changes(play: Play, kind: str) -> list[Change]:
    return [each for each in play.query.changes if each.kind == kind]


def test_a_read_is_told_until_it_is_answered() -> None:
    play = Play.started()
    play.hold(o.Capture)
    play.batch()
    order = play.ask()
    assert order is not None
    play.now = 5 * SECOND
    read = play.command(ReadState, "op")
    waiting = Change("read", "op", "a command", "waiting until no batch runs", 5 * SECOND)
    assert changes(play, "read") == [waiting]
    play.now = 6 * SECOND
    play.commit(order)
    capturing = Change("read", "op", "a command", "capturing between two batches", 5 * SECOND)
    assert changes(play, "read") == [capturing]
    play.let_go(o.Capture)
    assert play.ended[read].error is None
    assert changes(play, "read") == []


def test_that_the_stream_is_held_is_told_until_it_goes_on() -> None:
    play = Play.started(checkpointing=Periodic("1 hour", at_most=1000), retained_offsets=8)
    play.hold(o.Store)
    while (order := play.ask()) is not None:
        play.commit(order)
        play.now += SECOND
    (held,) = changes(play, "hold")
    assert (held.what, held.step) == ("stream", "waiting until a checkpoint is published")
    assert held.why == "Spark's log of offsets would soon not reach back to checkpoint -1"
    assert held.since == play.now - SECOND
    play.let_go(o.Store)
    assert changes(play, "hold") == []


def test_a_node_is_told_until_its_agent_has_started() -> None:
    play = Play.started(hosts="ab")
    play.hold(o.Prepare)
    play.wait(3)
    play.come("c")
    play.wait(4)
    (told,) = changes(play, "node")
    assert (told.what, told.step, told.since) == ("c", "starting its agent", 3 * SECOND)
    assert told.why == "the node came, or its agent is gone"
    play.fail(play.waiting(o.Prepare)[0], "it did not start")
    assert [each.why for each in changes(play, "node")] == ["the agent did not start"]
    play.wait(1)
    play.let_go(o.Prepare)
    assert changes(play, "node") == []


def test_a_restart_says_whose_agents_it_waits_for() -> None:
    play = Play.of()
    play.hold(o.Prepare)
    play.come("a")
    play.come("b")
    play.take_over(2)
    play.finish(play.waiting(o.Prepare)[0])
    (restart,) = changes(play, "restart")
    assert restart.step == "waiting for the agents of b"
    play.hold(o.Make)
    play.let_go(o.Prepare)
    (restart,) = changes(play, "restart")
    assert restart.step == "making slices from parts"
