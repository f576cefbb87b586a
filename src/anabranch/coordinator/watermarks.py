"""Watermarks: the progress of event time, by operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from anabranch.operators.operator import Operator
from anabranch.worker.reports import InstanceReport

Times = dict[str, tuple[int | None, ...]]
"""The latest event time seen by each operator on each of its inputs, in microseconds."""


@dataclass(frozen=True)
class Watermarks:
    """The event times of all committed batches, and the watermarks that follow from them.

    As in Spark, the watermark of a batch depends only on earlier batches. All instances therefore
    have the same one, also when the batch is repeated.
    """

    times: Times

    def of(self, name: str, operator: Operator) -> int | None:
        """An operator's watermark: the latest event time minus the delay, by its slowest input."""
        seen = self.times.get(name, ())
        if not seen or any(time is None for time in seen):
            return None
        pairs = zip(seen, operator.delays, strict=True)
        return min(time - delay for time, delay in pairs if time is not None)

    def advanced(
        self, operators: Mapping[str, Operator], reports: Iterable[InstanceReport]
    ) -> Watermarks:
        """The watermarks after a batch with these reports."""
        times = dict(self.times)
        for report in reports:
            sides = len(operators[report.operator].event_times)
            before = times.get(report.operator, (None,) * sides)
            times[report.operator] = tuple(
                max((t for t in pair if t is not None), default=None)
                for pair in zip(before, report.times, strict=True)
            )
        return Watermarks(times)
