"""Runs an operator over batches against real state tables, without Spark.

result = run(RunningAggregate({"n": count()}), ["word"], batches, folder)
result.rows, result.late, result.state
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from anabranch.operators.context import Context
from anabranch.operators.operator import Operator
from anabranch.operators.rows import Rows
from anabranch.state.keys import KeyLayout
from anabranch.state.table import StateTable, TableLayout
from anabranch.state.view import State
from anabranch.units import Version

KEY_GROUPS = 16
SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where tables are put: in memory if possible, which is many times faster for small ones."""
Row = dict[str, Any]


@dataclass
class Result:
    """What came out, and what the state was after the last batch."""

    batches: list[list[Row]] = field(default_factory=list)
    """The output of each batch."""
    late_batches: list[list[Row]] = field(default_factory=list)
    """The side output of each batch."""
    state: list[Row] = field(default_factory=list)
    """The rows left in the state: key, sub-key and value columns."""
    schema: pa.Schema | None = None

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self.batches for row in batch]

    @property
    def late(self) -> list[Row]:
        return [row for batch in self.late_batches for row in batch]


def run(
    operator: Operator,
    keys: Sequence[str],
    batches: Sequence[pa.RecordBatch],
    folder: Path,
    *,
    instances: int = 2,
    chunk: int | None = None,
    repeat: bool = False,
    shuffle: int | None = None,
    hasher: Callable[[Row], int] | None = None,
) -> Result:
    """Run batches through the instances of an operator.

    The watermark of a batch is the latest ``event_time`` of the batches before it, less the delay.
    ``chunk`` calls ``process`` with so many rows at a time. ``repeat`` runs every batch three
    times: the first attempt dies, half way or at the very end; the second finishes and is undone,
    which must leave the state as it was; the output of the third must be that of the second.
    ``shuffle`` is a seed for another order of rows.
    """
    schema = batches[0].schema
    bound = operator.bind(schema, keys)
    layout = TableLayout(
        KeyLayout([schema.field(name) for name in keys], bound.sub_keys, KEY_GROUPS),
        bound.state,
        bound.timers,
    )
    folders = [folder / str(instance) for instance in range(instances)]
    for place in folders:
        StateTable.create(place, layout).close()
    expected = bound.output(schema, keys)
    result = Result(schema=expected)
    order = None if shuffle is None else np.random.default_rng(shuffle)
    latest: int | None = None
    fence = 0
    for version, batch in enumerate(batches):
        if order is not None:
            batch = batch.take(pa.array(order.permutation(batch.num_rows)))
        rows = Rows(batch, _hashes(batch, keys, hasher))
        watermark = None if latest is None else latest - bound.watermark_delay
        out: list[Row] = []
        late: list[Row] = []
        for instance, place in enumerate(folders):
            mine = _of_instance(rows, instance, instances)
            before = _dump(place, layout, keys) if repeat else []
            attempts = []
            for attempt in range(3 if repeat else 1):
                if attempt == 2:
                    _undo(place, layout)
                    assert same(_dump(place, layout, keys), before)
                context = Context(Version(version), instance, tuple(keys), watermark)
                fence += 1
                dies = repeat and attempt == 0
                attempts.append(
                    _attempt(bound, place, layout, mine, context, fence, chunk, expected, dies)
                )
            if repeat:
                assert repr(attempts[1]) == repr(attempts[2])
            out += attempts[-1][0]
            late += attempts[-1][1]
        result.batches.append(out)
        result.late_batches.append(late)
        if bound.event_time is not None and batch.num_rows:
            valid = rows.valid(bound.event_time)
            if valid.any():
                seen = int(rows.times(bound.event_time)[valid].max())
                latest = seen if latest is None else max(latest, seen)
    for place in folders:
        result.state += _dump(place, layout, keys)
    return result


