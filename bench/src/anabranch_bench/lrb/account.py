"""An account of one run of Linear Road: how fast, how late, how large, and whether it was right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from anabranch_bench.harness import Grid, Result
from anabranch_bench.lrb.run import Outcome
from anabranch_linearroad.answers import Delays
from anabranch_linearroad.rows import Answer
from anabranch_linearroad.verdict import Verdict

_NAMES = {
    Answer.TOLL: "toll notifications",
    Answer.ALERT: "accident alerts",
    Answer.BALANCE: "balances",
    Answer.EXPENDITURE: "expenditures",
}
_PERCENTILES = {"p50": 50, "p95": 95, "p99": 99, "max": 100}


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


def account(found: Found) -> dict[str, Any]:
    """Everything about a run, for JSON."""
    outcome, delays = found.outcome, found.delays
    window = outcome.window
    checkpoints = [e for e in outcome.events if e.kind == "checkpoint"]
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
        "batches": len(outcome.measured),
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


def grids(said: dict[str, Any]) -> list[Grid]:
    """The same to be read by a person."""
    name = f"L = {said['xways']}"
    timed = [*said["delays"].items(), ("all", said["all_delays"])] if said["delays"] else []
    facts = {
        "limits": _limits(said),
        "verdict": (said["verdict"] or "not checked").splitlines()[0],
        "rows/s fed": f"{said['rows_per_second']:,.0f}",
        "rows/s while a batch runs": f"{said['busy_rows_per_second']:,.0f}",
        "batches": f"{said['batches']:,}",
        "state": f"{said['state_rows']:,} rows, {said['state_bytes'] / 2**20:,.0f} MiB",
        "checkpoints": f"{said['checkpoints']:,}",
        "a checkpoint": f"{said['checkpoint_bytes'] / 2**20:,.1f} MiB, "
        f"stored in {said['checkpoint_seconds']:.2f} s",
    }
    delays = [
        (kind, f"{of['answers']:,}", *(f"{of[p]:.3f}" for p in _PERCENTILES)) for kind, of in timed
    ]
    heads = ("answers", "number", "median s", "95th", "99th", "slowest")
    times = [(where, f"{seconds:.3f}") for where, seconds in said["time"].items()]
    found = [
        Grid(name, ("", ""), list(facts.items())),
        Grid(f"{name}: from arrival to answer", heads, delays),
        Grid(f"{name}: where the time of a batch goes", ("", "seconds"), times),
    ]
    return [grid for grid in found if grid.rows]


def show(said: dict[str, Any], console: Console) -> None:
    """Print the account of a run."""
    for grid in grids(said):
        table = Table(*grid.heads, title=grid.title, title_justify="left")
        for row in grid.rows:
            table.add_row(*row)
        console.print(table)
    if said["verdict"] is not None:
        console.print(said["verdict"])


def show_bars(result: Result, console: Console) -> None:
    """Print what all runs together are held to."""
    table = Table("bar", "value", "has to be", "holds", title="Bars", title_justify="left")
    for bar in result.bars:
        sense = "at least" if bar.at_least else "at most"
        table.add_row(
            bar.name, f"{bar.value:,.3f}", f"{sense} {bar.bar:g}", "yes" if bar.holds else "no"
        )
    console.print(table)
    for note in result.notes:
        console.print(note)


def _limits(said: dict[str, Any]) -> str:
    if not said["complete"]:
        return "the run fell behind and was given up"
    if not said["delays"]:
        return "as fast as it goes, without limits"
    return f"{said['late']:,} answers late" if said["late"] else "every answer within its limit"


def _where(outcome: Outcome) -> dict[str, float]:
    """Where the time of a batch goes, in seconds on average."""
    measured = outcome.measured
    times: dict[str, float] = {"batch": _mean([batch.seconds for batch in measured])}
    for number, of in enumerate(measured[0].operators if measured else ()):
        each = [batch.operators[number].instances for batch in measured]
        slowest = [max(i.seconds for i in instances) for instances in each]
        cpu = [sum(i.cpu_seconds for i in instances) for instances in each]
        times[f"{of.name}, slowest instance"] = _mean(slowest)
        times[f"{of.name}, processor"] = _mean(cpu)
    versions = {batch.version for batch in measured}
    phases = [of for version, of in outcome.phases.items() if version in versions]
    for name in sorted({name for of in phases for name in of}):
        times[f"Spark's {name}"] = _mean([of.get(name, 0) / 1000 for of in phases])
    return {name: round(seconds, 4) for name, seconds in times.items()}


def _busy(outcome: Outcome) -> float:
    seconds = sum(batch.seconds for batch in outcome.measured)
    return sum(batch.rows for batch in outcome.measured) / seconds if seconds else 0.0


def _percentiles(delays: Delays) -> dict[str, Any]:
    if not delays.total:
        return {"answers": 0}
    found = {name: round(delays.percentile(p), 4) for name, p in _PERCENTILES.items()}
    return {"answers": delays.total, **found}


def _mean(values: list[Any]) -> float:
    return float(sum(values) / len(values)) if values else 0.0
