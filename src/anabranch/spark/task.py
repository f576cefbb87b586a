"""One instance of an operator over one batch: the code that runs inside a Spark task."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark import TaskContext

from anabranch.errors import Misplaced, Reshaped, StateFull
from anabranch.nodes.captures import write_capture
from anabranch.nodes.folders import StateRoot
from anabranch.nodes.local import TABLES
from anabranch.operators.context import Context
from anabranch.operators.join import Join
from anabranch.operators.operator import Operator
from anabranch.operators.rows import Rows
from anabranch.spark.end_marks import watch
from anabranch.spark.nodes import executor
from anabranch.spark.open_tables import OpenTables
from anabranch.spark.packing import TARGET, Packing
from anabranch.spark.reports import Report, Reports
from anabranch.state.capture import capture
from anabranch.state.groups import KeyGroups, group_of
from anabranch.state.hashing import hash_keys
from anabranch.state.table import StateTable, TableLayout
from anabranch.state.view import State
from anabranch.units import Version

HASH = "__hash"
SEQUENCE = "__seq"
LATE = "__late"
INPUT_SIDE = "__side"
_SLICE = 131_072
_PIECE_ROWS, _PIECE_BYTES = 65_536, 1 << 24
_LOCK_SECONDS = 60.0

_open = OpenTables()

watch()


@dataclass(frozen=True)
class CaptureOrder:
    """That a checkpoint is to be taken with this batch, and on top of which version."""

    base: Version | None


@dataclass(frozen=True)
class OperatorTask:
    """Everything an instance needs to know to run one batch. Travels from driver to worker."""

    name: str
    operator: Operator
    keys: tuple[str, ...]
    layout: TableLayout
    output: pa.Schema
    side: pa.Schema | None
    root: StateRoot
    tables: str
    """The folder of the operator's tables below that of the query."""
    version: Version
    fence: int
    watermark: int | None
    batch_time: int
    track_changes: bool
    groups: tuple[KeyGroups, ...]
    """The key groups of each instance."""
    instances: tuple[int, ...]
    """The instance of each partition."""
    hosts: tuple[str, ...]
    """The node of each partition; empty where the driver runs the tasks itself."""
    capture: CaptureOrder | None = None
    packing: Packing | None = None
    """How rows come packed, if they do."""
    ordered: bool = False
    """Whether packed rows are to be seen in the order of the source."""

    def run(self, reports: Reports, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the batch. State is changed for good only if the iterator is exhausted."""
        spark = TaskContext.get()
        assert spark is not None, "an operator's batch runs inside a Spark task"
        partition, attempt = spark.partitionId(), spark.taskAttemptId()
        started, cpu = time.perf_counter(), time.process_time()
        queued = max(0.0, time.time() - self.batch_time / 1e6)
        instance = self._instance(partition)
        root = self._root(partition)
        owned = self._owned(instance)
        table = _open.get(root / TABLES / self.tables / str(instance), self.layout)
        if self.packing is not None:
            batches = self.packing.unpacked(batches, ordered=self.ordered)
        taken = 0
        times: list[int | None] = [None] * len(self.time_columns)
        with table.lock(_LOCK_SECONDS):
            table.begin(self.version, self.fence, attempt, track_dirty=self.track_changes)
            state = State(table, self.keys)
            context = Context(self.version, instance, self.keys, self.watermark, self.batch_time)
            for batch in self._chunks(batches):
                rows = self._rows(batch)
                self._check_owned(owned, rows, instance)
                taken += len(rows)
                times = self._latest(rows, times)
                yield from self._emit(self.operator.process(rows, state, context))
                yield from self._emit_side(context)
            yield from self._emit(self.operator.finish(state, context))
            yield from self._emit_side(context)
            captured, why_not = self._capture(table, instance, root)
            table.finish()
            report = Report(
                self.name,
                instance,
                self.version,
                self.fence,
                taken,
                table.count,
                table.bytes,
                time.perf_counter() - started,
                time.process_time() - cpu,
                queued,
                tuple(times),
                captured,
                attempt,
                why_not,
            )
        reports.send(report)

    @property
    def time_columns(self) -> tuple[str, ...]:
        """The event-time column of each input."""
        return event_times(self.operator)

    def _instance(self, partition: int) -> int:
        """The instance that a partition is of."""
        if partition >= len(self.instances):
            raise Reshaped(
                f"{self.name} has {len(self.instances)} partitions, and Spark ran one as number "
                f"{partition}: they were put together with others before they were computed, as "
                "by union() or a join. Keep the operator's result with persist() first"
            )
        return self.instances[partition]

    def _owned(self, instance: int) -> npt.NDArray[np.bool_]:
        """Which of all key groups are the instance's."""
        return self.groups[instance].mask(np.arange(self.layout.key.key_groups))

    def _check_owned(self, owned: npt.NDArray[np.bool_], rows: Rows, instance: int) -> None:
        assert rows.hashes is not None
        groups = group_of(rows.hashes, len(owned))
        if not owned[groups].all():
            other = int(groups[~owned[groups]][0])
            raise Reshaped(
                f"{self.name}, instance {instance}, has the key groups {self.groups[instance]}, "
                f"and rows of group {other} came to it: the operator's partitions were merged or "
                "shifted before they were computed, as by coalesce(), union() or a join. Keep the "
                "operator's result with persist() first"
            )

    def _chunks(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches that came, in pieces of a size that is worth the operator's while."""
        whole = self.operator.whole_batch
        parts: list[pa.RecordBatch] = []
        rows = size = 0
        for batch in batches:
            if batch.num_rows:
                parts.append(batch)
                rows, size = rows + batch.num_rows, size + batch.nbytes
            if (rows >= _PIECE_ROWS or size >= _PIECE_BYTES) and not whole:
                yield _joined(parts)
                parts, rows, size = [], 0, 0
        if parts:
            yield _joined(parts)

    def _rows(self, batch: pa.RecordBatch) -> Rows:
        names = [name for name in batch.schema.names if name not in (HASH, SEQUENCE, TARGET)]
        if HASH in batch.schema.names:
            hashes = batch.column(HASH).to_numpy().view(np.uint64)
        else:
            hashes = hash_keys([batch.column(name) for name in self.keys], batch.num_rows)
        return Rows(batch.select(names), hashes)

    def _latest(self, rows: Rows, times: list[int | None]) -> list[int | None]:
        latest = list(times)
        for side, column in enumerate(self.time_columns):
            seen = rows.times(column)[rows.valid(column)]
            if len(seen):
                most = int(seen.max())
                before = latest[side]
                latest[side] = most if before is None else max(most, before)
        return latest

    def _emit(self, rows: Rows | None) -> Iterator[pa.RecordBatch]:
        if rows is None or len(rows) == 0:
            return
        batch = conform(rows.batch, self.output, self.name)
        if self.side is not None:
            batch = batch.append_column(LATE, pa.nulls(batch.num_rows, pa.struct(list(self.side))))
        yield from _sliced(batch)

    def _emit_side(self, context: Context) -> Iterator[pa.RecordBatch]:
        late, context.side = context.side, []
        if self.side is None:
            return
        for rows in late:
            batch = conform(rows.batch, self.side, self.name)
            nothing = [pa.nulls(batch.num_rows, field.type) for field in self.output]
            packed = pa.StructArray.from_arrays(batch.columns, fields=list(self.side))
            schema = self.output.append(pa.field(LATE, packed.type))
            yield from _sliced(pa.RecordBatch.from_arrays([*nothing, packed], schema=schema))

    def _root(self, partition: int) -> Path:
        """The query's folder on this node, if it is the right one."""
        if not self.hosts:
            return self.root.path()
        wanted, here = self.hosts[partition], executor().host
        if here != wanted:
            raise Misplaced(
                f"{self.name}, instance {self.instances[partition]}: its state is on {wanted}, "
                f"and Spark ran its task on {here}; raise spark.locality.wait if this goes on"
            )
        return self.root.path(here)

    def _capture(
        self, table: StateTable, instance: int, root: Path
    ) -> tuple[str | None, str | None]:
        """The file of the checkpoint that was asked for, or why there is none."""
        if self.capture is None:
            return None, None
        owned, base = self.groups[instance], self.capture.base
        if base is not None and 2 * table.dirty_count > table.count:
            # All rows take hardly longer than most of them, and spare the reader a chain.
            base = None
        taken = capture(table, self.name, instance, groups=owned, base=base, whole=True)
        try:
            path = write_capture(taken, root, f"{self.name}-{self.version}-{instance}.arrow")
        except StateFull as error:
            # The rows stay marked as changed, and the batch goes on without the checkpoint.
            return None, str(error)
        table.mark_clean()
        return str(path), None


def event_times(operator: Operator) -> tuple[str, ...]:
    """The columns whose maximum drives an operator's watermark, one per input."""
    if isinstance(operator, Join):
        return operator.side_times
    return () if operator.event_time is None else (operator.event_time,)


def conform(batch: pa.RecordBatch, schema: pa.Schema, operator: str) -> pa.RecordBatch:
    """The batch with exactly the columns and types that were promised for it."""
    if batch.schema.equals(schema, check_metadata=False):
        return batch
    missing = [name for name in schema.names if name not in batch.schema.names]
    if missing:
        raise ValueError(
            f"operator {operator!r} returned rows without the columns {missing} "
            f"that it declared; it returned {batch.schema.names}"
        )
    columns = [batch.column(batch.schema.get_field_index(f.name)).cast(f.type) for f in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _joined(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def _sliced(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for start in range(0, batch.num_rows, _SLICE):
        yield batch.slice(start, _SLICE)
