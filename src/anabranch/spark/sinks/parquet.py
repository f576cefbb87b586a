"""A folder of Parquet files that holds every batch exactly once.

A task writes its rows to a file whose name starts with an underscore, which readers ignore. When
the whole batch is written, the driver renames the files to names made of the version and the
partition. A repeated batch has the same names and so replaces the files. The Python worker that
computed the rows writes them from Arrow to Parquet.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from anabranch.durable import flush, flush_ancestors
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
    _unflushed: list[str] = field(default_factory=list, repr=False)
    _reachable: bool = field(default=False, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

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
        with _writing(self.path):
            for final, temporary in self._pending.items():
                filesystem.move(f"{folder}/{temporary}", f"{folder}/{final}")
            if delivery.first:
                for name in _names(filesystem, folder):
                    if name.startswith(_prefix(delivery)) and name not in self._pending:
                        filesystem.delete_file(f"{folder}/{name}")
        with self._lock:
            self._unflushed += [f"{folder}/{final}" for final in self._pending]
        self._pending = {}

    @property
    def local(self) -> bool:
        """Whether the folder is on a disk of this machine."""
        return is_local(self.path)

    def flush(self) -> None:
        """Flush all files with their final names."""
        with self._lock:
            files, self._unflushed = self._unflushed, []
        if not files or not self.local:
            return
        for file in files:
            with suppress(FileNotFoundError):  # somebody tidied up, as when files are compacted
                flush(file)
        folder = resolve(self.path)[1]
        flush(folder)
        if not self._reachable:
            flush_ancestors(folder)
            self._reachable = True

    def resume(self, query: str, after: Version) -> None:
        """Flush the files of later batches with the next ones."""
        filesystem, folder = resolve(self.path)
        with self._lock:
            self._unflushed += [f"{folder}/{n}" for n in _later(filesystem, folder, query, after)]

    def take_back(self, query: str, after: Version) -> None:
        """Remove the files of later batches, and the unfinished ones."""
        filesystem, folder = resolve(self.path)
        for name in _later(filesystem, folder, query, after):
            filesystem.delete_file(f"{folder}/{name}")
        for name in _names(filesystem, folder):
            if _is_unfinished(name, query):
                filesystem.delete_file(f"{folder}/{name}")


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
