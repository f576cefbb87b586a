"""The time of the stream against the time of the world."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SLICES = 10
"""Slices of a second. The rows of a slice arrive together, when its time begins."""


@dataclass(frozen=True)
class Clock:
    """When each second of a stream was, from the one on at which the clock was started.

    >>> clock = Clock(started=1000.0, second=600, pace=2.0)
    >>> clock.second_at(1005.0), clock.slices(1000.06), clock.arrival(6010)
    (610.0, 6002, 1000.5)
    """

    started: float
    """In seconds since the epoch."""
    second: int
    """The second of the stream that was then."""
    pace: float = 1.0
    """Seconds of the stream to one of the world."""

    def second_at(self, time: Any) -> Any:
        """The second of the stream at a time of the world."""
        return self.second + (time - self.started) * self.pace

    def arrival(self, slice_: Any) -> Any:
        """When the rows of a slice arrived, in the time of the world."""
        return self.started + (slice_ / SLICES - self.second) / self.pace

    def slices(self, time: float) -> int:
        """How many slices of the stream have come by a time of the world."""
        since = max(0.0, time - self.started)
        return self.second * SLICES + int(since * SLICES * self.pace) + 1

    def write(self, file: Path) -> None:
        """Put it on record, whole or not at all."""
        partial = file.with_name(file.name + ".partial")
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(file)

    @classmethod
    def read(cls, file: Path) -> Clock | None:
        """The clock on record, None if it has not been started."""
        return cls(**json.loads(file.read_text())) if file.exists() else None
