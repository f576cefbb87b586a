"""One run of Linear Road or a search of many, and their limits.

Copies of the expressway are fed at true pace, after the stream was brought to its state as fast as
it goes. The delay of an answer is the time from the arrival of the row that it is to until the
commit of the batch that has it.
"""

from __future__ import annotations

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

from anabranch_bench.harness import Bar, Measure, Result, Timing
from anabranch_bench.lrb import picture
from anabranch_bench.lrb.account import Found, account, grids, show, show_bars
from anabranch_bench.lrb.run import Outcome, Window, run, session
from anabranch_bench.lrb.world import World
from anabranch_linearroad.clock import SLICES
from anabranch_linearroad.copies import rows_before
from anabranch_linearroad.rows import HOURS3

Array = npt.NDArray[Any]

L_BAR, MEDIAN_BAR, TAIL_BAR = 350, 0.700, 1.459
_HOUR = 3600
_COLD = 5
"""Batches before a query is up to speed, which would flatter what comes later."""


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
class LrbResult(Result):
    """A result with everything that was found out about each run."""

    runs: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The whole result, with the runs."""
        shown = [grid.to_json() for run in self.runs for grid in grids(run)]
        return super().to_json() | {"runs": self.runs, "tables": shown}


def measure(order: Order, console: Console) -> LrbResult:
    """Run what is ordered, and print it."""
    result = LrbResult("lrb", order.seed, order.quick)
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
                result.runs.append(account(found))
                show(result.runs[-1], console)
                return found

            best = _search(one, order) if order.search else one(order.xways)
        _conclude(result, order, best)
        if window.start == 0 and not window.pace and window.end >= 2 * _HOUR:
            _compare_hours(result, best.outcome, rows_before(str(world.input)))
        if order.output is not None:
            count = best.outcome.answers.write(order.output)
            console.print(f"written: {count:,} answers to {order.output}")
        if order.plot is not None:
            picture.write(best.outcome, best.delays, world.input, order.plot)
    show_bars(result, console)
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


def _conclude(result: LrbResult, order: Order, best: Found) -> None:
    outcome, delays = best.outcome, best.delays
    if measured := outcome.measured:
        rows = round(median(batch.rows for batch in measured))
        timing = Timing(rows, tuple(batch.seconds for batch in measured))
        result.measures.append(Measure("batches", f"L = {outcome.xways}", "anabranch", timing))
    bars = result.bars
    if best.verdict is not None:
        incorrect = best.verdict.incorrect
        bars.append(Bar("answers missing, extra or wrong", incorrect, 0, at_least=False))
    if order.window.pace == 1:
        bars.append(Bar("answers after their limit", delays.late, 0, at_least=False))
    if order.window.pace == 1 and order.nodes is None:
        held = outcome.xways if best.holds else 0
        bars.append(Bar("expressways held", held, L_BAR, at_least=True))
        bars.append(Bar("median delay, s", delays.percentile(50), MEDIAN_BAR, at_least=False))
        bars.append(Bar("99th percentile, s", delays.percentile(99), TAIL_BAR, at_least=False))
    if order.faults:
        bars.append(Bar("node killed and operators scaled", len(outcome.faults), 4, at_least=True))
    if order.nodes is not None:
        result.notes.append(f"{order.nodes} nodes; {', '.join(outcome.faults) or 'no faults'}")
    if order.window.pace not in (0, 1):
        result.notes.append(f"limits are by a clock that ran {order.window.pace:g} times as fast")
    if order.window.start:
        result.notes.append(
            f"started at second {order.window.start}: balances are not of the whole stream"
        )


def _compare_hours(result: LrbResult, outcome: Outcome, before: Array) -> None:
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
