"""Deduplication: only the first row of each key is emitted."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import pyarrow as pa
from pyarrow import types

from anabranch.errors import PlanError
from anabranch.kernels.dedup import first_seen, first_within
from anabranch.operators.context import Context
from anabranch.operators.operator import Operator
from anabranch.operators.rows import Rows
from anabranch.state import schema
from anabranch.state.schema import Column, StateSchema
from anabranch.state.view import State

_NEVER = int(np.iinfo(np.int64).min)


class Deduplicate(Operator):
    """Emits the first row of every key and drops the others.

    Without ``ttl`` a key is remembered forever. With ``ttl`` (microseconds of the event time
    ``on``) a row is dropped if its time is at most ``ttl`` after that of the last emitted row of
    its key. A later row is emitted and starts a new interval. The key is removed once the watermark
    is past its interval; no row that is not late could be dropped after that. So the result depends
    only on the order of the rows, not on the limits of batches or the removal of keys. (Spark's
    ``dropDuplicatesWithinWatermark`` drops all rows until the key is removed.)

    Rows before the watermark, and rows without a time, are late rows of the result.

    >>> Deduplicate(ttl=600_000_000, on="at", watermark=60_000_000)
    Deduplicate(ttl=0:10:00, on='at')

    Output columns: those of the input.
    """

    def __init__(
        self, *, ttl: int | None = None, on: str | None = None, watermark: int = 0
    ) -> None:
        if (ttl is None) != (on is None):
            raise PlanError("deduplicate: ttl needs on=, the event-time column")
        if ttl is not None and ttl < 0:
            raise PlanError(f"deduplicate: ttl is {ttl} us; it must not be negative")
        self.ttl = ttl
        self.event_time = on
        self.watermark_delay = watermark
        if self.ttl is None:
            self.state = StateSchema((Column("_seen", schema.bool_, False),))
        else:
            self.state = StateSchema((Column("_expires", schema.timestamp, _NEVER),))
            self.timers = True
            self.late = True

    def __repr__(self) -> str:
        if self.ttl is None:
            return "Deduplicate()"
        return f"Deduplicate(ttl={timedelta(microseconds=self.ttl)}, on={self.event_time!r})"

    def bind(self, schema: pa.Schema, keys: Sequence[str]) -> Deduplicate:
        """Check that the time column exists and is a timestamp."""
        if self.event_time is not None:
            at = schema.get_field_index(self.event_time)
            if at < 0:
                raise PlanError(
                    f"deduplicate: there is no column on={self.event_time!r}; "
                    f"the rows have {schema.names}"
                )
            if not types.is_timestamp(schema.field(at).type):
                raise PlanError(
                    f"deduplicate: on={self.event_time!r} is {schema.field(at).type}, "
                    "not a timestamp; cast it in a transform"
                )
        return self

    def output(self, schema: pa.Schema, keys: Sequence[str]) -> pa.Schema:
        """The columns of the input."""
        return schema

    def process(self, rows: Rows, state: State, context: Context) -> Rows:
        """Emit the rows whose key is new."""
        if self.event_time is None or self.ttl is None:
            at = state.rows(rows)
            unseen = np.flatnonzero(~state["_seen"][at])
            at = at[unseen]
            state.table.touch(at)
            return rows.take(unseen[first_seen(state.table.column("_seen"), at)])
        in_time = rows.valid(self.event_time)
        if context.watermark is not None:
            in_time &= rows.times(self.event_time) >= context.watermark
        context.late(rows.filter(~in_time))
        rows = rows.filter(in_time)
        at = state.rows(rows)
        times = rows.times(self.event_time)
        # The interval of a key only ever moves forward: what is inside it now can be left out, and
        # only the keys that really change are touched.
        maybe = np.flatnonzero(times > state["_expires"][at])
        at = at[maybe]
        state.table.touch(at)
        passed = first_within(state.table.column("_expires"), at, times[maybe], self.ttl)
        state.set_timer(at, state["_expires"][at])
        return rows.take(maybe[passed])

    def finish(self, state: State, context: Context) -> None:
        """Remove the keys whose interval is over."""
        if self.ttl is not None and context.watermark is not None:
            state.delete(state.due(context.watermark - 1))
