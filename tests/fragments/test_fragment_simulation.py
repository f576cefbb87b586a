"""The simulation of many nodes, and what it must show."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest

from anabranch.errors import PlanError
from anabranch.fragments import simulation
from anabranch.fragments.simulation import Plan, simulate
from anabranch.fragments.spread import Holder
from anabranch.ring import Settings

LARGE = Plan(searches=3000, killed=0)


def test_five_thousand_nodes() -> None:
    report = simulate(LARGE)
    assert report.routing.mean <= log(5000, 16)
    assert report.routing.most <= 5
    assert report.spread.mean == 6
    assert report.spread.most_of_95_percent <= 11
    assert report.spread.most <= 18
    assert report.spread.within[report.spread.most] == 1
    small = simulate(replace(LARGE, nodes=500))
    growth = report.routing.retrieval_seconds / small.routing.retrieval_seconds
    assert growth <= 1.25
    # Of a state so small that only messages count, too.
    trip = 2 * LARGE.latency
    assert (report.routing.mean_seconds + trip) / (small.routing.mean_seconds + trip) <= 1.25


def test_five_thousand_nodes_in_twenty_racks() -> None:
    report = simulate(replace(LARGE, racks=20))
    assert report.routing.mean <= log(5000, 16) + 0.5
    assert report.spread.most_of_95_percent <= 11
    assert report.spread.most <= 18


def test_a_simulation_repeats() -> None:
    plan = Plan(nodes=60, applications=20, data=3, parity=2, searches=50)
    assert simulate(plan) == simulate(plan)
    assert simulate(plan) != simulate(replace(plan, seed=1))


def test_lost_fragments_are_made_again() -> None:
    plan = Plan(nodes=150, applications=200, data=4, parity=4, searches=10, killed=0.1, state=400)
    report = simulate(plan)
    assert report.repair is not None
    assert report.repair.killed == 15
    assert 3 < report.repair.periods < 6
    assert 0 < report.repair.messages_per_node < report.repair.usual_messages_per_node
    assert report.repair.lost_fragments == pytest.approx(0.1 * 200 * 8, rel=0.3)
    assert report.repair.lost_states == 0
    # At least the lost ones, at most with three others each to make it from.
    assert report.repair.moved_bytes >= 100 * report.repair.lost_fragments
    assert report.repair.moved_bytes <= 400 * report.repair.lost_fragments


def test_states_of_which_too_little_is_left_are_lost() -> None:
    plan = Plan(nodes=120, applications=300, data=4, parity=1, searches=10, killed=0.5)
    report = simulate(plan)
    assert report.repair is not None
    # The owner is killed, and at least two of five holders: 1/2 times 26/32.
    assert report.repair.lost_states == pytest.approx(300 * 0.5 * 26 / 32, rel=0.3)


def test_a_worse_choice_of_holders_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(
        nodes: list[Holder], fragments: int, parity: int, holding: list[Holder]
    ) -> list[Holder]:
        return sorted(nodes, key=lambda node: node.host)[:fragments]

    monkeypatch.setattr(simulation, "spread", first)
    plan = replace(LARGE, data=5, parity=5, searches=1, nodes=500)
    worse = simulate(plan)
    monkeypatch.undo()
    assert simulate(plan).spread.most < worse.spread.most


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data": 16, "parity": 16}, "32 fragments do not fit in a leaf set of 32 nodes"),
        ({"nodes": 30}, "30 fragments need as many other nodes"),
        ({"killed": 1.0}, "give a share of the nodes"),
        ({"parity": 0}, "must be positive"),
        ({"latency": 0}, "must be positive"),
    ],
)
def test_a_plan_is_checked(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(**wrong)  # type: ignore[arg-type]
    Plan(data=16, parity=16, settings=Settings(leaves=34))
