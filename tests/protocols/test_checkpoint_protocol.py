"""Checkpoints: what is captured when, and which versions exist."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from anabranch.checkpointing.policy import Kind, Never, Periodic, Situation
from anabranch.protocols import coverage
from anabranch.protocols import orders as o
from anabranch.protocols.events import BatchLeft, Cause, Done, GiveUp, Inspected, Scale, SliceReport
from anabranch.protocols.model import OperatorPlan
from anabranch.protocols.orders import SECOND
from anabranch.state.part import Part
from anabranch.units import Version
from protocols.played import EVERYTHING, AtPeers, Play, groups_of, whole


@dataclass(frozen=True)
class AtAllPeers(AtPeers):
    def holders(self, owner: str, key: str, nodes: Any, senders: Any) -> tuple[str, ...]:
        return tuple(sorted(set(nodes) - {owner}))


def test_nothing_is_captured_before_it_is_due() -> None:
    play = Play.started()
    assert [bool(order.captures) for order in play.batches(4)] == [False, False, False, True]
    assert play.published == [3]


def test_a_checkpoint_is_due_after_its_interval_too() -> None:
    play = Play.started(checkpointing=Periodic("5 seconds"))
    assert not play.batch().captures
    play.wait(5)
    assert play.batch().captures


def test_the_first_capture_is_of_all_rows_and_later_ones_of_what_changed() -> None:
    play = Play.started()
    first, second = (order for order in play.batches(8) if order.captures)
    assert {each.base for each in first.captures} == {None}
    assert {each.base for each in second.captures} == {Version(3)}
    assert all(each.clean for each in (*first.captures, *second.captures))
    assert play.published == [3, 7]


def test_all_rows_are_captured_each_time_if_the_policy_says_so() -> None:
    play = Play.started(checkpointing=Periodic("1 hour", at_most=1, incremental=False))
    taken = [order for order in play.batches(6) if order.captures]
    assert len(taken) == 3
    assert {each.base for order in taken for each in order.captures} == {None}


@dataclass(frozen=True)
class EveryThirdFull(Periodic):
    """Captures all rows with every third checkpoint, though changes are tracked."""

    def decide(self, situation: Situation) -> Kind | None:
        due = super().decide(situation)
        return "full" if due and situation.now >= 10 * SECOND else due


def test_all_rows_are_captured_when_the_policy_says_so() -> None:
    play = Play.started(checkpointing=EveryThirdFull("1 hour", at_most=1))
    bases = []
    for _ in range(3):
        taken = next(order for order in play.batches(2) if order.captures)
        bases.append({each.base for each in taken.captures})
        play.wait(5)
    assert bases == [{None}, {Version(1)}, {None}]


def test_a_version_exists_once_all_of_its_parts_are_stored() -> None:
    play = Play.started()
    play.hold(o.Store)
    play.batches(4)
    first, second = play.waiting(o.Store)
    play.finish(first)
    assert not play.given(o.Publish)
    play.finish(second)
    (publish,) = play.given(o.Publish)
    assert publish.published.version == 3
    names = {part.name for part in publish.published.parts["op"]}
    assert names == {part.name for part in play.query.inventory["op"].parts}


def test_the_manifest_of_a_change_names_what_it_is_based_on() -> None:
    play = Play.started()
    play.batches(8)
    parts = play.last(o.Publish).published.parts["op"]
    assert [(part.version, part.base) for part in parts] == [(3, None), (3, None), (7, 3), (7, 3)]


def test_batches_go_on_while_a_checkpoint_is_stored() -> None:
    play = Play.started()
    play.hold(o.Store)
    play.batches(4)
    later = play.batches(4)
    assert not any(order.captures for order in later)  # one at a time
    play.let_go(o.Store)
    assert play.published == [3]
    assert play.batch().captures


def test_a_checkpoint_that_others_wait_for_is_told_of_once() -> None:
    play = Play.started()
    play.hold(o.Store)
    play.batches(4)
    play.wait(7)
    play.batches(3)
    assert not play.told("checkpoint late")
    play.batches(5)
    told = {"seconds": 7.0, "version": 3, "committed": 6, "batches": 3}
    assert play.told("checkpoint late") == [told]


def test_one_that_is_due_as_time_has_passed_waits_in_silence() -> None:
    play = Play.started(checkpointing=Periodic("1 second"))
    play.wait(1)
    play.hold(o.Store)
    for _ in range(9):
        play.batch()
        play.wait(1)
    assert play.waiting(o.Store)
    assert not play.told("checkpoint late")


def test_a_checkpoint_by_hand_is_taken_with_the_next_batch() -> None:
    play = Play.started()
    play.batch()
    command = play.checkpoint()
    assert play.batch().captures
    assert play.ended[command] == o.End(command, None, Version(1))
    assert play.published == [1]


def test_a_checkpoint_by_hand_beside_a_periodic_one_is_one_of_its_own() -> None:
    play = Play.started()
    play.hold(o.Store)
    play.batches(4)
    command = play.checkpoint()
    play.wait(10)
    assert command not in play.ended
    play.let_go(o.Store)
    play.wait(10)
    play.batch()
    assert play.ended[command].error is None
    assert play.ended[command].result in (3, 4)
    assert play.published[-1] == play.ended[command].result


def test_without_a_batch_it_is_taken_at_rest_and_the_stream_waits_for_the_captures_alone() -> None:
    play = Play.started()
    play.batches(2)
    play.hold(o.Capture, o.Store)
    command = play.checkpoint()
    assert not play.given(o.Capture)
    play.wait(0.2)
    captures = play.waiting(o.Capture)
    assert groups_of([each.slice for each in captures]) == EVERYTHING
    assert play.ask() is None
    play.let_go(o.Capture)
    play.commit(play.last(o.RunBatch))
    assert command not in play.ended
    play.let_go(o.Store)
    assert play.ended[command].result == 1


def test_what_is_captured_at_rest_leaves_the_tables_as_they_are() -> None:
    play = Play.started()
    play.batches(4)
    play.checkpoint()
    play.wait(0.2)
    play.batch()
    play.checkpoint()
    play.wait(0.2)
    wanted = [each.wanted for each in play.given(o.Capture)]
    assert not any(each.clean for each in wanted)
    assert {each.base for each in wanted} == {Version(3)}
    assert play.published[-1] == 4


def test_a_checkpoint_of_a_version_that_exists_captures_nothing() -> None:
    play = Play.started()
    play.batches(4)
    command = play.checkpoint()
    play.wait(0.2)
    assert not play.given(o.Capture)
    assert play.ended[command].result == 3


def test_a_checkpoint_before_the_first_batch_is_of_no_version() -> None:
    play = Play.started()
    command = play.checkpoint()
    assert play.ended[command] == o.End(command, None, Version(-1))


def test_a_command_that_nobody_wants_any_more_ends() -> None:
    play = Play.started()
    play.batch()
    command = play.checkpoint()
    play.happen(GiveUp(command))
    assert play.ended[command].error == "the command was cancelled by its caller"


def test_a_part_that_cannot_be_stored_fails_the_checkpoint_and_the_stream_goes_on() -> None:
    play = Play.started()
    play.hold(o.Store)
    play.batches(4)
    bad, good = play.waiting(o.Store)
    play.fail(bad, "the disk is full")
    play.finish(good)
    assert not play.given(o.Publish)
    assert [each["reason"] for each in play.told("checkpoint failed")] == ["the disk is full"]
    assert o.Drop(bad.captured.node, files=(bad.captured.file,)) in play.sent
    play.batch()


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_command_for_a_checkpoint_has_three_attempts(failing: int) -> None:
    """A node may have gone with what was captured there, and another checkpoint succeeds."""
    play = Play.started(checkpointing=Periodic("1 hour"))
    play.batches(3)
    play.hold(o.Store)
    command = play.checkpoint()
    for _ in range(failing):
        assert command not in play.ended
        play.wait(10)
        bad, good = play.waiting(o.Store)
        play.fail(bad, "the disk is full")
        play.finish(good)
    play.let_go(o.Store)
    play.wait(10)
    assert play.ended[command].error == (None if failing < 3 else "the disk is full")


def test_after_a_part_was_not_stored_its_slice_is_captured_whole() -> None:
    play = Play.started()
    play.hold(o.Store)
    play.batches(4)
    bad, good = play.waiting(o.Store)
    play.fail(bad)
    play.finish(good)
    play.let_go(o.Store)
    play.wait(60)
    again = [each.wanted for each in play.given(o.Capture)]
    assert [(each.slice, each.base) for each in again] == [(bad.captured.slice, None)]
    assert play.published == [3]


def test_a_capture_without_room_fails_the_checkpoint_and_not_the_batch() -> None:
    play = Play.started()
    play.batches(3)
    order = play.ask()
    assert order is not None
    first, second = (each.id for each in order.slices)
    no_room = {f"s{first.replace('-', '_')}": SliceReport(not_captured="no room in /dev/shm")}
    play.commit(order, **no_room)
    assert play.query.committed == 3
    assert play.told("checkpoint failed")[0]["reason"] == "no room in /dev/shm"
    assert play.published == []
    play.wait(60)
    play.batches(4)
    assert play.published != []
    again = next(o for o in reversed(play.given(o.RunBatch)) if o.captures)
    assert {each.slice: each.base for each in again.captures} == {first: None, second: Version(3)}


def test_a_manifest_that_may_have_been_written_is_withdrawn_after_the_next_one() -> None:
    """It may be the only one that is whole until then."""
    play = with_a_doubtful_manifest()
    assert not play.given(o.Withdraw)
    assert play.published == []
    play.let_go(o.Publish)
    play.batch()
    play.checkpoint()
    play.wait(5)
    (withdrawn,) = play.given(o.Withdraw)
    assert withdrawn.versions == (3,)
    assert play.published == [play.query.committed]


def test_a_version_whose_publishing_failed_can_be_published_later() -> None:
    play = with_a_doubtful_manifest()
    play.let_go(o.Publish)
    play.checkpoint()
    play.wait(5)
    assert play.published == [3]
    play.batch()
    play.checkpoint()
    play.wait(5)
    assert play.published == [3, 4]
    assert not play.given(o.Withdraw)


def with_a_doubtful_manifest() -> Play:
    play = Play.started()
    play.hold(o.Publish)
    play.batches(4)
    play.fail(play.last(o.Publish), "the answer was lost")
    return play


def test_a_version_that_loses_a_copy_while_it_is_published_is_known_to_have_lost_it() -> None:
    play = Play.started(hosts="abc", instances=1, backup=AtAllPeers())
    play.hold(o.Publish)
    play.batches(4)
    (publish,) = play.waiting(o.Publish)
    (gone, other) = publish.published.parts["op"][0].holders
    play.lose(gone)
    play.come(gone)  # without what it held
    play.finish(publish)
    (published,) = play.query.published
    assert [part.holders for part in published.parts["op"]] == [(other,)]


def test_a_version_that_loses_a_part_while_it_is_published_is_withdrawn() -> None:
    play = Play.started(hosts="abc", instances=1, backup=AtPeers())
    play.hold(o.Publish)
    play.batches(4)
    (publish,) = play.waiting(o.Publish)
    (gone,) = publish.published.parts["op"][0].holders
    play.lose(gone)
    play.come(gone)
    play.finish(publish)
    assert play.published == []
    assert [order.versions for order in play.given(o.Withdraw)] == [(publish.published.version,)]
    assert "lost while it was published" in play.told("checkpoint failed")[-1]["reason"]


def test_an_order_that_is_not_answered_in_time_has_failed() -> None:
    play = Play.started()
    play.hold(o.Publish)
    play.batches(4)
    play.wait(61)
    assert "not answered within" in play.told("checkpoint failed")[0]["reason"]


def test_after_many_failures_in_a_row_the_query_stops() -> None:
    play = Play.started(tolerate=2)
    play.hold(o.Store)
    for number in range(3):
        assert not play.given(o.Stop)
        play.checkpoint()
        play.wait(60)
        while not play.waiting(o.Store):
            play.batch()
        for store in play.waiting(o.Store):
            play.fail(store, f"failure {number}")
    assert "3 checkpoints in a row failed: failure 2" in play.last(o.Stop).reason


def test_the_command_ends_whose_checkpoint_was_one_too_many() -> None:
    play = Play.started(tolerate=0)
    play.batches(1)
    play.hold(o.Store)
    saved = play.checkpoint()
    while not play.waiting(o.Store):
        play.batch()
    for store in play.waiting(o.Store):
        play.fail(store, "the store is full")
    assert play.given(o.Stop)
    assert play.ended[saved].error == "the store is full"


def test_a_success_in_between_counts_as_a_new_beginning() -> None:
    play = Play.started(tolerate=1)
    for _ in range(3):
        play.hold(o.Store)
        while not play.waiting(o.Store):
            play.batch()
            play.wait(60)
        for store in play.waiting(o.Store):
            play.fail(store)
        before = play.published
        play.let_go(o.Store)
        while play.published == before:
            play.wait(60)
            play.batch()
    assert len(play.told("checkpoint failed")) == 3
    assert not play.given(o.Stop)


def test_a_pause_after_a_failure() -> None:
    play = Play.started()
    play.hold(o.Store)
    play.batches(4)
    for store in play.waiting(o.Store):
        play.fail(store)
    play.let_go(o.Store)
    assert not any(order.captures for order in play.batches(6))
    play.wait(1)
    assert play.batch().captures


# Merging


def test_a_long_chain_is_merged_and_the_next_manifest_names_the_merged_part() -> None:
    play = Play.started(checkpointing=Periodic("1 hour", at_most=1, retain=1), longest_chain=3)
    play.hold(o.Merge)
    while not play.waiting(o.Merge):
        play.batch()
    (merge,) = play.waiting(o.Merge)
    assert len(merge.parts) == 4
    assert merge.parts[0].base is None
    before = play.query.published[-1]
    merged = play.part(merge.version, None, merge.groups)
    play.finish(merge, merged)
    play.let_go(o.Merge)
    play.batches(2)
    parts = play.last(o.Publish).published.parts["op"]
    mine = [part for part in parts if part.groups & merge.groups]
    assert mine[0] == merged
    assert len(mine) == 2
    withdrawn = {part.name for each in play.given(o.Withdraw) for part in each.parts}
    assert {part.name for part in merge.parts} <= withdrawn
    assert before.version in {v for each in play.given(o.Withdraw) for v in each.versions}


def test_checkpoints_go_on_while_a_chain_is_merged() -> None:
    play = Play.started(checkpointing=Periodic("1 hour", at_most=1, retain=1), longest_chain=3)
    play.hold(o.Merge)
    while not play.waiting(o.Merge):
        play.batch()
    (merge,) = play.waiting(o.Merge)
    before = play.published
    play.batches(4)
    assert play.published > before
    assert play.waiting(o.Merge) == [merge]  # one at a time
    used = {part.name for part in merge.parts}
    withdrawn = {part.name for each in play.given(o.Withdraw) for part in each.parts}
    assert not used & withdrawn


def test_no_chain_grows_for_ever_though_one_is_merged_at_a_time() -> None:
    often = Periodic("1 hour", at_most=1, retain=1)
    play = Play.started(checkpointing=often, instances=8, longest_chain=3)
    play.batches(60)
    for each in play.slices:
        inventory, usable = play.query.inventory["op"], play.query.usable("op")
        newest = inventory.newest(each.groups, usable)
        assert newest is not None
        assert len(inventory.recipe(each.groups, newest, usable)) <= 8


def test_after_a_chain_that_cannot_be_merged_its_slice_is_captured_whole() -> None:
    play = Play.started(checkpointing=Periodic("1 hour", at_most=1, retain=1), longest_chain=3)
    play.hold(o.Merge)
    while not play.waiting(o.Merge):
        play.batch()
    (merge,) = play.waiting(o.Merge)
    play.fail(merge, "a part is damaged", damaged=merge.parts[1].name)
    taken = next(order for order in play.batches(4) if order.captures)
    assert {each.base for each in taken.captures if each.slice == merge.slice.id} == {None}
    assert play.published[-1] >= taken.version
    assert all(part.name != merge.parts[1].name for part in play.query.inventory["op"].parts)


def test_only_so_many_versions_are_kept() -> None:
    play = Play.started(checkpointing=Periodic("1 hour", at_most=1, retain=2, incremental=False))
    play.batches(8)
    assert play.published == [5, 7]
    withdraws = play.given(o.Withdraw)
    assert [each.versions for each in withdraws] == [(Version(1),), (Version(3),)]
    assert [{part.version for part in each.parts} for each in withdraws] == [{1}, {3}]


# What is protected


def test_without_a_policy_nothing_is_captured() -> None:
    play = Play.started(checkpointing=Never())
    assert not any(order.captures for order in play.batches(60))
    assert not play.given(o.Store)


def test_what_an_idle_node_held_is_stored_again() -> None:
    play = Play.started(hosts="abc", backup=AtPeers())
    play.batches(4)
    assert {host for p in play.query.inventory["op"].parts for host in p.holders} == {"a", "b"}
    held = [s for s in play.slices if s.node == "b"]
    play.lose("a")
    again = play.batch()
    assert {each.slice for each in again.captures} >= {s.id for s in held}
    for each in play.slices:
        assert coverage.protected(play.query, each) is not None


def test_a_slice_is_stored_again_when_only_its_holder_is_lost() -> None:
    play = Play.started(hosts="abc", instances=1, backup=AtPeers())
    play.batches(4)
    (each,) = play.slices
    (holder,) = {host for part in play.query.inventory["op"].parts for host in part.holders}
    assert holder != each.node
    play.lose(holder)
    assert coverage.protected(play.query, each) is None
    assert not play.given(o.Replay)
    order = play.batch()
    assert {c.slice: c.base for c in order.captures} == {each.id: None}
    assert coverage.protected(play.query, each) == 4


def test_a_version_with_a_lost_part_is_not_counted_on() -> None:
    play = Play.started(hosts="abc", instances=1, backup=AtPeers())
    play.batches(4)
    (holder,) = {host for part in play.query.inventory["op"].parts for host in part.holders}
    play.hold(o.Store)
    play.batches(3)
    play.lose(holder)
    play.let_go(o.Store)
    for each in play.query.published:
        if each.version > 3:
            assert all(p.available(play.query.nodes) for p in each.parts["op"])


def test_a_version_that_cannot_be_made_any_more_is_withdrawn_before_its_other_parts() -> None:
    """A node comes back without what it held; a manifest must not name what is deleted next."""
    full = Periodic("1 hour", at_most=3, retain=2, incremental=False)
    play = Play.started(hosts="abc", backup=AtPeers(), checkpointing=full)
    play.batches(8)
    assert play.published == [3, 7]
    gone = "a"
    play.lose(gone)
    play.wait(1)
    play.come(gone)  # and has nothing
    play.batches(12)
    versions: set[int] = set()
    for each in play.given(o.Withdraw):
        versions |= set(each.versions)
        for part in each.parts:
            assert not {p.version for p in everything_published(play) if p.uses(part)} - versions
    assert {part.version for each in play.given(o.Withdraw) for part in each.parts} >= {3, 7}


@dataclass(frozen=True)
class Manifest:
    version: Version
    parts: frozenset[str]

    def uses(self, part: Part) -> bool:
        return part.name in self.parts


def everything_published(play: Play) -> list[Manifest]:
    return [
        Manifest(p.published.version, frozenset(part.name for part in p.published.parts["op"]))
        for p in play.given(o.Publish)
    ]


def test_a_part_that_was_stored_since_a_node_was_asked_is_not_forgotten() -> None:
    """Its answer is of the moment at which it looked, and may be on its way for long."""
    play = Play.started(hosts="ab", backup=AtPeers())
    play.hold(o.Store, o.Prepare)
    play.batches(4)
    for early in play.waiting(o.Store):
        play.fail(early, unreachable=early.captured.node)
    prepares = play.waiting(o.Prepare)
    assert {prepare.host for prepare in prepares} == {"a", "b"}
    play.wait(10)
    play.batch()
    play.let_go(o.Store)
    stored = play.query.inventory["op"].parts
    assert {host for part in stored for host in part.holders} == {"a", "b"}
    for prepare in prepares:
        play.finish(prepare, Inspected({}, frozenset()))
    assert play.query.inventory["op"].parts == stored


def test_a_part_whose_holder_was_lost_while_it_was_stored_does_not_count() -> None:
    """It may have been stored before the loss, or after it."""
    play = Play.started(hosts="abc", instances=1, backup=AtPeers())
    play.hold(o.Store)
    play.batches(4)
    (store,) = play.waiting(o.Store)
    (holder,) = store.holders
    play.lose(holder)
    play.come(holder)
    play.let_go(o.Store)
    assert not play.query.inventory["op"].parts
    withdrawn = [part for order in play.given(o.Withdraw) for part in order.parts]
    assert [(part.groups, part.holders) for part in withdrawn] == [(EVERYTHING, store.holders)]
    assert f"{holder} may have lost the part" in play.told("checkpoint failed")[-1]["reason"]


def test_the_other_holders_of_such_a_part_count() -> None:
    play = Play.started(hosts="abc", instances=1, backup=AtAllPeers())
    play.hold(o.Store)
    play.batches(4)
    (store,) = play.waiting(o.Store)
    gone, other = store.holders
    play.lose(gone)
    play.come(gone)
    play.let_go(o.Store)
    (part,) = play.query.inventory["op"].parts
    assert part.holders == (other,)
    assert play.published == [part.version]


def test_what_a_node_said_before_it_was_lost_does_not_count() -> None:
    play = Play.started(hosts="abc", backup=AtPeers())
    play.hold(o.Prepare)
    play.lose("c")
    play.come("c")
    (early,) = play.waiting(o.Prepare)
    play.lose("c")
    play.come("c")
    (late,) = play.waiting(o.Prepare)
    assert late is not early
    number = play._number(early)
    play.happen(Done(number, Inspected({}, frozenset())))
    assert not play.query.nodes["c"].is_ready
    play.finish(late)
    assert play.query.nodes["c"].is_ready


def test_operators_have_checkpoints_of_their_own() -> None:
    play = Play.started(OperatorPlan("up", 8), OperatorPlan("down", 8, before=("up",)))
    orders = play.batches(4)
    assert {play.query.slices[c.slice].operator for c in orders[3].captures} == {"up", "down"}
    assert set(play.last(o.Publish).published.parts) == {"up", "down"}


# Offsets


def test_the_stream_is_held_before_offsets_run_out_until_a_version_is_published() -> None:
    play = Play.started(checkpointing=Periodic("1 hour", at_most=1000), retained_offsets=8)
    play.hold(o.Store)
    while (order := play.ask()) is not None:
        play.commit(order)
    assert play.query.committed == 7
    assert play.told("stream held") == [{"published": -1, "committed": 7}]
    play.let_go(o.Store)
    assert play.published != []
    assert len(play.told("stream goes on")) == 1
    play.commit(play.last(o.RunBatch))
    assert play.query.committed == 8


def test_a_query_without_operators_is_not_held_for_ever() -> None:
    play = Play.of(checkpointing=Periodic("1 hour", at_most=1000), retained_offsets=8)
    object.__setattr__(play.query, "operators", {})
    play.come("a")
    play.take_over(routed={}, published=(whole(0, operators=()),), committed=Version(20))
    assert play.ask() is not None, "a checkpoint was taken, so that the stream goes on"
    assert play.published == [0, 20]


def test_a_batch_that_spark_did_not_want_any_more_has_captured_nothing() -> None:
    play = Play.started(checkpointing=Periodic("10 seconds"))
    play.batches(1)
    play.wait(11)
    order = play.ask()
    assert order is not None
    assert order.captures
    play.happen(BatchLeft(order.version))
    play.hold(o.Store)
    play.checkpoint()
    play.wait(1)
    assert not play.batch().captures, "the checkpoint between two batches is in progress"
    play.let_go(o.Store)
    assert play.batch().captures, "it is still due"


def test_parts_are_kept_as_long_as_a_manifest_cannot_be_read_that_may_name_them() -> None:
    play = Play.started()
    play.batches(4)
    assert play.published == [3]
    older = play.part(2)
    inventory = {"op": play.query.inventory["op"].with_part(older)}
    play.query = replace(play.query, inventory=inventory, unreadable=(Version(5),))
    play.batches(4)
    assert older in play.query.inventory["op"].parts
    play.batches(4)
    assert play.published == [7, 11]
    assert older not in play.query.inventory["op"].parts
    assert [Version(5) in each.versions for each in play.given(o.Withdraw) if older in each.parts]


def test_or_the_query_stops_if_it_is_not_to_be_held() -> None:
    play = Play.started(
        checkpointing=Periodic("1 hour", at_most=1000), retained_offsets=8, hold=False
    )
    play.hold(o.Store)
    while (order := play.ask()) is not None:
        play.commit(order)
    assert not play.given(o.Stop)
    for failed in range(3):
        # The first one began before the stream was held: it says nothing of the store as it is now.
        assert not play.given(o.Stop)
        for store in play.waiting(o.Store):
            play.fail(store, "the store is full")
        play.wait(5)
        assert len(play.told("checkpoint failed")) == failed + 1
    for store in play.waiting(o.Store):
        play.fail(store, "the store is full")
    assert "log of offsets will not reach back" in play.last(o.Stop).reason


# Answers that nobody waits for


@pytest.mark.parametrize("twice", [False, True])
def test_a_part_that_nobody_waits_for_is_removed(twice: bool) -> None:
    play = Play.started(hosts="abc")
    play.hold(o.Store)
    play.batches(4)
    store = play.waiting(o.Store)[0]
    number = play._number(store)
    late = play.part(3, None, store.captured.groups)
    if twice:
        play.happen(Done(number, late))
        play.happen(Done(number, late))
        assert o.Withdraw((), (late,)) not in play.sent  # it is known
    else:
        play.lose(store.captured.node)
        play.happen(Done(number, late))
        assert o.Withdraw((), (late,)) in play.sent


def test_a_move_leaves_other_checkpoints_incremental() -> None:
    play = Play.started(hosts="abcd")
    play.batches(4)
    stays = {each.id for each in play.slices}
    play.command(Scale, "op", 4)
    play.batches(8)
    assert play.query.routed["op"].routing.instances == 4
    taken = next(order for order in reversed(play.given(o.RunBatch)) if order.captures)
    assert stays < {each.slice for each in taken.captures}
    assert None not in {each.base for each in taken.captures}


def test_a_checkpoint_by_command_is_taken_after_the_query_went_back() -> None:
    play = Play.started(hosts="a", replays=False)
    play.batches(6)
    command = play.checkpoint()
    order = play.ask()
    assert order is not None
    assert order.captures
    play.tables["a"] = {}
    play.break_off(order, Cause.STATE_MISSING)
    assert play.told("going back")
    assert command not in play.ended
    play.batches(2)
    play.wait(5)
    assert play.ended[command].error is None
    assert play.ended[command].result in play.published


def test_changes_do_not_follow_on_what_the_node_of_the_slice_holds_itself() -> None:
    """A slice was recovered where its own backup is: that must be stored elsewhere as a whole."""
    play = Play.started(hosts="abc", instances=1, backup=AtPeers())
    play.batches(4)
    (before,) = play.slices
    (holder,) = play.query.inventory["op"].parts[0].holders
    assert holder != before.node
    play.lose(before.node)
    play.wait(60)
    play.batches(4)
    play.wait(60)
    for each in play.slices:
        assert coverage.protected(play.query, each) is not None
    published = len(play.published)
    play.wait(60)
    assert len(play.told("checkpoint")) <= 8, "it is stored again and again"
    assert len(play.published) == published
