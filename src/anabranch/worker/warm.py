"""Compiling, or loading, the kernels that nearly every query uses, before the first row comes.

The first use of a kernel on a machine compiles it, which takes seconds; later processes load it
from a cache on disk. Python workers are forked from a daemon that has called :func:`warm`, so that
they start with the kernels in memory. ``python -m anabranch.worker.warm`` fills the cache.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

from anabranch.operators.aggregates import count, sum
from anabranch.operators.context import Context
from anabranch.operators.operator import Operator
from anabranch.operators.rows import Rows
from anabranch.operators.running_aggregate import RunningAggregate
from anabranch.operators.windowed import windowed
from anabranch.operators.windows import tumbling
from anabranch.state.capture import capture
from anabranch.state.checkpoint import read, write
from anabranch.state.groups import KeyGroups
from anabranch.state.hashing import hash_keys
from anabranch.state.keys import KeyLayout
from anabranch.state.restore import restore
from anabranch.state.table import StateTable, TableLayout
from anabranch.state.view import State
from anabranch.units import Version

_ROWS = 64


def warm() -> None:
    """Run two common operators over a few batches in a temporary folder."""
    aggregates = {"n": count(), "total": sum("x")}
    window = windowed(tumbling(1, on="at"), aggregates, mode="append", delay=0, lateness=0)
    batch = pa.RecordBatch.from_pydict(
        {
            "key": [f"key {number % 9}" for number in range(_ROWS)],
            "at": pa.array(np.arange(_ROWS) * 100_000, pa.timestamp("us", tz="UTC")),
            "x": np.arange(_ROWS),
        }
    )
    rows = Rows(batch, hash_keys([batch["key"], batch["x"]], _ROWS))
    with tempfile.TemporaryDirectory() as folder:
        for number, operator in enumerate((RunningAggregate(aggregates), window)):
            _run(operator.bind(batch.schema, ["key"]), rows, Path(folder) / str(number))


def _run(operator: Operator, rows: Rows, folder: Path) -> None:
    key = KeyLayout([rows.schema.field("key")], operator.sub_keys, 128)
    table = StateTable.create(folder, TableLayout(key, operator.state, operator.timers))
    for batch in range(3):
        with table.lock(timeout=1):
            table.begin(Version(batch), batch)
            context = Context(Version(batch), 0, ("key",), watermark=batch * 3_000_000)
            state = State(table, ("key",))
            operator.process(rows, state, context)
            operator.finish(state, context)
            capture(table, "warm", 0, groups=KeyGroups.all(128), base=Version(batch - 1))
            table.mark_clean()
            table.finish()
    whole = write(capture(table, "warm", 0, groups=KeyGroups.all(128), base=None))
    restored = folder.with_name(f"{folder.name}-restored")
    restore(restored, table.layout, [read(pa.py_buffer(whole), name="warm")])
    table.close()


if __name__ == "__main__":
    warm()
