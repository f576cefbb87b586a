"""Restart: a driver carries on where another one ended, with as little work as can be."""

from typing import Any

import pytest

from anabranch.checkpointing.policy import Checkpointing, Never, Periodic
from anabranch.errors import (
    DidNotHappen,
    MayHaveHappened,
    SchemaChanged,
    StateFull,
    StateMissing,
)
from anabranch.protocols import orders as o
from anabranch.protocols.attempts import ATTEMPTS
from anabranch.protocols.events import Inspected, Scale, TakeCheckpoint
from anabranch.protocols.model import Published, Role, Routed, Slice, SliceId
from anabranch.state.groups import KeyGroups, Routing
from anabranch.units import NO_VERSION, Version
from protocols.played import AtPeers, Play, whole

ROUTED = {"op": Routed(Routing.even(8, 2), ("a", "b"))}
LOW, HIGH = KeyGroups.parse("0-3"), KeyGroups.parse("4-7")


def noted(host: str, number: int, groups: KeyGroups) -> Slice:
    return Slice(SliceId(f"0-{number}"), "op", number, host, groups, Role.SERVING)


SLICES = {each.id: each for each in (noted("a", 0, LOW), noted("b", 1, HIGH))}


def version(play: Play, number: int, holder: str | None = None) -> Published:
    """A published version of one full part for each slice."""
    holders = () if holder is None else (holder,)
    return whole(number, *(play.part(number, None, each, holders) for each in (LOW, HIGH)))


def driver(hosts: str = "ab", tables: int | None = None, **policies: Any) -> Play:
    """A driver that has not taken over, and nodes whose tables are at a version."""
    play = Play.of(**policies)
    at = {} if tables is None else {i: frozenset([Version(tables)]) for i in SLICES}
    for host in hosts:
        play.tables[host] = {i: v for i, v in at.items() if SLICES[i].node == host}
        play.come(host)
    return play


def resumed(play: Play, *published: Published, committed: int, **facts: Any) -> None:
    play.take_over(
        **{
            "routed": ROUTED,
            "slices": SLICES,
            "published": published,
            "committed": Version(committed),
            "delivered": Version(committed),
            **facts,
        }
    )


def test_a_new_query_begins_with_empty_slices() -> None:
    play = driver()
    play.take_over(2)
    assert play.query.settled
    assert [(m.parts, m.version) for m in play.given(o.Make)] == [((), NO_VERSION)] * 2
    assert not play.given(o.Rewind)
    assert play.batch().version == 0


@pytest.mark.parametrize(("later", "used"), [(20, {"a", "b"}), (40, {"a"})])
def test_all_nodes_get_instances_though_agents_are_slow_to_start(
    later: float, used: set[str]
) -> None:
    play = driver("")
    play.hold(o.Prepare)
    play.come("a")
    play.come("b")
    play.take_over(2)
    play.wait(55)
    play.finish(play.waiting(o.Prepare)[0])
    play.wait(later)
    play.let_go(o.Prepare)
    assert play.query.settled
    assert {each.node for each in play.query.slices.values()} == used


def test_tables_in_place_are_used_as_they_are() -> None:
    play = driver(tables=9)
    resumed(play, version(play, 7), committed=9)
    assert play.query.settled
    assert not play.given(o.Make)
    assert not play.given(o.Rewind)
    order = play.batch()
    assert order.version == 10
    assert {each.id for each in order.slices} == set(SLICES)


def test_the_first_checkpoint_after_a_takeover_is_a_full_one() -> None:
    """Nobody knows what the driver before has captured, and not stored."""
    play = driver(tables=9)
    resumed(play, version(play, 7), committed=9)
    taken = next(order for order in play.batches(5) if order.captures)
    assert {each.base for each in taken.captures} == {None}


@pytest.mark.parametrize("tables", [8, None])
def test_otherwise_the_newest_version_is_restored_and_later_batches_run_again(
    tables: int | None,
) -> None:
    play = driver(tables=tables)
    older, newer = version(play, 3), version(play, 7)
    resumed(play, older, newer, committed=9)
    made = play.given(o.Make)
    assert {make.version for make in made} == {Version(7)}
    assert {part.name for make in made for part in make.parts} == {
        part.name for part in newer.parts["op"]
    }
    assert [(r.start, r.target) for r in play.given(o.Rewind)] == [(Version(7), Version(9))]
    assert play.query.committed == 7
    orders = play.batches(3)
    assert [(order.version, order.deliver) for order in orders] == [
        (8, False),
        (9, False),
        (10, True),
    ]


