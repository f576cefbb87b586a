"""Rings of thousands of nodes, simulated: figures 9c and 12."""

from __future__ import annotations

import time

from anabranch.fragments.simulation import Plan, Report, simulate
from anabranch_bench.fragments.nodes import MB
from anabranch_bench.fragments.result import Bench, Panel

NAME = "ring"
HOPS, ROUTING, LOAD, FRAGMENT = "hops", "routing", "load", "fragment, simulated"
PANELS = {
    FRAGMENT: Panel("A fragment, simulated (9c)", "nodes", "seconds"),
    ROUTING: Panel("Time of a search, by hops (12a)", "hops", "ms"),
    HOPS: Panel("Searches within hops (12c)", "hops", "share of searches"),
    LOAD: Panel("Nodes by fragments (12b)", "fragments at most", "share of nodes"),
}
STATE = 128 * MB
DATA, PARITY = 10, 20
GROWTH_BAR, SECONDS_BAR = 0.25, 120.0
HOPS_BAR_WITH_RACKS = 0.5
_RACKS = 20
_APPLICATIONS = 0.2
"""For each node: 1,000 among 5,000."""
_FULL = 5000
_MOST_OF_95_PERCENT, _MOST = 11, 18


def run(bench: Bench) -> None:
    """Simulate all of them."""
    sizes = (500, 1000, 2000) if bench.quick else (500, 1000, 2000, _FULL)
    seconds: dict[int, float] = {}
    for count in sizes:
        report, took = _simulated(bench, count, 1)
        seconds[count] = report.routing.retrieval_seconds
        bench.point(FRAGMENT, f"{DATA} + {PARITY}", count, seconds[count])
        name = f"{count:,} nodes"
        for hops, share in report.routing.within.items():
            bench.point(HOPS, name, hops, share)
        for hops, each in report.routing.seconds.items():
            bench.point(ROUTING, name, hops, each * 1000)
        for load, share in report.spread.within.items():
            bench.point(LOAD, name, load, share)
        _judge(bench, report, took)
    growth = seconds[sizes[-1]] / seconds[sizes[0]] - 1
    bench.at_most(
        f"ring: a fragment takes longer, {sizes[0]} to {sizes[-1]:,} nodes", growth, GROWTH_BAR
    )
    report, _ = _simulated(bench, sizes[-1], _RACKS)
    extra = report.routing.mean - report.routing.logarithm
    name = f"ring: {sizes[-1]:,} nodes in {_RACKS} racks, mean hops beyond log16"
    bench.at_most(name, extra, HOPS_BAR_WITH_RACKS)


def _simulated(bench: Bench, count: int, racks: int) -> tuple[Report, float]:
    bench.say(f"ring: {count:,} nodes in {racks} racks")
    began = time.perf_counter()
    plan = Plan(
        count,
        racks,
        applications=round(count * _APPLICATIONS),
        data=DATA,
        parity=PARITY,
        killed=0.0,
        state=STATE // DATA,
        seed=bench.result.seed,
    )
    return simulate(plan), time.perf_counter() - began


def _judge(bench: Bench, report: Report, took: float) -> None:
    extra = report.routing.mean - report.routing.logarithm
    bench.at_most(f"ring: {report.nodes:,} nodes, mean hops beyond log16", extra, 0.0)
    if report.nodes == _FULL:
        spread = report.spread
        name = f"ring: {report.nodes:,} nodes"
        bench.at_most(f"{name}, fragments of 95 %", spread.most_of_95_percent, _MOST_OF_95_PERCENT)
        bench.at_most(f"{name}, fragments of any", spread.most, _MOST)
        bench.at_most(f"{name}, seconds to simulate", took, SECONDS_BAR)
