"""Timers of rows, with access to the due ones without reading the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels import timers as kernels
from anabranch.state.files import Arena, Region

Array = npt.NDArray[Any]

NEVER = int(kernels.NEVER)
TIMES = "timer"
LINKS = "timer links"
_LISTS, _CLOCK = "timer lists", "timer clock"
_MANY = 1024


class Timers:
    """One optional time per row. The lists are derived from the times and can be rebuilt."""

    def __init__(self, arena: Arena, head: Array, width: int) -> None:
        self._arena = arena
        self._head, self._width = head, width
        self.times = arena.array(TIMES)
        self._links = arena.array(LINKS)
        self._lists = arena.array(_LISTS)
        self._clock = arena.array(_CLOCK)

    @staticmethod
    def regions() -> list[Region]:
        """The arrays that do not grow with the rows."""
        return [
            Region(_LISTS, np.dtype(np.int32), 2 * kernels.LISTS),
            Region(_CLOCK, np.dtype(np.int64), 2),
        ]

    def allocate(self) -> None:
        """Allocate the memory of a table without rows."""
        self._arena.ensure(_LISTS, 2 * kernels.LISTS)
        self._arena.ensure(_CLOCK, 2)

    def put(self, rows: Array, times: Array) -> None:
        """Set timers of rows. ``NEVER`` removes them."""
        kernels.put(self.times, self._lists, self._links, self._clock, rows, times)

    def clear(self, rows: Array) -> None:
        """Remove the timers of rows."""
        self.put(rows, np.full(len(rows), NEVER, np.int64))

    def due(self, upto: int, rows: int) -> Array:
        """The rows below a count whose time is at most ``upto``, in no order."""
        if self._clock[1] == 0:
            return np.empty(0, np.int64)
        if upto > self._clock[0]:
            kernels.advance(self.times, self._lists, self._links, self._clock, upto)
        found, count, early, at = [], 0, 0, int(self._lists[0])
        while at > 0:
            out = np.empty(max(_MANY, 4 * count), np.int64)
            some, at, not_due = kernels.due(self.times, self._links, upto, at, out)
            found.append(out[:some])
            count += some
            early += not_due
        if early > max(_MANY, count):
            # The clock was ahead of the times that really come; it would be asked in vain again.
            self._clock[0] = upto
            self.rebuild(rows)
        return np.concatenate([*found, np.empty(0, np.int64)])

    def replace(self, source: Array, target: Array) -> None:
        """Let target rows stand in for source rows, after their times were copied."""
        kernels.replace(self.times, self._lists, self._links, source, target)

    def rebuild(self, rows: int) -> None:
        """Rebuild the lists from the times of all live rows."""
        now = int(self._clock[0])
        kernels.rebuild(self.times, self._lists, self._links, self._head, self._width, rows, now)

    def listed(self) -> Array:
        """All rows in the lists, sorted. For checks."""
        found = []
        heads, tails = self._lists[: kernels.LISTS], self._lists[kernels.LISTS :]
        assert np.array_equal(heads == 0, tails == 0), "a list has a beginning and no end"
        for which in np.flatnonzero(heads).tolist():
            at, before = int(heads[which]), -1 - which
            while at > 0:
                found.append(at - 1)
                assert self._links[2 * at - 1] == before, f"list {which} is broken at row {at - 1}"
                before, at = at, int(self._links[2 * at - 2])
            assert (at, tails[which]) == (-1 - which, before), f"list {which} ends elsewhere"
        return np.sort(np.array(found, np.int64))
