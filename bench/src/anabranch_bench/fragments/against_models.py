"""Retrieval, recomputing and their sum against the models of fragments: figure 10.

The rates in the models are those of an earlier round, of a state of another size.
"""

from __future__ import annotations

import time
from statistics import median

import pyarrow as pa

from anabranch.fragments import Fragment, models, recompute
from anabranch.fragments.models import Rates, Sample
from anabranch_bench.fragments.nodes import MB, Nodes, check, state_of
from anabranch_bench.fragments.recovery import DATA, PARITY, link_rate
from anabranch_bench.fragments.result import Bench, Panel

NAME = "models"
RETRIEVAL, RECOMPUTE, SUM = "retrieval", "recompute", "sum"
PANELS = {
    RETRIEVAL: Panel("Retrieval (10a)", "MB of a state", "seconds", logarithmic=True),
    RECOMPUTE: Panel("Recompute (10b)", "MB of a state", "seconds", logarithmic=True),
    SUM: Panel("Recovery (10c)", "MB of a state", "seconds", logarithmic=True),
}
MEASURED, MODEL = "measured", "model"
_EARLIER = 16 * MB
_ROUNDS = 3
"""Of recomputing, which is so short that anything else on the machine shows."""
_LOST = models.lost_rows(DATA, PARITY)
_NEAR, _SHARE = 0.2, 0.1


def run(bench: Bench, nodes: Nodes) -> None:
    """Measure all sizes against the models."""
    sizes = (8, 32, 64) if bench.quick else (8, 16, 32, 64, 128, 256, 512)
    link = link_rate(nodes)
    rates = _earlier(nodes)
    bench.note(
        f"models: in an earlier round a link passed {link / MB:.2f} MB/s, and "
        f"{rates.of(DATA, _LOST) / 1e9:.2f} GB/s were computed"
    )
    off = dict.fromkeys(PANELS, 0.0)
    share = 0.0
    for size in sizes:
        bench.say(f"models: {size} MB")
        state = state_of(size * MB, bench.result.seed)
        took = _once(nodes, state)
        model = {
            RETRIEVAL: models.retrieval(size * MB, DATA, PARITY, up=link, down=link),
            RECOMPUTE: size * MB / rates.of(DATA, _LOST),
            SUM: models.fragment_recovery(size * MB, link, rates.of(DATA, _LOST)),
        }
        for panel, seconds in took.items():
            bench.timed(panel, MEASURED, size, [seconds], size * MB)
            bench.point(panel, MODEL, size, model[panel])
            off[panel] = max(off[panel], abs(seconds / model[panel] - 1))
        share = max(share, took[RECOMPUTE] / took[SUM])
    if nodes.linked:
        for panel, most in off.items():
            bench.at_most(f"models: {panel}, furthest off its model", most, _NEAR)
        bench.at_most("models: greatest share of coding in recovery", share, _SHARE)


def _earlier(nodes: Nodes) -> Rates:
    """The rate of recomputing, as a round before took."""
    took = min(_once(nodes, state_of(_EARLIER, 0))[RECOMPUTE] for _ in range(2))
    return Rates((Sample(DATA, _LOST, _EARLIER / took),))


def _once(nodes: Nodes, state: pa.Buffer) -> dict[str, float]:
    """The seconds of retrieving a state, of computing it again, and their sum."""
    owner = nodes.hosts[0]
    part = nodes.save(owner, "state", state, DATA, PARITY)
    host = nodes.others(part, owner)[0]
    found: list[Fragment] = []
    # As many of parity as if all holders sent in turn.
    taken = [part.holders[each * len(part.holders) // DATA] for each in range(DATA)]
    retrieval = nodes.at_once([lambda: found.extend(nodes.retrieve(host, part, taken))])
    computed = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        again = recompute(found)
        computed.append(time.perf_counter() - began)
        check(pa.py_buffer(again), state, "recomputed from fragments")
    computing = median(computed)
    nodes.drop([part])
    return {RETRIEVAL: retrieval, RECOMPUTE: computing, SUM: retrieval + computing}
