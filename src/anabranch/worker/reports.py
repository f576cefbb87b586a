"""What instances tell the coordinator about a batch, brought home by a Spark accumulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark import AccumulatorParam, SparkContext
from pyspark.accumulators import Accumulator

from anabranch.nodes.requests import TableName
from anabranch.units import Version


@dataclass(frozen=True)
class TableReport:
    """What a task says of one slice after a batch."""

    table: TableName
    rows: int
    """The rows of the batch that it has taken."""
    state_rows: int
    state_bytes: int
    changed: int
    """The rows of state changed or deleted since the last clean capture before this batch."""
    captured: str | None = None
    """The file on the node with what was captured, if that was asked for."""
    base: Version | None = None
    """The version since which the changes were captured; None for all rows."""
    not_captured: str | None = None
    """Why nothing was captured though that was asked for."""
    left_to_shed: int = 0
    """The rows of groups that have left the slice which are still in its table."""


@dataclass(frozen=True)
class InstanceReport:
    """One instance's account of one batch."""

    operator: str
    instance: int
    version: Version
    fence: int
    slices: tuple[TableReport, ...]
    seconds: float
    cpu_seconds: float
    queued: float
    """Seconds from the planning of the batch until the instance began with it."""
    times: tuple[int | None, ...]
    """The latest event time seen on each input, in microseconds, for the watermark."""
    attempt: int = 0
    """Spark's number of the task attempt; it grows within an attempt of the batch."""

    @property
    def rows(self) -> int:
        """The rows of the batch that the instance has taken."""
        return sum(each.rows for each in self.slices)

    @property
    def state_rows(self) -> int:
        """How many rows of state there are after the batch."""
        return sum(each.state_rows for each in self.slices)

    @property
    def state_bytes(self) -> int:
        """How much memory they take."""
        return sum(each.state_bytes for each in self.slices)


class _Concatenate(AccumulatorParam[list[InstanceReport]]):
    def zero(self, value: list[InstanceReport]) -> list[InstanceReport]:
        return []

    def addInPlace(  # noqa: N802
        self, value1: list[InstanceReport], value2: list[InstanceReport]
    ) -> list[InstanceReport]:
        return value1 + value2


class Reports:
    """A mailbox from the tasks of a query to its driver. Safe to send to workers."""

    def __init__(self, context: SparkContext) -> None:
        self._mail: Accumulator[list[InstanceReport]] = context.accumulator([], _Concatenate())

    def send(self, report: InstanceReport) -> None:
        """Called in a task; arrives when the task has succeeded."""
        self._mail.add([report])

    def take(self, version: Version) -> dict[tuple[str, int], InstanceReport]:
        """All reports of a version, the last attempt's where there were several, and empty it."""
        mail: Sequence[InstanceReport] = self._mail.value
        self._mail.value = []
        reports = (r for r in mail if r.version == version)
        newest = sorted(reports, key=lambda r: (r.fence, r.attempt))
        return {(report.operator, report.instance): report for report in newest}