def every_way(
    operator: Operator, keys: Sequence[str], batches: Sequence[pa.RecordBatch], chunk: int
) -> Result:
    """Run a stream whole, in portions with every batch repeated, and on one instance.

    What comes out, row by row and to the bit, and what stays in the state are the same; the order
    of the rows that a batch sends out may differ.
    """
    ways: list[dict[str, Any]] = [{}, {"chunk": chunk, "repeat": True}, {"instances": 1}]
    results = []
    for way in ways:
        with TemporaryDirectory(dir=SCRATCH) as folder:
            results.append(run(operator, keys, batches, Path(folder), **way))
    first = results[0]
    for other in results[1:]:
        for one, another in zip(first.batches, other.batches, strict=True):
            assert same(one, another)
        for one, another in zip(first.late_batches, other.late_batches, strict=True):
            assert same(one, another)
        assert same(first.state, other.state)
    return first


def same(left: Sequence[Row], right: Sequence[Row], places: int | None = None) -> bool:
    """Whether two lists have the same rows, in any order; floats may differ by ``places``."""
    return Counter(_frozen(row, places) for row in left) == Counter(
        _frozen(row, places) for row in right
    )


def _frozen(row: Mapping[str, Any], places: int | None) -> tuple[Any, ...]:
    def plain(value: Any) -> Any:
        if isinstance(value, float):
            if value != value:
                return "NaN"
            if places is None:
                return value.hex()
            return float(f"{value:.{places}g}") + 0.0
        return tuple(map(plain, value)) if isinstance(value, list) else value

    return tuple((name, plain(value)) for name, value in row.items())


def _attempt(
    operator: Operator,
    folder: Path,
    layout: TableLayout,
    rows: Rows,
    context: Context,
    fence: int,
    chunk: int | None,
    expected: pa.Schema | None,
    dies: bool,
) -> tuple[list[Row], list[Row]]:
    table = StateTable.open(folder, layout)
    outputs: list[Rows | None] = []
    with table.lock(5.0):
        table.begin(context.version, fence)
        state = State(table, context.keys)
        size = chunk or max(1, len(rows))
        starts = range(0, len(rows), size)
        half = dies and context.version % 2 == 0
        for start in starts[: len(starts) // 2 + 1] if half else starts:
            part = np.arange(start, min(start + size, len(rows)))
            outputs.append(operator.process(rows.take(part), state, context))
        if not half:
            outputs.append(operator.finish(state, context))
        if not dies:
            table.finish()
            table.validate()
    table.close()
    for output in outputs:
        if output is not None and expected is not None:
            assert output.schema.equals(expected), (output.schema, expected)
    return (
        [row for output in outputs if output is not None for row in output.to_pylist()],
        [row for output in context.late_rows for row in output.to_pylist()],
    )


def _hashes(
    batch: pa.RecordBatch, keys: Sequence[str], hasher: Callable[[Row], int] | None
) -> np.ndarray:
    one = hasher or (lambda key: xxhash.xxh3_64_intdigest(repr(key).encode()))
    return np.array([one(key) for key in batch.select(list(keys)).to_pylist()], dtype=np.uint64)


def _of_instance(rows: Rows, instance: int, instances: int) -> Rows:
    assert rows.hashes is not None
    groups = np.mod(rows.hashes.view(np.int64), KEY_GROUPS)
    return rows.filter(groups % instances == instance)


def _undo(folder: Path, layout: TableLayout) -> None:
    table = StateTable.open(folder, layout)
    with table.lock(5.0):
        table.rollback()
        table.validate()
    table.close()


def _dump(folder: Path, layout: TableLayout, keys: Sequence[str]) -> list[Row]:
    table = StateTable.open(folder, layout)
    live = table.live()
    names = [*keys, *layout.key.sub]
    columns = dict(zip(names, table.keys(live), strict=True))
    for column in layout.values:
        values = table.get(column.name, live)
        columns[column.name] = values if isinstance(values, pa.Array) else list(values)
    if layout.timers:
        columns["(timer)"] = table.timers(live)
    table.close()
    dumped: list[Row] = []
    for at in range(len(live)):
        row = {}
        for name, values in columns.items():
            value = values[at]
            row[name] = value.as_py() if isinstance(value, pa.Scalar) else value.tolist()
        dumped.append(row)
    return dumped
