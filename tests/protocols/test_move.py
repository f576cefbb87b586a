"""Moves: groups go to other instances while the stream runs; what stays is not touched."""

from typing import Any

import pytest

from anabranch.checkpointing.policy import Never, Periodic
from anabranch.protocols import orders as o
from anabranch.protocols.events import Cause, GiveUp, Rebalance, Scale, SliceReport
from anabranch.protocols.model import Role
from anabranch.state.groups import KeyGroups
from anabranch.units import NO_VERSION
from protocols.played import EVERYTHING, Play, groups_of

SELDOM = Periodic("1 hour", at_most=1000)


def running(batches: int = 2, **given: Any) -> Play:
    """Two instances on a and b; c and d are idle."""
    play = Play.started(**{"hosts": "abcd", "checkpointing": SELDOM, **given})
    play.batches(batches)
    return play


def until_done(play: Play, command: o.CommandId) -> None:
    for _ in range(20):
        if command in play.ended:
            return
        play.batch()
    raise AssertionError(f"the move does not end: {play.query.changes}")


def test_only_groups_that_move_are_captured_and_made() -> None:
    play = running()
    before = play.query.routed["op"].routing
    command = play.command(Scale, "op", 4)
    order = play.batch()
    after = before.scaled(4)
    moved = KeyGroups.of(g for i, owned in enumerate(after.owners) if i >= 2 for g in owned)
    captured = KeyGroups()
    for each in order.captures:
        assert not each.clean
        captured = captured | each.groups
    assert captured == moved
    until_done(play, command)
    made = [make for make in play.given(o.Make) if make.version != NO_VERSION]
    assert groups_of([make.slice for make in made]) == moved
    assert play.query.routed["op"].routing == after


def test_slices_that_stay_keep_their_tables_and_shed_the_rest() -> None:
    play = running()
    stays = {each.id: each.groups for each in play.slices}
    until_done(play, play.command(Scale, "op", 4))
    for each in play.slices:
        if each.id in stays:
            assert each.groups | each.leaving == stays[each.id]
            assert each.leaving
    assert groups_of(play.slices) == EVERYTHING


def test_a_slice_has_shed_when_its_task_says_so() -> None:
    play = running()
    until_done(play, play.command(Scale, "op", 4))
    order = play.ask()
    assert order is not None
    shedding, *_ = (each for each in order.slices if each.leaving)
    name = f"s{shedding.id.replace('-', '_')}"
    play.commit(order, **{name: SliceReport(left_to_shed=5)})
    assert play.query.slices[shedding.id].leaving
    order = play.ask()
    assert order is not None
    play.commit(order, **{name: SliceReport(left_to_shed=0)})
    assert not play.query.slices[shedding.id].leaving


def test_until_the_switch_rows_go_where_they_went() -> None:
    play = running()
    before = play.query.routed["op"]
    play.hold(o.Make)
    command = play.command(Scale, "op", 4)
    orders = play.batches(5)
    assert all(order.routed["op"] == before for order in orders)
    assert all({s.role for s in order.slices} == {Role.SERVING} for order in orders)
    play.let_go(o.Make)
    until_done(play, command)
    order = play.batch()
    assert order.routed["op"].routing.instances == 4
    assert order.arrangement != orders[-1].arrangement


def test_a_slice_stands_by_from_when_it_has_a_table_until_it_serves() -> None:
    play = running()
    play.hold(o.Make, o.Replay)
    command = play.command(Scale, "op", 4)
    play.batches(6)
    made = play.waiting(o.Make)
    targets = [order.slice.id for order in made]
    assert targets
    assert {play.query.slices[i].role for i in targets} == {Role.ARRIVING}
    for order in made:
        play.finish(order)
    assert {play.query.slices[i].role for i in targets} == {Role.STANDBY}
    assert groups_of(play.slices) == EVERYTHING, "those that stand by do not serve yet"
    play.let_go(o.Replay)
    until_done(play, command)
    assert {play.query.slices[i].role for i in targets} == {Role.SERVING}


