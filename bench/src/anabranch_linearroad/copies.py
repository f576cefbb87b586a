"""The input of a time, many times over: what the feeder sends, made from rows kept in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch_linearroad.clock import SLICES
from anabranch_linearroad.files import read_columns, read_input
from anabranch_linearroad.rows import INPUT, UNUSED, Row

Array = npt.NDArray[Any]

_NAMES = ("Type", "Time", "VID", "Spd", "XWay", "Lane", "Dir", "Seg", "Pos", "QID", "Day")
FED = pa.schema([*(INPUT.field(name) for name in _NAMES), pa.field("Slice", pa.int32())])
"""The columns that anybody needs, and when a row arrives, in slices since second 0."""

_SHIFTED = ("VID", "QID", "XWay")
_ROWS_AT_ONCE = 131_072


@dataclass(frozen=True)
class Copies:
    """Copies ``first`` to ``last`` of an input; see :func:`~anabranch_linearroad.replicate`."""

    path: str
    first: int
    last: int
    spans: tuple[int, int, int]
    """By how much the vehicles, requests and expressways of a copy are shifted."""

    def between(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """The rows of some slices, always the same ones."""
        while start < end:
            minute = start // (60 * SLICES)
            stop = min(end, (minute + 1) * 60 * SLICES)
            columns = _minute(self.path, minute).between(start, stop)
            size = len(columns["Time"])
            at_once = max(1, _ROWS_AT_ONCE // max(size, 1))
            for first in range(self.first, self.last, at_once):
                copies = np.arange(first, min(first + at_once, self.last))
                if size:
                    yield self._copied(columns, copies)
            start = stop

    def _copied(self, columns: dict[str, Array], copies: Array) -> pa.RecordBatch:
        spans = dict(zip(_SHIFTED, self.spans, strict=True))
        arrays = []
        for field in FED:
            column = columns[field.name]
            shape = (len(copies), len(column))
            if field.name in spans and len(copies) * copies[-1]:
                steps = (copies * spans[field.name]).astype(column.dtype)[:, None]
                whole = column + steps
                if field.name != "VID":
                    np.copyto(whole, column, where=column == UNUSED)
            else:
                whole = np.broadcast_to(column, shape)
            arrays.append(pa.array(whole.reshape(-1)))
        return pa.record_batch(arrays, schema=FED)


@dataclass(frozen=True)
class _Minute:
    columns: dict[str, Array]

    def between(self, start: int, end: int) -> dict[str, Array]:
        at, to = np.searchsorted(self.columns["Slice"], (start, end))
        return {name: column[at:to] for name, column in self.columns.items()}


# Kept by the process: workers are used again, and a batch is much shorter than a minute.
@lru_cache(maxsize=3)
def _minute(path: str, minute: int) -> _Minute:
    rows = read_input(path, 60 * minute, 60 * (minute + 1)).combine_chunks()
    kept = np.flatnonzero(rows["Type"].to_numpy() != Row.TRAVEL_TIME)
    columns = {name: rows[name].to_numpy()[kept] for name in _NAMES}
    columns["Slice"] = _slices(columns["Time"])
    return _Minute(columns)


def _slices(time: Array) -> Array:
    """The slice of each row: those of a second are spread evenly over it."""
    seconds, first, count = np.unique(time, return_index=True, return_counts=True)
    nth = np.arange(len(time)) - np.repeat(first, count)
    within = nth * SLICES // np.repeat(count, count)
    slices: Array = (np.repeat(seconds, count) * SLICES + within).astype(np.int32)
    return slices


@lru_cache(maxsize=4)
def rows_before(path: str) -> Array:
    """How many rows there are before each slice, about: those of a second count evenly."""
    seconds = np.bincount(read_columns(path, ["Time"])["Time"].to_numpy())
    by_slice = np.repeat(seconds / SLICES, SLICES)
    return np.concatenate([[0.0], np.cumsum(by_slice)])
