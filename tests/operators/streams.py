"""Random streams: lists of batches of rows, and the ways in which they must all come out equal."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from harness import Result, run
from hypothesis import strategies as st

from anabranch.operators.context import Context
from anabranch.operators.operator import Operator
from anabranch.operators.rows import Rows
from anabranch.state.view import State

Row = dict[str, Any]
TIME = pa.timestamp("us", "UTC")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def moment(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else _EPOCH + timedelta(microseconds=microseconds)


@contextmanager
def folder() -> Iterator[Path]:
    """A folder for state tables, in memory if the machine has one there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


def bag(rows: Iterable[Row]) -> list[str]:
    """Rows in any order, to the bit: NaN is NaN, and the two zeros differ."""

    def text(value: Any) -> str:
        return str((value - _EPOCH).total_seconds()) if isinstance(value, datetime) else repr(value)

    return sorted(str([(name, text(row[name])) for name in sorted(row)]) for row in rows)


def batches_of(row: st.SearchStrategy[Row]) -> st.SearchStrategy[list[list[Row]]]:
    """A few batches of a few rows, some of them empty."""
    return st.lists(st.lists(row, max_size=14), min_size=1, max_size=4)


def arrow(batches: Sequence[Sequence[Row]], schema: pa.Schema) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_pylist(list(batch), schema=schema) for batch in batches]


class Marked(Operator):
    """An operator with the watermark of each batch written down beforehand."""

    def __init__(self, operator: Operator, marks: Sequence[int | None]) -> None:
        self.operator = operator
        self.marks = marks
        for name in ("sub_keys", "timers", "late"):
            setattr(self, name, getattr(operator, name))
        if hasattr(operator, "state"):
            self.state = operator.state

    def bind(self, schema: pa.Schema, keys: Sequence[str]) -> "Marked":
        return Marked(self.operator.bind(schema, keys), self.marks)

    def output(self, schema: pa.Schema, keys: Sequence[str]) -> pa.Schema | None:
        return self.operator.output(schema, keys)

    def process(self, rows: Rows, state: State, context: Context) -> Rows | None:
        return self.operator.process(rows, state, self._marked(context))

    def finish(self, state: State, context: Context) -> Rows | None:
        return self.operator.finish(state, self._marked(context))

    def _marked(self, context: Context) -> Context:
        return replace(context, watermark=self.marks[context.version])


def run_every_way(
    operator: Operator,
    keys: Sequence[str],
    batches: list[pa.RecordBatch],
    chunk: int,
    instances: int = 2,
) -> Result:
    """Run a stream whole, and in portions with every batch repeated: output and state are equal.

    Not only the rows are, but their order too.
    """
    with folder() as place:
        whole = run(operator, keys, batches, place / "whole", instances=instances)
        other = run(
            operator, keys, batches, place / "other", instances=instances, chunk=chunk, repeat=True
        )
    assert repr(other.batches) == repr(whole.batches)
    assert repr(other.late_batches) == repr(whole.late_batches)
    assert bag(other.state) == bag(whole.state)
    return whole
