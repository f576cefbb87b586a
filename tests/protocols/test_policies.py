"""Policies of users: the protocols ask of an axis no more than its protocol says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from anabranch.checkpointing import Never, Periodic
from anabranch.checkpointing.policy import Checkpointing, Kind, Situation
from anabranch.coordinator.batches import loads_of
from anabranch.placement import Even, NoNodes, Placed, Placement
from anabranch.protocols.events import BatchCommitted, Rebalance, Scale
from anabranch.protocols.model import OperatorPlan
from anabranch.protocols.orders import RunBatch
from anabranch.protocols.query import Policies, Query
from anabranch.units import Version
from anabranch.worker.reports import InstanceReport
from protocols.played import InStore, Play


@dataclass(frozen=True)
class Packed:
    """All instances on as few nodes as possible, so many on each."""

    slots: int

    def place(
        self, instances: Mapping[str, int], alive: Collection[str], before: Placed
    ) -> Mapping[str, Sequence[str]]:
        if not alive:
            raise NoNodes("there is no node")
        hosts = sorted(alive)
        placed: dict[str, list[str]] = {}
        at = 0
        for name, count in instances.items():
            numbers = range(at, at + count)
            placed[name] = [hosts[min(n // self.slots, len(hosts) - 1)] for n in numbers]
            at += count
        return placed

    def missing(self, alive: Collection[str], placed: Placed) -> int:
        return 0


@dataclass(frozen=True)
class WhenIdle:
    """A checkpoint of an operator once it has little to do."""

    seen: list[Situation] = field(default_factory=list, compare=False)
    tracks_changes: bool = True
    retain: int = 2
    backs_up: bool = True
    tolerate: int = 10
    hold: bool = True

    def decide(self, situation: Situation) -> Kind | None:
        self.seen.append(situation)
        return "delta" if situation.batches and situation.load < 0.2 else None


def play_with(placement: Placement, checkpointing: Checkpointing, hosts: str) -> Play:
    policies = Policies(checkpointing, InStore(), placement)
    play = Play(Query({"op": OperatorPlan("op", 8)}, policies, epoch=1))
    for host in hosts:
        play.come(host)
    play.take_over(2)
    return play


def test_instances_are_where_a_placement_of_ones_own_has_them() -> None:
    play = play_with(Packed(2), Periodic("1 hour"), "abc")
    play.batches(3)
    assert play.query.routed["op"].hosts == ("a", "a")
    play.command(Scale, "op", 5)
    play.wait(5)
    play.batches(3)
    assert play.query.routed["op"].hosts == ("a", "a", "b", "b", "c")
    assert {each.node for each in play.query.slices.values()} == {"a", "b", "c"}
    play.lose("a")
    play.wait(60)
    play.batches(2)
    # What was whole stays where it is until the query is rebalanced.
    assert play.query.routed["op"].hosts == ("b", "b", "b", "b", "c")
    play.command(Rebalance)
    play.wait(5)
    play.batches(3)
    assert play.query.routed["op"].hosts == ("b", "b", "c", "c", "c")


def test_both_placements_are_placements() -> None:
    placements: list[Placement] = [Even(), Packed(1)]
    for placement in placements:
        assert set(placement.place({"op": 3}, ["a", "b", "c"], {})["op"]) == {"a", "b", "c"}


def commit_with_load(play: Play, load: float) -> RunBatch:
    order = play.ask()
    assert order is not None
    play.happen(BatchCommitted(order.version, order.fence, loads={"op": load}))
    return order


def test_a_checkpoint_may_be_taken_when_an_operator_has_little_to_do() -> None:
    policy = WhenIdle()
    play = play_with(Even(), policy, "ab")
    for _ in range(5):
        commit_with_load(play, 0.9)
    assert not play.published
    assert {each.load for each in policy.seen if each.batches > 1} == {0.9}
    commit_with_load(play, 0.1)
    order = play.ask()
    assert order is not None
    assert order.captures


def test_never_decides_nothing() -> None:
    assert Never().decide(Situation(now=10**9, last=0, batches=10**6, load=0.0)) is None


def test_the_load_of_an_operator_is_that_of_its_busiest_instance() -> None:
    def report(operator: str, instance: int, cpu: float) -> InstanceReport:
        return InstanceReport(operator, instance, Version(3), 1, (), 1.0, cpu, 0.0, ())

    reports = [report("a", 0, 0.2), report("a", 1, 0.5), report("b", 0, 2.5)]
    assert loads_of(reports, 2.0) == {"a": 0.25, "b": 1.25}
