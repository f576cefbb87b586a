"""Aggregates that keep one of the values they get: min, max, first and last."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from anabranch.kernels import picks, reduce
from anabranch.kernels.grouping import number
from anabranch.operators.aggregate import Aggregate
from anabranch.operators.values import readonly, restored, storage
from anabranch.state import schema
from anabranch.state.schema import Column, StateType
from anabranch.state.strings import strings_of
from anabranch.state.table import StateTable

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Pick(Aggregate):
    """The common part of the four: the kept value, and whether there is one."""

    def refusal(self, kind: pa.DataType) -> str | None:
        """Numbers, booleans, times, strings and bytes can be kept."""
        if storage(kind) is None:
            return "a number that is not a decimal, a boolean, a time, a string or binary"
        return None

    @property
    def output(self) -> pa.DataType:
        """The type of the input."""
        return self.type

    @property
    def stored_as(self) -> StateType:
        """The type of the state column."""
        kind = storage(self.type)
        assert kind is not None
        return kind

    def columns(self) -> tuple[Column, ...]:
        """The value, and whether there is one."""
        return (
            Column(f"{self.name}_value", self.stored_as),
            Column(f"{self.name}_seen", schema.bool_),
        )

    def merge(self, table: StateTable, into: Array, source: Array) -> None:
        """Add the kept values of source rows like any others."""
        full = np.flatnonzero(self.state(table, "seen")[source])
        if not len(full):
            return
        source = source[full]
        values = table.get(f"{self.name}_value", source)
        if not isinstance(values, pa.Array):
            values = readonly(values)
        times = readonly(self.state(table, "time")[source]) if self._timed else None
        self.reduce(table, readonly(into[full]), values, times)

    @property
    def _timed(self) -> bool:
        return False

    def result(self, table: StateTable, at: Array) -> pa.Array:
        """The kept value, null if there is none."""
        seen = self.state(table, "seen")[at]
        return restored(table.get(f"{self.name}_value", at), seen, self.type)

    def reduce(self, table: StateTable, at: Array, values: Any, times: Array | None) -> None:
        """Keep the right ones."""
        if isinstance(values, pa.Array):
            self._reduce_strings(table, at, values, times)
        else:
            self._reduce_numbers(table, at, values, times)

    @abstractmethod
    def _reduce_numbers(
        self, table: StateTable, at: Array, values: Array, times: Array | None
    ) -> None: ...

    @abstractmethod
    def _reduce_strings(
        self, table: StateTable, at: Array, values: pa.Array, times: Array | None
    ) -> None: ...

    def _keep(self, table: StateTable, rows: Array, values: pa.Array, chosen: Array) -> None:
        table.set(f"{self.name}_value", rows, values.take(pa.array(chosen)))
        self.state(table, "seen")[rows] = True


@dataclass(frozen=True)
class Extreme(Pick):
    """Min and max."""

    ordered = False
    sign = 1

    def _reduce_numbers(
        self, table: StateTable, at: Array, values: Array, times: Array | None
    ) -> None:
        if types.is_floating(self.type):
            # Equal floats of different bits (zeros, NaNs) would make the state depend on order.
            values = readonly(np.where(np.isnan(values), np.nan, values + 0.0))
        kernel = reduce.least if self.sign > 0 else reduce.greatest
        kernel(self.state(table, "value"), self.state(table, "seen"), at, values)

    def _reduce_strings(
        self, table: StateTable, at: Array, values: pa.Array, times: Array | None
    ) -> None:
        groups, firsts = number(at)
        rows = at[firsts]
        both = pa.concat_arrays([table.get(f"{self.name}_value", rows), values])
        starts, lens, data = map(readonly, strings_of(both))
        chosen = picks.extreme_of(groups, len(rows), starts, lens, data, self.sign)
        new = np.flatnonzero(chosen >= len(rows))
        self._keep(table, rows[new], both, chosen[new])


@dataclass(frozen=True)
class Min(Extreme):
    """See :func:`anabranch.operators.aggregates.min`."""


@dataclass(frozen=True)
class Max(Extreme):
    """See :func:`anabranch.operators.aggregates.max`."""

    sign = -1


@dataclass(frozen=True)
class Placed(Pick):
    """First and last."""

    ordered = True

    @property
    def _timed(self) -> bool:
        return self.by_time

    def columns(self) -> tuple[Column, ...]:
        """The value, whether there is one, and its time if order is that of time."""
        time = Column(f"{self.name}_time", schema.timestamp)
        return super().columns() + ((time,) if self.by_time else ())


@dataclass(frozen=True)
class First(Placed):
    """See :func:`anabranch.operators.aggregates.first`."""

    def _reduce_numbers(
        self, table: StateTable, at: Array, values: Array, times: Array | None
    ) -> None:
        column, seen = self.state(table, "value"), self.state(table, "seen")
        if times is not None:
            reduce.earliest(column, seen, self.state(table, "time"), at, values, times)
        else:
            reduce.first(column, seen, at, values)

    def _reduce_strings(
        self, table: StateTable, at: Array, values: pa.Array, times: Array | None
    ) -> None:
        groups, firsts = number(at)
        rows = at[firsts]
        new = ~self.state(table, "seen")[rows]
        chosen = firsts
        if times is not None:
            chosen = picks.earliest_of(groups, len(rows), times)
            kept = self.state(table, "time")
            new |= times[chosen] < kept[rows]
            kept[rows[new]] = times[chosen[new]]
        self._keep(table, rows[new], values, chosen[new])


@dataclass(frozen=True)
class Last(Placed):
    """See :func:`anabranch.operators.aggregates.last`."""

    def _reduce_numbers(
        self, table: StateTable, at: Array, values: Array, times: Array | None
    ) -> None:
        column, seen = self.state(table, "value"), self.state(table, "seen")
        if times is not None:
            reduce.latest(column, seen, self.state(table, "time"), at, values, times)
        else:
            reduce.last(column, seen, at, values)

    def _reduce_strings(
        self, table: StateTable, at: Array, values: pa.Array, times: Array | None
    ) -> None:
        groups, firsts = number(at)
        rows = at[firsts]
        if times is not None:
            chosen = picks.latest_of(groups, len(rows), times)
            kept = self.state(table, "time")
            new = ~self.state(table, "seen")[rows] | (times[chosen] >= kept[rows])
            rows, chosen = rows[new], chosen[new]
            kept[rows] = times[chosen]
        else:
            chosen = picks.last_of(groups, len(rows))
        self._keep(table, rows, values, chosen)
