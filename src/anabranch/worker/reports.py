"""What instances tell the coordinator about a batch, brought home by a Spark accumulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark import AccumulatorParam, SparkContext
from pyspark.accumulators import Accumulator

from anabranch.units import Version


@dataclass(frozen=True)
class Report:
    """One instance's account of one batch."""

    operator: str
    instance: int
    version: Version
    fence: int
    rows: int
    state_rows: int
    state_bytes: int
    seconds: float
    cpu_seconds: float
    queued: float
    """Seconds from the planning of the batch until the instance began with it."""
    times: tuple[int | None, ...]
    """The latest event time seen on each input, in microseconds, for the watermark."""
    captured: str | None = None
    """Where the checkpoint taken with this batch lies, if one was asked for."""
    attempt: int = 0
    """Spark's number of the task attempt; it grows within an attempt of the batch."""
    not_captured: str | None = None
    """Why there is no checkpoint though one was asked for."""


class _Concatenate(AccumulatorParam[list[Report]]):
    def zero(self, value: list[Report]) -> list[Report]:
        return []

    def addInPlace(self, value1: list[Report], value2: list[Report]) -> list[Report]:  # noqa: N802
        return value1 + value2


class Reports:
    """A mailbox from the tasks of a query to its driver. Safe to send to workers."""

    def __init__(self, context: SparkContext) -> None:
        self._mail: Accumulator[list[Report]] = context.accumulator([], _Concatenate())

    def send(self, report: Report) -> None:
        """Called in a task; arrives when the task has succeeded."""
        self._mail.add([report])

    def take(self, version: Version) -> dict[tuple[str, int], Report]:
        """All reports of a version, the last attempt's where there were several, and empty it."""
        mail: Sequence[Report] = self._mail.value
        self._mail.value = []
        reports = (r for r in mail if r.version == version)
        newest = sorted(reports, key=lambda r: (r.fence, r.attempt))
        return {(report.operator, report.instance): report for report in newest}
