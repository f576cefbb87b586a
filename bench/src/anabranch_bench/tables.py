"""The result of the state benchmarks as tables in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from anabranch_bench import growth, keyed, overhead, words
from anabranch_bench.harness import Measure, Result, Timing, in_order
from anabranch_bench.plan import Checkpoints, Engine


def show(result: Result, console: Console) -> None:
    """Print a table for each benchmark that was run, and one with the bars."""
    if result.pick(keyed.NAME):
        console.print(_speeds(result, keyed.NAME, "Count and sum per key, 1,000,000 keys"))
    if result.pick(words.NAME):
        console.print(_speeds(result, words.NAME, "Words per window of 30 s (rows: sentences)"))
    if result.pick(growth.NAME):
        console.print(_growth(result))
    if result.pick(overhead.NAME):
        console.print(_overhead(result))
    if result.bars:
        console.print(_bars(result))
    for note in result.notes:
        console.print(f"note: {note}")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(
            name, justify="left" if name in ("batch", "side", "state", "bar") else "right"
        )
    return table


def _speeds(result: Result, benchmark: str, title: str) -> Table:
    table = _table(
        title,
        "batch",
        "side",
        "rows/s",
        "median",
        "slowest..fastest batch",
        "ms a batch",
        "ours is",
    )
    for case in in_order(measure.case for measure in result.pick(benchmark)):
        ours = result.timing(benchmark, case, Engine.ANABRANCH)
        for measure in result.pick(benchmark, case):
            timing = measure.timing
            slowest, fastest = (timing.rows / pick(timing.seconds) for pick in (max, min))
            times = ours.rows_per_second / timing.rows_per_second
            table.add_row(
                case,
                measure.side,
                f"{timing.rows_per_second:,.0f}",
                f"{timing.rows / timing.median:,.0f}",
                f"{slowest:,.0f}..{fastest:,.0f}",
                f"{timing.median * 1000:,.0f}",
                "" if measure.side == Engine.ANABRANCH else f"{times:,.1f}x",
            )
        table.add_section()
    return table


def _growth(result: Result) -> Table:
    table = _table(
        "A batch of 100,000 rows as the state grows",
        "side",
        "state",
        "ms a batch",
        "min..max",
        "against 1e5",
    )
    for side in in_order(measure.side for measure in result.pick(growth.NAME)):
        base = result.timing(growth.NAME, growth.case(100_000), side)
        for measure in result.pick(growth.NAME):
            if measure.side == side:
                timing = measure.timing
                low, high = min(timing.seconds) * 1000, max(timing.seconds) * 1000
                table.add_row(
                    side,
                    measure.case.removeprefix("state of "),
                    f"{timing.median * 1000:,.0f}",
                    f"{low:,.0f}..{high:,.0f}",
                    f"{timing.median / base.median:.2f}x",
                )
        table.add_section()
    return table


def pooled(measures: list[Measure]) -> Timing:
    """The batches of several measures as one."""
    seconds = [second for measure in measures for second in measure.timing.seconds]
    return Timing(measures[0].timing.rows, tuple(seconds))


def _overhead(result: Result) -> Table:
    table = _table(
        "Checkpoints every 5 s (all rounds)",
        "side",
        "rows/s",
        "lost",
        "ms p50",
        "ms p95",
        "ms p99",
        "ms max",
    )
    for policy in Checkpoints:
        timing = pooled([m for m in result.pick(overhead.NAME) if m.side == policy])
        table.add_row(
            policy,
            f"{timing.rows_per_second:,.0f}",
            f"{overhead.cost(result, policy):.1%}",
            *(f"{timing.percentile(p) * 1000:,.0f}" for p in (50, 95, 99, 100)),
        )
    return table


def _bars(result: Result) -> Table:
    table = _table("Bars", "bar", "value", "has to be", "holds")
    for bar in result.bars:
        sense = "at least" if bar.at_least else "at most"
        holds = "[green]yes[/]" if bar.holds else "[red]no[/]"
        table.add_row(bar.name, f"{bar.value:,.2f}", f"{sense} {bar.bar:,g}", holds)
    return table