def test_slices_that_were_noted_for_earlier_batches_are_not_used() -> None:
    play = driver(tables=9)
    resumed(play, version(play, 9), committed=9, noted=4, arrangement=5)
    assert {make.version for make in play.given(o.Make)} == {Version(9)}
    assert not set(SLICES) & {each.id for each in play.slices}


@pytest.mark.parametrize("policy", [Periodic("1 hour"), Never()], ids=repr)
def test_slices_that_were_noted_after_the_last_batch_are_used(policy: Checkpointing) -> None:
    """They were moved, merged or recovered, and the driver died before a batch ran with them."""
    play = driver(tables=9, checkpointing=policy)
    resumed(play, committed=9, noted=5, arrangement=4)
    assert play.query.settled
    assert not play.given(o.Make)
    order = play.batch()
    assert {each.id for each in order.slices} == set(SLICES)
    assert order.arrangement == 5, "or the driver after this one would not use them"


def test_but_only_if_they_are_at_the_last_version() -> None:
    play = driver(tables=8)
    resumed(play, version(play, 7), committed=9, noted=5, arrangement=4)
    assert {make.version for make in play.given(o.Make)} == {Version(7)}


def test_tables_that_nobody_wants_are_dropped() -> None:
    play = driver(tables=9)
    play.hold(o.Prepare)
    resumed(play, version(play, 9), committed=9, noted=4, arrangement=5)
    play.come("c")
    play.tables["c"] = {SliceId("0-99"): frozenset([Version(9)])}
    play.let_go(o.Prepare)
    assert any(set(d.slices) == {SliceId("0-99")} and d.host == "c" for d in play.given(o.Drop))


def test_a_damaged_version_is_passed_over() -> None:
    play = driver()
    play.hold(o.Make)
    older, newer = version(play, 3), version(play, 7)
    resumed(play, older, newer, committed=9)
    first = play.waiting(o.Make)[0]
    play.fail(first, "bad checksum", damaged=first.parts[0].name)
    play.wait(1)
    assert {make.version for make in play.waiting(o.Make)} == {Version(3)}
    play.let_go(o.Make)
    assert [(r.start, r.target) for r in play.given(o.Rewind)] == [(Version(3), Version(9))]
    assert play.told("checkpoint damaged") == [{"version": 7, "reason": "bad checksum"}]
    assert play.published == [3]
    assert any(Version(7) in each.versions for each in play.given(o.Withdraw))


def test_if_all_are_damaged_everything_runs_again() -> None:
    play = driver()
    play.hold(o.Make)
    resumed(play, version(play, 3), committed=5)
    first = play.waiting(o.Make)[0]
    play.fail(first, "bad checksum", damaged=first.parts[0].name)
    play.wait(1)
    play.let_go(o.Make)
    assert [(r.start, r.target) for r in play.given(o.Rewind)] == [(NO_VERSION, Version(5))]
    assert [order.deliver for order in play.batches(7)] == [False] * 6 + [True]


def test_a_fault_that_is_none_of_the_version_is_tried_again() -> None:
    play = driver()
    play.hold(o.Make)
    resumed(play, version(play, 3), version(play, 7), committed=7)
    play.fail(play.waiting(o.Make)[0], "the disk is full", kind=StateFull)
    play.wait(1)
    assert {make.version for make in play.waiting(o.Make)} == {Version(7)}
    play.let_go(o.Make)
    assert play.query.settled
    assert play.told("restart failed")[0]["reason"] == "the disk is full"


def fail_again(play: Play, order: type, **what: Any) -> float | None:
    """The next order fails; how long it takes until it is given again, if it ever is."""
    before = play.now
    play.fail(play.waiting(order)[0], "it failed", **what)
    while not play.waiting(order) and play.query.stopped is None:
        play.wait(0.5)
    return None if play.query.stopped else (play.now - before) / o.SECOND


