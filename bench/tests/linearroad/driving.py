"""The operators of the query over batches, against real state tables, without Spark."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

from anabranch.operators.context import Context
from anabranch.operators.operator import Operator
from anabranch.operators.rows import Rows
from anabranch.state.groups import group_of
from anabranch.state.hashing import hash_keys
from anabranch.state.keys import KeyLayout
from anabranch.state.table import StateTable, TableLayout
from anabranch.state.view import State
from anabranch.units import Version
from anabranch_linearroad.accounts import Accounts
from anabranch_linearroad.ledger import Ledger
from anabranch_linearroad.tolls import ROADS, TOLD, Tolls

KEY_GROUPS = 16
SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None


class Step:
    """An operator with tables of its own."""

    def __init__(
        self, operator: Operator, schema: pa.Schema, keys: Sequence[str], folder: Path, tables: int
    ) -> None:
        key = KeyLayout([schema.field(name) for name in keys], operator.sub_keys, KEY_GROUPS)
        layout = TableLayout(key, operator.state, operator.timers)
        self.operator, self.keys = operator, tuple(keys)
        self.tables = [StateTable.create(folder / str(i), layout) for i in range(tables)]

    def run(self, version: int, table: pa.Table) -> pa.Table:
        batch = table.combine_chunks().to_batches()[0] if len(table) else None
        out = []
        for i, state in enumerate(self.tables):
            rows = None if batch is None else self._mine(batch, i)
            state.begin(Version(version), 2 * version)
            context = Context(Version(version), i, self.keys)
            if rows is not None and len(rows):
                found = self.operator.process(rows, State(state, self.keys), context)
                assert found is not None
                out.append(found.batch)
            if version % 3 == 2:
                state.mark_clean()
            state.finish()
            if version % 10 == 0:
                state.validate()
        schema = self.operator.output(table.schema, self.keys)
        return pa.Table.from_batches(out, schema)

    def _mine(self, batch: pa.RecordBatch, number: int) -> Rows:
        hashes = hash_keys([batch.column(name) for name in self.keys], batch.num_rows)
        owner = group_of(hashes, KEY_GROUPS) % len(self.tables)
        return Rows(batch, hashes).filter(owner == number)


class Drive:
    """Tolls, then accounts, over one batch after the other."""

    def __init__(self, history: pa.Table, schema: pa.Schema, folder: Path, tables: int = 2) -> None:
        ledger = Ledger.write(history, folder / "ledger")
        self.tolls = Step(Tolls(), schema, ROADS, folder / "tolls", tables)
        self.accounts = Step(Accounts(ledger), TOLD, ["VID"], folder / "accounts", tables)
        self._version = 0

    def batch(self, rows: pa.Table) -> pa.Table:
        answers = self.accounts.run(self._version, self.tolls.run(self._version, rows))
        self._version += 1
        return answers

    @property
    def state_rows(self) -> int:
        return sum(table.count for table in self.tolls.tables)


def cut(rows: pa.Table, rng: np.random.Generator, batches: int) -> Iterator[pa.Table]:
    """Rows in batches that begin anywhere; those of a second are in any order."""
    time = rows["Time"].to_numpy()
    order = np.lexsort((rng.random(len(time)), time))
    cuts = np.sort(rng.integers(0, len(time) + 1, batches))
    for part in np.split(order, cuts):
        yield rows.take(rng.permutation(part))


def answers(
    rows: pa.Table, history: pa.Table, *, seed: int = 0, batches: int = 5, tables: int = 2
) -> pa.Table:
    """What the operators answer to an input that is cut into batches at random places."""
    slices = pa.array(np.arange(len(rows), dtype=np.int32))
    given = rows.append_column("Slice", slices)
    with TemporaryDirectory(dir=SCRATCH) as folder:
        drive = Drive(history, given.schema, Path(folder), tables)
        parts = cut(given, np.random.default_rng(seed), batches)
        return pa.concat_tables([drive.batch(part) for part in parts])
