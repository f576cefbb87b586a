"""The protocol of aggregates: state columns, a reduction into them, and a result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import PlanError
from anabranch.operators.rows import Rows
from anabranch.operators.values import readonly, stored
from anabranch.state.keytypes import plain
from anabranch.state.schema import Column
from anabranch.state.table import StateTable

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Aggregate(ABC):
    """One aggregate of one output column. Made by functions such as :func:`anabranch.sum`.

    Nulls are ignored. An aggregate is usable once :meth:`bind` has given it the name of its output
    column and the type of its input column.
    """

    column: str | None = None
    name: str = ""
    type: pa.DataType | None = None
    by_time: bool = False

    def bind(self, name: str, schema: pa.Schema, by_time: bool = False) -> Self:
        """The aggregate for an output column of this name over rows of this schema.

        With ``by_time``, order means the order of the times given to :meth:`update`.
        """
        kind = None
        if self.column is not None:
            if self.column not in schema.names:
                raise PlanError(
                    f"{name}={self}: there is no column {self.column!r}; "
                    f"the input has {schema.names}"
                )
            kind = schema.field(self.column).type
            needs = self.refusal(kind)
            if needs:
                raise PlanError(
                    f"{name}={self}: column {self.column!r} has type {kind}, "
                    f"it needs {needs}; cast it in a transform"
                )
        return replace(self, name=name, type=kind, by_time=by_time)

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}({'' if self.column is None else repr(self.column)})"

    @abstractmethod
    def refusal(self, kind: pa.DataType) -> str | None:
        """The kind of column that is needed, if values of this type cannot be aggregated."""

    @property
    @abstractmethod
    def ordered(self) -> bool:
        """Whether the result depends on the order of rows, even if only in the last bit."""

    @property
    @abstractmethod
    def output(self) -> pa.DataType:
        """The type of the result."""

    @abstractmethod
    def columns(self) -> tuple[Column, ...]:
        """The state columns, each named by the output, an underscore and one word.

        The additional word keeps the columns of two aggregates from clashing.
        """

    @abstractmethod
    def reduce(self, table: StateTable, at: Array, values: Any, times: Array | None) -> None:
        """Add values that are not null to state rows, which have been touched."""

    @abstractmethod
    def merge(self, table: StateTable, into: Array, source: Array) -> None:
        """Merge the state of source rows into other rows, which have been touched.

        A row may be a target several times. The source rows must not be used afterwards.
        """

    @abstractmethod
    def result(self, table: StateTable, at: Array) -> pa.Array:
        """The values of the output column for state rows."""

    def state(self, table: StateTable, word: str) -> Array:
        """One of the aggregate's own state columns."""
        column: Array = table.column(f"{self.name}_{word}")
        return column

    def update(self, table: StateTable, at: Array, rows: Rows, times: Array | None) -> None:
        """Add rows to the state rows at these numbers, which have been touched."""
        assert self.column is not None
        column = rows.arrow(self.column)
        if column.null_count:
            valid = np.flatnonzero(rows.valid(self.column))
            at = readonly(at[valid])
            times = None if times is None else readonly(times[valid])
            column = column.drop_null()
        self.reduce(table, at, stored(column), times)


class Aggregates:
    """All aggregates of an operator, bound to its input."""

    def __init__(self, bound: Sequence[Aggregate]) -> None:
        self.bound = tuple(bound)

    @classmethod
    def bind(
        cls,
        given: Mapping[str, Aggregate],
        schema: pa.Schema,
        others: Sequence[str],
        by_time: bool = False,
    ) -> Aggregates:
        """Check the aggregates and bind them. ``others`` are the output's other columns."""
        if not given:
            raise PlanError("nothing to aggregate: give at least one, such as n=ab.count()")
        bound = []
        for name, aggregate in given.items():
            if not isinstance(aggregate, Aggregate):
                raise PlanError(
                    f"{name}={aggregate!r} is not an aggregate; write, say, {name}=ab.sum('amount')"
                )
            if name in others:
                raise PlanError(
                    f"{name}={aggregate}: the output already has a column {name!r}; "
                    "choose another name"
                )
            bound.append(aggregate.bind(name, schema, by_time))
            for column in bound[-1].columns():
                if column.name in others:
                    raise PlanError(
                        f"{name}={aggregate} keeps a state column {column.name!r}, which is "
                        "also a key column; choose another name"
                    )
        return cls(bound)

    @property
    def ordered(self) -> bool:
        """Whether any result depends on the order of rows."""
        return any(aggregate.ordered for aggregate in self.bound)

    @property
    def inputs(self) -> list[str]:
        """The input columns that are needed."""
        return [aggregate.column for aggregate in self.bound if aggregate.column is not None]

    def columns(self) -> tuple[Column, ...]:
        """The state columns."""
        return tuple(column for aggregate in self.bound for column in aggregate.columns())

    def fields(self) -> list[pa.Field]:
        """The output columns."""
        return [pa.field(aggregate.name, aggregate.output) for aggregate in self.bound]

    def update(self, table: StateTable, at: Array, rows: Rows, times: Array | None = None) -> None:
        """Add rows to the state rows at these numbers."""
        table.touch(at)
        at = readonly(at)
        times = None if times is None else readonly(times)
        for aggregate in self.bound:
            aggregate.update(table, at, rows, times)

    def merge(self, table: StateTable, into: Array, source: Array) -> None:
        """Merge the state of source rows into other rows."""
        table.touch(into)
        for aggregate in self.bound:
            aggregate.merge(table, readonly(into), readonly(source))

    def reset(self, table: StateTable, at: Array) -> None:
        """Reset state rows to the values of new rows."""
        table.touch(at)
        for column in self.columns():
            if column.type.variable:
                table.set(column.name, at, pa.nulls(len(at), column.type.arrow))
            else:
                table.column(column.name)[at] = column.default

    def results(self, table: StateTable, at: Array) -> list[pa.Array]:
        """The output columns for state rows."""
        return [aggregate.result(table, readonly(at)) for aggregate in self.bound]


def key_fields(schema: pa.Schema, keys: Sequence[str]) -> list[pa.Field]:
    """The key columns, read from the state."""
    return [schema.field(name).with_type(plain(schema.field(name).type)) for name in keys]


def described(aggregates: Mapping[str, Aggregate]) -> str:
    """The aggregates in the form that a user writes."""
    return ", ".join(f"{name}={aggregate}" for name, aggregate in aggregates.items())
