"""An operator grows while its query runs: ``anabranch bench scaling``.

``pause``: from 2 to 4 instances, with all keys in the state. Beside it Spark's way: the query is
stopped, its checkpoint is divided offline, and it is started again. What is measured is the longest
time from commit to commit, from just before the change until well after it; the pause is how much
longer that is than an ordinary batch of the same side. ``moved``: see :mod:`anabranch_bench.moved`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from rich.console import Console
from rich.progress import Progress

from anabranch_bench import moved
from anabranch_bench.faults import Act, Outcome, Scenario, Scheme, run
from anabranch_bench.harness import Bar, Measure, Result, Timing

HELD, MOVED = "pause", "moved"
CHOICES = (HELD, MOVED)
"""What can be run alone."""
CALM, LONGEST, PAUSE, WHOLE = "calm", "longest", "pause", "whole"
TITLES = {
    CALM: "A batch before the change",
    LONGEST: "The longest time between two commits around the change",
    PAUSE: "How much longer that is than a batch",
    WHOLE: "From the command to the end of the change",
}
_SIDES = (Scheme.CHECKPOINT, Scheme.SPARK)
_SETTLED = 10.0


def scenarios(*, quick: bool, seed: int) -> list[tuple[str, Scenario]]:
    """Case and scenario of every run."""
    sizes = (1_000_000,) if quick else (100_000, 1_000_000)
    base = Scenario(
        Scheme.CHECKPOINT,
        rate=2_000,
        fill=True,
        window=None,
        nodes=4,
        warm=60.0,
        after=_SETTLED,
        act=Act.SCALE,
        seed=seed,
    )
    return [
        (f"{keys:,} keys", replace(base, scheme=scheme, keys=keys))
        for keys in sizes
        for scheme in _SIDES
    ]


def measure(
    *, quick: bool = False, seed: int = 7, only: Sequence[str] = (), console: Console | None = None
) -> Result:
    """Run all scenarios, one after the other, each with a cluster of its own."""
    result = Result("scaling", seed, quick)
    if not only or HELD in only:
        _measure_pause(result, console or Console())
    if not only or MOVED in only:
        moved.measure(result)
    return result


def _measure_pause(result: Result, console: Console) -> None:
    chosen = scenarios(quick=result.quick, seed=result.seed)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("scaling", total=len(chosen))
        for case, scenario in chosen:
            outcome = run(scenario)
            for benchmark, seconds in _figures(outcome).items():
                timing = Timing(scenario.rate, tuple(seconds))
                result.measures.append(Measure(benchmark, case, scenario.scheme.value, timing))
            progress.advance(task)
        for case in dict.fromkeys(case for case, _ in chosen):
            _bars(result, case)


def _figures(outcome: Outcome) -> dict[str, list[float]]:
    calm = outcome.between(outcome.happened - 2 * _SETTLED, outcome.happened)
    around = outcome.between(outcome.happened, outcome.over + _SETTLED)
    return {
        CALM: calm,
        LONGEST: [max(around)],
        PAUSE: [max(around) - median(calm)],
        WHOLE: [outcome.over - outcome.happened],
    }


def _bars(result: Result, case: str) -> None:
    ours, theirs = (result.timing(PAUSE, case, side.value).median for side in _SIDES)
    longest = result.timing(LONGEST, case, Scheme.CHECKPOINT.value).median
    batch = result.timing(CALM, case, Scheme.CHECKPOINT.value).median
    result.bars += [
        Bar(f"{case}: longest batch against the median", longest / batch, 3.0, at_least=False),
        Bar(f"{case}: seconds that a result is late", ours, 2.0, at_least=False),
        Bar(f"{case}: pause against Spark's", ours / theirs, 0.1, at_least=False),
    ]
