"""How long an order may take: the more there is to do, the longer."""

from dataclasses import replace

import pytest

from anabranch.checkpointing.policy import Periodic
from anabranch.protocols import orders as o
from anabranch.protocols.events import BatchCommitted, ReadState, Scale, SliceReport
from anabranch.protocols.orders import SECOND, patience
from anabranch.units import Version
from protocols.played import Play

GIGABYTES = 5_000_000_000
HOUR = 3600


def large_batch(play: Play) -> None:
    """A batch after which every slice has a large table."""
    order = play.ask()
    assert order is not None
    slices = {each.id: each for each in order.slices}
    captured = {
        wanted.slice: play.captured(wanted, slices[wanted.slice], order.version)
        for wanted in order.captures
    }
    reports = {i: SliceReport(captured.get(i), rows=10, bytes=GIGABYTES) for i in slices}
    play.happen(BatchCommitted(order.version, order.fence, reports))


@pytest.mark.parametrize("kind", [o.Make, o.Advance, o.Merge])
def test_what_reads_parts_has_time_for_their_bytes(kind: type) -> None:
    play = Play.started()
    (each, *_), part = play.slices, play.part(3)
    orders = {
        size: {
            o.Make: o.Make(each, (replace(part, bytes=size),), Version(3)),
            o.Advance: o.Advance(each, (replace(part, bytes=size),), Version(2), Version(3), 1),
            o.Merge: o.Merge(each, (replace(part, bytes=size),), each.groups, Version(3), ()),
        }[kind]
        for size in (0, GIGABYTES)
    }
    base = patience(orders[0])
    assert 60 * SECOND < base < HOUR * SECOND
    assert patience(orders[GIGABYTES]) - base == 5000 * SECOND


def test_a_restore_that_takes_long_is_not_ordered_again() -> None:
    play = Play.started(checkpointing=Periodic("1 hour", at_most=1))
    play.batches(2)
    parts = tuple(replace(p, bytes=GIGABYTES) for p in play.query.inventory["op"].parts)
    play.query = replace(play.query, inventory={"op": type(play.query.inventory["op"])(parts)})
    play.hold(o.Make)
    play.lose("a")
    (make,) = play.waiting(o.Make)
    play.wait(HOUR)
    assert play.waiting(o.Make) == [make]
    play.wait(3 * HOUR)
    assert "was not answered within 5600 s" in play.told("recovery failed")[0]["reason"]


def test_a_capture_that_takes_long_to_store_is_a_checkpoint_all_the_same() -> None:
    play = Play.started(checkpointing=Periodic("1 hour", at_most=1))
    play.hold(o.Store)
    large_batch(play)
    large_batch(play)
    assert play.waiting(o.Store)
    play.wait(HOUR)
    play.let_go(o.Store)
    assert not play.told("checkpoint failed")
    assert play.published == [1]


def test_every_capture_at_rest_has_time_for_the_table_as_it_was_reported() -> None:
    play = Play.started(hosts="abcd", checkpointing=Periodic("1 hour"))
    large_batch(play)
    play.hold(o.Capture)
    play.checkpoint()
    play.wait(1)
    assert {capture.bytes for capture in play.waiting(o.Capture)} == {GIGABYTES}
    play.let_go(o.Capture)
    play.hold(o.Capture)
    play.command(Scale, "op", 4)
    play.wait(10)
    assert {capture.bytes for capture in play.waiting(o.Capture)} == {GIGABYTES}
    play.let_go(o.Capture)
    play.hold(o.Capture)
    play.command(ReadState, "op")
    found = {capture.slice.id: patience(capture) for capture in play.waiting(o.Capture)}
    assert found == {s.id: 60 * SECOND + play.query.size(s) for s in play.slices}


def test_before_a_batch_has_reported_it_the_parts_say_how_large_a_slice_is() -> None:
    play = Play.started(checkpointing=Periodic("1 hour", at_most=1))
    play.batches(2)
    (each, _) = play.slices
    play.query = replace(play.query, sizes={})
    assert play.query.size(each) == 100


def test_a_replay_has_time_for_each_of_its_batches() -> None:
    play = Play.started()
    (each, *_) = play.slices
    few, many = (o.Replay((each,), Version(upto), 1) for upto in (1, 101))
    assert patience(many) - patience(few) == 6000 * SECOND
