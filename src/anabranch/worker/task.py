"""One instance of an operator over one batch: the code that runs inside a Spark task."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark import TaskContext

from anabranch.errors import Misplaced, Reshaped
from anabranch.nodes.folders import StateRoot
from anabranch.operators.context import Context
from anabranch.operators.operator import Operator
from anabranch.operators.rows import Rows
from anabranch.state.groups import KeyGroups, group_of
from anabranch.state.hashing import hash_keys
from anabranch.state.table import TableLayout
from anabranch.state.view import State
from anabranch.units import Version
from anabranch.worker.end_marks import watch
from anabranch.worker.here import executor
from anabranch.worker.packing import TARGET, Packing
from anabranch.worker.reports import InstanceReport, Reports
from anabranch.worker.slices import (
    Attempt,
    Division,
    Slice,
    SliceOrder,
    begun,
    by_lowest_group,
    end,
    groups_of,
    pieces,
)

HASH = "__hash"
SEQUENCE = "__seq"
LATE = "__late"
_MOST_AT_ONCE = 131_072
"""The number of rows that are passed to Spark at a time."""

watch()


@dataclass(frozen=True)
class OperatorTask:
    """The settings of an instance for one batch, sent from the driver to the worker."""

    name: str
    operator: Operator
    keys: tuple[str, ...]
    layout: TableLayout
    output: pa.Schema
    late: pa.Schema | None
    root: StateRoot
    version: Version
    fence: int
    watermark: int | None
    batch_time: int
    track_changes: bool
    slices: tuple[tuple[SliceOrder, ...], ...]
    """The slices that each partition runs: those of its instance."""
    instances: tuple[int, ...]
    """The instance of each partition."""
    hosts: tuple[str, ...]
    """The node of each partition; empty where the driver runs the tasks itself."""
    packing: Packing | None = None
    """How rows come packed, if they do."""
    ordered: bool = False
    """Whether packed rows are sorted into the order of the source."""

    def run(self, reports: Reports, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the batch. The version is finished only when the iterator is exhausted."""
        spark = TaskContext.get()
        assert spark is not None, "an operator's batch runs inside a Spark task"
        partition, attempt = spark.partitionId(), spark.taskAttemptId()
        started, cpu = time.perf_counter(), time.process_time()
        queued = max(0.0, time.time() - self.batch_time / 1e6)
        instance = self._instance(partition)
        root = self._root(partition)
        orders = by_lowest_group(self.slices[partition])
        division = Division(orders, self.layout.key.key_groups)
        if self.packing is not None:
            batches = self.packing.unpacked(batches, ordered=self.ordered)
        times: list[int | None] = [None] * len(self.operator.event_times)
        by = Attempt(self.version, self.fence, attempt, self.track_changes)
        with begun(orders, root, self.layout, by) as tables:
            slices = [
                Slice(order, table, State(table, self.keys, order.shed), self._context(instance))
                for order, table in zip(orders, tables, strict=True)
            ]
            made = self._made(slices, division, batches, partition, times)
            # Many slices make many small batches, each of which costs Spark as much as a large one.
            for batch in pieces(made) if len(slices) > 1 else made:
                yield from _sliced(batch)
            ended = end(slices, self.name, root)
            for table in tables:
                table.finish()
            report = InstanceReport(
                self.name,
                instance,
                self.version,
                self.fence,
                ended,
                time.perf_counter() - started,
                time.process_time() - cpu,
                queued,
                tuple(times),
                attempt,
                spark.stageId(),
            )
        reports.send(report)

    def _made(
        self,
        slices: Sequence[Slice],
        division: Division,
        batches: Iterator[pa.RecordBatch],
        partition: int,
        times: list[int | None],
    ) -> Iterator[pa.RecordBatch]:
        """The results of the slices. ``times`` then has the latest event time of each input."""
        whole = self.operator.whole_batch
        for window in division.windows(batches, whole=whole):
            rows = self._rows(window)
            numbers = self._numbers(division, rows, partition)
            self._note_latest(rows, times)
            for number, part in division.divided(rows, numbers, whole=whole):
                to = slices[number]
                to.rows += len(part)
                yield from self._conformed(
                    self.operator.process(part, to.state, to.context), to.context
                )
        for each in slices:
            yield from self._conformed(self.operator.finish(each.state, each.context), each.context)

    @property
    def groups(self) -> tuple[KeyGroups, ...]:
        """The key groups of each partition."""
        return tuple(groups_of(orders) for orders in self.slices)

    def _context(self, instance: int) -> Context:
        return Context(self.version, instance, self.keys, self.watermark, self.batch_time)

    def _instance(self, partition: int) -> int:
        """The instance of a partition."""
        if partition >= len(self.instances):
            raise Reshaped(
                f"{self.name} has {len(self.instances)} partitions, but Spark ran partition "
                f"{partition}: the operator's partitions were combined with others before they "
                "were computed, as by union() or a join. Call persist() on the operator's result "
                "first"
            )
        return self.instances[partition]

    def _numbers(self, division: Division, rows: Rows, partition: int) -> npt.NDArray[np.int16]:
        """The number of the slice of each row."""
        assert rows.hashes is not None
        groups = group_of(rows.hashes, self.layout.key.key_groups)
        numbers = division.numbers(groups)
        if numbers.min() < 0:
            other = int(groups[numbers < 0][0])
            raise Reshaped(
                f"{self.name}, instance {self.instances[partition]}, has the key groups "
                f"{self.groups[partition]}, but received rows of group {other}: the operator's "
                "partitions were merged or shifted before they were computed, as by coalesce(), "
                "union() or a join. Call persist() on the operator's result first"
            )
        return numbers

    def _rows(self, batch: pa.RecordBatch) -> Rows:
        names = [name for name in batch.schema.names if name not in (HASH, SEQUENCE, TARGET)]
        if HASH in batch.schema.names:
            hashes = batch.column(HASH).to_numpy().view(np.uint64)
        else:
            hashes = hash_keys([batch.column(name) for name in self.keys], batch.num_rows)
        return Rows(batch.select(names), hashes)

    def _note_latest(self, rows: Rows, times: list[int | None]) -> None:
        for side, column in enumerate(self.operator.event_times):
            seen = rows.times(column)[rows.valid(column)]
            if len(seen):
                most, before = int(seen.max()), times[side]
                times[side] = most if before is None else max(most, before)

    def _conformed(self, rows: Rows | None, context: Context) -> Iterator[pa.RecordBatch]:
        """The results of an operator, then its late rows, with the columns for Spark."""
        if rows is not None and len(rows):
            batch = conform(rows.batch, self.output, self.name)
            if self.late is not None:
                nothing = pa.nulls(batch.num_rows, pa.struct(list(self.late)))
                batch = batch.append_column(LATE, nothing)
            yield batch
        found, context.late_rows = context.late_rows, []
        if self.late is None:
            return
        for some in found:
            batch = conform(some.batch, self.late, self.name)
            nulls = [pa.nulls(batch.num_rows, field.type) for field in self.output]
            packed = pa.StructArray.from_arrays(batch.columns, fields=list(self.late))
            schema = self.output.append(pa.field(LATE, packed.type))
            yield pa.RecordBatch.from_arrays([*nulls, packed], schema=schema)

    def _root(self, partition: int) -> Path:
        """The query's folder on this node. Misplaced if the state is on another node."""
        if not self.hosts:
            return self.root.path()
        wanted, here = self.hosts[partition], executor().host
        if here != wanted:
            raise Misplaced(
                f"{self.name}, instance {self.instances[partition]}: its state is on {wanted}, "
                f"but Spark ran its task on {here}; raise spark.locality.wait if this happens again"
            )
        return self.root.path(here)


def conform(batch: pa.RecordBatch, schema: pa.Schema, operator: str) -> pa.RecordBatch:
    """The batch with exactly the columns and types of a schema."""
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


def _sliced(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for start in range(0, batch.num_rows, _MOST_AT_ONCE):
        yield batch.slice(start, _MOST_AT_ONCE)
