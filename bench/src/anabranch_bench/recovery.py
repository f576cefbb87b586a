"""Recovery after a node was killed: ``anabranch bench recovery``.

Paper 1's figures 11 to 15, and Spark's own stateful query beside them on the same cluster. Recovery
is the time from the kill to the commit of the first batch that was begun after it. Latency is the
time from commit to commit while nothing happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import Progress

from anabranch_bench.faults import Act, Outcome, Scenario, Scheme, run
from anabranch_bench.harness import Bar, Measure, Result, Timing

RATES, INTERVALS, PARALLEL, SIZES = "rate", "interval", "parallelism", "state"
LATENCY, TRADE, COST = "latency", "trade-off", "cost"
TITLES = {
    RATES: "Recovery against input rate (figure 11)",
    INTERVALS: "Recovery against checkpoint interval (figure 12)",
    PARALLEL: "Serial and parallel recovery (figure 13)",
    LATENCY: "95th percentile of latency, with checkpoints and without (figure 14)",
    TRADE: "95th percentile of latency against checkpoint interval (figure 15)",
    SIZES: "Recovery against keys in the state, Spark's own beside it",
    COST: "A batch without pause between batches, with checkpoints and without",
}
CHOICES = (RATES, INTERVALS, PARALLEL, LATENCY, SIZES, COST)
"""What can be run alone; the trade-off comes out of the runs over intervals."""

_SCHEMES = (Scheme.CHECKPOINT, Scheme.BUFFERS, Scheme.SOURCE)
_WITH, _WITHOUT = "every 5 s", "never"
_HALF = 15_000
"""Rows a second: half of what Spark's side can do on 3 nodes of a machine with 2 cores, at 1e6 and
at 1e7 keys (see ``backlog`` of :class:`Scenario`); ours can do twice that."""
_CALM = 15.0
_FIRST = 10
"""Batches before a query without pauses is up to speed."""


@dataclass(frozen=True)
class Case:
    """One run of a benchmark."""

    benchmark: str
    name: str
    side: str
    scenario: Scenario


def cases(*, quick: bool, seed: int) -> list[Case]:
    """All runs, in order."""
    rates = (1_000, _HALF) if quick else (1_000, 4_000, 8_000, _HALF)
    intervals = (1.0, 10.0) if quick else (1.0, 5.0, 10.0, 20.0, 30.0)
    sizes = (100_000, 1_000_000) if quick else (100_000, 1_000_000, 10_000_000)
    base = Scenario(Scheme.CHECKPOINT, rates[-1], seed=seed)
    filled = replace(base, window=None, fill=True, warm=20.0)
    found = [
        Case(RATES, f"{rate:,} rows/s", scheme.value, replace(base, scheme=scheme, rate=rate))
        for rate in rates
        for scheme in _SCHEMES
    ]
    found += [
        Case(INTERVALS, f"{interval:g} s", "over 1", replace(base, interval=interval))
        for interval in intervals
    ]
    found += [
        Case(PARALLEL, f"{each:g} s", f"over {n}", replace(base, interval=each, parallelism=n))
        for each in intervals[1:]
        for n in (1, 2)
    ]
    calm = replace(filled, act=Act.NOTHING, warm=_CALM * 2)
    found += [
        Case(
            LATENCY,
            f"{keys:,} keys, {rate:,} rows/s",
            side,
            replace(calm, keys=keys, rate=rate, checkpoints=side == _WITH),
        )
        for keys in sizes[:2]
        for rate in (rates[0], rates[-1])
        for side in (_WITH, _WITHOUT)
    ]
    found += [
        Case(SIZES, f"{keys:,} keys", scheme.value, replace(filled, scheme=scheme, keys=keys))
        for keys in sizes
        for scheme in (Scheme.CHECKPOINT, Scheme.SPARK)
    ]
    busy = replace(calm, rate=200_000, keys=100_000, backlog=40 if quick else 80)
    found += [
        Case(COST, f"{busy.rate:,} rows, round {n}", side, replace(busy, checkpoints=side == _WITH))
        for n in range(1 if quick else 3)
        for side in (_WITH, _WITHOUT)
    ]
    return found


def measure(
    *, quick: bool = False, seed: int = 7, only: Sequence[str] = (), console: Console | None = None
) -> Result:
    """Run all cases, one after the other, each with a cluster of its own."""
    console = console or Console()
    result = Result("recovery", seed, quick)
    chosen = [case for case in cases(quick=quick, seed=seed) if not only or case.benchmark in only]
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("recovery", total=len(chosen))
        for case in chosen:
            progress.update(task, description=f"{case.benchmark}: {case.name}, {case.side}")
            _note(result, case, run(case.scenario))
            progress.advance(task)
    _bars(result)
    return result


def _note(result: Result, case: Case, outcome: Outcome) -> None:
    def add(benchmark: str, *seconds: float) -> None:
        timing = Timing(case.scenario.rate, seconds)
        result.measures.append(Measure(benchmark, case.name, case.side, timing))

    calm = outcome.between(outcome.happened - _CALM, outcome.happened)
    if case.benchmark == LATENCY:
        add(LATENCY, *calm)
    elif case.benchmark == COST:
        add(COST, *outcome.between(0.0, outcome.happened)[_FIRST:])
    else:
        add(case.benchmark, outcome.gap)
    if case.benchmark == INTERVALS:
        add(TRADE, *calm)


def _bars(result: Result) -> None:
    for benchmark, others in ((RATES, _SCHEMES[1:]), (SIZES, (Scheme.SPARK,))):
        for case in dict.fromkeys(each.case for each in result.pick(benchmark)):
            ours = result.timing(benchmark, case, Scheme.CHECKPOINT.value).median
            for other in others:
                theirs = result.timing(benchmark, case, other.value).median
                name = f"{case}: recovery against {other.value}"
                result.bars.append(Bar(name, ours / theirs, 1.0, at_least=False))
    rates = {
        side: [m.timing.rows_per_second for m in result.pick(COST) if m.side == side]
        for side in (_WITH, _WITHOUT)
    }
    if all(rates.values()):
        lost = 1 - max(rates[_WITH]) / max(rates[_WITHOUT])
        result.bars.append(Bar("throughput lost to checkpoints", lost, 0.05, at_least=False))
