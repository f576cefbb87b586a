"""Aggregates over all rows of a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import pyarrow as pa

from anabranch.errors import PlanError
from anabranch.operators.aggregate import Aggregate, Aggregates, described, key_fields
from anabranch.operators.context import Context
from anabranch.operators.operator import Operator
from anabranch.operators.rows import Rows
from anabranch.state.schema import StateSchema
from anabranch.state.view import State


class RunningAggregate(Operator):
    """Keeps aggregates per key. Every batch emits the keys that changed, once each."""

    _aggregates: Aggregates
    _schema: pa.Schema

    def __init__(self, aggregates: Mapping[str, Aggregate], mode: str = "update") -> None:
        if mode != "update":
            raise PlanError(
                f"mode={mode!r}: an aggregate without a window is never final; use mode='update'"
            )
        self._given = dict(aggregates)

    def __repr__(self) -> str:
        return f"aggregate({described(self._given)})"

    def bind(self, schema: pa.Schema, keys: Sequence[str]) -> RunningAggregate:
        """Check the aggregates against the input."""
        bound = copy(self)
        bound._aggregates = Aggregates.bind(self._given, schema, keys)
        bound._schema = pa.schema([*key_fields(schema, keys), *bound._aggregates.fields()])
        bound.state = StateSchema(bound._aggregates.columns())
        bound.ordered = bound._aggregates.ordered
        return bound

    def output(self, schema: pa.Schema, keys: Sequence[str]) -> pa.Schema:
        """Key columns, then the aggregates."""
        return self.bind(schema, keys)._schema

    def process(self, rows: Rows, state: State, context: Context) -> None:
        """Add rows to the aggregates of their keys."""
        self._aggregates.update(state.table, state.rows(rows), rows)

    def finish(self, state: State, context: Context) -> Rows | None:
        """Emit the keys that changed in this batch."""
        at = state.changed()
        if not len(at):
            return None
        columns = [*state.keys(at), *self._aggregates.results(state.table, at)]
        return Rows(pa.RecordBatch.from_arrays(columns, schema=self._schema))
