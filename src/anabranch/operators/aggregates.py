"""The aggregates that users name: ``ab.count()``, ``ab.sum("amount")`` and so on.

Results are those of Spark's functions of the same name. All of them ignore nulls.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from anabranch.kernels import reduce
from anabranch.operators.aggregate import Aggregate as Aggregate
from anabranch.operators.distinct import ApproxCountDistinct, precision_for
from anabranch.operators.picks import First, Last, Max, Min
from anabranch.operators.values import readonly, restored
from anabranch.state import schema
from anabranch.state.schema import Column
from anabranch.state.table import StateTable

Array = npt.NDArray[Any]


def count(column: str | None = None) -> Aggregate:
    """The number of rows or, with a column, of rows in which it is not null."""
    return Count(column)


def sum(column: str) -> Aggregate:
    """The sum: bigint of whole numbers, double of floating-point ones, null of no value.

    A bigint that grows past its 64 bits wraps around, as in Spark without ANSI mode.
    """
    return Sum(column)


def mean(column: str) -> Aggregate:
    """The arithmetic mean as a double, null of no value."""
    return Mean(column)


def variance(column: str) -> Aggregate:
    """The sample variance (Spark's ``var_samp``) as a double, null of fewer than two values."""
    return Variance(column)


def min(column: str) -> Aggregate:
    """The smallest value, of the column's own type: a number, time, boolean, string or binary.

    As in Spark, NaN is greater than every number, and strings are compared by their UTF-8 bytes.
    """
    return Min(column)


def max(column: str) -> Aggregate:
    """The greatest value, of the column's own type; compared as in :func:`min`."""
    return Max(column)


def first(column: str) -> Aggregate:
    """The first value that is not null, in the order of the source; in a session window, in time.

    Spark's ``first(column, ignorenulls=True)``.
    """
    return First(column)


def last(column: str) -> Aggregate:
    """The last value that is not null, in the order of the source; in a session window, in time.

    Spark's ``last(column, ignorenulls=True)``.
    """
    return Last(column)


def approx_count_distinct(column: str, relative_error: float = 0.05) -> Aggregate:
    """About how many different values there are, from a HyperLogLog sketch.

    ``relative_error`` is the standard deviation of the result, from 0.005 to 0.2; the sketch of
    one key takes about 1.1 / relative_error**2 bytes, from 512 bytes at the default of 5 % (which
    really gives 4.6 %) to 4 KiB at 2 %.
    """
    return ApproxCountDistinct(column, precision=precision_for(column, relative_error))


@dataclass(frozen=True)
class Count(Aggregate):
    """See :func:`count`."""

    ordered = False
    output = pa.int64()

    def refusal(self, kind: pa.DataType) -> str | None:
        """Values of every type can be counted."""
        return None

    def columns(self) -> tuple[Column, ...]:
        """The count."""
        return (Column(f"{self.name}_count", schema.int64),)

    def update(self, table: StateTable, at: Array, rows: Any, times: Array | None) -> None:
        """Count rows; what is in them does not matter."""
        if self.column is not None and rows.arrow(self.column).null_count:
            at = readonly(at[rows.valid(self.column)])
        self.reduce(table, at, None, times)

    def reduce(self, table: StateTable, at: Array, values: Any, times: Array | None) -> None:
        """Count."""
        reduce.count(self.state(table, "count"), at)

    def merge(self, table: StateTable, into: Array, source: Array) -> None:
        """Add the counts up."""
        counts = self.state(table, "count")
        reduce.add(counts, into, readonly(counts[source]))

    def result(self, table: StateTable, at: Array) -> pa.Array:
        """The count, 0 of no value."""
        return pa.array(self.state(table, "count")[at])


@dataclass(frozen=True)
class Sum(Aggregate):
    """See :func:`sum`."""

    def refusal(self, kind: pa.DataType) -> str | None:
        """Only numbers have a sum."""
        return _not_a_number(kind)

    @property
    def ordered(self) -> bool:
        """Floating-point addition is not associative; that of whole numbers is."""
        return bool(types.is_floating(self.type))

    @property
    def output(self) -> pa.DataType:
        """Bigint or double."""
        return pa.float64() if self.ordered else pa.int64()

    def columns(self) -> tuple[Column, ...]:
        """The sum, and whether there was anything to add."""
        kind = schema.float64 if self.ordered else schema.int64
        return Column(f"{self.name}_sum", kind), Column(f"{self.name}_seen", schema.bool_)

    def reduce(self, table: StateTable, at: Array, values: Any, times: Array | None) -> None:
        """Add."""
        reduce.add_seen(self.state(table, "sum"), self.state(table, "seen"), at, values)

    def merge(self, table: StateTable, into: Array, source: Array) -> None:
        """Add the sums up."""
        source, into = _seen(self.state(table, "seen"), source, into)
        self.reduce(table, into, readonly(self.state(table, "sum")[source]), None)

    def result(self, table: StateTable, at: Array) -> pa.Array:
        """The sum, null of no value."""
        return restored(self.state(table, "sum")[at], self.state(table, "seen")[at], self.output)


@dataclass(frozen=True)
class Mean(Aggregate):
    """See :func:`mean`."""

    ordered = True
    output = pa.float64()

    def refusal(self, kind: pa.DataType) -> str | None:
        """Only numbers have a mean."""
        return _not_a_number(kind)

    def columns(self) -> tuple[Column, ...]:
        """The sum and the count."""
        return (
            Column(f"{self.name}_sum", schema.float64),
            Column(f"{self.name}_count", schema.int64),
        )

    def reduce(self, table: StateTable, at: Array, values: Any, times: Array | None) -> None:
        """Add and count."""
        sums, counts = self.state(table, "sum"), self.state(table, "count")
        reduce.add_counted(sums, counts, at, readonly(values.astype(np.float64, copy=False)))

    def merge(self, table: StateTable, into: Array, source: Array) -> None:
        """Add sums and counts up."""
        for column in (self.state(table, "sum"), self.state(table, "count")):
            reduce.add(column, into, readonly(column[source]))

    def result(self, table: StateTable, at: Array) -> pa.Array:
        """The mean, null of no value."""
        counts = self.state(table, "count")[at]
        means = self.state(table, "sum")[at] / np.maximum(counts, 1)
        return pa.array(means, mask=counts == 0)


@dataclass(frozen=True)
class Variance(Aggregate):
    """See :func:`variance`."""

    ordered = True
    output = pa.float64()

    def refusal(self, kind: pa.DataType) -> str | None:
        """Only numbers have a variance."""
        return _not_a_number(kind)

    def columns(self) -> tuple[Column, ...]:
        """The count, the mean, and the sum of squared deviations from it."""
        return (
            Column(f"{self.name}_count", schema.int64),
            Column(f"{self.name}_mean", schema.float64),
            Column(f"{self.name}_squares", schema.float64),
        )

    def _moments(self, table: StateTable) -> tuple[Array, Array, Array]:
        return (
            self.state(table, "count"),
            self.state(table, "mean"),
            self.state(table, "squares"),
        )

    def reduce(self, table: StateTable, at: Array, values: Any, times: Array | None) -> None:
        """Take values into the moments."""
        values = readonly(values.astype(np.float64, copy=False))
        reduce.moments(*self._moments(table), at, values)

    def merge(self, table: StateTable, into: Array, source: Array) -> None:
        """Merge the moments."""
        reduce.merge_moments(*self._moments(table), into, source)

    def result(self, table: StateTable, at: Array) -> pa.Array:
        """The sample variance, null of fewer than two values."""
        counts = self.state(table, "count")[at]
        found = self.state(table, "squares")[at] / np.maximum(counts - 1, 1)
        return pa.array(found, mask=counts < 2)


def _not_a_number(kind: pa.DataType) -> str | None:
    number = types.is_floating(kind) or (types.is_integer(kind) and not types.is_uint64(kind))
    return None if number else "a whole or floating-point number"


def _seen(seen: Array, source: Array, into: Array) -> tuple[Array, Array]:
    full = np.flatnonzero(seen[source])
    return readonly(source[full]), readonly(into[full])
