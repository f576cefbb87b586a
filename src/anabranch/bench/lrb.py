"""Linear Road: ``anabranch bench lrb``.

Copies of the expressway are fed at true pace, after the stream was brought to its state as fast as
it goes. The delay of an answer is the time from the arrival of the row that it is to until the
commit of the batch that has it.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from anabranch.bench import road_plot
from anabranch.bench.harness import Bar, Measure, Result, Timing
from anabranch.bench.road import World
from anabranch.bench.road_run import Outcome, Window, run, session
from anabranch.linearroad.answers import Delays
from anabranch.linearroad.clock import SLICES
from anabranch.linearroad.copies import rows_before
from anabranch.linearroad.rows import HOURS3, Answer
from anabranch.linearroad.verdict import Verdict

Array = npt.NDArray[Any]

L_BAR, MEDIAN_BAR, TAIL_BAR = 350, 0.700, 1.459
_HOUR = 3600
_COLD = 5
"""Batches before a query is up to speed, which would flatter what comes later."""
_NAMES = {
    Answer.TOLL: "toll notifications",
    Answer.ALERT: "accident alerts",
    Answer.BALANCE: "balances",
    Answer.EXPENDITURE: "expenditures",
}


@dataclass(frozen=True)
class Order:
    """What is to be run."""

    xways: int
    window: Window
    seed: int = 1
    quick: bool = False
    search: bool = False
    check: bool = False
    nodes: int | None = None
    faults: bool = False
    input: Path | None = None
    history: Path | None = None
    expected: Path | None = None
    output: Path | None = None
    plot: Path | None = None
    step: int = 25
    """How finely the search looks for the greatest number of expressways."""


@dataclass
class RoadResult(Result):
    """A result with everything that was found out about each run."""

    runs: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The whole result, with the runs."""
        return super().to_json() | {"runs": self.runs}


@dataclass(frozen=True)
class Found:
    """A run, judged."""

    outcome: Outcome
    delays: Delays
    verdict: Verdict | None

    @property
    def holds(self) -> bool:
        """Whether everything was answered in time, and right as far as that was looked at."""
        right = self.verdict is None or self.verdict.passed
        return self.outcome.complete and self.delays.late == 0 and right


def measure(order: Order, console: Console) -> RoadResult:
    """Run what is ordered, and print it."""
    result = RoadResult("lrb", order.seed, order.quick)
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-lrb-") as scratch,
        Progress(console=console, disable=not console.is_terminal, transient=True) as progress,
    ):
        folder = Path(scratch)
        if order.input is not None:
            world = World.given(order.input, order.history, folder / "world")
        else:
            world = World.generated(order.seed, HOURS3, progress)
        window = replace(order.window, end=min(order.window.end, world.seconds))
        with session(order.nodes) as (spark, cluster):

            def one(xways: int) -> Found:
                place = folder / f"run-{xways}"
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                task = progress.add_task(f"L = {xways}", total=window.end)
                outcome = run(
                    spark,
                    world,
                    xways,
                    window,
                    place,
                    tick=lambda second: progress.update(task, completed=second),
                    cluster=cluster,
                    faults=order.faults,
                )
                found = _judged(order, world, outcome, progress)
                _show(found, console)
                result.runs.append(_described(found))
                return found

            best = _search(one, order) if order.search else one(order.xways)
        _conclude(result, order, best)
        if window.start == 0 and not window.pace and window.end >= 2 * _HOUR:
            _compare_hours(result, best.outcome, rows_before(str(world.input)))
        if order.output is not None:
            count = best.outcome.answers.write(order.output)
            console.print(f"written: {count:,} answers to {order.output}")
        if order.plot is not None:
            road_plot.write(best.outcome, best.delays, world.input, order.plot)
    _show_bars(result, console)
    return result


def _judged(order: Order, world: World, outcome: Outcome, progress: Progress) -> Found:
    verdict = None
    if order.check:
        expected = world.expected(order.expected, progress)
        window = outcome.window
        verdict = world.verdict(outcome.answers, expected, outcome.xways, window.start, window.end)
    return Found(outcome, outcome.answers.delays(), verdict)


