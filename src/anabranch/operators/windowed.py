"""Aggregates over tumbling and sliding windows of event time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import PlanError
from anabranch.kernels import windows as kernels
from anabranch.kernels.windows import EMITTED, OPEN
from anabranch.operators.aggregate import Aggregate, Aggregates, described, key_fields
from anabranch.operators.context import Context
from anabranch.operators.count_windows import CountWindowAggregate
from anabranch.operators.operator import Operator
from anabranch.operators.rows import Rows
from anabranch.operators.sessions import SessionAggregate
from anabranch.operators.windows import (
    CountWindow,
    SessionWindow,
    TimeWindow,
    Window,
    check_delays,
    closed_before,
    needed,
    window_fields,
)
from anabranch.state.schema import Column, StateSchema, uint8
from anabranch.state.view import State

Array = npt.NDArray[Any]


class WindowAggregate(Operator):
    """Keeps aggregates per key and window; a state row is one window of one key.

    In append mode a window is emitted once the watermark has reached its end, and again after each
    batch that brings it rows within the allowed lateness. In update mode every batch emits the
    windows that changed. Rows that come too late for all their windows, and rows without a time,
    are late rows of the result. ``watermark_delay`` and ``allowed_lateness`` are microseconds.
    """

    sub_keys = ("window_start",)
    timers = True
    late = True
    _aggregates: Aggregates
    _schema: pa.Schema

    def __init__(
        self,
        window: TimeWindow,
        aggregates: Mapping[str, Aggregate],
        *,
        watermark_delay: int = 0,
        allowed_lateness: int = 0,
        mode: str = "append",
    ) -> None:
        check_delays(watermark_delay, allowed_lateness)
        if mode not in ("append", "update"):
            raise PlanError(f"mode={mode!r}: use 'append' or 'update'")
        self._window = window
        self._given = dict(aggregates)
        self._lateness = allowed_lateness
        self._mode = mode
        self.event_time = window.on
        self.watermark_delay = watermark_delay

    def __repr__(self) -> str:
        return f"window({self._window}).aggregate({described(self._given)}, mode={self._mode!r})"

    def bind(self, schema: pa.Schema, keys: Sequence[str]) -> WindowAggregate:
        """Check the window and the aggregates against the input."""
        bound = copy(self)
        times = window_fields(schema, keys, self._window.on)
        others = [*keys, "window_start", "window_end"]
        bound._aggregates = Aggregates.bind(self._given, schema, others)
        bound._schema = pa.schema([*key_fields(schema, keys), *times, *bound._aggregates.fields()])
        bound.state = StateSchema((Column("window_status", uint8), *bound._aggregates.columns()))
        bound.ordered = bound._aggregates.ordered
        return bound

    def output(self, schema: pa.Schema, keys: Sequence[str]) -> pa.Schema:
        """Key columns, ``window_start``, ``window_end``, then the aggregates."""
        return self.bind(schema, keys)._schema

    def process(self, rows: Rows, state: State, context: Context) -> None:
        """Add rows to their windows that are not closed yet."""
        window = self._window
        index, starts, late = window.assign(
            rows.times(window.on),
            rows.valid(window.on),
            closed_before(context.watermark, self._lateness),
        )
        if len(late):
            context.late(rows.take(late))
        rows = needed(rows, context.keys, self._aggregates.inputs)
        if index is not None:
            rows = rows.take(index)
        if not len(rows):
            return
        at = state.rows(rows, window_start=starts)
        self._aggregates.update(state.table, at, rows)
        new = kernels.opened(state.table.column("window_status"), at)
        kept = self._lateness if self._mode == "update" else 0
        state.set_timer(at[new], starts[new] + (window.size + kept))

    def finish(self, state: State, context: Context) -> Rows | None:
        """Emit windows, and remove those that accept no more rows."""
        watermark = context.watermark
        due = np.empty(0, np.int64) if watermark is None else state.due(watermark)
        if self._mode == "update":
            changed = state.changed()
            output = self._rows(state, changed, state.keys(changed)) if len(changed) else None
            state.delete(due)
            return output
        is_open = state.table.column("window_status")[due] == OPEN
        state.delete(due[~is_open])
        sent = due[is_open]
        if watermark is None or not len(sent):
            return None
        keys = state.keys(sent)
        output = self._rows(state, sent, keys)
        closes = keys[-1].to_numpy() + (self._window.size + self._lateness)
        kept = closes > watermark
        state.set("window_status", sent[kept], EMITTED)
        state.set_timer(sent[kept], closes[kept])
        state.delete(sent[~kept])
        return output

    def _rows(self, state: State, at: Array, keys: list[pa.Array]) -> Rows:
        starts = keys[-1]
        kind = self._schema.field("window_start").type
        ends = pa.array(starts.to_numpy() + self._window.size)
        results = self._aggregates.results(state.table, at)
        columns = [*keys[:-1], starts.view(kind), ends.view(kind), *results]
        return Rows(pa.RecordBatch.from_arrays(columns, schema=self._schema))


def windowed(
    window: Window, aggregates: Mapping[str, Aggregate], *, mode: str, delay: int, lateness: int
) -> Operator:
    """The operator that keeps aggregates over windows of any kind.

    ``delay`` is how far the watermark stays behind, ``lateness`` how long closed windows accept
    rows, both in microseconds.
    """
    if isinstance(window, CountWindow):
        if delay or lateness:
            raise PlanError(
                "window: a count window has no event time; leave out watermark and allowed_lateness"
            )
        return CountWindowAggregate(window, aggregates, mode=mode)
    if isinstance(window, SessionWindow):
        return SessionAggregate(
            window, aggregates, mode=mode, watermark_delay=delay, allowed_lateness=lateness
        )
    if isinstance(window, TimeWindow):
        return WindowAggregate(
            window, aggregates, mode=mode, watermark_delay=delay, allowed_lateness=lateness
        )
    raise PlanError(
        f"window: {window!r} is not a window; use ab.tumbling, ab.sliding, ab.session_window "
        "or ab.count_window"
    )
