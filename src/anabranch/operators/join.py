"""The windowed join of two keyed streams."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from anabranch.errors import PlanError
from anabranch.kernels.joins import arrange, match
from anabranch.operators.context import Context
from anabranch.operators.join_buffer import BOOKKEEPING, LEFT, SUB_KEYS, JoinBuffer, Touched
from anabranch.operators.operator import Operator
from anabranch.operators.payload import Payload
from anabranch.operators.rows import Rows
from anabranch.operators.siblings import owners
from anabranch.state.schema import StateSchema
from anabranch.state.view import State

Array = npt.NDArray[Any]

_SIDES = ("left", "right")
SIDE = "__side"
"""The int8 column that says which stream a row is of: 0 left, 1 right."""


class Join(Operator):
    """Pairs the rows of two streams that have the same key and times close to each other.

    A left and a right row are a pair if ``left.time - before <= right.time <= left.time + after``,
    both in microseconds. ``on`` names the two time columns, ``delays`` is how far the watermark
    stays behind each. Rows are kept until the watermark, the lesser one of the two streams, rules
    out a partner.

    >>> Join(on=("shown", "clicked"), before=0, after=600_000_000, how="left")
    Join(left, shown - 0:00:00 <= clicked <= shown + 0:10:00)

    ``how="inner"``: pairs only, as soon as the later row of the two arrives. ``how="left"``: a left
    row without a partner is emitted with nulls on the right, once a partner is ruled out.

    The input has the rows of both streams: the key columns, ``__side``, the columns of the left and
    those of the right, null in rows of the other side. Rows before the watermark are late rows of
    the result. A null in the key or the time matches nothing.

    Pairs are in the order of the later row of the two, then by the time of the earlier one.

    Output columns: the key, the columns of the left, the columns of the right.
    """

    sub_keys = SUB_KEYS
    timers = True
    late = True

    _buffer: JoinBuffer
    _output: pa.Schema

    def __init__(
        self,
        *,
        on: tuple[str, str],
        before: int,
        after: int,
        how: Literal["inner", "left"] = "inner",
        delays: tuple[int, int] = (0, 0),
    ) -> None:
        if how not in ("inner", "left"):
            raise PlanError(f"join: how={how!r}; it is 'inner' or 'left'")
        if before + after < 0:
            raise PlanError(f"join: within is empty: from {before} us before to {after} us after")
        self.columns: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self._times_on = on
        self._delays = delays
        self.before = before
        self.after = after
        self.how = how

    def __repr__(self) -> str:
        left, right = self.event_times
        before, after = (timedelta(microseconds=reach) for reach in (self.before, self.after))
        return f"Join({self.how}, {left} - {before} <= {right} <= {left} + {after})"

    @property
    def event_times(self) -> tuple[str, str]:
        """The time columns of left and right."""
        return self._times_on

    @property
    def delays(self) -> tuple[int, int]:
        """How far the watermark stays behind the latest time of each, in microseconds."""
        return self._delays

    def of(self, *columns: Sequence[str]) -> Join:
        """The join for inputs with these columns besides the key. No name may be in both."""
        left, right = columns
        join = copy.copy(self)
        join.columns = (tuple(left), tuple(right))
        return join

    def bind(self, schema: pa.Schema, keys: Sequence[str]) -> Join:
        """Lay the state out for the columns of both sides."""
        left, right = self._columns()
        expected = [*keys, SIDE, *left, *right]
        if sorted(expected) != sorted(schema.names):
            raise PlanError(
                f"join: the rows have the columns {schema.names} but need {expected}: the columns "
                "of the key, the left and the right side, each once"
            )
        taken = [*keys, *SUB_KEYS, *(column.name for column in BOOKKEEPING)]
        payloads = []
        for side, columns, time in zip(_SIDES, (left, right), self.event_times, strict=True):
            _check_time(schema, side, columns, time)
            fields = [schema.field(name) for name in columns]
            # A row without a time is never kept.
            fields = [f.with_nullable(False) if f.name == time else f for f in fields]
            payloads.append(Payload(fields, taken))
            taken += [column.name for column in payloads[-1].columns]
        bound = copy.copy(self)
        bound._buffer = JoinBuffer(
            (payloads[0], payloads[1]), self.event_times, (self.after, self.before)
        )
        bound._output = self.output(schema, keys)
        bound.state = StateSchema((*BOOKKEEPING, *payloads[0].columns, *payloads[1].columns))
        return bound

    def output(self, schema: pa.Schema, keys: Sequence[str]) -> pa.Schema:
        """The key, the left columns, the right columns."""
        left, right = ([schema.field(name) for name in names] for names in self._columns())
        if self.how == "left":
            right = [field.with_nullable(True) for field in right]
        return pa.schema([*(schema.field(name) for name in keys), *left, *right])

    def process(self, rows: Rows, state: State, context: Context) -> Rows | None:
        """Pair the rows with earlier ones, and keep them for later ones."""
        rows = self._in_time(rows, context)
        side, times, can_match = self._times(rows)
        for name in context.keys:
            can_match &= rows.valid(name)
        usable = np.flatnonzero(can_match)
        new = rows.take(usable)
        keys, side, times = new.select(*context.keys), side[usable], times[usable]
        touched = self._buffer.touch(state, keys, side)
        row, partner = self._pairs(state, touched, side, times)
        new_at = self._buffer.add(state, new, keys, side, times, touched)

        # Entries are numbered: first what was buffered, then all rows of this call.
        old = len(touched.at)
        mine = old + usable[row]
        partner = np.concatenate([np.arange(old), old + usable])[partner]
        left = np.where(side[row] == LEFT, mine, partner)
        right = np.where(side[row] == LEFT, partner, mine)
        if self.how == "left":
            entry_at = np.full(old + len(rows), -1, np.int64)
            entry_at[:old] = touched.at
            entry_at[old + usable] = new_at
            self._mark(state, entry_at[left])
            alone = np.flatnonzero(~can_match & (rows[SIDE] == LEFT))
            mine = np.concatenate([mine, old + alone])
            order = np.argsort(mine, kind="stable")
            mine = mine[order]
            left = np.concatenate([left, old + alone])[order]
            right = np.concatenate([right, np.full(len(alone), -1)])[order]
        if not len(mine):
            return None
        columns = [rows.arrow(name).take(pa.array(mine - old)) for name in context.keys]
        for payload, entries in zip(self._buffer.payloads, (left, right), strict=True):
            columns += payload.pick(state, touched.at, rows, entries)
        return self._rows(columns)

    def finish(self, state: State, context: Context) -> Rows | None:
        """Drop rows that cannot have a partner any more. Emit left ones that had none."""
        if context.watermark is None:
            return None
        due = state.due(context.watermark - 1)
        if not len(due):
            return None
        keys, (side, slot) = owners(state, due, context.keys)
        out = None
        if self.how == "left":
            alone = np.flatnonzero((side == LEFT) & ~state["_matched"][due])
            left, right = self._buffer.payloads
            columns = [keys.arrow(name).take(pa.array(alone)) for name in context.keys]
            columns += left.read(state, due[alone])
            columns += [pa.nulls(len(alone), field.type) for field in right.fields]
            out = self._rows(columns) if len(alone) else None
        self._buffer.remove(state, due, keys, side, slot)
        return out

    def _columns(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        if self.columns is None:
            raise PlanError("join: the columns of its two sides are not known; name them with of()")
        return self.columns

    def _in_time(self, rows: Rows, context: Context) -> Rows:
        if context.watermark is None:
            return rows
        _, times, timed = self._times(rows)
        late = timed & (times < context.watermark)
        if not late.any():
            return rows
        context.late(rows.filter(late))
        return rows.filter(~late)

    def _times(self, rows: Rows) -> tuple[Array, Array, Array]:
        """Side and time of each row, and whether it has a time."""
        side = rows[SIDE].astype(np.int64)
        left, right = self.event_times
        times = np.where(side == LEFT, rows.times(left), rows.times(right))
        return side, times, np.where(side == LEFT, rows.valid(left), rows.valid(right))

    def _pairs(
        self, state: State, touched: Touched, side: Array, times: Array
    ) -> tuple[Array, Array]:
        """The number of the later row of each pair, and of the entry that came before it."""
        bucket = np.concatenate([touched.bucket, 2 * touched.group + side])
        all_times = np.concatenate(
            [self._buffer.times_of(state, touched.at, touched.bucket & 1), times]
        )
        order, starts = arrange(bucket, all_times, 2 * len(touched.heads))
        is_left = side == LEFT
        return match(
            all_times[order],
            order,
            starts,
            2 * touched.group + 1 - side,
            times - np.where(is_left, self.before, self.after),
            times + np.where(is_left, self.after, self.before),
            len(touched.at),
        )

    def _mark(self, state: State, at: Array) -> None:
        at = at[~state["_matched"][at]]
        state.set("_matched", at, np.ones(len(at), bool))

    def _rows(self, columns: list[pa.Array]) -> Rows:
        return Rows(pa.RecordBatch.from_arrays(columns, schema=self._output))


def _check_time(schema: pa.Schema, side: str, columns: Sequence[str], time: str) -> None:
    """Raise :class:`PlanError` unless a side has this column, and it is a time."""
    if time not in columns:
        raise PlanError(
            f"join: on={time!r} is not a column of the {side} side, which has {list(columns)} "
            "besides its key"
        )
    kind = schema.field(time).type
    if not types.is_timestamp(kind) or kind.unit != "us":
        raise PlanError(
            f"join: on={time!r} of the {side} side is {kind}, not a timestamp in microseconds; "
            "cast it in a transform"
        )