@pytest.mark.parametrize("order", [o.Make, o.Rewind])
def test_a_disk_that_stays_full_ends_the_query_after_a_while(order: type) -> None:
    play = driver()
    play.hold(order)
    resumed(play, version(play, 7), committed=9)
    found = [fail_again(play, order, kind=StateFull) for _ in range(ATTEMPTS)]
    assert found[-1] is None
    pauses = [pause for pause in found if pause is not None]
    assert pauses == sorted(pauses)
    assert pauses[0] == 0.5
    assert 60 < sum(pauses) < 180
    stop = play.last(o.Stop)
    assert stop.kind is StateFull
    assert stop.reason.endswith("failed in 12 attempts: it failed")
    told = [each["pause"] for each in play.told("restart failed")]
    assert told == [*pauses, None]


def test_an_error_that_comes_again_for_certain_ends_the_query_at_once() -> None:
    play = driver()
    play.hold(o.Make)
    resumed(play, version(play, 7), committed=9)
    assert fail_again(play, o.Make, kind=SchemaChanged, final=True) is None
    assert play.last(o.Stop).kind is SchemaChanged


@pytest.mark.parametrize(
    "what", [{"kind": DidNotHappen, "unreachable": "a"}, {"kind": MayHaveHappened}, {}], ids=repr
)
def test_a_store_or_a_node_that_does_not_answer_is_waited_for(what: Any) -> None:
    play = driver()
    play.hold(o.Rewind)
    resumed(play, version(play, 7), committed=9)
    for _ in range(40):
        assert fail_again(play, o.Rewind, **what) is not None
    play.let_go(o.Rewind)
    assert play.query.settled


def test_a_node_that_is_lost_is_no_reason_to_wait_longer() -> None:
    play = driver(hosts="abcdef")
    play.hold(o.Make)
    resumed(play, version(play, 7), committed=7)
    for _ in range(3):
        fail_again(play, o.Make, kind=StateFull)
    play.lose(play.waiting(o.Make)[0].slice.node)
    play.wait(0.5)
    assert play.waiting(o.Make)


def test_offsets_that_are_gone_end_the_query_with_their_numbers() -> None:
    play = driver()
    resumed(play, version(play, 3), committed=9, oldest_offsets=6)
    stop = play.last(o.Stop)
    assert stop.kind is StateMissing
    assert "newest checkpoint is of version 3" in stop.reason
    assert "batches 4 to 5" in stop.reason
    assert stop.kind is StateMissing


def test_offsets_that_are_not_needed_may_be_gone() -> None:
    play = driver()
    resumed(play, version(play, 9), committed=9, oldest_offsets=200)
    assert play.query.settled
    assert play.query.committed == 9


def test_holders_of_a_newer_version_are_waited_for() -> None:
    play = driver(backup=AtPeers())
    resumed(play, version(play, 3, "a"), version(play, 7, "z"), committed=7)
    assert not play.given(o.Make)
    play.wait(20)
    assert not play.given(o.Make)
    play.hold(o.Prepare)
    play.come("z")
    (prepare,) = play.waiting(o.Prepare)
    play.finish(prepare, Inspected({}, frozenset(p.name for p in play.query.inventory["op"].parts)))
    assert {make.version for make in play.given(o.Make)} == {Version(7)}


def test_but_not_for_ever() -> None:
    play = driver(hosts="", backup=AtPeers())
    play.hold(o.Prepare)
    old = version(play, 3, "a")
    for host in "ab":
        play.tables[host] = {}
        play.come(host)
    resumed(play, old, version(play, 7, "z"), committed=7)
    names = frozenset(part.name for part in old.parts["op"])
    for prepare in play.waiting(o.Prepare):
        play.finish(prepare, Inspected({}, names if prepare.host == "a" else frozenset()))
    play.wait(31)
    assert {make.version for make in play.given(o.Make)} == {Version(3)}


@pytest.mark.parametrize("older", [True, False])
def test_a_holder_that_is_there_is_waited_for_until_its_agent_has_started(older: bool) -> None:
    """It takes up to a minute, three times."""
    play = driver(hosts="a", backup=AtPeers())
    play.hold(o.Prepare)
    newer = version(play, 7, "z")
    resumed(play, *([version(play, 3, "a")] if older else []), newer, committed=7)
    play.come("z")
    play.wait(59)
    play.fail(play.waiting(o.Prepare)[-1], "it did not start")
    play.wait(59)
    play.fail(play.waiting(o.Prepare)[-1], "it did not start")
    play.wait(50)
    assert not play.given(o.Make)
    assert any("waiting for the agents of z" in each.step for each in play.query.changes)
    names = frozenset(part.name for part in newer.parts["op"])
    play.finish(play.waiting(o.Prepare)[-1], Inspected({}, names))
    assert {make.version for make in play.given(o.Make)} == {Version(7)}


