"""Recovery: what was lost is made elsewhere and replayed, and the rest is left alone."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from anabranch.checkpointing.policy import Periodic
from anabranch.errors import StateFull
from anabranch.protocols import coverage
from anabranch.protocols import orders as o
from anabranch.protocols.events import Cause, Done, Inspected
from anabranch.protocols.model import Inventory, OperatorPlan, SliceId
from anabranch.state.groups import KeyGroups
from anabranch.units import NO_VERSION, Version
from protocols.played import EVERYTHING, AtPeers, Play, groups_of


def with_checkpoint(**policies: object) -> Play:
    """Two instances on a and b, c idle; version 3 is published and 5 is committed."""
    play = Play.started(**{"hosts": "abc", **policies})  # type: ignore[arg-type]
    play.batches(6)
    return play


def makes_since(play: Play, before: int) -> list[o.Make]:
    return [each for each in play.sent[before:] if isinstance(each, o.Make)]


def test_lost_slices_are_made_of_parts_and_replayed() -> None:
    play = with_checkpoint()
    (lost,) = play.at("a")
    before = len(play.sent)
    play.lose("a")
    (make,) = makes_since(play, before)
    assert make.slice.groups == lost.groups
    assert make.version == 3
    assert [(part.version, part.groups) for part in make.parts] == [(3, lost.groups)]
    (replay,) = play.given(o.Replay)
    assert [each.id for each in replay.slices] == [make.slice.id]
    assert replay.upto == 5
    assert play.query.recovery is None
    assert play.told("recovery")[0]["restored"] == 3
    assert play.told("recovery")[0]["replayed"] == 2


def test_what_is_whole_is_left_alone() -> None:
    play = with_checkpoint()
    (whole,) = play.at("b")
    before = len(play.sent)
    play.lose("a")
    assert whole in play.slices
    assert all(not make.slice.groups & whole.groups for make in makes_since(play, before))
    dropped = {i for each in play.sent[before:] if isinstance(each, o.Drop) for i in each.slices}
    assert whole.id not in dropped


def test_new_slices_have_names_that_none_had() -> None:
    play = with_checkpoint()
    before = {each.slice.id for each in play.given(o.Make)}
    play.lose("a")
    play.lose("c")
    made = [each.slice.id for each in play.given(o.Make)]
    assert len(set(made)) == len(made)
    assert before < set(made)


def test_rows_go_to_the_new_node_from_the_next_batch_on() -> None:
    play = with_checkpoint()
    play.lose("a")
    order = play.batch()
    assert set(order.routed["op"].hosts) <= {"b", "c"}
    assert {each.node for each in order.slices} <= {"b", "c"}
    assert groups_of(order.slices) == EVERYTHING
    noted = play.last(o.Note)
    assert {each.id for each in noted.slices} == {each.id for each in order.slices}
    assert noted.arrangement == order.arrangement


def test_a_batch_with_lost_slices_is_cancelled_and_run_again() -> None:
    play = with_checkpoint()
    order = play.ask()
    assert order is not None
    play.lose("a")
    assert play.last(o.CancelBatch) == o.CancelBatch(order.version, order.fence)
    assert not play.given(o.Replay)  # tasks of the batch may still write
    play.break_off(order, Cause.PROCESS_LOST)
    play.wait(5)
    again = play.last(o.RunBatch)
    assert again.version == order.version
    assert again.fence > order.fence
    play.commit(again)
    assert play.query.committed == 6


def test_what_a_lost_instance_had_is_divided_over_several() -> None:
    play = with_checkpoint(parallelism=2)
    (lost,) = play.at("a")
    play.lose("a")
    routed = play.query.routed["op"]
    assert routed.routing.instances == 3
    made = [each for each in play.slices if each.groups <= lost.groups]
    assert len(made) == 2
    assert groups_of(made) == lost.groups


def test_the_loss_of_an_idle_node_needs_no_recovery() -> None:
    play = with_checkpoint()
    before = len(play.sent)
    play.lose("c")
    assert not makes_since(play, before)
    assert play.batch().version == 6


def test_suspected_slices_that_are_whole_go_on() -> None:
    play = with_checkpoint()
    order = play.ask()
    assert order is not None
    before = len(play.sent)
    play.break_off(order, Cause.STATE_MISSING)
    assert {each.host for each in play.given(o.Inspect)} == {"a", "b"}
    assert not makes_since(play, before)
    play.wait(5)
    assert play.last(o.RunBatch).slices == order.slices


def test_only_the_missing_table_is_made_anew() -> None:
    play = with_checkpoint()
    order = play.ask()
    assert order is not None
    (missing,), (whole,) = play.at("a"), play.at("b")
    play.tables["a"] = {}
    before = len(play.sent)
    play.break_off(order, Cause.STATE_MISSING)
    (make,) = makes_since(play, before)
    assert make.slice.groups == missing.groups
    assert make.slice.node == "a"
    assert whole in play.slices


def test_a_table_at_another_version_counts_as_lost() -> None:
    play = with_checkpoint()
    order = play.ask()
    assert order is not None
    (each,) = play.at("a")
    play.tables["a"] = {each.id: frozenset([Version(7)])}
    before = len(play.sent)
    play.break_off(order, Cause.STATE_MISSING)
    assert [make.slice.groups for make in makes_since(play, before)] == [each.groups]


def test_a_slice_that_cannot_be_made_is_begun_again_under_another_name() -> None:
    play = with_checkpoint()
    play.hold(o.Make)
    play.lose("a")
    (make,) = play.waiting(o.Make)
    play.fail(make, "the disk is full")
    assert play.told("recovery failed")[0]["reason"] == "the disk is full"
    assert o.Drop(make.slice.node, (make.slice.id,)) in play.sent
    assert not play.waiting(o.Make)
    play.wait(1)
    (again,) = play.waiting(o.Make)
    assert again.slice.id != make.slice.id
    assert again.slice.groups == make.slice.groups
    play.let_go(o.Make)
    assert play.query.recovery is None


def test_a_target_that_is_lost_as_well() -> None:
    play = with_checkpoint(hosts="abcd")
    play.hold(o.Make)
    play.lose("a")
    (make,) = play.waiting(o.Make)
    play.lose(make.slice.node)
    play.wait(1)
    assert {each.slice.node for each in play.waiting(o.Make)} <= set(play.query.nodes)
    play.let_go(o.Make)
    assert play.query.recovery is None
    assert play.batch().version == 6


def test_an_answer_to_a_recovery_that_was_given_up_counts_for_nothing() -> None:
    play = with_checkpoint()
    play.hold(o.Make)
    play.lose("a")
    (make,) = play.waiting(o.Make)
    number = play._number(make)
    play.held[number] = make
    play.fail(make)
    play.happen(Done(number))
    assert play.query.recovery is not None
    assert make.slice.id not in play.query.slices


def test_a_damaged_part_is_not_used_again() -> None:
    play = with_checkpoint()
    play.batches(2)
    assert play.published == [3, 7]
    play.hold(o.Make)
    play.lose("a")
    (make,) = play.waiting(o.Make)
    assert make.version == 7
    newest = max(make.parts, key=lambda part: part.version)
    play.fail(make, "bad checksum", damaged=newest.name)
    play.wait(1)
    # The state of version 3 can still be made, but what was sent since is not kept any more.
    assert newest.name not in {part.name for part in play.query.inventory["op"].parts}
    play.let_go(o.Make)
    assert play.told("going back"), "no node that may come has anything better"
    assert play.query.settled


@dataclass(frozen=True)
class AtTwoPeers(AtPeers):
    def holders(self, owner: str, key: str, nodes: Any, senders: Any) -> tuple[str, ...]:
        others = sorted(set(nodes) - {owner})
        return others[0], others[-1]


def test_a_copy_that_is_damaged_is_not_asked_for_again_while_another_holder_is_silent() -> None:
    play = with_checkpoint(hosts="abcd", backup=AtTwoPeers())
    play.hold(o.Make, o.Prepare)
    play.lose("a")
    (make,) = play.waiting(o.Make)
    (part,) = make.parts
    assert part.holders == ("b", "d")
    what = {"unreachable": "d", "damaged": part.name, "damaged_at": ("b",)}
    play.fail(make, "d is silent", **what)
    (prepare,) = play.waiting(o.Prepare)
    assert (make.slice.node, prepare.host) == ("c", "d")
    kept = {each.name: each for each in play.query.inventory["op"].parts}
    assert kept[part.name].holders == ("d",), "it may be whole there"
    play.finish(prepare, Inspected({}, frozenset(kept)))
    play.wait(1)
    (again,) = play.waiting(o.Make)
    assert again.parts[0].holders == ("d",)
    play.lose("d")
    play.fail(again, "d was lost", unreachable="d")
    before = len(play.sent)
    play.let_go(o.Make, o.Prepare)
    play.wait(200)
    used = {each.name for made in makes_since(play, before) for each in made.parts}
    assert part.name not in used
    assert play.query.settled
    assert play.query.recovery is None


def test_state_without_any_checkpoint_is_computed_from_the_first_batch() -> None:
    play = Play.started(hosts="abc")
    play.batches(3)
    before = len(play.sent)
    play.lose("a")
    (make,) = makes_since(play, before)
    assert (make.parts, make.version) == ((), NO_VERSION)
    assert play.last(o.Replay).upto == 2
    assert not play.told("going back")


def test_where_nothing_is_replayed_the_query_goes_back() -> None:
    play = Play.started(hosts="a", replays=False)
    play.batches(6)
    order = play.ask()
    assert order is not None
    play.tables["a"] = {}
    play.break_off(order, Cause.STATE_MISSING)
    assert play.told("going back")  # at once: there is nobody to wait for
    assert [(r.start, r.target) for r in play.given(o.Rewind)] == [(Version(3), Version(5))]
    assert play.query.committed == 3
    again = play.batches(2)
    assert [order.deliver for order in again] == [False, False]
    assert play.batch().deliver


def test_replays_that_fail_again_and_again_end_in_going_back() -> None:
    play = with_checkpoint()
    play.hold(o.Replay)
    play.lose("a")
    for _ in range(3):
        assert not play.told("going back")
        play.fail(play.waiting(o.Replay)[0], "what was sent is lost")
        play.wait(1)
    assert play.told("going back")
    assert [(r.start, r.target) for r in play.given(o.Rewind)] == [(Version(3), Version(5))]
    assert [order.deliver for order in play.batches(3)] == [False, False, True]


def test_a_node_lost_during_a_replay_does_not_count_as_its_failure() -> None:
    play = with_checkpoint(hosts="abcdef")
    play.hold(o.Replay)
    play.lose("a")
    for _ in range(3):
        play.wait(1)
        (replay,) = play.waiting(o.Replay)
        play.lose(replay.slices[0].node)
    play.wait(1)
    play.let_go(o.Replay)
    assert not play.told("going back")
    assert play.batch().version == 6


def test_replays_are_counted_anew_once_more_slices_are_lost() -> None:
    """A sender that is lost as well makes the rows again that the replays before did not find."""
    play = with_checkpoint()
    play.hold(o.Replay)
    play.lose("a")
    play.fail(play.waiting(o.Replay)[0], "what was sent is lost")
    play.wait(1)
    play.fail(play.waiting(o.Replay)[0], "what was sent is lost")
    play.hold(o.Make)
    play.wait(1)
    assert {make.slice.node for make in play.waiting(o.Make)} == {"c"}
    play.lose("b")
    play.let_go(o.Make)
    play.fail(play.waiting(o.Replay)[0], "what was sent is lost")
    play.wait(1)
    assert not play.told("going back")
    (replay,) = play.waiting(o.Replay)
    assert groups_of(replay.slices) == EVERYTHING
    play.let_go(o.Replay)
    assert play.batch().version == 6


def test_replays_are_counted_anew_once_there_are_newer_parts() -> None:
    """A node that returns during a replay may have what makes the rows needless that are lost."""
    play = Play.started(hosts="abcd", backup=AtPeers())
    play.hold(o.Store)
    play.batches(4)
    store = next(each for each in play.waiting(o.Store) if each.holders == ("b",))
    groups = store.captured.groups
    play.finish(store, play.part(3, None, groups, ("b",)))
    play.hold(o.Replay)
    play.lose("b")
    play.lose("a")
    for attempt in range(3):
        play.wait(1)
        (replay,) = play.waiting(o.Replay)
        assert {made.version for made in replay.slices} == {NO_VERSION}
        if attempt == 2:
            play.parts_at["b"] = frozenset(p.name for p in play.query.inventory["op"].parts)
            play.come("b")
        play.fail(replay, "what was sent is lost")
    play.wait(1)
    assert not play.told("going back")
    (replay,) = play.waiting(o.Replay)
    assert {made.version for made in replay.slices if made.groups <= groups} == {3}


def test_holders_of_newer_parts_are_waited_for() -> None:
    play = with_checkpoint(backup=AtPeers())
    play.hold(o.Prepare)
    (lost,) = play.at("b")
    (holder,) = {
        h for p in play.query.inventory["op"].parts if p.groups & lost.groups for h in p.holders
    }
    agent_starts_anew(play, holder)
    play.lose("b")
    before = len(play.sent)
    play.wait(29)
    assert not makes_since(play, before)
    prepare = next(each for each in play.waiting(o.Prepare) if each.host == holder)
    names = frozenset(p.name for p in play.query.inventory["op"].parts if holder in p.holders)
    tables = {s.id: frozenset([play.query.committed]) for s in play.at(holder)}
    play.finish(prepare, Inspected(tables, names))
    assert [make.slice.groups for make in makes_since(play, before)] == [lost.groups]
    assert not play.told("going back")


def agent_starts_anew(play: Play, host: str) -> None:
    """The agent of a node does not answer an order, and is being replaced."""
    play.hold(o.Store)
    play.checkpoint()
    play.wait(0.2)
    for store in play.waiting(o.Store):
        if store.captured.node == host:
            play.fail(store, "no answer", unreachable=host)
    play.let_go(o.Store)
    assert [each.host for each in play.waiting(o.Prepare)] == [host]


def test_holders_that_are_gone_are_waited_for_and_then_the_query_goes_back() -> None:
    play = with_checkpoint(backup=AtPeers(), checkpointing=Periodic("1 hour", at_most=3))
    play.lose("a")
    play.lose("b")
    assert not play.told("going back")
    play.wait(119)
    assert not play.told("going back")
    assert any("waiting for nodes a, b" in each.step for each in play.query.changes)
    play.wait(1)
    assert "nodes a, b, which may hold some" in play.told("going back")[0]["reason"]


def test_the_only_holder_is_waited_for_until_its_agent_has_started() -> None:
    play = with_checkpoint(hosts="abcd", backup=AtPeers())
    play.hold(o.Prepare)
    (lost,) = play.at("b")
    holders = {
        h for p in play.query.inventory["op"].parts if p.groups & lost.groups for h in p.holders
    }
    (holder,) = holders
    agent_starts_anew(play, holder)
    held = frozenset(p.name for p in play.query.inventory["op"].parts if holder in p.holders)
    play.lose("b")
    for _ in range(2):
        play.wait(50)
        play.fail(next(p for p in play.waiting(o.Prepare) if p.host == holder), "no start")
        play.wait(2)
    play.wait(30)
    assert not play.told("going back")
    tables = {s.id: frozenset([play.query.committed]) for s in play.at(holder)}
    prepare = next(p for p in play.waiting(o.Prepare) if p.host == holder)
    play.finish(prepare, Inspected(tables, held))
    assert play.query.recovery is None
    assert not play.told("going back")


def test_a_disk_that_stays_full_ends_the_query_with_its_error() -> None:
    play = with_checkpoint()
    play.hold(o.Make)
    play.lose("a")
    began = play.now
    for _ in range(400):
        for make in play.waiting(o.Make):
            play.fail(make, "the disk is full", kind=StateFull)
        if play.query.stopped is not None:
            break
        play.wait(0.5)
    assert play.last(o.Stop).kind is StateFull
    assert "the disk is full" in play.last(o.Stop).reason
    assert 60 < (play.now - began) / o.SECOND < 180


def test_slices_that_reach_different_versions_are_made_at_these() -> None:
    """Each has another checkpoint that the other one does not have, and both are protected."""
    play = with_checkpoint(hosts="abc", instances=2, checkpointing=Periodic("1 hour"))
    first, second = play.slices
    parts = (play.part(3, None, first.groups), play.part(2, None, second.groups))
    play.query = replace(play.query, inventory={"op": Inventory(parts)}, trimmed={"op": Version(2)})
    order = play.ask()
    assert order is not None
    play.tables = {host: {} for host in "abc"}
    before = len(play.sent)
    play.break_off(order, Cause.STATE_MISSING)
    made = {make.slice.groups: (make.version, make.parts) for make in makes_since(play, before)}
    assert made == {
        first.groups: (Version(3), parts[:1]),
        second.groups: (Version(2), parts[1:]),
    }
    (replay,) = play.given(o.Replay)
    assert {each.groups: each.version for each in replay.slices} == {
        first.groups: 3, second.groups: 2,
    }  # fmt: skip
    assert not play.told("going back")
    assert {each.groups for each in play.slices} == {first.groups, second.groups}


def test_slices_of_one_instance_are_apart_where_they_begin_at_different_versions() -> None:
    play = with_checkpoint(hosts="ab", instances=1, checkpointing=Periodic("1 hour"))
    (lost,) = play.slices
    low, high = KeyGroups.parse("0-3"), KeyGroups.parse("4-7")
    other = replace(lost, id=SliceId("1-999"), groups=high)
    play.query = replace(
        play.query,
        slices={lost.id: replace(lost, groups=low), other.id: other},
        inventory={"op": Inventory([play.part(3, None, low), play.part(2, None, high)])},
        trimmed={"op": Version(2)},
    )
    play.lose(lost.node)
    assert play.query.recovery is None
    assert [(each.groups, each.base) for each in play.slices] == [(low, 3), (high, 2)]


def test_a_slice_is_divided_if_its_groups_begin_at_different_versions() -> None:
    """One that was merged of two has no common version before it is captured."""
    play = with_checkpoint(hosts="ab", instances=1, checkpointing=Periodic("1 hour"))
    (lost,) = play.slices
    low, high = KeyGroups.parse("0-3"), KeyGroups.parse("4-7")
    play.query = replace(
        play.query,
        inventory={"op": Inventory([play.part(3, None, low), play.part(2, None, high)])},
        trimmed={"op": Version(2)},
    )
    play.lose(lost.node)
    assert not play.told("going back")
    assert [(each.groups, each.base) for each in play.slices] == [(low, 3), (high, 2)]


def test_slices_begin_alike_where_all_of_them_can() -> None:
    play = with_checkpoint(hosts="abc", instances=2, checkpointing=Periodic("1 hour"))
    parts = [play.part(4, 2, play.slices[0].groups), play.part(2)]
    play.query = replace(play.query, inventory={"op": Inventory(parts)})
    order = play.ask()
    assert order is not None
    play.tables = {host: {} for host in "abc"}
    play.break_off(order, Cause.STATE_MISSING)
    (replay,) = play.given(o.Replay)
    assert {each.version for each in replay.slices} == {2}, "they are replayed in one job"


def test_what_is_being_published_when_the_query_goes_back_is_waited_for() -> None:
    """Or it would be there, newer than where Spark's logs are cut, and nobody withdrew it."""
    play = Play.started(hosts="a", replays=False)
    play.batches(6)
    play.hold(o.Publish)
    play.batches(3)
    (publish,) = play.waiting(o.Publish)
    assert publish.published.version == 7
    order = play.ask()
    assert order is not None
    play.tables["a"] = {}
    before = len(play.sent)
    play.break_off(order, Cause.STATE_MISSING)
    assert play.told("going back")
    assert not makes_since(play, before)
    play.finish(publish)
    assert {make.version for make in makes_since(play, before)} == {Version(7)}
    assert play.published == [3, 7]


