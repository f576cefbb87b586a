"""Aggregates over windows of a number of rows of a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import numpy as np
import pyarrow as pa

from anabranch.errors import PlanError
from anabranch.kernels import windows as kernels
from anabranch.operators.aggregate import Aggregate, Aggregates, described, key_fields
from anabranch.operators.context import Context
from anabranch.operators.operator import Operator
from anabranch.operators.rows import Rows
from anabranch.operators.windows import CountWindow, needed
from anabranch.state.schema import Column, StateSchema, int64
from anabranch.state.view import State

HEADER = -1
"""The sub-key of the state row that counts the rows of a key; its windows are 0, 1, ..."""


class CountWindowAggregate(Operator):
    """Keeps aggregates per key and count window, in the order of the source.

    A window is emitted when it is full. ``window`` in the output numbers the windows of a key
    from 0.
    """

    sub_keys = ("window",)
    _aggregates: Aggregates
    _schema: pa.Schema

    def __init__(
        self, window: CountWindow, aggregates: Mapping[str, Aggregate], *, mode: str = "append"
    ) -> None:
        if mode != "append":
            raise PlanError(
                f"mode={mode!r}: a count window is emitted once, when it is full; use mode='append'"
            )
        self._window = window
        self._given = dict(aggregates)

    def __repr__(self) -> str:
        return f"window({self._window}).aggregate({described(self._given)})"

    def bind(self, schema: pa.Schema, keys: Sequence[str]) -> CountWindowAggregate:
        """Check the aggregates against the input."""
        if "window" in keys:
            raise PlanError(
                "window: a key column is called 'window', as is a column of the output; "
                "rename it in a transform"
            )
        bound = copy(self)
        bound._aggregates = Aggregates.bind(self._given, schema, [*keys, "window"])
        number = pa.field("window", pa.int64())
        bound._schema = pa.schema([*key_fields(schema, keys), number, *bound._aggregates.fields()])
        bound.state = StateSchema((Column("window_rows", int64), *bound._aggregates.columns()))
        return bound

    def output(self, schema: pa.Schema, keys: Sequence[str]) -> pa.Schema:
        """Key columns, ``window``, then the aggregates."""
        return self.bind(schema, keys)._schema

    def process(self, rows: Rows, state: State, context: Context) -> Rows | None:
        """Add rows to their windows. Emit and drop the windows that are full."""
        table = state.table
        headers = state.rows(rows, window=np.full(len(rows), HEADER))
        table.touch(headers)
        numbers = kernels.ordinals(table.column("window_rows"), headers)
        index, windows, full = kernels.assign_counted(
            numbers, self._window.size, self._window.slide
        )
        rows = needed(rows, context.keys, self._aggregates.inputs).take(index)
        at = state.rows(rows, window=windows)
        self._aggregates.update(table, at, rows)
        done = at[full]
        if not len(done):
            return None
        columns = [*state.keys(done), *self._aggregates.results(table, done)]
        state.delete(done)
        return Rows(pa.RecordBatch.from_arrays(columns, schema=self._schema))