def test_the_only_holders_are_waited_for_longer_and_named() -> None:
    play = driver(hosts="a", backup=AtPeers())
    resumed(play, version(play, 7, "z"), committed=9, oldest_offsets=5)
    play.wait(119)
    assert not play.given(o.Stop)
    assert any("waiting for nodes z" in each.step for each in play.query.changes)
    play.wait(2)
    stop = play.last(o.Stop)
    assert stop.kind is StateMissing
    assert "Checkpoint 7 is held by nodes z, which did not come" in stop.reason


def test_before_everything_runs_again_holders_are_waited_for_longer_too() -> None:
    play = driver(hosts="a", backup=AtPeers())
    resumed(play, version(play, 7, "z"), committed=9)
    play.wait(119)
    assert not play.given(o.Make)
    play.wait(2)
    assert {make.version for make in play.given(o.Make)} == {NO_VERSION}


def test_a_node_that_goes_after_long_is_waited_for_like_any() -> None:
    play = driver(hosts="a")
    play.hold(o.Make)
    resumed(play, version(play, 7), committed=9)
    play.wait(500)
    play.lose("a")
    play.wait(100)
    assert not play.given(o.Stop)
    play.wait(25)
    assert "no node for two minutes" in play.last(o.Stop).reason


def test_nodes_that_had_the_tables_are_waited_for_a_little() -> None:
    play = driver(hosts="a", tables=9)
    resumed(play, version(play, 7), committed=9)
    assert not play.given(o.Make)
    play.tables["b"] = {SliceId("0-1"): frozenset([Version(9)])}
    play.wait(3)
    play.come("b")
    assert play.query.settled
    assert not play.given(o.Make)


def test_or_their_slices_are_made_anew() -> None:
    play = driver(hosts="a", tables=9)
    resumed(play, version(play, 7), committed=9)
    play.wait(6)
    assert {make.slice.node for make in play.given(o.Make)} == {"a"}
    assert play.query.settled


def test_without_any_node_it_waits_and_then_stops() -> None:
    play = driver(hosts="")
    resumed(play, version(play, 7), committed=9)
    play.wait(119)
    assert not play.given(o.Stop)
    play.wait(2)
    assert "no node for two minutes" in play.last(o.Stop).reason


def test_a_node_lost_while_slices_are_made() -> None:
    play = driver(hosts="abc")
    play.hold(o.Make)
    resumed(play, version(play, 7), committed=7)
    play.lose(play.waiting(o.Make)[0].slice.node)
    play.wait(1)
    assert {make.slice.node for make in play.waiting(o.Make)} <= set(play.query.nodes)
    play.let_go(o.Make)
    assert play.query.settled


def test_taking_spark_back_is_tried_again_unless_it_can_never_be() -> None:
    play = driver()
    play.hold(o.Rewind)
    resumed(play, version(play, 7), committed=9)
    play.fail(play.waiting(o.Rewind)[0], "no answer")
    play.wait(1)
    play.fail(play.waiting(o.Rewind)[0], "offsets of batch 8 are gone", final=True)
    assert play.last(o.Stop) == o.Stop("offsets of batch 8 are gone", StateMissing)


# What is newer than where it begins


def withdrawn(play: Play) -> set[int]:
    return {version for each in play.given(o.Withdraw) for version in each.versions}


def test_newer_versions_are_withdrawn_before_spark_is_taken_back() -> None:
    """A driver that dies then would begin from one of them, and Spark's logs end before it."""
    play = driver(backup=AtPeers())
    play.hold(o.Rewind)
    resumed(play, version(play, 3, "a"), version(play, 7, "z"), committed=9)
    play.wait(31)
    assert [(r.start, r.target) for r in play.waiting(o.Rewind)] == [(Version(3), Version(9))]
    assert withdrawn(play) == {7}


@pytest.mark.parametrize("start", [3, 9])
def test_taking_spark_back_that_another_driver_began_is_finished(start: int) -> None:
    """Though there is nothing to run again: Spark's logs are cut."""
    play = driver()
    resumed(play, version(play, start), committed=-1, delivered=Version(9), rewinding=True)
    assert [(r.start, r.target) for r in play.given(o.Rewind)] == [(Version(start), Version(9))]
    assert play.query.committed == start


