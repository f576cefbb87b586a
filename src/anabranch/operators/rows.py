"""The rows of a batch for an operator: an Arrow record batch with numpy access."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]


class Rows:
    """Some rows of one micro-batch, for the keys of one slice.

    ``rows["speed"]`` is a numpy array for numbers, booleans and times (``datetime64[us]``), and an
    Arrow array for everything else. Nulls in a number column read as 0 (false, 1970);
    :meth:`valid` tells where they are.

    >>> rows = Rows(pa.record_batch({"car": ["a", "b"], "speed": [90, 130]}))
    >>> fast = rows.filter(rows["speed"] > 120)
    >>> fast.append_column("over", fast["speed"] - 120).to_pylist()
    [{'car': 'b', 'speed': 130, 'over': 10}]
    """

    __slots__ = ("batch", "hashes")

    def __init__(self, batch: pa.RecordBatch, hashes: Array | None = None) -> None:
        self.batch = batch
        self.hashes = hashes
        """The 64-bit hash of each row's key (uint64), or None for rows that carry no key."""

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def __contains__(self, name: object) -> bool:
        return name in self.batch.schema.names

    def __getitem__(self, name: str) -> Any:
        column = self.arrow(name)
        return column if _is_opaque(column.type) else _numpy(column)

    def __repr__(self) -> str:
        return f"Rows({len(self)} x {self.batch.schema.names})"

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self.batch.schema.names)

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the rows."""
        return self.batch.schema

    def arrow(self, name: str) -> pa.Array:
        """A column as an Arrow array, nulls included."""
        at = self.batch.schema.get_field_index(name)
        if at < 0:
            raise KeyError(f"no column {name!r}; the rows have {self.names}")
        return self.batch.column(at)

    def times(self, name: str) -> Array:
        """A timestamp column as int64 microseconds since 1970."""
        column = self.arrow(name)
        return _numpy(column.cast(pa.timestamp("us", tz=column.type.tz))).view(np.int64)

    def valid(self, name: str) -> Array:
        """True where the column is not null."""
        column = self.arrow(name)
        if column.null_count == 0:
            return np.ones(len(self), dtype=bool)
        return np.asarray(column.is_valid().to_numpy(zero_copy_only=False), dtype=bool)

    def filter(self, mask: Array) -> Rows:
        """The rows where the mask is true."""
        return self.take(np.flatnonzero(mask))

    def take(self, at: Array) -> Rows:
        """The rows at these positions, in this order."""
        hashes = None if self.hashes is None else self.hashes[at]
        return Rows(self.batch.take(pa.array(at)), hashes)

    def select(self, *names: str) -> Rows:
        """Only these columns."""
        return Rows(self.batch.select(list(names)), self.hashes)

    def append_column(self, name: str, values: Array | pa.Array | Sequence[Any]) -> Rows:
        """The same rows with one more column at the end."""
        array = values if isinstance(values, pa.Array) else pa.array(values)
        return Rows(self.batch.append_column(name, array), self.hashes)

    def to_pylist(self) -> list[dict[str, Any]]:
        """The rows as dictionaries, for tests and for inspection."""
        return list(self.batch.to_pylist())


def _is_opaque(kind: pa.DataType) -> bool:
    return not (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_timestamp(kind)
    )


def _numpy(column: pa.Array) -> Array:
    if column.null_count:
        column = column.fill_null(
            pa.scalar(0, pa.int64()).cast(column.type)
            if pa.types.is_timestamp(column.type)
            else pa.scalar(0).cast(column.type)
        )
    return np.asarray(column.to_numpy(zero_copy_only=False))
