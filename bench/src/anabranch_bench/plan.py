"""The runs of one side of a benchmark, passed to its process as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

FILES_PER_BATCH = 2
"""Every batch is this many files, so that the scan uses as many cores."""


class Engine(StrEnum):
    """Who keeps the state."""

    ANABRANCH = "anabranch"
    ROCKSDB = "spark, rocksdb"
    HDFS = "spark, hdfs-backed"
    PANDAS = "applyInPandasWithState"


class Workload(StrEnum):
    """The query that is run."""

    KEYED = "keyed"
    """count and sum per key."""
    WORDS = "words"
    """count per word and window of 30 seconds of event time."""


class Checkpoints(StrEnum):
    """How our side checkpoints; Spark's stores always do, with every batch."""

    NEVER = "never"
    FULL = "full"
    INCREMENTAL = "incremental"


@dataclass(frozen=True)
class Phase:
    """Batches of one kind that follow each other in a run."""

    name: str
    batches: int
    rows: int
    """Rows in a batch."""
    keys: int
    """Keys to draw from (words in the vocabulary)."""
    fill_from: int | None = None
    """If set: instead of drawing, take every key from this one up to ``keys`` in turn."""
    measured: bool = False
    """Whether the batches count; the others warm up or fill the state."""


@dataclass(frozen=True)
class Run:
    """One query over one folder of input, from the first file to the last."""

    name: str
    workload: Workload
    input: str
    """The folder that :func:`anabranch_bench.inputs.write` has filled."""
    phases: tuple[Phase, ...]
    checkpoints: Checkpoints = Checkpoints.INCREMENTAL
    verify: bool = False
    """Whether to read the final state and compare it with what the other sides have."""

    @property
    def batches(self) -> int:
        """How many batches the run has."""
        return sum(phase.batches for phase in self.phases)

    def slices(self) -> Iterator[tuple[Phase, slice]]:
        """Each phase, and where its batches are among those of the run."""
        start = 0
        for phase in self.phases:
            yield phase, slice(start, start + phase.batches)
            start += phase.batches


@dataclass(frozen=True)
class Totals:
    """The final state of a keyed run, summed up."""

    keys: int
    n: int
    total: int


@dataclass(frozen=True)
class Outcome:
    """What a run has given: the seconds of every batch and, if asked for, the final state."""

    seconds: tuple[float, ...]
    totals: Totals | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Outcome:
        """The outcome of which :func:`dataclasses.asdict` was sent."""
        totals = value["totals"] and Totals(**value["totals"])
        return cls(tuple(value["seconds"]), totals)


@dataclass(frozen=True)
class Side:
    """Some runs, one after the other, in one process with a fresh JVM."""

    engine: Engine
    runs: tuple[Run, ...]

    def to_json(self) -> str:
        """The side as text for the other process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Side:
        """The side that :meth:`to_json` wrote.

        >>> side = Side(Engine.HDFS, (Run("a", Workload.KEYED, "in", (Phase("warm", 2, 10, 5),)),))
        >>> Side.from_json(side.to_json()) == side
        True
        """
        side = json.loads(text)
        return cls(Engine(side["engine"]), tuple(_run(run) for run in side["runs"]))


def _run(run: dict[str, Any]) -> Run:
    return Run(
        run["name"],
        Workload(run["workload"]),
        run["input"],
        tuple(Phase(**phase) for phase in run["phases"]),
        Checkpoints(run["checkpoints"]),
        run["verify"],
    )