def _search(one: Callable[[int], Found], order: Order) -> Found:
    """The run with the greatest number of expressways that held; the last one if none did."""
    low, high, best = 0, 0, None
    xways = order.xways
    while True:
        found = one(xways)
        if found.holds:
            low, best = xways, found
        else:
            high = xways
        if high and high - low <= order.step:
            return best or found
        middle = (low + high) // 2 if high else round(low * 1.25)
        xways = max(1, order.step * round(middle / order.step))
        if xways in (low, high):
            return best or found


def _conclude(result: RoadResult, order: Order, best: Found) -> None:
    outcome, delays = best.outcome, best.delays
    timing = Timing(
        round(median(batch.rows for batch in outcome.paced)) if outcome.paced else 0,
        tuple(batch.seconds for batch in outcome.paced) or (math.nan,),
    )
    result.measures.append(Measure("batches", f"L = {outcome.xways}", "anabranch", timing))
    bars = result.bars
    if best.verdict is not None:
        incorrect = best.verdict.incorrect
        bars.append(Bar("answers missing, extra or wrong", incorrect, 0, at_least=False))
    if order.window.pace:
        held = outcome.xways if best.holds else 0
        bars.append(Bar("expressways held", held, L_BAR, at_least=True))
        bars.append(Bar("answers after their limit", delays.late, 0, at_least=False))
        bars.append(Bar("median delay, s", delays.percentile(50), MEDIAN_BAR, at_least=False))
        bars.append(Bar("99th percentile, s", delays.percentile(99), TAIL_BAR, at_least=False))
    if order.faults:
        bars.append(Bar("node killed and operators scaled", len(outcome.faults), 3, at_least=True))
    if order.nodes is not None:
        result.notes.append(f"{order.nodes} nodes; {', '.join(outcome.faults) or 'no faults'}")
    if order.window.start:
        result.notes.append(
            f"started at second {order.window.start}: balances are not of the whole stream"
        )


def _compare_hours(result: RoadResult, outcome: Outcome, before: Array) -> None:
    """Throughput of the first hour and of the last, in batches of the same size."""
    seconds, rows, fed = [0.0, 0.0], [0, 0], 0
    for batch in outcome.batches:
        fed += batch.rows
        if batch.version < _COLD:
            continue
        at = int(np.searchsorted(before, fed / outcome.xways)) / SLICES
        for number, (since, until) in enumerate(
            [(0, _HOUR), (outcome.window.end - _HOUR, outcome.window.end)]
        ):
            if since < at <= until:
                seconds[number] += batch.seconds
                rows[number] += batch.rows
    if not all(rows):
        result.notes.append("too few batches to compare the first hour with the last")
        return
    first, last = (each / spent for each, spent in zip(rows, seconds, strict=True))
    result.notes.append(f"first hour {first:,.0f} rows/s, last hour {last:,.0f} rows/s")
    name = "throughput of the last hour against the first"
    result.bars.append(Bar(name, last / first, 0.9, at_least=True))


def _described(found: Found) -> dict[str, Any]:
    """Everything about a run, for JSON."""
    outcome, delays = found.outcome, found.delays
    window = outcome.window
    checkpoints = [event for event in outcome.events if event.kind == "checkpoint"]
    last = outcome.batches[-1] if outcome.batches else None
    return {
        "xways": outcome.xways,
        "start": window.start,
        "from": window.paced_from,
        "to": window.end,
        "pace": window.pace,
        "holds": found.holds,
        "complete": outcome.complete,
        "rows_per_second": round(outcome.rate, 1),
        "busy_rows_per_second": round(_busy(outcome), 1),
        "batches": len(outcome.paced),
        "delays": {
            _NAMES[kind]: _percentiles(delays.of(kind)) for kind in Answer if delays.of(kind).total
        },
        "all_delays": _percentiles(delays),
        "late": delays.late,
        "state_rows": last.state_rows if last else 0,
        "state_bytes": last.state_bytes if last else 0,
        "checkpoints": len(checkpoints),
        "checkpoint_bytes": round(_mean([e.details.get("bytes", 0) for e in checkpoints])),
        "checkpoint_seconds": round(_mean([e.seconds for e in checkpoints]), 4),
        "time": _where(outcome),
        "faults": outcome.faults,
        "verdict": None if found.verdict is None else str(found.verdict),
    }


