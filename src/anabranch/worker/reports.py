"""The reports of instances on a batch, sent to the coordinator by a Spark accumulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark import AccumulatorParam, SparkContext
from pyspark.accumulators import Accumulator

from anabranch.nodes.requests import TableName
from anabranch.state.maintenance import NO_UPKEEP, Upkeep
from anabranch.units import Version


@dataclass(frozen=True)
class TableReport:
    """The report of a task on one slice after a batch."""

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
    upkeep: Upkeep = NO_UPKEEP
    """What was done to the table before the batch."""


@dataclass(frozen=True)
class InstanceReport:
    """The report of one instance on one batch."""

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
    stage: int = 0
    """Spark's number of the stage that the task is of."""

    @property
    def rows(self) -> int:
        """The input rows of the instance in the batch."""
        return sum(each.rows for each in self.slices)

    @property
    def state_rows(self) -> int:
        """The number of state rows after the batch."""
        return sum(each.state_rows for each in self.slices)

    @property
    def state_bytes(self) -> int:
        """Their memory in bytes."""
        return sum(each.state_bytes for each in self.slices)

    @property
    def compacted_rows(self) -> int:
        """By how many rows tables were made shorter before the batch."""
        return sum(each.upkeep.compacted_rows for each in self.slices)

    @property
    def cleaned_bytes(self) -> int:
        """How many bytes of strings were looked through before it, to use old ones again."""
        return sum(each.upkeep.cleaned_bytes for each in self.slices)


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
        """Send a report from a task. It arrives if the task succeeds."""
        self._mail.add([report])

    def take(self, version: Version) -> dict[tuple[str, int], InstanceReport]:
        """Take all reports of a version, those of the last attempt where there were several."""
        mail: Sequence[InstanceReport] = self._mail.value
        self._mail.value = []
        reports = (r for r in mail if r.version == version)
        newest = sorted(reports, key=lambda r: (r.fence, r.attempt))
        return {(report.operator, report.instance): report for report in newest}
