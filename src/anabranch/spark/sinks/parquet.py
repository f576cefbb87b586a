"""A folder of Parquet files that holds every batch exactly once.

A task writes its rows to a file whose name starts with an underscore, which readers ignore. When
the whole batch is written, the driver renames the files to names made of the version and the
partition. A repeated batch has the same names and so replaces the files. The Python worker that
computed the rows writes them from Arrow to Parquet.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from anabranch.durable import Unflushed, flush_ancestors
from anabranch.errors import SinkFailed
from anabranch.spark.columns import map_in_arrow
from anabranch.spark.sinks.sink import Delivery, PartWriter
from anabranch.spark.types import arrow_schema
from anabranch.units import Version
from anabranch.uris import is_local, resolve

_TEMPORARY = "_anabranch-"


@dataclass
class ParquetSink:
    """Writes a folder of Parquet files; see :meth:`anabranch.Stream.to_parquet`."""

    path: str
    _pending: dict[str, str] = field(default_factory=dict, repr=False)
    _unflushed: Unflushed = field(default_factory=Unflushed, repr=False, compare=False)
    _reachable: bool = field(default=False, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"parquet {self.path}"

    def check(self, schema: StructType) -> None:
        """Every column needs an Arrow type."""
        arrow_schema(schema, where=f"sink {self!r}")

    @property
    def written(self) -> StructType:
        """The temporary and the final name of each file."""
        return StructType().add("temporary", "string").add("final", "string")

    def part_writer(self, delivery: Delivery) -> PartWriter:
        """Write the rows of a partition to one temporary file."""
        return partial(_write_part, self.path, _mark(delivery), _prefix(delivery))

    def write(self, frame: DataFrame, delivery: Delivery) -> None:
        """Write all partitions."""
        self.accept(map_in_arrow(frame, self.part_writer(delivery), self.written), delivery)

    def accept(self, frame: DataFrame, delivery: Delivery) -> None:
        """Run the tasks, and record the names of their files."""
        files = frame.collect()
        filesystem, folder = resolve(self.path)
        with _writing(self.path):
            filesystem.create_dir(folder, recursive=True)
            if delivery.first:
                _sweep(filesystem, folder, delivery)
        self._pending = {row["final"]: row["temporary"] for row in files}

    def commit(self, delivery: Delivery) -> None:
        """Rename the files to their final names, and remove files of earlier attempts."""
        filesystem, folder = resolve(self.path)
        try:
            with _writing(self.path):
                for final, temporary in self._pending.items():
                    filesystem.move(f"{folder}/{temporary}", f"{folder}/{final}")
                if delivery.first:
                    for name in _names(filesystem, folder):
                        if name.startswith(_prefix(delivery)) and name not in self._pending:
                            filesystem.delete_file(f"{folder}/{name}")
        finally:
            if self._pending or delivery.first:
                self._changed(folder, list(self._pending))
        self._pending = {}

    @property
    def local(self) -> bool:
        """Whether the folder is on a disk of this machine."""
        return is_local(self.path)

    def flush(self) -> None:
        """Have on disk which files there are, and what is in them."""
        self._unflushed.flush()
        folder = resolve(self.path)[1]
        if not self._reachable and self.local and Path(folder).is_dir():
            flush_ancestors(folder)
            self._reachable = True

    def resume(self, query: str, after: Version) -> None:
        """Flush with the next files what an earlier run may have made, or removed."""
        filesystem, folder = resolve(self.path)
        self._changed(folder, _later(filesystem, folder, query, after))

    def take_back(self, query: str, after: Version) -> None:
        """Remove the files of later batches, and the unfinished ones."""
        filesystem, folder = resolve(self.path)
        with _writing(self.path):
            for name in _later(filesystem, folder, query, after):
                filesystem.delete_file(f"{folder}/{name}")
            for name in _names(filesystem, folder):
                if _is_unfinished(name, query):
                    filesystem.delete_file(f"{folder}/{name}")
            # Also if nothing was there: a run that died may have removed it and not flushed that.
            # A file that came back would count once a checkpoint of a later batch exists.
            self._changed(folder, [])
            self.flush()

    def _changed(self, folder: str, files: list[str]) -> None:
        """Files have come into the folder, or gone."""
        if self.local:
            self._unflushed.add([*(f"{folder}/{name}" for name in files), folder])


def _later(filesystem: fs.FileSystem, folder: str, query: str, after: Version) -> list[str]:
    """The files of a query's batches after a version."""
    found = ((re.fullmatch(rf"part-{query}-(\d+)-.*", n), n) for n in _names(filesystem, folder))
    return [name for match, name in found if match and int(match[1]) > after]


def _mark(delivery: Delivery) -> str:
    """The prefix of the names of a driver's unfinished files."""
    return f"{_TEMPORARY}{delivery.epoch}-"


def _prefix(delivery: Delivery) -> str:
    return f"part-{delivery.query}-{delivery.version:010d}-"


def _names(filesystem: fs.FileSystem, folder: str) -> list[str]:
    return [
        info.base_name
        for info in filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True))
    ]


def _sweep(filesystem: fs.FileSystem, folder: str, delivery: Delivery) -> None:
    """Remove the unfinished files of other drivers of the query.

    A driver that was paused before it renamed them can then not do so any more.
    """
    for name in _names(filesystem, folder):
        if _is_unfinished(name, delivery.query) and not name.startswith(_mark(delivery)):
            filesystem.delete_file(f"{folder}/{name}")


def _is_unfinished(name: str, query: str) -> bool:
    return re.match(rf"{_TEMPORARY}(\d+-)?part-{query}-", name) is not None


def _write_part(
    path: str, mark: str, prefix: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    filesystem, folder = resolve(path)
    partition = TaskContext.get().partitionId()  # type: ignore[union-attr]
    temporary = f"{mark}{prefix}{partition:05d}-{uuid.uuid4().hex}"
    writer: pq.ParquetWriter | None = None
    try:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            with _writing(path):
                if writer is None:
                    filesystem.create_dir(folder, recursive=True)
                    writer = pq.ParquetWriter(
                        f"{folder}/{temporary}", batch.schema, filesystem=filesystem
                    )
                writer.write_batch(batch)
    finally:
        if writer is not None:
            with _writing(path):
                writer.close()
    if writer is not None:
        names = {"temporary": [temporary], "final": [f"{prefix}{partition:05d}.parquet"]}
        yield pa.RecordBatch.from_pydict(names)


@contextmanager
def _writing(path: str) -> Iterator[None]:
    """Turn errors of the disk or the store into SinkFailed, unlike errors of the user's code."""
    try:
        yield
    except OSError as error:
        raise SinkFailed(f"results could not be written to {path}: {error}") from error