def test_the_stream_is_held_for_the_last_changes_alone() -> None:
    play = running()
    play.hold(o.Make, o.Replay)
    command = play.command(Scale, "op", 4)
    play.batches(6)  # neither captures nor the making of slices hold it
    play.let_go(o.Make)
    (replay,) = play.waiting(o.Replay)
    play.batches(2)  # nor the first replay
    play.finish(replay)
    assert play.ask() is None
    play.let_go(o.Replay)
    assert command in play.ended
    assert play.last(o.RunBatch).version == play.query.committed + 1


def test_targets_catch_up_by_changes_where_their_sources_know_them() -> None:
    play = running(batches=6, checkpointing=Periodic("1 hour", at_most=3), replays=False)
    assert play.published == [3]
    play.hold(o.Make)
    command = play.command(Scale, "op", 4)
    play.batches(3)
    play.let_go(o.Make)
    for _ in range(20):
        if command in play.ended:
            break
        play.wait(1)
        if play.ask() is not None:
            play.commit(play.last(o.RunBatch))
    assert play.ended[command].error is None
    advanced = play.given(o.Advance)
    assert advanced
    assert all(each.after < each.upto for each in advanced)
    assert not play.given(o.Replay)
    assert not play.told("scale failed")


def test_the_last_changes_are_captured_by_a_batch_and_the_stream_is_held_after_it() -> None:
    given = {"checkpointing": Periodic("1 hour", at_most=3), "replays": False}
    play = running(batches=6, hosts="ab", **given)
    play.command(Scale, "op", 4)
    play.hold(o.Make)
    play.batches(3)
    order = play.ask()
    assert order is not None
    play.let_go(o.Make)
    play.wait(1)  # Spark asks for the next batch a moment after this one, however long it took
    play.commit(order)
    play.hold(o.Store)
    captured = play.batch()
    assert captured.captures
    assert play.ask() is None, "the stream is held until the captured changes are applied"
    assert not play.given(o.Capture), "nothing is captured while it is held"
    play.wait(0.2)
    play.let_go(o.Store)
    (told,) = play.told("scale")
    assert told["pause"] == pytest.approx(0.2, abs=0.01)
    assert play.ask() is not None


def test_a_batch_that_still_runs_is_not_part_of_the_pause() -> None:
    play = running(hosts="ab")
    play.hold(o.Make)
    command = play.command(Scale, "op", 4)
    play.batch()
    order = play.ask()
    assert order is not None
    play.let_go(o.Make)
    (change,) = play.query.changes
    assert change.step == "holding the stream for the last changes"
    play.wait(3)
    play.commit(order)
    assert command in play.ended
    (told,) = play.told("scale")
    assert told["pause"] == 0


def test_targets_catch_up_by_replay_where_no_changes_are_known() -> None:
    play = running()
    play.hold(o.Make)
    command = play.command(Scale, "op", 4)
    play.batches(5)
    play.let_go(o.Make)
    until_done(play, command)
    assert play.given(o.Replay)
    assert not play.given(o.Advance)


def test_with_no_way_to_catch_up_groups_are_copied_while_the_stream_waits() -> None:
    play = running(checkpointing=Never(), replays=False)
    play.hold(o.Capture)
    command = play.command(Scale, "op", 4)
    assert play.waiting(o.Capture)
    assert play.ask() is None
    play.let_go(o.Capture)
    assert play.ended[command].error is None
    assert not play.given(o.Replay)
    assert not play.given(o.Advance)


def test_before_the_first_batch_there_is_nothing_to_move() -> None:
    play = running(batches=0)
    command = play.command(Scale, "op", 4)
    assert play.ended[command].error is None
    assert not play.given(o.Capture)
    assert play.batch().routed["op"].routing.instances == 4


def test_where_the_first_batch_fails_there_is_nothing_to_capture() -> None:
    play = running(batches=0)
    order = play.ask()
    assert order is not None
    command = play.command(Scale, "op", 4)
    play.break_off(order, Cause.PROCESS_LOST)
    play.wait(10)
    assert play.ended[command].error is None
    assert not play.given(o.Capture)
    assert {make.parts for make in play.given(o.Make)} == {()}


