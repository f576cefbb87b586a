"""The time of the stream: stretches of it, and when they are in the time of the world."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

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


@dataclass(frozen=True)
class Seconds:
    """From a second up to, and without, another; None is for no bound.

    >>> Seconds(60, 120).overlaps(100, 200), Seconds(60, 120).overlaps(120, 200)
    (True, False)
    """

    since: int | None = None
    until: int | None = None

    def overlaps(self, first: int, last: int) -> bool:
        """Whether any second from ``first`` to ``last`` is in it."""
        return (self.since is None or last >= self.since) and (
            self.until is None or first < self.until
        )

    def of(self, name: str) -> pc.Expression:
        """The rows with such a second in a column; those with none are before all others."""
        column = pc.field(name)
        if self.since is not None and self.until is not None:
            return (column >= self.since) & (column < self.until)
        if self.since is not None:
            return column >= self.since
        if self.until is not None:
            return column.is_null() | (column < self.until)
        return pc.scalar(True)


ALWAYS = Seconds()
