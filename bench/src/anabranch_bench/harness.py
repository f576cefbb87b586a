"""The result of a benchmark: measures, bars and the machine, as JSON."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Timing:
    """The batches of one kind on one side: rows in each, and how long each took.

    >>> timing = Timing(1000, (0.5, 0.25, 0.25))
    >>> timing.rows_per_second, timing.median
    (3000.0, 0.25)
    """

    rows: int
    seconds: tuple[float, ...]

    @property
    def rows_per_second(self) -> float:
        """All rows over all the time: a slow batch counts in full, such as one that checkpoints."""
        return self.rows * len(self.seconds) / sum(self.seconds)

    @property
    def median(self) -> float:
        """The time of the batch in the middle."""
        return median(self.seconds)

    def percentile(self, percent: float) -> float:
        """The time that this share of the batches stay within."""
        return float(np.percentile(self.seconds, percent))

    def to_json(self) -> dict[str, Any]:
        """Rows, rates and times, every single batch included."""
        return {
            "rows": self.rows,
            "batches": len(self.seconds),
            "rows_per_second": round(self.rows_per_second, 1),
            "median_rows_per_second": round(self.rows / self.median, 1),
            "min_rows_per_second": round(self.rows / max(self.seconds), 1),
            "max_rows_per_second": round(self.rows / min(self.seconds), 1),
            "median_seconds": self.median,
            "p95_seconds": round(self.percentile(95), 4),
            "p99_seconds": round(self.percentile(99), 4),
            "seconds": list(self.seconds),
        }


@dataclass(frozen=True)
class Measure:
    """A timing, and what was timed."""

    benchmark: str
    case: str
    side: str
    timing: Timing

    def to_json(self) -> dict[str, Any]:
        """One flat object."""
        names = {"benchmark": self.benchmark, "case": self.case, "side": self.side}
        return names | self.timing.to_json()


@dataclass(frozen=True)
class Bar:
    """A figure that has to be reached, or not to be passed.

    >>> Bar("speed-up", 6.2, 5.0, at_least=True).holds
    True
    >>> Bar("overhead", 0.08, 0.05, at_least=False).holds
    False
    """

    name: str
    value: float
    bar: float
    at_least: bool

    @property
    def holds(self) -> bool:
        """Whether the value is on the right side of the bar."""
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def to_json(self) -> dict[str, Any]:
        """Name, value, bar, sense, holds."""
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "bar": self.bar,
            "sense": "at least" if self.at_least else "at most",
            "holds": self.holds,
        }


@dataclass(frozen=True)
class Grid:
    """A table of text, for the terminal and for the report."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_json(self) -> dict[str, Any]:
        """Title, heads and rows."""
        return {"title": self.title, "heads": list(self.heads), "rows": list(map(list, self.rows))}


@dataclass
class Result:
    """Everything that one run of a benchmark found out."""

    name: str
    seed: int
    quick: bool
    measures: list[Measure] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=lambda: machine())
    versions: dict[str, str] = field(default_factory=lambda: versions())
    started: datetime = field(default_factory=lambda: datetime.now(UTC))

    def pick(self, benchmark: str, case: str | None = None) -> list[Measure]:
        """The measures of one benchmark, or of one of its cases."""
        return [
            measure
            for measure in self.measures
            if measure.benchmark == benchmark and case in (None, measure.case)
        ]

    def timing(self, benchmark: str, case: str, side: str) -> Timing:
        """One timing; a KeyError if it was not measured."""
        for measure in self.pick(benchmark, case):
            if measure.side == side:
                return measure.timing
        raise KeyError(f"no measure of {side} in {benchmark}, {case}")

    def to_json(self) -> dict[str, Any]:
        """The whole result; see the guide to benchmarks for the fields."""
        return {
            "benchmark": self.name,
            "quick": self.quick,
            "seed": self.seed,
            "started": self.started.isoformat(timespec="seconds"),
            "machine": self.machine,
            "versions": self.versions,
            "measures": [measure.to_json() for measure in self.measures],
            "bars": [bar.to_json() for bar in self.bars],
            "notes": self.notes,
        }

    def write_json(self, path: Path) -> None:
        """Write the result to a file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(self.to_json(), indent=2) + "\n")
        partial.replace(path)


def in_order(names: Iterable[str]) -> list[str]:
    """Each name once, as first seen."""
    return list(dict.fromkeys(names))


def machine() -> dict[str, Any]:
    """The machine: processor, cores we may use, memory, system, and how busy it was."""
    cpus = re.findall(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    memory = re.search(r"MemTotal:\s*(\d+) kB", _read("/proc/meminfo"))
    return {
        "cpu": cpus[0] if cpus else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(int(memory[1]) / 2**20, 1) if memory else None,
        "system": f"{platform.system()} {platform.release()}",
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions(packages: Sequence[str] = ("pyspark", "pyarrow", "numpy", "numba")) -> dict[str, str]:
    """The versions of everything that has a part in the figures."""
    found = {"anabranch": version("anabranch"), "python": platform.python_version()}
    java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False)
    named = re.search(r'version "([^"]+)"', java.stderr)
    found["java"] = named[1] if named else "unknown"
    return found | {package: version(package) for package in packages}


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
