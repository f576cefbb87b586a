"""The state for an operator: rows by key, columns changed by row."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.kernels import reduce
from anabranch.state.groups import KeyGroups
from anabranch.state.keys import KeyBatch
from anabranch.state.table import StateTable

Array = npt.NDArray[Any]
NO_GROUPS = KeyGroups()


class Keyed(Protocol):
    """Rows with their keys, such as the input of ``process()``."""

    hashes: Array | None
    """The 64-bit hash of each row's key (uint64)."""

    def arrow(self, name: str) -> pa.Array:
        """A column, nulls included."""
        ...


class Column:
    """One state column. Read it at row numbers: ``state["times"][at]``."""

    __slots__ = ("_name", "_table")

    def __init__(self, table: StateTable, name: str) -> None:
        self._table = table
        self._name = name

    def __getitem__(self, at: Array) -> Any:
        return self._table.get(self._name, at)


class State:
    """The table of one slice of an operator during one batch.

    A slice has all rows of some keys. An instance runs one or several slices. Rows of groups that
    have ``left`` for another slice may still be in the table, but are not visible.

    Row numbers are valid until the end of the batch. Every change is rolled back if the batch
    fails.
    """

    def __init__(
        self, table: StateTable, keys: tuple[str, ...], left: KeyGroups = NO_GROUPS
    ) -> None:
        self.table = table
        self._keys = keys
        self._stays: Array | None = None
        """For each key group whether its rows are seen; None: those of all are."""
        if left:
            self._stays = np.ones(table.layout.key.key_groups, np.bool_)
            self._stays[list(left)] = False

    def rows(self, rows: Keyed, **sub: Array) -> Array:
        """The state row of each row's key, created where the key is new."""
        return self.table.rows(self._encode(rows, sub))

    def find(self, rows: Keyed, **sub: Array) -> Array:
        """The state row of each row's key, -1 where there is none."""
        return self.table.find(self._encode(rows, sub))

    def _encode(self, rows: Keyed, sub: dict[str, Array]) -> KeyBatch:
        layout = self.table.layout.key
        if rows.hashes is None:
            raise ValueError("these rows carry no key: pass rows that came into process()")
        if tuple(sub) != tuple(layout.sub):
            raise ValueError(f"expected the sub-keys {list(layout.sub)}, got {list(sub)}")
        columns = [rows.arrow(name) for name in self._keys]
        return layout.encode(columns, rows.hashes, [np.asarray(v, np.int64) for v in sub.values()])

    def __getitem__(self, name: str) -> Column:
        self.table.layout.values[name]
        return Column(self.table, name)

    def set(self, name: str, at: Array, values: Any) -> None:
        """Set values of rows. The last one counts where a row occurs twice."""
        self.table.set(name, at, values)

    def add(self, name: str, at: Array, values: Any) -> None:
        """Add values to rows. A row may occur any number of times."""
        self._reduce(reduce.add, name, at, values)

    def min(self, name: str, at: Array, values: Any) -> None:
        """Keep the smaller of the row's value and the given ones."""
        self._reduce(reduce.minimum, name, at, values)

    def max(self, name: str, at: Array, values: Any) -> None:
        """Keep the greater of the row's value and the given ones."""
        self._reduce(reduce.maximum, name, at, values)

    def _reduce(self, function: Any, name: str, at: Array, values: Any) -> None:
        self.table.touch(at)
        column = self.table.column(name)
        given = np.broadcast_to(np.asarray(values, dtype=column.dtype), at.shape)
        function(column, np.ascontiguousarray(at), np.ascontiguousarray(given))

    def delete(self, at: Array) -> None:
        """Delete rows and their keys."""
        self.table.delete(at)

    def keys(self, at: Array) -> list[pa.Array]:
        """The key columns of rows, followed by their sub-key columns."""
        return self.table.keys(at)

    def part(self, number: int, parts: int) -> Array:
        """The live rows in one of several equal parts of the state.

        To scan a large state, read another part in every batch, for example
        ``context.version % parts``.
        """
        return self._seen(self.table.part(number, parts))

    def changed(self) -> Array:
        """The rows changed in this batch, in the order of their first changes."""
        return self.table.changed()

    def set_timer(self, at: Array, times: Any) -> None:
        """Set the timers of rows to these times (microseconds since 1970)."""
        self.table.set_timer(at, np.broadcast_to(np.asarray(times, np.int64), at.shape))

    def clear_timer(self, at: Array) -> None:
        """Remove the timers of rows."""
        self.table.clear_timer(at)

    def due(self, upto: int) -> Array:
        """The rows whose timer is at or before this time, the earliest first."""
        return self._seen(self.table.due(upto))

    def _seen(self, at: Array) -> Array:
        if self._stays is None:
            return at
        seen: Array = at[self._stays[self.table.groups(at)]]
        return seen
