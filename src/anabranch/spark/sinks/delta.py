"""A Delta table that holds every batch exactly once.

Each commit has the query's id and the version as Delta's own application transaction. A batch that
is already in the table is recognised by it and skipped.

The package flushes nothing. In a table on a local disk a commit might outlast a power failure, and
its files or an earlier commit not. So each commit is flushed before the next one is made, beside
the batch between them, and before a checkpoint counts on it.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from anabranch.durable import flush, flush_ancestors
from anabranch.errors import PlanError, SinkFailed
from anabranch.spark.sinks.sink import Delivery
from anabranch.spark.types import arrow_schema
from anabranch.uris import absolute, resolve

try:
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
except ImportError as error:
    raise PlanError(
        "to_delta() needs the deltalake package: pip install 'anabranch[delta]'"
    ) from error


_log = logging.getLogger("anabranch")
_ENTRY = re.compile(r"(\d{20})\..*")


@dataclass
class DeltaSink:
    """Appends to a Delta table; see :meth:`anabranch.Stream.to_delta`. The driver writes."""

    uri: str
    _pending: pa.Table | None = field(default=None, repr=False)
    _version: int | None = field(default=None, repr=False, compare=False)
    """The table's version after the last commit, for a local table."""
    _flushed: int | None = field(default=None, repr=False, compare=False)
    """The table's version up to which all is on disk; None before the first flush."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"delta {self.uri}"

    def check(self, schema: StructType) -> None:
        """Every column needs an Arrow type."""
        arrow_schema(schema, where=f"sink {self!r}")

    def write(self, frame: DataFrame, delivery: Delivery) -> None:
        """Collect the rows in the driver."""
        self._pending = frame.toArrow()

    def commit(self, delivery: Delivery) -> None:
        """Append the rows, unless the table has this batch already."""
        rows, self._pending = self._pending, None
        if rows is None:
            return
        if self.local:
            try:
                self.flush()  # by now there is seldom anything left to do
            except OSError as error:
                raise SinkFailed(f"{self.uri} cannot be flushed: {error}") from error
        table = self._table()
        last = None if table is None else table.transaction_version(delivery.query)
        if last is None or last < delivery.version:
            mark = CommitProperties(
                app_transactions=[Transaction(delivery.query, delivery.version)]
            )
            write_deltalake(table or self.uri, rows, mode="append", commit_properties=mark)
        if self.local:
            self._version = (table or DeltaTable(self.uri)).version()
            threading.Thread(
                target=self._flush_beside, name="anabranch-delta-flush", daemon=True
            ).start()

    @property
    def local(self) -> bool:
        """Whether the table is on a disk of this machine."""
        uri = absolute(self.uri)
        return "://" not in uri or uri.startswith("file:")

    def flush(self) -> None:
        """Have all of the table on disk. The first time that is also what earlier runs wrote."""
        if not self.local:
            return
        with self._lock:
            upto = self._version
            if upto is None and (table := self._table()) is not None:
                upto = table.version()
            if upto is None or (self._flushed is not None and self._flushed >= upto):
                return
            folder = Path(resolve(self.uri)[1])
            for path in _written(folder, self._flushed, upto):
                with suppress(FileNotFoundError):  # vacuumed since
                    flush(str(path))
            if self._flushed is None:
                flush_ancestors(str(folder))
            self._flushed = upto

    def _flush_beside(self) -> None:
        try:
            self.flush()
        except OSError as error:
            _log.warning("%s is not flushed, which is tried again: %s", self.uri, error)

    def _table(self) -> DeltaTable | None:
        return DeltaTable(self.uri) if DeltaTable.is_deltatable(self.uri) else None


def _written(folder: Path, after: int | None, upto: int) -> Iterator[Path]:
    """The files of a table that came with some versions, all if it is None; then their folders."""
    log = folder / "_delta_log"
    if after is None:
        files = {Path(uri) for uri in DeltaTable(str(folder)).file_uris()}
    else:
        files = {file for v in range(after + 1, upto + 1) for file in _added(folder, log, v)}
    yield from files
    for path in log.iterdir():
        entry = _ENTRY.fullmatch(path.name)
        if entry is None or after is None or int(entry[1]) >= after:
            yield path
    yield from {log, folder, *(above for file in files for above in _upto(file.parent, folder))}


def _added(folder: Path, log: Path, version: int) -> Iterator[Path]:
    """The files that a commit has added to a table."""
    with suppress(FileNotFoundError):  # the log was cut
        for line in (log / f"{version:020d}.json").read_text().splitlines():
            added = json.loads(line).get("add")
            if added is not None:
                yield folder / unquote(added["path"])


def _upto(inner: Path, outer: Path) -> Iterator[Path]:
    """The folders from one to another that it is in."""
    yield inner
    while inner != outer and outer in inner.parents:
        inner = inner.parent
        yield inner