def test_so_it_is_in_a_query_without_operators() -> None:
    play = Play.of()
    object.__setattr__(play.query, "operators", {})
    play.come("a")
    play.take_over(
        routed={}, published=(Published(Version(4), {}),), delivered=Version(6), rewinding=True
    )
    assert [(r.start, r.target) for r in play.given(o.Rewind)] == [(Version(4), Version(6))]


def test_a_damaged_manifest_is_removed_once_enough_newer_ones_are_there() -> None:
    play = driver(tables=8)
    resumed(play, version(play, 3), version(play, 8), committed=8, unreadable=(Version(5),))
    play.batches(3)
    assert withdrawn(play) == set()
    assert play.published == [3, 8], "two are retained, and one of them is older"
    play.batches(1)
    assert play.published == [8, 12]
    assert withdrawn(play) == {3, 5}
    assert play.query.unreadable == ()


@pytest.mark.parametrize("tables", [9, None])
def test_one_that_is_newer_than_where_it_begins_is_removed_at_once(tables: int | None) -> None:
    play = driver(tables=tables)
    resumed(play, version(play, 3), committed=9, unreadable=(Version(7), Version(11)))
    assert withdrawn(play) == ({11} if tables else {7, 11})
    assert play.query.unreadable == ((Version(7),) if tables else ())


def test_after_a_power_failure_only_what_was_published_counts() -> None:
    play = driver(tables=9)
    resumed(play, version(play, 7), committed=9, trusted=False)
    assert {make.version for make in play.given(o.Make)} == {Version(7)}
    assert [(r.start, r.target) for r in play.given(o.Rewind)] == [(Version(7), Version(7))]
    assert [order.deliver for order in play.batches(3)] == [True, True, True]


def test_after_a_power_failure_spark_reaches_back_to_where_the_query_began() -> None:
    """Batches after the checkpoint are planned anew, so their offsets are in the log."""
    play = driver(tables=None)
    resumed(
        play,
        version(play, 7),
        committed=40,
        oldest_offsets=30,
        trusted=False,
        delivered=Version(40),
    )
    play.batches(1)
    play.hold(o.Replay)
    play.lose("a")
    for _ in range(3):
        play.wait(60)
        for replay in play.waiting(o.Replay):
            play.fail(replay, "what was sent is lost")
    play.wait(60)
    assert play.told("going back")
    assert not play.given(o.Stop)
    assert play.query.settled


def test_after_a_power_failure_the_only_checkpoint_is_not_removed_while_its_holder_is_away() -> (
    None
):
    play = driver("a")
    resumed(play, version(play, 7, "z"), committed=40, oldest_offsets=30, trusted=False)
    play.wait(130)
    assert "is held by nodes z, which did not come" in play.last(o.Stop).reason
    assert not withdrawn(play)
    assert not play.given(o.Rewind)


def test_commands_wait_until_the_restart_is_over() -> None:
    play = driver()
    play.hold(o.Make)
    resumed(play, version(play, 7), committed=7)
    scale = play.command(Scale, "op", 4)
    saved = play.command(TakeCheckpoint)
    assert not play.ended
    play.let_go(o.Make)
    play.wait(10)
    assert play.ended[scale].error is None
    assert play.ended[saved].error is None


def test_batches_wait_until_the_restart_is_over() -> None:
    play = driver()
    play.hold(o.Make)
    resumed(play, version(play, 7), committed=7)
    assert play.ask() is None
    play.let_go(o.Make)
    assert play.last(o.RunBatch).version == 8


def test_a_query_without_operators_has_versions() -> None:
    play = Play.of()
    object.__setattr__(play.query, "operators", {})
    play.come("a")
    play.take_over(routed={}, committed=Version(4), delivered=Version(6))
    assert play.query.settled
    assert play.query.committed == 6


def test_nodes_are_asked_for_once_it_is_known_which_are_idle() -> None:
    play = driver("", pool=2)
    play.hold(o.Prepare)
    play.take_over(1)
    for host in "abc":
        play.come(host)
    play.let_go(o.Prepare)
    assert play.query.settled
    assert not play.given(o.AskNodes)
    (idle, _) = sorted(play.query.nodes.keys() - {s.node for s in play.query.slices.values()})
    play.lose(idle)
    assert play.given(o.AskNodes) == [o.AskNodes(3)]
    assert [each["missing"] for each in play.told("pool short")] == [1]
