"""Sinks that hand a batch to a function, keep it in memory, or print it."""

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

    The function may be called again for a version if the driver dies before the batch is committed;
    it is exactly once if it writes under the version, as with Spark's own ``foreachBatch``.
    """

    function: Callable[[DataFrame, int], None]

    def __repr__(self) -> str:
        return f"for each batch {getattr(self.function, '__name__', 'function')}"

    def check(self, schema: StructType) -> None:
        """Anything goes."""

    def write(self, frame: DataFrame, delivery: Delivery) -> None:
        """Call the function."""
        self.function(frame, int(delivery.version))

    def commit(self, delivery: Delivery) -> None:
        """The function has done it all."""


@dataclass
class MemorySink:
    """Keeps all rows in the driver, for tests and for looking at: ``query.memory(name)``."""

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
        """Bring the rows to the driver."""
        self._pending = frame.toArrow()

    def commit(self, delivery: Delivery) -> None:
        """Show them."""
        if self._pending is not None:
            self._batches[delivery.version] = self._pending
        self._pending = None

    @property
    def local(self) -> bool:
        """The rows are gone with the driver in any case."""
        return False

    def flush(self) -> None:
        """There is nothing to flush."""

    def resume(self, query: str, after: Version) -> None:
        """There is nothing to flush."""

    def take_back(self, query: str, after: Version) -> None:
        """Forget the rows of later batches."""
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
        """Anything can be printed."""

    def write(self, frame: DataFrame, delivery: Delivery) -> None:
        """Print."""
        print(f"batch {delivery.version}")
        frame.limit(self.rows + 1).show(self.rows, truncate=False)

    def commit(self, delivery: Delivery) -> None:
        """Printed already."""

    @property
    def local(self) -> bool:
        """What was printed was printed."""
        return False

    def flush(self) -> None:
        """There is nothing to flush."""

    def resume(self, query: str, after: Version) -> None:
        """There is nothing to flush."""

    def take_back(self, query: str, after: Version) -> None:
        """What was printed stays so."""
