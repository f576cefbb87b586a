"""A live query with each backup: what checkpoints cost it.

Words are counted in windows on a cluster, in batches without a pause. The links of the nodes are
not limited: what is measured is the work.
"""

from __future__ import annotations

from statistics import median

from anabranch_bench.faults import Act, Backup, Outcome, Scenario, Scheme
from anabranch_bench.faults import run as carry_out
from anabranch_bench.fragments.result import Bench, Panel

NAME = "live"
THROUGHPUT, BATCH = "throughput", "batch"
PANELS = {
    THROUGHPUT: Panel("Windowed word count, live", "seconds between checkpoints", "rows/s"),
    BATCH: Panel("A batch of it", "seconds between checkpoints", "seconds"),
}
LOSS_BAR = 0.05
_SIDES = (Backup.UPSTREAM, Backup.FRAGMENTS, Backup.FILES)
_RATE = 100_000
"""Rows of a batch."""
_FIRST = 10
"""Batches before a query without pauses is up to speed."""


def scenario(backup: Backup, interval: float, *, quick: bool, seed: int) -> Scenario:
    """Few nodes in a quick run, and enough for 4 + 2 fragments otherwise."""
    return Scenario(
        Scheme.CHECKPOINT,
        rate=_RATE,
        keys=100_000,
        interval=interval,
        nodes=4 if quick else 7,
        backlog=60 if quick else 150,
        act=Act.NOTHING,
        backup=backup,
        fragments=(2, 1) if quick else (4, 2),
        seed=seed,
    )


def run(bench: Bench) -> None:
    """Run the query with each backup, in rounds in which another one goes first."""
    for interval in (5.0,) if bench.quick else (5.0, 30.0):
        batches: dict[Backup, list[float]] = {backup: [] for backup in _SIDES}
        lost = []
        for number in range(1 if bench.quick else 3):
            rates = {}
            for backup in (*_SIDES[number:], *_SIDES[:number]):
                bench.say(f"live: {backup.value}, checkpoints every {interval:g} s")
                wanted = scenario(backup, interval, quick=bench.quick, seed=bench.result.seed)
                outcome = carry_out(wanted)
                taken = outcome.between(0.0, outcome.happened)[_FIRST:]
                batches[backup] += taken
                rates[backup] = wanted.rate * len(taken) / sum(taken)
                _note(bench, backup, interval, outcome)
            lost.append(1 - rates[Backup.FRAGMENTS] / rates[Backup.UPSTREAM])
        for backup, taken in batches.items():
            bench.timed(BATCH, backup.value, interval, taken, _RATE)
            bench.point(THROUGHPUT, backup.value, interval, _RATE * len(taken) / sum(taken))
        name = f"live: throughput lost to Upstream, checkpoints every {interval:g} s"
        bench.at_most(name, median(lost), LOSS_BAR)


def _note(bench: Bench, backup: Backup, interval: float, outcome: Outcome) -> None:
    stored = [each["seconds"] for each in outcome.events if each["kind"] == "checkpoint"]
    took = f", stored in {median(stored):.2f} s (median)" if stored else ""
    bench.note(f"live: {backup.value}, every {interval:g} s: {len(stored)} checkpoints{took}")
