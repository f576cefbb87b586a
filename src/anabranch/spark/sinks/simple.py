"""Sinks that pass a batch to a function, keep it in memory, or print it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from anabranch.spark.sinks.sink import Delivery
from anabranch.spark.types import arrow_schema
from anabranch.units import Version


@dataclass(frozen=True)
class FunctionSink:
    """Calls ``function(frame, version)`` for every batch.

    The function is called again for a version if the driver dies, or the attempt fails, before the
    batch is committed. Results are exactly-once if the function writes each version only once, as
    with Spark's own ``foreachBatch``.
    """

    function: Callable[[DataFrame, int], None]

    def __repr__(self) -> str:
        return f"for each batch {getattr(self.function, '__name__', 'function')}"

    def check(self, schema: StructType) -> None:
        """Accept every schema."""

    def write(self, frame: DataFrame, delivery: Delivery) -> None:
        """Call the function."""
        self.function(frame, int(delivery.version))

    def commit(self, delivery: Delivery) -> None:
        """Do nothing: the function has written the rows."""


@dataclass
class MemorySink:
    """Keeps all rows in the driver, for tests and for inspection: ``query.memory(name)``."""

    name: str
    schema: pa.Schema | None = None
    _batches: dict[Version, pa.Table] = field(default_factory=dict, repr=False)
    _pending: pa.Table | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"memory {self.name!r}"

    def check(self, schema: StructType) -> None:
        """Every column needs an Arrow type."""
        self.schema = arrow_schema(schema, where=f"sink {self!r}")

    def write(self, frame: DataFrame, delivery: Delivery) -> None:
        """Collect the rows in the driver."""
        self._pending = frame.toArrow()

    def commit(self, delivery: Delivery) -> None:
        """Make the rows visible."""
        if self._pending is not None:
            self._batches[delivery.version] = self._pending
        self._pending = None

    @property
    def local(self) -> bool:
        """False: the rows do not survive the driver in any case."""
        return False

    def flush(self) -> None:
        """There is nothing to flush."""

    def resume(self, query: str, after: Version) -> None:
        """There is nothing to flush."""

    def take_back(self, query: str, after: Version) -> None:
        """Drop the rows of later batches."""
        self._batches = {v: rows for v, rows in self._batches.items() if v <= after}

    def table(self) -> pa.Table:
        """All committed rows, in the order of their batches."""
        if not self._batches:
            return (self.schema or pa.schema([])).empty_table()
        return pa.concat_tables([self._batches[version] for version in sorted(self._batches)])


@dataclass(frozen=True)
class ConsoleSink:
    """Prints the first rows of every batch."""

    rows: int = 20

    def __repr__(self) -> str:
        return "console"

    def check(self, schema: StructType) -> None:
        """Accept every schema."""

    def write(self, frame: DataFrame, delivery: Delivery) -> None:
        """Print."""
        print(f"batch {delivery.version}")
        frame.limit(self.rows + 1).show(self.rows, truncate=False)

    def commit(self, delivery: Delivery) -> None:
        """Do nothing: the rows were printed."""

    @property
    def local(self) -> bool:
        """False: nothing of it is on a disk."""
        return False

    def flush(self) -> None:
        """There is nothing to flush."""

    def resume(self, query: str, after: Version) -> None:
        """There is nothing to flush."""

    def take_back(self, query: str, after: Version) -> None:
        """Do nothing: printed rows stay."""
