"""Operators written key by key: a function that is called for each key of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import PlanError
from anabranch.kernels.grouping import number
from anabranch.operators.context import Context
from anabranch.operators.key_state import KeyState, check_names
from anabranch.operators.operator import Operator
from anabranch.operators.rows import Rows
from anabranch.state.schema import StateSchema
from anabranch.state.view import State

Array = npt.NDArray[Any]
Record = Mapping[str, Any]
Returned = Record | Rows | Iterable[Record | Rows] | None
OnRows = Callable[[tuple[Any, ...], Rows, KeyState], Returned]
OnTimer = Callable[[tuple[Any, ...], KeyState], Returned]


class PerKey(Operator):
    """Calls a function once for each key of a batch, with the rows and the state of the key.

    ``fn(key, rows, state)`` gets the key as a tuple, its rows in order, and its state as an object
    (see :class:`KeyState`). It returns, or yields, dictionaries or :class:`Rows` with the columns
    of ``output``; what it leaves out is null.

    This form is the simplest to write and costs some microseconds per key and batch. Write an
    :class:`Operator` where there are many keys with few rows each.

    ``state.set_timer(time)`` sets a timer. ``on_timer(key, state)`` is called at the end of the
    first batch in which the time has come, in the order of the timers, and the timer is removed.
    Times are compared with the watermark if there is an ``event_time``, otherwise with
    ``batch_time``.

    >>> import anabranch as ab
    >>> def count(key, rows, state):
    ...     state.n += len(rows)
    ...     return {"car": key[0], "n": state.n}
    >>> PerKey(count, state=ab.schema(n=ab.int64), output=ab.schema(car=ab.string, n=ab.int64))
    PerKey(count)
    """

    whole_batch = True
    """All rows of a batch come in one call of ``process``."""

    def __init__(
        self,
        fn: OnRows,
        *,
        state: StateSchema,
        output: StateSchema | pa.Schema,
        on_timer: OnTimer | None = None,
        event_time: str | None = None,
        watermark: int = 0,
    ) -> None:
        check_names(state)
        self.fn = fn
        self.on_timer = on_timer
        self.state = state
        self.timers = on_timer is not None
        self.event_time = event_time
        self.watermark_delay = watermark
        fields = output.arrow() if isinstance(output, StateSchema) else list(output)
        if not fields:
            raise PlanError("per_key: output names no columns")
        self._output = pa.schema([field.with_nullable(True) for field in fields])

    def __repr__(self) -> str:
        return f"PerKey({getattr(self.fn, '__name__', type(self.fn).__name__)})"

    def output(self, schema: pa.Schema, keys: Sequence[str]) -> pa.Schema:
        """The columns that were declared."""
        return self._output

    def process(self, rows: Rows, state: State, context: Context) -> Rows | None:
        """Call the function for every key, in the order of their first rows."""
        at = state.rows(rows)
        group, first = number(at)
        by_key = rows.take(np.argsort(group, kind="stable"))
        ends = np.cumsum(np.bincount(group, minlength=len(first)))
        keys = [rows.arrow(name).take(pa.array(first)).to_pylist() for name in context.keys]
        objects = self._load(state, at[first], context)
        collected = _Collected(self._output)
        start = 0
        for key, end, values in zip(_tuples(keys, len(first)), ends.tolist(), objects, strict=True):
            mine = Rows(by_key.batch.slice(start, end - start))
            collected.add(self.fn(key, mine, values))
            start = end
        self._store(state, at[first], objects)
        return collected.rows()

    def finish(self, state: State, context: Context) -> Rows | None:
        """Call ``on_timer`` for the keys whose time has come."""
        now = context.batch_time if self.event_time is None else context.watermark
        if self.on_timer is None or now is None:
            return None
        due = state.due(now)
        state.clear_timer(due)
        keys = [column.to_pylist() for column in state.keys(due)]
        objects = self._load(state, due, context)
        collected = _Collected(self._output)
        for key, values in zip(_tuples(keys, len(due)), objects, strict=True):
            collected.add(self.on_timer(key, values))
        self._store(state, due, objects)
        return collected.rows()

    def _load(self, state: State, at: Array, context: Context) -> list[KeyState]:
        columns = {column.name: _plain(state[column.name][at]) for column in self.state}
        return [
            KeyState(dict(zip(columns, values, strict=True)), context.watermark, context.batch_time)
            for values in _tuples(list(columns.values()), len(at))
        ]

    def _store(self, state: State, at: Array, objects: Sequence[KeyState]) -> None:
        kept = np.array([not each._deleted for each in objects], dtype=bool)
        for column in self.state:
            values = [each._values[column.name] for each in objects if not each._deleted]
            before = _plain(state[column.name][at[kept]])
            # A key that the function only looked at must not count as changed.
            differs = [not _same(a, b) for a, b in zip(before, values, strict=True)]
            changed = [value for value, other in zip(values, differs, strict=True) if other]
            if changed:
                given = pa.array(changed, column.type.arrow) if column.type.variable else changed
                state.set(column.name, at[kept][differs], given)
        if self.timers:
            _store_timers(state, at[kept], [each for each in objects if not each._deleted])
        elif any(each._timer_set for each in objects):
            raise ValueError("set_timer was called, but per_key was given no on_timer function")
        state.delete(at[~kept])


class _Collected:
    """The results of the function, combined in order."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._batches: list[pa.RecordBatch] = []
        self._records: list[Record] = []

    def add(self, returned: Returned) -> None:
        for each in _each(returned):
            if isinstance(each, Rows):
                self._flush()
                self._batches.append(self._conformed(each.batch))
            else:
                unknown = each.keys() - set(self._schema.names)
                if unknown:
                    raise ValueError(
                        f"per_key: {sorted(unknown)} are not among the output columns "
                        f"{self._schema.names}"
                    )
                self._records.append(each)

    def rows(self) -> Rows | None:
        self._flush()
        if not self._batches:
            return None
        table = pa.Table.from_batches(self._batches).combine_chunks()
        return Rows(table.to_batches()[0]) if table.num_rows else None

    def _flush(self) -> None:
        if self._records:
            self._batches.append(pa.RecordBatch.from_pylist(self._records, schema=self._schema))
            self._records = []

    def _conformed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        missing = [name for name in self._schema.names if name not in batch.schema.names]
        if missing:
            raise ValueError(f"per_key: the rows returned lack the columns {missing}")
        columns = [batch.column(field.name).cast(field.type) for field in self._schema]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _each(returned: Returned) -> Iterator[Record | Rows]:
    if returned is None:
        return
    if isinstance(returned, Mapping | Rows):
        yield returned
    else:
        yield from returned


def _store_timers(state: State, at: Array, objects: Sequence[KeyState]) -> None:
    timers = [(row, each._timer) for row, each in zip(at, objects, strict=True) if each._timer_set]
    state.clear_timer(np.array([row for row, time in timers if time is None], np.int64))
    setting = [(row, time) for row, time in timers if time is not None]
    rows = np.array([row for row, _ in setting], np.int64)
    state.set_timer(rows, np.array([time for _, time in setting], np.int64))


def _tuples(columns: Sequence[Sequence[Any]], count: int) -> Iterator[tuple[Any, ...]]:
    return zip(*columns, strict=True) if columns else iter([()] * count)


def _plain(values: Any) -> list[Any]:
    """Python values of a column; a vector is an array of its own for each key."""
    if isinstance(values, pa.Array):
        return list(values.to_pylist())
    return [row.copy() for row in values] if values.ndim > 1 else list(values.tolist())


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, np.ndarray):
        return np.array_equal(before, after, equal_nan=before.dtype.kind == "f")
    return bool(before == after) or (before != before and after != after)
