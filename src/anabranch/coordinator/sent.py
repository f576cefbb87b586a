"""Output buffers: rows sent to operators in earlier batches, kept for replay."""

from __future__ import annotations

from collections.abc import Mapping

from anabranch.coordinator.frames import Step
from anabranch.coordinator.watermarks import Times
from anabranch.plan.graph import Stateful
from anabranch.units import Version


class Sent:
    """The steps of each operator in each kept batch, with the rows that were sent to it."""

    def __init__(self, window: int | None) -> None:
        self._window = window
        """Only rows of so much event time matter, in microseconds; None: all."""
        self._steps: dict[str, dict[Version, Step]] = {}

    def get(self, operator: str, version: Version) -> Step | None:
        """The step of an operator in a batch, if it is kept."""
        return self._steps.get(operator, {}).get(version)

    def keep(self, version: Version, steps: Mapping[Stateful, Step], times: Times) -> None:
        """Keep the steps of a batch. ``times`` are the event times seen so far."""
        for step in steps.values():
            if step.buffer is not None:
                seen = [time for time in times.get(step.bound.name, ()) if time is not None]
                step.time = max(seen, default=None)
                self._steps.setdefault(step.bound.name, {})[version] = step

    def trim(self, operator: str, upto: Version) -> None:
        """Drop the rows that were sent to an operator up to a batch."""
        kept = self._steps.get(operator, {})
        for version in [v for v in kept if v <= upto]:
            kept.pop(version).trim()

    def clear(self) -> None:
        """Drop all kept rows."""
        for kept in self._steps.values():
            for step in kept.values():
                step.trim()
        self._steps = {}

    def obsolete(self, committed: Version, times: Times) -> dict[str, Version]:
        """For each operator the last batch whose rows are older than the window to keep."""
        if self._window is None:
            return {}
        found = {}
        for name, kept in self._steps.items():
            seen = [time for time in times.get(name, ()) if time is not None]
            since = min(seen, default=0) - self._window
            newer = [
                version
                for version, step in kept.items()
                if (step.time or 0) >= since - step.bound.operator.watermark_delay
            ]
            found[name] = Version(min(newer, default=committed + 1) - 1)
        return found