def _where(outcome: Outcome) -> dict[str, float]:
    """Where the time of a batch goes, in seconds on average."""
    paced = outcome.paced or outcome.batches
    times: dict[str, float] = {"batch": _mean([batch.seconds for batch in paced])}
    for number, of in enumerate(paced[0].operators if paced else ()):
        each = [batch.operators[number].instances for batch in paced]
        slowest = [max(i.seconds for i in instances) for instances in each]
        cpu = [sum(i.cpu_seconds for i in instances) for instances in each]
        times[f"{of.name}, slowest instance"] = _mean(slowest)
        times[f"{of.name}, processor"] = _mean(cpu)
    versions = {batch.version for batch in paced}
    phases = [of for version, of in outcome.phases.items() if version in versions]
    for name in sorted({name for of in phases for name in of}):
        times[f"Spark's {name}"] = _mean([of.get(name, 0) / 1000 for of in phases])
    return {name: round(seconds, 4) for name, seconds in times.items()}


def _busy(outcome: Outcome) -> float:
    paced = outcome.paced or outcome.batches
    seconds = sum(batch.seconds for batch in paced)
    return sum(batch.rows for batch in paced) / seconds if seconds else 0.0


def _percentiles(delays: Delays) -> dict[str, float]:
    named = {"p50": 50, "p95": 95, "p99": 99, "max": 100}
    found = {name: round(delays.percentile(p), 4) for name, p in named.items()}
    return {"answers": delays.total, **found}


def _mean(values: list[Any]) -> float:
    return float(sum(values) / len(values)) if values else 0.0


def _show(found: Found, console: Console) -> None:
    said = _described(found)
    console.print(
        f"[bold]L = {said['xways']}[/bold]: "
        f"{'holds all limits' if found.holds else 'does not hold its limits'}; "
        f"{said['rows_per_second']:,.0f} rows/s fed, {said['busy_rows_per_second']:,.0f} rows/s "
        f"while a batch runs, {said['batches']} batches"
    )
    table = Table("answers", "number", "median s", "p95", "p99", "slowest", title_justify="left")
    for name, of in [*said["delays"].items(), ("all", said["all_delays"])]:
        table.add_row(
            name, f"{of['answers']:,}", *(f"{of[p]:.3f}" for p in ("p50", "p95", "p99", "max"))
        )
    console.print(table)
    console.print(
        f"state: {said['state_rows']:,} rows, {said['state_bytes'] / 2**20:,.0f} MiB; "
        f"{said['checkpoints']} checkpoints of {said['checkpoint_bytes'] / 2**20:,.1f} MiB, "
        f"stored in {said['checkpoint_seconds']:.2f} s; {said['late']:,} answers late"
    )
    times = Table("where the time of a batch goes", "seconds", title_justify="left")
    for name, seconds in said["time"].items():
        times.add_row(name, f"{seconds:.3f}")
    console.print(times)
    if found.verdict is not None:
        console.print(str(found.verdict))


def _show_bars(result: Result, console: Console) -> None:
    table = Table("bar", "value", "has to be", "holds", title="Bars", title_justify="left")
    for bar in result.bars:
        sense = "at least" if bar.at_least else "at most"
        table.add_row(
            bar.name, f"{bar.value:,.3f}", f"{sense} {bar.bar:g}", "yes" if bar.holds else "no"
        )
    console.print(table)
    for note in result.notes:
        console.print(note)
