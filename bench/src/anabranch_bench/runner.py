"""What the benchmarks of a suite share while they run: the input folder, progress, the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import Progress

from anabranch.errors import QueryFailed
from anabranch_bench import inputs
from anabranch_bench.harness import Bar, Measure, Result, Timing
from anabranch_bench.plan import Engine, Phase, Run, Side, Totals, Workload
from anabranch_bench.process import Tick, run_side, timings


@dataclass
class Runner:
    """Writes inputs, runs sides one after the other, shows how far they are."""

    result: Result
    folder: Path
    progress: Progress
    _totals: dict[str, Totals | None] = field(default_factory=dict)

    @property
    def quick(self) -> bool:
        """Whether to be done in a few minutes rather than to be exact."""
        return self.result.quick

    def prepare(self, name: str, workload: Workload, phases: Sequence[Phase]) -> Run:
        """Write the input of a run."""
        folder = self.folder / name.replace(" ", "-")
        with self._task(f"{name}: input", sum(phase.batches for phase in phases)) as tick:
            inputs.write(folder, workload, phases, self.result.seed, tick)
        return Run(name, workload, str(folder), tuple(phases))

    def run(self, engine: Engine, *runs: Run) -> dict[str, dict[str, Timing]]:
        """Carry out runs in one fresh process; the timings by run and phase."""
        with self._task(f"{runs[0].name}: {engine}", sum(run.batches for run in runs)) as tick:
            outcomes = run_side(Side(engine, runs), tick)
        for run in runs:
            self._compare(engine, run, outcomes[run.name].totals)
        return {run.name: timings(run, outcomes[run.name]) for run in runs}

    def _compare(self, engine: Engine, run: Run, totals: Totals | None) -> None:
        """A side that is quick and wrong must not win."""
        expected = self._totals.setdefault(run.input, totals)
        if totals != expected:
            raise QueryFailed(f"{run.name}: {engine} ended with {totals}, not with {expected}")

    def record(self, benchmark: str, case: str, side: str, timing: Timing) -> None:
        """Keep a measure."""
        self.result.measures.append(Measure(benchmark, case, side, timing))

    def at_least(self, name: str, value: float, bar: float) -> None:
        """Keep a figure that has to reach a bar."""
        self.result.bars.append(Bar(name, value, bar, at_least=True))

    def at_most(self, name: str, value: float, bar: float) -> None:
        """Keep a figure that must not pass a bar."""
        self.result.bars.append(Bar(name, value, bar, at_least=False))

    @contextmanager
    def _task(self, name: str, total: int) -> Iterator[Tick]:
        task = self.progress.add_task(name, total=total)
        yield lambda done: self.progress.update(task, completed=done)
        self.progress.update(task, completed=total)
        if not self.progress.console.is_terminal:
            self.progress.console.print(f"{name}: done")