def test_the_query_goes_back_to_it_if_it_may_have_been_published() -> None:
    """Its parts are there. A later driver begins with it, or with an older one, as it finds."""
    play = Play.started(hosts="a", replays=False)
    play.batches(6)
    play.hold(o.Publish)
    play.batches(3)
    order = play.ask()
    assert order is not None
    play.tables["a"] = {}
    play.break_off(order, Cause.STATE_MISSING)
    play.fail(play.waiting(o.Publish)[0], "the answer was lost")
    assert [(r.start, r.target) for r in play.given(o.Rewind)] == [(Version(7), Version(8))]
    assert not play.given(o.Withdraw)
    assert play.published == [3]
    play.let_go(o.Publish)
    play.batches(6)
    assert {v for order in play.given(o.Withdraw) for v in order.versions} == {7}


def test_without_any_node_the_query_waits_and_then_stops() -> None:
    play = with_checkpoint()
    for host in "abc":
        play.lose(host)
    play.wait(100)
    assert not play.given(o.Stop)
    play.wait(21)
    assert "no node for two minutes" in play.last(o.Stop).reason


def test_a_node_that_comes_in_time_is_enough() -> None:
    play = with_checkpoint()
    for host in "abc":
        play.lose(host)
    play.wait(100)
    play.come("d")
    play.wait(1)
    assert {each.node for each in play.slices} == {"d"}
    assert play.batch().version == 6


