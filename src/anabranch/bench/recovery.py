"""Recovery after a node was killed: ``anabranch bench recovery``.

Paper 1's figures 11 to 13, and Spark's own stateful query beside them on the same cluster. What is
measured is the time from the kill to the commit of the first batch that was begun after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from anabranch.bench.faults import Scenario, Scheme, run
from anabranch.bench.harness import Bar, Measure, Result, Timing

RATES, INTERVALS, PARALLEL, SIZES = "rate", "interval", "parallelism", "state"
"""The benchmarks: recovery time against each of these."""

_TITLES = {
    RATES: "Recovery against input rate (figure 11)",
    INTERVALS: "Recovery against checkpoint interval (figure 12)",
    PARALLEL: "Serial and parallel recovery (figure 13)",
    SIZES: "Recovery against keys in the state, Spark's own beside it",
}
_SCHEMES = (Scheme.CHECKPOINT, Scheme.BUFFERS, Scheme.SOURCE)


def scenarios(quick: bool, seed: int) -> list[tuple[str, str, str, Scenario]]:
    """Benchmark, case, side and scenario of every run."""
    rates = (2_000, 8_000) if quick else (2_000, 4_000, 8_000, 16_000)
    intervals = (1.0, 10.0) if quick else (1.0, 5.0, 10.0, 20.0, 30.0)
    sizes = (100_000, 1_000_000) if quick else (100_000, 1_000_000, 10_000_000)
    base = Scenario(Scheme.CHECKPOINT, rates[-1], seed=seed)
    found = [
        (RATES, f"{rate:,} rows/s", scheme.value, replace(base, scheme=scheme, rate=rate))
        for rate in rates
        for scheme in _SCHEMES
    ]
    found += [
        (INTERVALS, f"{interval:g} s", Scheme.CHECKPOINT.value, replace(base, interval=interval))
        for interval in intervals
    ]
    found += [
        (PARALLEL, f"{interval:g} s", f"over {n}", replace(base, interval=interval, parallelism=n))
        for interval in intervals[1:]
        for n in (1, 2)
    ]
    large = replace(base, rate=rates[0], window=None, fill=True, warm=20.0)
    found += [
        (SIZES, f"{keys:,} keys", scheme.value, replace(large, scheme=scheme, keys=keys))
        for keys in sizes
        for scheme in (Scheme.CHECKPOINT, Scheme.SPARK)
    ]
    return found


def measure(
    *, quick: bool = False, seed: int = 7, only: Sequence[str] = (), console: Console | None = None
) -> Result:
    """Run all scenarios, one after the other, each with a cluster of its own."""
    console = console or Console()
    result = Result("recovery", seed, quick)
    chosen = [found for found in scenarios(quick, seed) if not only or found[0] in only]
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("recovery", total=len(chosen))
        for benchmark, case, side, scenario in chosen:
            outcome = run(scenario)
            result.measures.append(
                Measure(benchmark, case, side, Timing(scenario.rate, (outcome.gap,)))
            )
            console.print(f"{benchmark}: {case}, {side}: {outcome.gap:.2f} s")
            progress.advance(task)
    _bars(result)
    return result


def show(result: Result, console: Console) -> None:
    """Print a table for each benchmark, and the bars."""
    for benchmark, title in _TITLES.items():
        measures = result.pick(benchmark)
        if not measures:
            continue
        table = Table("case", "side", "seconds", title=title, title_justify="left")
        for each in measures:
            table.add_row(each.case, each.side, f"{each.timing.median:.2f}")
        console.print(table)
    bars = Table("bar", "value", "has to be", "holds", title="Bars", title_justify="left")
    for bar in result.bars:
        bars.add_row(
            bar.name, f"{bar.value:.2f}", f"at most {bar.bar:g}", "yes" if bar.holds else "no"
        )
    console.print(bars)


def _bars(result: Result) -> None:
    for benchmark, others in ((RATES, _SCHEMES[1:]), (SIZES, (Scheme.SPARK,))):
        for case in dict.fromkeys(each.case for each in result.pick(benchmark)):
            ours = result.timing(benchmark, case, Scheme.CHECKPOINT.value).median
            for other in others:
                theirs = result.timing(benchmark, case, other.value).median
                name = f"{case}: recovery against {other.value}"
                result.bars.append(Bar(name, ours / theirs, 1.0, at_least=False))