def test_also_where_there_is_no_way_to_catch_up() -> None:
    full = Periodic("1 hour", at_most=1000, incremental=False)
    play = running(batches=0, replays=False, checkpointing=full)
    order = play.ask()
    assert order is not None
    command = play.command(Scale, "op", 4)
    play.break_off(order, Cause.PROCESS_LOST)
    play.wait(10)
    assert play.ended[command].error is None
    assert not play.given(o.Capture)
    assert {(make.parts, make.version) for make in play.given(o.Make)} == {((), NO_VERSION)}
    assert play.batch().routed["op"].routing.instances == 4


def test_without_a_batch_the_groups_are_captured_at_rest() -> None:
    play = running()
    command = play.command(Scale, "op", 4)
    assert not play.given(o.Capture)
    play.wait(1)
    assert play.given(o.Capture)
    assert play.ended[command].error is None


@pytest.mark.parametrize("held", [o.Make, o.Store, o.Replay])
def test_a_move_that_is_given_up_leaves_nothing_behind(held: type) -> None:
    play = running()
    before, slices = play.query.routed["op"], play.slices
    play.hold(held, o.Make)
    command = play.command(Scale, "op", 4)
    play.batches(5)
    if held is o.Replay:
        play.let_go(o.Make)
    assert play.waiting(held)
    targets = {each.id: each.node for each in play.query.slices.values()}
    play.happen(GiveUp(command))
    assert play.ended[command].error == "the command was cancelled by its caller"
    assert play.query.routed["op"] == before
    assert play.slices == slices
    assert set(play.query.slices) == {each.id for each in slices}
    dropped = {i for each in play.given(o.Drop) for i in each.slices}
    assert targets.keys() - {each.id for each in slices} <= dropped
    play.let_go(held, o.Make)
    assert play.query.slices.keys() == {each.id for each in slices}
    assert play.batch().slices == tuple(play.query.slices.values())


def test_a_lost_target_has_the_move_begin_again_elsewhere() -> None:
    play = running()
    play.hold(o.Make)
    command = play.command(Scale, "op", 4)
    play.batch()
    gone = play.waiting(o.Make)[0].slice.node
    play.lose(gone)
    assert play.told("scale failed")[0]["attempt"] == 1
    play.let_go(o.Make)
    play.wait(1)
    until_done(play, command)
    assert play.ended[command].error is None
    assert gone not in play.query.routed["op"].hosts


def test_a_lost_source_is_recovered_first() -> None:
    play = running()
    play.hold(o.Make)
    command = play.command(Scale, "op", 4)
    play.batch()
    play.lose("a")
    assert play.query.recovery is not None
    play.let_go(o.Make)
    play.wait(1)
    until_done(play, command)
    assert play.told("recovery")
    assert groups_of(play.slices) == EVERYTHING
    assert play.query.routed["op"].routing.instances == 4


def test_after_five_attempts_it_is_left() -> None:
    play = running()
    before = play.query.routed["op"]
    play.hold(o.Make)
    command = play.command(Scale, "op", 4)
    for _ in range(5):
        assert command not in play.ended
        play.wait(1)
        while not play.waiting(o.Make):
            play.batch()
        play.fail(play.waiting(o.Make)[0], "the disk is full")
    assert play.ended[command].error == "the disk is full"
    assert play.query.routed["op"] == before
    play.batch()


def test_a_batch_that_fails_captures_again_with_its_next_attempt() -> None:
    play = running()
    command = play.command(Scale, "op", 4)
    order = play.ask()
    assert order is not None
    play.break_off(order, Cause.PROCESS_LOST)
    play.wait(1)
    again = play.last(o.RunBatch)
    assert [(c.slice, c.groups) for c in again.captures] == [
        (c.slice, c.groups) for c in order.captures
    ]
    play.commit(again)
    until_done(play, command)


def test_scaling_in_brings_groups_together() -> None:
    play = running(instances=4)
    until_done(play, play.command(Scale, "op", 2))
    routed = play.query.routed["op"]
    assert routed.routing.instances == 2
    assert {each.node for each in play.slices} == set(routed.hosts)
    assert groups_of(play.slices) == EVERYTHING


def test_sources_without_groups_are_dropped() -> None:
    play = running(instances=4)
    before = {each.id: each for each in play.slices}
    until_done(play, play.command(Scale, "op", 1))
    gone = before.keys() - {each.id for each in play.slices}
    assert gone
    dropped = {(each.host, i) for each in play.given(o.Drop) for i in each.slices}
    assert {(before[i].node, i) for i in gone} <= dropped


