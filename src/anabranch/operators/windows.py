"""Window definitions by users, and the assignment of rows to windows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from anabranch.errors import PlanError
from anabranch.kernels import windows as kernels
from anabranch.operators.rows import Rows
from anabranch.units import Duration, microseconds

Array = npt.NDArray[Any]

NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True)
class TimeWindow:
    """Windows of one length at regular times; made by :func:`tumbling` and :func:`sliding`."""

    size: int
    slide: int
    on: str
    offset: int = 0

    def assign(self, times: Array, valid: Array, closed: int) -> tuple[Array | None, Array, Array]:
        """The windows of each time that end after ``closed``.

        Returns the position of the time (None: every time once, in order) and the start of the
        window for every pair, and the positions of the times that have none.
        """
        if self.size == self.slide:
            starts = (times - self.offset) // self.size * self.size + self.offset
            kept = valid & (starts + self.size > closed)
            if kept.all():
                return None, starts, np.empty(0, np.int64)
            index = np.flatnonzero(kept)
            return index, starts[index], np.flatnonzero(~kept)
        index, starts, counts = kernels.assign(
            times, valid, self.size, self.slide, self.offset, closed
        )
        return index, starts, np.flatnonzero(counts == 0)


@dataclass(frozen=True)
class SessionWindow:
    """Windows that end after a gap without rows; made by :func:`session_window`."""

    gap: int
    on: str


@dataclass(frozen=True)
class CountWindow:
    """Windows of a number of rows; made by :func:`count_window`."""

    size: int
    slide: int


Window = TimeWindow | SessionWindow | CountWindow


def tumbling(size: Duration, *, on: str, offset: Duration = 0) -> TimeWindow:
    """Windows of equal length without overlap. Every row is in exactly one of them.

    ``on`` is the timestamp column. Windows start at whole multiples of ``size`` since 1970 in UTC,
    moved by ``offset``.
    """
    length = _positive(size, "the size of a tumbling window")
    return TimeWindow(length, length, on, microseconds(offset, what="offset"))


def sliding(size: Duration, slide: Duration, *, on: str, offset: Duration = 0) -> TimeWindow:
    """Windows of equal length that overlap, one starting every ``slide``.

    The state grows with ``size / slide``, since each row is counted in that many windows.
    """
    length = _positive(size, "the size of a sliding window")
    step = _positive(slide, "the slide of a sliding window")
    if step > length:
        raise PlanError(
            f"sliding({size!r}, {slide!r}): rows between the windows would be lost; "
            "the slide must not be longer than the window"
        )
    return TimeWindow(length, step, on, microseconds(offset, what="offset"))


def session_window(gap: Duration, *, on: str) -> SessionWindow:
    """Windows that end when a key has had no row for as long as ``gap``.

    A session starts at its first row and ends ``gap`` after its last. Rows at most ``gap`` apart
    are in one session, whatever the order in which they come.
    """
    return SessionWindow(_positive(gap, "the gap of a session window"), on)


def count_window(size: int, slide: int | None = None) -> CountWindow:
    """Windows of ``size`` rows of a key, a new one every ``slide`` rows (default: ``size``)."""
    step = size if slide is None else slide
    if size < 1 or not 1 <= step <= size:
        raise PlanError(
            f"count_window({size}, slide={slide}): the size must be at least 1, and the slide "
            "from 1 to the size"
        )
    return CountWindow(size, step)


def _positive(duration: Duration, what: str) -> int:
    length = microseconds(duration, what=what)
    if length <= 0:
        raise PlanError(f"{what} is {duration!r}; it must be longer than 0")
    return length


def window_fields(schema: pa.Schema, keys: Sequence[str], on: str) -> list[pa.Field]:
    """The columns ``window_start`` and ``window_end``, with or without time zone as the input."""
    if on not in schema.names:
        raise PlanError(f"window: there is no column {on!r}; the input has {schema.names}")
    kind = schema.field(on).type
    if not types.is_timestamp(kind):
        raise PlanError(f"window: column {on!r} has type {kind}, it needs a timestamp; cast it")
    for name in ("window_start", "window_end"):
        if name in keys:
            raise PlanError(
                f"window: a key column is called {name!r}, as is a column of the output; "
                "rename it in a transform"
            )
    times = pa.timestamp("us", tz=kind.tz)
    return [pa.field("window_start", times), pa.field("window_end", times)]


def check_delays(watermark_delay: int, allowed_lateness: int) -> None:
    """PlanError if a delay is negative."""
    if watermark_delay < 0 or allowed_lateness < 0:
        raise PlanError("window: the watermark delay and the allowed lateness cannot be negative")


def closed_before(watermark: int | None, allowed_lateness: int) -> int:
    """The time up to which windows are closed: those that end at it or earlier accept no rows."""
    return NEVER if watermark is None else watermark - allowed_lateness


def needed(rows: Rows, keys: Sequence[str], inputs: Sequence[str]) -> Rows:
    """The rows with only the needed columns, before they are assigned to several windows."""
    return rows.select(*dict.fromkeys([*keys, *inputs]))
