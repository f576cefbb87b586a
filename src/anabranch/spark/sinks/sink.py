"""The protocol of a sink: write, then commit, under the version of the batch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from anabranch.units import Version

PartWriter = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class Delivery:
    """The batch that a sink gets, and whether an earlier attempt may have left files."""

    query: str
    version: Version
    first: bool
    """Whether sinks may have results of the batch: it is the first since a start, and an earlier
    run may have died half way through it, or an attempt at it failed after sinks had begun."""
    epoch: int = 0
    """The number of the driver; a later one has a greater number."""


class Sink(Protocol):
    """Writes the rows of a batch.

    Both methods may be called again for a version that was written, or even committed, before the
    batch was. The result must be as if they were called once.
    """

    def check(self, schema: StructType) -> None:
        """Raise :class:`~anabranch.PlanError` if rows of this schema cannot be written."""
        ...

    def write(self, frame: DataFrame, delivery: Delivery) -> None:
        """Write the rows, invisible to readers. The last call for a version counts."""
        ...

    def commit(self, delivery: Delivery) -> None:
        """Make the rows that were written last visible."""
        ...


@runtime_checkable
class Flushed(Sink, Protocol):
    """A sink on whose results a checkpoint counts only once they are flushed."""

    @property
    def local(self) -> bool:
        """Whether a power failure of this machine may lose the results written last."""
        ...

    def flush(self) -> None:
        """Flush everything that was committed so far. Called while the next batches run."""
        ...


@runtime_checkable
class Replaceable(Flushed, Protocol):
    """A sink whose newest batches can be removed, and written again with other rows.

    Its results are not flushed with every batch: after a power failure all results after the newest
    checkpoint are removed and computed again.
    """

    def resume(self, query: str, after: Version) -> None:
        """Continue after a run whose results after this version may not be flushed."""
        ...

    def take_back(self, query: str, after: Version) -> None:
        """Remove the results of a query's batches after a version."""
        ...


@runtime_checkable
class PartSink(Sink, Protocol):
    """A sink that writes in the task that made the rows, without passing them to the JVM."""

    def part_writer(self, delivery: Delivery) -> PartWriter:
        """A function for the worker: writes the rows of one partition, yields the files' names."""
        ...

    @property
    def written(self) -> StructType:
        """The schema of the rows that a part writer yields."""
        ...

    def accept(self, frame: DataFrame, delivery: Delivery) -> None:
        """Run the writers: ``frame`` is the output of part writers."""
        ...
