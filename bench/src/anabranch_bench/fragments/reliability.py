"""When a state can be recovered: figures 7 and 8.

Equation 3 stands beside trials, in which the agents of holders are stopped at random. Equation 4
says how slow a shared store has to be for fragments to recover faster.
"""

from __future__ import annotations

import math
import random

import pyarrow as pa

from anabranch.errors import CheckpointError, StoreError
from anabranch.fragments import encode, models, recompute
from anabranch.state.part import Part
from anabranch_bench.fragments.coding import timed
from anabranch_bench.fragments.nodes import MB, Nodes, check, state_of
from anabranch_bench.fragments.recovery import link_rate
from anabranch_bench.fragments.result import Bench, Panel

NAME = "reliability"
LOSS, STORE = "reliability", "fastest store"
PANELS = {
    LOSS: Panel("States recovered by nodes lost (7)", "share of nodes lost, p", "share of states"),
    STORE: Panel(
        "Fastest store that loses (8)", "recompute, MB/s", "store, MB/s", logarithmic=True
    ),
}
SHAPES = ((4, 0), (4, 2), (4, 4), (10, 5), (10, 10), (16, 8), (16, 16))
"""m and k: n goes to 2 m, as in the paper."""
TRIED = ((4, 2), (4, 4), (10, 5))
TRIED_LOSSES = (0.1, 0.3, 0.5)
_LOSSES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
_SILENCE = 3.0
"""Seconds after which an agent counts as lost: more than a busy machine keeps one waiting."""
_DEVIATIONS = 3.0
_LINKS = {"100 Mbit": 12.5e6, "1 Gbit": 125e6, "10 Gbit": 1.25e9}


def run(bench: Bench, nodes: Nodes) -> None:
    """Compute the equations, and try."""
    for data, parity in SHAPES:
        for p in _LOSSES:
            value = models.reliability(data, parity, p)
            bench.point(LOSS, f"m={data}, n={data + parity}, model", p, value)
    _try(bench, nodes)
    for name, link in _LINKS.items():
        for exponent in range(1, 5):
            rate = 10.0**exponent * MB
            fastest = models.fastest_store(link, rate)
            bench.point(STORE, f"{name}, model", rate / MB, fastest / MB)
    _mark(bench, nodes)


def _try(bench: Bench, nodes: Nodes) -> None:
    trials = 20 if bench.quick else 100
    chance = random.Random(bench.result.seed)
    hasty = nodes.patient(_SILENCE)
    furthest = 0.0
    owner, state = nodes.hosts[0], state_of(MB, bench.result.seed)
    for data, parity in TRIED[:2] if bench.quick else TRIED:
        part = nodes.save(owner, "state", state, data, parity)
        for p in TRIED_LOSSES:
            bench.say(f"reliability: {data} + {parity}, {trials} trials of p = {p}")
            recovered = 0
            for _ in range(trials):
                lost = [host for host in part.holders if chance.random() < p]
                with nodes.stopped(lost):
                    recovered += _recovers(hasty, owner, part, state)
            share, model = recovered / trials, models.reliability(data, parity, p)
            bench.point(LOSS, f"m={data}, n={data + parity}", p, share)
            # Of a share that is nearly certain, one trial that went otherwise says little.
            spread = math.sqrt(model * (1 - model) / trials) + 0.5 / trials
            furthest = max(furthest, abs(share - model) / spread)
        nodes.drop([part])
    bench.at_most("reliability: trials off equation 3, standard deviations", furthest, _DEVIATIONS)


def _recovers(nodes: Nodes, host: str, part: Part, state: pa.Buffer) -> bool:
    try:
        found = nodes.recover(host, part)
    except (CheckpointError, StoreError):
        return False
    check(found, state, "fragments of the holders that were left")
    return True


def _mark(bench: Bench, nodes: Nodes) -> None:
    """The rates of this machine, in the figure."""
    state = state_of(32 * MB, bench.result.seed)
    lost = encode(10, 10, state)[10:]
    rate = state.size / min(timed(lambda: recompute(lost), 3).wall)
    link = link_rate(nodes)
    bench.point(STORE, "measured", rate / MB, models.fastest_store(link, rate) / MB)
    bench.note(
        f"reliability: with {rate / 1e9:.2f} GB/s computed and links of {link / MB:.2f} MB/s, a "
        f"shared store has to read faster than {models.fastest_store(link, rate) / MB:.2f} MB/s"
    )
