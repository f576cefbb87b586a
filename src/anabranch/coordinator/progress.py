"""The public figures of a running query: progress, latency, operations in progress."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from anabranch.backup.policy import Backup
from anabranch.protocols import model
from anabranch.units import Version
from anabranch.worker.reports import InstanceReport


@dataclass(frozen=True)
class InstanceProgress:
    """One instance of an operator in one batch."""

    instance: int
    rows: int
    state_rows: int
    state_bytes: int
    seconds: float
    """From the first to the last of what it did for the batch."""
    cpu_seconds: float
    """Of the Python process; what Spark's own code takes is not in it."""
    queue_seconds: float
    """How long the batch had been planned before the instance began with it. If nodes' clocks
    differ, this is off by as much."""
    compacted_rows: int = 0
    """By how many rows tables were made shorter before the batch, after many were deleted."""
    cleaned_bytes: int = 0
    """How many bytes of strings were looked through before it, to use those of old ones again."""


@dataclass(frozen=True)
class OperatorProgress:
    """One operator in one batch."""

    name: str
    instances: tuple[InstanceProgress, ...]
    watermark: int | None

    @property
    def rows(self) -> int:
        """Input rows."""
        return sum(each.rows for each in self.instances)

    @property
    def state_rows(self) -> int:
        """Rows of state after the batch."""
        return sum(each.state_rows for each in self.instances)

    @property
    def state_bytes(self) -> int:
        """Memory of the state after the batch."""
        return sum(each.state_bytes for each in self.instances)


@dataclass(frozen=True)
class FragmentsProgress:
    """How checkpoints are coded into fragments at present."""

    data: int
    parity: int
    stripe: int | None
    """The bytes that are coded at a time. None: it has not been chosen."""


@dataclass(frozen=True)
class Progress:
    """One batch of a query."""

    version: Version
    seconds: float
    """From the start of the batch to its commit."""
    operators: tuple[OperatorProgress, ...]
    checkpoint: Version
    """The version of the newest checkpoint that is safely stored, -1 if none."""
    attempts: int = 1
    """How often the batch was tried; more than 1 after a worker was lost."""
    at: float = 0.0
    """When it was committed, in seconds since the epoch."""
    fragments: FragmentsProgress | None = None
    """The fragments of the next checkpoint; None with other backups."""

    def __getitem__(self, operator: str) -> OperatorProgress:
        for each in self.operators:
            if each.name == operator:
                return each
        raise KeyError(f"no operator {operator!r}; there are {[o.name for o in self.operators]}")

    @property
    def rows(self) -> int:
        """Input rows of the first operators of the query."""
        return self.operators[0].rows if self.operators else 0

    @property
    def state_rows(self) -> int:
        """Rows of state over all operators."""
        return sum(each.state_rows for each in self.operators)

    @property
    def state_bytes(self) -> int:
        """Memory of the state of all operators."""
        return sum(each.state_bytes for each in self.operators)


@dataclass(frozen=True)
class Latency:
    """Percentiles of the durations of recent batches, in seconds."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def over(cls, recent: Sequence[Progress]) -> Latency:
        """The percentiles over some batches; zeros if there are none."""
        seconds = [progress.seconds for progress in recent] or [0.0]
        p50, p95, p99 = (float(p) for p in np.percentile(seconds, [50, 95, 99]))
        return cls(p50, p95, p99)


@dataclass(frozen=True)
class Change:
    """An operation in progress: its present step, its reason, and its duration so far."""

    kind: str
    """``move`` (scale and rebalance are moves), ``merge``, ``note`` (of the arrangement of
    slices), ``checkpoint``, ``read``, ``hold``, ``node``, ``recovery`` or ``restart``."""
    what: str
    """What is changed, such as the name of an operator."""
    why: str
    """What it was begun for, such as ``scale to 4 instances``."""
    step: str
    """What is done now, such as ``catching up with the stream``."""
    seconds: float
    """How long ago it was begun."""

    @classmethod
    def of(cls, change: model.Change, now: int) -> Change:
        """The public form of the coordinator's change, at a time of its clock."""
        seconds = max(0, now - change.since) / 1e6
        return cls(change.kind, change.what, change.why, change.step, seconds)


def fragments_progress(backup: Backup) -> FragmentsProgress | None:
    """What a backup policy makes of checkpoints at present, if these are fragments."""
    coding = backup.coding
    if coding is None:
        return None
    return FragmentsProgress(coding.data, coding.parity, coding.stripe_bytes)


def operator_progress(
    name: str, reports: Iterable[InstanceReport], watermark: int | None
) -> OperatorProgress:
    """Combine the reports of an operator's instances."""
    instances = sorted((r for r in reports if r.operator == name), key=lambda r: r.instance)
    return OperatorProgress(
        name,
        tuple(
            InstanceProgress(
                r.instance,
                r.rows,
                r.state_rows,
                r.state_bytes,
                r.seconds,
                r.cpu_seconds,
                r.queued,
                r.compacted_rows,
                r.cleaned_bytes,
            )
            for r in instances
        ),
        watermark,
    )