def test_a_checkpoint_at_rest_ends_when_state_is_lost() -> None:
    play = with_checkpoint()
    play.hold(o.Capture)
    command = play.checkpoint()
    play.wait(0.2)
    assert play.waiting(o.Capture)
    play.lose("a")
    assert play.told("checkpoint failed")
    play.let_go(o.Capture)
    assert play.batch().version == 6
    play.wait(10)
    assert play.ended[command].error is None, "a checkpoint of what was recovered serves as well"


@pytest.mark.parametrize("down_at", [3, 7])
def test_what_sends_is_not_made_later_than_what_it_sends_to(down_at: int) -> None:
    """An operator's rows are computed again by its own replay, which must reach back far enough."""
    up, down = OperatorPlan("up", 8), OperatorPlan("down", 8, before=("up",))
    play = Play.started(up, down, hosts="abc", instances=1)
    play.batches(6)
    if down_at == 7:
        play.batches(3)
    order = play.ask()
    assert order is not None
    play.tables = {host: {} for host in "abc"}
    before = len(play.sent)
    play.break_off(order, Cause.STATE_MISSING)
    versions = {make.slice.operator: make.version for make in makes_since(play, before)}
    assert versions == {"up": down_at, "down": down_at}


def test_recovered_slices_are_protected_again() -> None:
    play = with_checkpoint(backup=AtPeers())
    play.lose("a")
    play.batches(2)
    for each in play.slices:
        assert coverage.protected(play.query, each) is not None
    assert groups_of(play.slices) == EVERYTHING
