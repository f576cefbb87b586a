"""Packed rows: rows between two operators travel as binary values of many rows each.

Operators read and write Arrow batches, and Spark's shuffle moves rows. Between two operators the
shuffle gets a few large values instead, so that no row is converted to Spark's format and back. The
functions here run in the workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import BinaryType, IntegerType, LongType, StructField, StructType

from anabranch.state.groups import group_of
from anabranch.state.hashing import hash_keys
from anabranch.worker.end_marks import watch

TARGET, SEQUENCE, ROWS = "__target", "__sequence", "__rows"
PACKED = StructType(
    [
        StructField(TARGET, IntegerType()),
        StructField(SEQUENCE, LongType()),
        StructField(ROWS, BinaryType()),
    ]
)
"""The partition that rows go to, their sequence number, and the rows."""

VERSION = "__version"
"""Rows of several batches that travel together have the version of theirs in this column."""

SEQUENCE_BITS = 33
"""As in Spark's own row numbers: the sender above, the number at the sender below."""

_ARROW = pa.schema([(TARGET, pa.int32()), (SEQUENCE, pa.int64()), (ROWS, pa.binary())])
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 262_144, 1 << 23

watch()

Batches = Iterator[pa.RecordBatch]
Targets = npt.NDArray[np.int32]
"""The target of every key group; -1: its rows are not wanted."""


@dataclass(frozen=True)
class Packing:
    """Rows of one schema, divided by their keys."""

    schema: pa.Schema
    keys: tuple[str, ...]

    def divided(self, targets: Targets, batches: Batches) -> Batches:
        """Pack rows for the targets of their keys, in the order in which they came."""
        sequence = TaskContext.get().partitionId() << SEQUENCE_BITS  # type: ignore[union-attr]
        waiting: dict[int, list[pa.RecordBatch]] = {}
        for batch in batches:
            for target, rows in self._parts(targets, batch):
                parts = waiting.setdefault(target, [])
                parts.append(rows)
                if _full(parts):
                    yield _row(target, sequence, waiting.pop(target))
                    sequence += 1
        for target, parts in waiting.items():
            yield _row(target, sequence, parts)
            sequence += 1

    def divided_again(self, targets: Targets, packed: Batches) -> Batches:
        """Pack packed rows for other targets. Every row keeps its number and its version."""
        for batch in packed:
            versions = batch.column(VERSION)
            for at, (sequence, rows) in enumerate(self._opened(iter([batch]))):
                for target, part in self._parts(targets, rows):
                    row = _row(target, sequence, [part])
                    yield row.append_column(VERSION, versions.slice(at, 1))

    def as_from(self, senders: Sequence[int], batches: Batches) -> Batches:
        """Pack rows for no target yet, as if ``senders[i]`` had sent partition i.

        Without senders the rows have no sequence number, as where their order does not matter.
        """
        number = TaskContext.get().partitionId()  # type: ignore[union-attr]
        sequence = senders[number] << SEQUENCE_BITS if senders else 0
        for batch in batches:
            if batch.num_rows:
                yield _row(0, sequence, [batch.cast(self.schema)])
                sequence += 1

    def unpacked(self, packed: Batches, *, ordered: bool) -> Batches:
        """Unpack rows. ``ordered``: in the order of the source."""
        opened = self._opened(packed)
        for _, rows in sorted(opened, key=lambda each: each[0]) if ordered else opened:
            yield rows

    def _opened(self, packed: Batches) -> Iterator[tuple[int, pa.RecordBatch]]:
        for batch in packed:
            numbers = batch.column(SEQUENCE).to_pylist()
            for sequence, value in zip(numbers, batch.column(ROWS), strict=True):
                yield sequence, pa.ipc.read_record_batch(value.as_buffer(), self.schema)

    def _parts(
        self, targets: Targets, batch: pa.RecordBatch
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        if batch.num_rows == 0:
            return
        if not batch.schema.equals(self.schema, check_metadata=False):
            batch = batch.cast(self.schema)
        columns = [batch.column(name) for name in self.keys]
        groups = group_of(hash_keys(columns, batch.num_rows), len(targets))
        wanted = targets[groups]
        counts = np.bincount(wanted + 1)
        if counts.max() == batch.num_rows:
            if wanted[0] >= 0:
                yield int(wanted[0]), batch
            return
        # Few targets, so the sort is a pass or two over small numbers.
        order = np.argsort(wanted.astype(np.int16), kind="stable")
        sorted_ = batch.take(pa.array(order))
        start = int(counts[0])
        for target, count in enumerate(counts[1:].tolist()):
            if count:
                yield target, sorted_.slice(start, count)
            start += count


def versioned(schema: StructType) -> StructType:
    """The schema of rows with the version of their batch."""
    return StructType([*schema.fields, StructField(VERSION, LongType())])


def read_values(column: str, schema: pa.Schema, batches: Batches) -> Batches:
    """The rows in the values of a column, each of which is an Arrow stream."""
    for batch in batches:
        for value in batch.column(column):
            if not value.is_valid:
                continue
            source = pa.BufferReader(value.as_buffer())
            with pa.ipc.open_stream(source) as reader:
                if not reader.schema.equals(schema, check_metadata=False):
                    raise ValueError(
                        f"a value of column {column!r} has rows of the schema\n{reader.schema}\n"
                        f"but unpack() was given the schema\n{schema}"
                    )
                at = source.tell()
                for rows in reader:
                    at = source.tell()
                    if rows.num_rows:
                        yield rows
                if source.tell() == at:
                    raise ValueError(
                        f"a value of column {column!r} is an Arrow stream without its "
                        "end-of-stream mark: it was cut off, or its writer was not closed"
                    )


def _full(parts: list[pa.RecordBatch]) -> bool:
    rows, size = sum(part.num_rows for part in parts), sum(part.nbytes for part in parts)
    return bool(rows >= _ROWS_AT_ONCE or size >= _BYTES_AT_ONCE)


def _row(target: int, sequence: int, parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    whole = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
    data = whole.serialize()
    offsets = pa.py_buffer(np.array([0, data.size], np.int32).tobytes())
    value = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, data])
    columns = [pa.array([target], pa.int32()), pa.array([sequence], pa.int64()), value]
    return pa.RecordBatch.from_arrays(columns, schema=_ARROW)
