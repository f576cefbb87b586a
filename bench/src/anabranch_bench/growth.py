"""Benchmark 3: the time of a batch of 100,000 rows as the state grows from 1e4 to 1e7 rows."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from anabranch_bench.harness import Timing
from anabranch_bench.plan import Engine, Phase, Workload
from anabranch_bench.runner import Runner

NAME = "growth"
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
"""Rows in the state."""

_ROWS = 100_000
_FILL = 1_000_000  # rows of the batches that fill the state


def case(size: int) -> str:
    """The name of the case with a state of that size.

    >>> case(1_000_000)
    'state of 1,000,000 rows'
    """
    return f"state of {size:,} rows"


def run(runner: Runner) -> None:
    """One query grows through all sizes and is timed at each; ours several times over."""
    plan = runner.prepare(NAME, Workload.KEYED, tuple(_phases(runner.quick)))
    rounds = [replace(plan, name=f"{NAME} {i + 1}") for i in range(1 if runner.quick else 3)]
    timed = list(runner.run(Engine.ANABRANCH, *rounds).values())
    for size in SIZES:
        seconds = [second for timings in timed for second in timings[case(size)].seconds]
        runner.record(NAME, case(size), Engine.ANABRANCH, Timing(_ROWS, tuple(seconds)))
    if not runner.quick:
        for name, timing in runner.run(Engine.ROCKSDB, plan)[plan.name].items():
            runner.record(NAME, name, Engine.ROCKSDB, timing)
    # Each round is compared with itself, so that a machine that slows down in between rounds
    # does not count for or against us.
    ratios = [t[case(10_000_000)].median / t[case(100_000)].median for t in timed]
    runner.at_most("batch over 1e7 state rows: times the batch over 1e5", median(ratios), 1.3)


def _phases(quick: bool) -> Iterator[Phase]:
    before = 0
    for size in SIZES:
        rows = min(_FILL, size - before)
        yield Phase("fill", -(-(size - before) // rows), rows, size, fill_from=before)
        # Long enough for the checkpoint of what was just filled in to be written.
        yield Phase("warm up", (4 if quick else 20) * (2 if size > _FILL else 1), _ROWS, size)
        yield Phase(case(size), 6 if quick else 20, _ROWS, size, measured=True)
        before = size