def test_as_many_instances_as_there_are_is_done_at_once() -> None:
    play = running()
    before = len(play.sent)
    command = play.command(Scale, "op", 2)
    assert play.sent[before:] == [o.End(command)]


def test_one_move_after_the_other() -> None:
    play = running()
    first, second = play.command(Scale, "op", 4), play.command(Scale, "op", 3)
    assert set(play.query.moves) == {first}
    until_done(play, second)
    assert list(play.ended) == [first, second]
    assert play.query.routed["op"].routing.instances == 3


def test_a_move_that_waits_can_be_given_up() -> None:
    play = running()
    first, second = play.command(Scale, "op", 4), play.command(Scale, "op", 3)
    play.happen(GiveUp(second))
    assert play.ended[second].error == "the command was cancelled by its caller"
    until_done(play, first)
    assert play.query.routed["op"].routing.instances == 4


def test_rebalancing_uses_a_node_that_has_come() -> None:
    play = running(hosts="a", instances=2)
    play.come("b")
    until_done(play, play.command(Rebalance))
    assert set(play.query.routed["op"].hosts) == {"a", "b"}
    assert {each.node for each in play.slices} == {"a", "b"}


def test_small_slices_of_a_crowded_instance_are_merged() -> None:
    play = running(hosts="a", instances=8, most_slices=3)
    for instances in range(7, 0, -1):
        until_done(play, play.command(Scale, "op", instances))
    play.batches(5)
    assert len(play.slices) <= 3
    assert groups_of(play.slices) == EVERYTHING
    assert play.told("slices merged")
    assert play.query.routed["op"].routing.instances == 1


def test_the_user_is_told_what_a_move_cost() -> None:
    play = running()
    until_done(play, play.command(Scale, "op", 4))
    (told,) = play.told("scale")
    assert (told["before"], told["after"], told["attempts"]) == (2, 4, 1)
    assert told["bytes"] == 100 * len(play.given(o.Store))


def test_what_a_move_does_can_be_seen() -> None:
    play = running()
    play.hold(o.Make)
    play.command(Scale, "op", 4)
    play.batch()
    (change,) = play.query.changes
    assert (change.kind, change.what, change.why) == ("move", "op", "scale to 4 instances")
    assert change.step == "making slices at their new nodes"
    assert change.since == play.now


def test_slices_that_moved_are_checkpointed_with_the_others() -> None:
    play = running(checkpointing=Periodic("1 hour", at_most=3))
    until_done(play, play.command(Scale, "op", 4))
    before = play.published
    while play.published == before:
        play.batch()
    newest = play.query.published[-1]
    assert KeyGroups.of(g for part in newest.parts["op"] for g in part.groups) == EVERYTHING


@pytest.mark.parametrize(("hosts", "replays"), [("abcd", True), ("ab", False)])
def test_a_node_that_is_new_to_the_operator_runs_a_batch_before_it_serves(
    hosts: str, replays: bool
) -> None:
    """Its first batch takes longer; in the background nobody waits for it."""
    play = running(batches=6, hosts=hosts, checkpointing=Periodic("1 hour", at_most=3))
    play.hold(o.Replay)
    command = play.command(Scale, "op", 4)
    play.batches(3)
    assert bool(play.waiting(o.Replay)) == replays
    assert (command in play.ended) == (not replays)
    if replays:
        play.batches(2)
        assert play.query.routed["op"].routing.instances == 2
        play.let_go(o.Replay)
        until_done(play, command)
        assert play.given(o.Advance), "changes are known, and less work than a second replay"
    assert play.ended[command].error is None


def test_a_replay_that_fails_is_not_tried_where_changes_are_known() -> None:
    play = running(batches=6, checkpointing=Periodic("1 hour", at_most=3))
    play.hold(o.Replay)
    command = play.command(Scale, "op", 4)
    play.batches(3)
    play.fail(play.waiting(o.Replay)[0], "what was sent is not kept")
    play.wait(1)
    until_done(play, command)
    assert play.ended[command].error is None
    assert len(play.given(o.Replay)) == 1
