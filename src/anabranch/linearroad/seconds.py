"""A stretch of the stream's time."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow.compute as pc


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
