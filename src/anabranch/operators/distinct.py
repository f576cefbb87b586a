"""The approximate number of different values."""

from dataclasses import dataclass
from math import ceil, log2
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from anabranch.errors import PlanError
from anabranch.kernels import sketch
from anabranch.operators.aggregate import Aggregate
from anabranch.operators.values import readonly, storage
from anabranch.state import schema
from anabranch.state.schema import Column, vector
from anabranch.state.strings import strings_of
from anabranch.state.table import StateTable

Array = npt.NDArray[Any]


def precision_for(column: str, relative_error: float) -> int:
    """How many bits of a hash must pick a register for a standard error of 1.04 / sqrt(2**p)."""
    if not 0.005 <= relative_error <= 0.2:
        raise PlanError(
            f"approx_count_distinct({column!r}): relative_error is {relative_error}; "
            "it must be from 0.005 to 0.2"
        )
    return ceil(2 * log2(1.04 / relative_error))


@dataclass(frozen=True)
class ApproxCountDistinct(Aggregate):
    """See :func:`anabranch.operators.aggregates.approx_count_distinct`."""

    precision: int = 9

    ordered = False
    output = pa.int64()

    def __str__(self) -> str:
        return f"approx_count_distinct({self.column!r})"

    def refusal(self, kind: pa.DataType) -> str | None:
        """Values that a state column can hold can be told apart."""
        if storage(kind) is None:
            return "a number that is not a decimal, a boolean, a time, a string or binary"
        return None

    def columns(self) -> tuple[Column, ...]:
        """The registers of the sketch."""
        return (Column(f"{self.name}_registers", vector(schema.uint8, 1 << self.precision)),)

    def reduce(self, table: StateTable, at: Array, values: Any, times: Array | None) -> None:
        """Hash values and take them into the registers."""
        if isinstance(values, pa.Array):
            hashes = sketch.hash_bytes(*map(readonly, strings_of(values)))
        else:
            if types.is_floating(self.type):
                # Spark takes all NaNs for one value, and the two zeros.
                values = np.where(np.isnan(values), np.nan, values + 0.0)
            hashes = sketch.hash_words(readonly(values.view(np.int64)))
        sketch.observe(self.state(table, "registers"), at, hashes, self.precision)

    def merge(self, table: StateTable, into: Array, source: Array) -> None:
        """Merge the registers."""
        sketch.merge(self.state(table, "registers"), into, source)

    def result(self, table: StateTable, at: Array) -> pa.Array:
        """The estimate, 0 of no value."""
        return pa.array(sketch.estimate(self.state(table, "registers"), at, self.precision))
