"""What vehicles are told and charged: the operator that knows the roads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import anabranch as ab
from anabranch_linearroad import kernels
from anabranch_linearroad.rows import EXIT_LANE, REPORT_EVERY, SEGMENTS, Row

Array = npt.NDArray[Any]

ROADS = ("XWay", "Dir")
"""The key: nothing on one road matters for another."""

TOLD = pa.schema(
    [
        ("Type", pa.int8()),
        ("VID", pa.int32()),
        ("Time", pa.int32()),
        ("Spd", pa.int32()),
        ("Toll", pa.int32()),
        ("Seg", pa.int32()),
        ("Charge", pa.int32()),
        ("XWay", pa.int16()),
        ("Day", pa.int8()),
        ("QID", pa.int32()),
        ("Slice", pa.int32()),
    ]
)
"""What comes out: reports that enter a segment, and requests as they came.

Of a report ``Spd`` and ``Toll`` are what the vehicle is told (``Toll`` is -1 if it is told
nothing), ``Seg`` where there is an accident ahead, or -1, and ``Charge`` what it has to pay for the
segment that it has left.
"""

_ASKED = ("Type", "VID", "Time", "XWay", "Day", "QID", "Slice")
_NOTICES, _MINUTES, _PLACES = -1, -1 - SEGMENTS, -10_000
_PARTS = 128
_FORGET_AFTER = 60  # seconds; whoever comes back later is on another trip


class Tolls(ab.Operator):
    """Keeps vehicles, minutes of segments and accidents, for each direction of an expressway.

    The rows of a batch may be in any order. What is before a second must be in the same batch or
    one before it.
    """

    state = ab.schema(cell=ab.Column("cell", ab.vector(ab.int32, 4), kernels.NEW))
    sub_keys = ("item",)
    ordered = False
    whole_batch = True

    def output(self, schema: pa.Schema, keys: Sequence[str]) -> pa.Schema:
        """See :data:`TOLD`."""
        return TOLD

    def process(self, rows: ab.Rows, state: ab.State, context: ab.Context) -> ab.Rows:
        """Take all rows of a batch, half minute by half minute."""
        time = _read(rows, "Time")
        told: list[tuple[Array, Array]] = []
        if len(rows):
            batch = _Batch(rows, time, state)
            for half in range(batch.halves):
                if batch.reports(half):
                    told.append(batch.drive(half))
            batch.forget(context.version % _PARTS)
        return ab.Rows(_told(rows, told))


class _Batch:
    """The reports of a batch, in the order of half minutes, and the state rows of all they need."""

    def __init__(self, rows: ab.Rows, time: Array, state: ab.State) -> None:
        self._state, self._table = state, state.table
        first, self._last = int(time.min()), int(time.max())
        self._first = first // REPORT_EVERY
        self.halves = self._last // REPORT_EVERY - self._first + 1
        order = np.empty(len(rows), np.int64)
        starts = np.zeros(self.halves + 2, np.int64)
        kernels.by_half_minute(_read(rows, "Type"), time, self._first, order, starts)
        self._order, self._starts = order[: starts[self.halves]], starts
        self._keys = rows.select(*ROADS).take(self._order)
        self._columns = {
            name: _read(rows, name) for name in ("Time", "Spd", "Lane", "Seg", "Pos", "VID")
        }
        self._number_roads()
        self._at = state.rows(self._keys, item=self._columns["VID"][self._order])
        self._table.touch(self._at)
        self._left: list[Array] = []

    def reports(self, half: int) -> int:
        """How many reports there are of a half minute."""
        return int(self._starts[half + 1] - self._starts[half])

    def _number_roads(self) -> None:
        xway, direction = (_frozen(self._keys[name]) for name in ROADS)
        count = len(self._order)
        most = 2 * int(xway.max(initial=0)) + 2
        self._road = np.empty(count, np.int64)
        firsts = np.empty(most, np.int64)
        numbers = np.full(most, -1)
        every = np.arange(count)
        found = kernels.find_roads(xway, direction, every, numbers, self._road, firsts)
        self._roads = self._keys.take(np.repeat(firsts[:found], SEGMENTS))
        self._directions = direction[firsts[:found]].astype(np.int64)
        self._segments = np.tile(np.arange(SEGMENTS), found)

    def _items(self, first: int) -> Array:
        """The rows of one kind of item, for each road and segment."""
        rows = self._state.rows(self._roads, item=first - self._segments)
        return rows.reshape(-1, SEGMENTS)

    def drive(self, half: int) -> tuple[Array, Array]:
        """Take a half minute; returns the reports that are answered, and what."""
        part = slice(self._starts[half], self._starts[half + 1])
        minute = (self._first + half) // 2 + 1
        notices = self._items(_NOTICES)
        minutes = self._items(_MINUTES - minute % kernels.KEPT * SEGMENTS)
        stale = self._cells[notices[:, 0], 0] != -minute
        if stale.any():
            self._announce(notices, minute, np.flatnonzero(stale))
        self._table.touch(minutes.reshape(-1))
        cells = self._cells
        kernels.begin_minute(cells, minutes.reshape(-1), minute)
        count = self.reports(half)
        told, stopped, left = np.empty((3, count), np.int64)
        results = np.empty((4, count), np.int32)
        columns = self._columns
        tellings, stops, exits = kernels.drive(
            cells,
            self._order[part],
            self._at[part],
            self._road[part],
            columns["Time"],
            columns["Spd"],
            columns["Lane"],
            columns["Seg"],
            columns["Pos"],
            notices,
            minutes,
            told,
            results,
            stopped,
            left,
        )
        if stops:
            self._crash(stopped[:stops] + part.start, minutes)
        self._left.append(left[:exits])
        return told[:tellings], results[:, :tellings]

    def _announce(self, notices: Array, minute: int, stale: Array) -> None:
        kept = [self._items(_MINUTES - m * SEGMENTS) for m in range(kernels.KEPT)]
        self._table.touch(notices[stale].reshape(-1))
        kernels.announce(self._cells, notices, np.stack(kept), self._directions, minute, stale)

    def _crash(self, stopped: Array, minutes: Array) -> None:
        rows = self._order[stopped]
        time, vid, lane, seg, pos = (
            self._columns[name][rows] for name in ("Time", "VID", "Lane", "Seg", "Pos")
        )
        places = _PLACES - (pos.astype(np.int64) * 8 + lane)
        at = self._state.rows(self._keys.take(stopped), item=places)
        self._table.touch(at)
        kernels.crash(self._cells, at, minutes[self._road[stopped], seg], time, vid)

    def forget(self, part: int) -> None:
        """Forget vehicles that have left, and of one part of the state those long not heard of."""
        cells = self._cells
        left = np.concatenate([*self._left, np.empty(0, np.int64)])
        here = cells[left, 3] >> 14 & 7
        self._state.delete(left[here == EXIT_LANE])
        rows = self._state.part(part, _PARTS)
        out = np.empty(len(rows), np.int64)
        count = kernels.expired(cells, rows, self._last - _FORGET_AFTER, out)
        self._state.delete(out[:count])

    @property
    def _cells(self) -> Array:
        # Anew each time: what was taken before rows were made does not reach up to them.
        return self._table.column("cell")


def _told(rows: ab.Rows, told: list[tuple[Array, Array]]) -> pa.RecordBatch:
    kind = rows["Type"]
    asked = np.flatnonzero((kind == Row.BALANCE) | (kind == Row.EXPENDITURE))
    which = np.concatenate([*(rows_ for rows_, _ in told), np.empty(0, np.int64)])
    results = np.concatenate([*(found for _, found in told), np.empty((4, 0), np.int32)], axis=1)
    at = np.concatenate([which, asked])
    columns = {name: rows[name][at] for name in _ASKED}
    for number, name in enumerate(("Spd", "Toll", "Seg", "Charge")):
        columns[name] = np.concatenate([results[number], np.zeros(len(asked), np.int32)])
    return pa.record_batch([pa.array(columns[f.name], f.type) for f in TOLD], schema=TOLD)


def _read(rows: ab.Rows, name: str) -> Array:
    return _frozen(rows[name])


def _frozen(array: Array) -> Array:
    """A read-only view: to the compiler a writable array is of another type."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view
