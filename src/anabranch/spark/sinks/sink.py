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
    """The batch that a sink is to take, and whether an earlier attempt may have left traces."""

    query: str
    version: Version
    first: bool
    """Whether it is the first since a start: an earlier run may have died half way through it."""
    epoch: int = 0
    """The number of the driver; a later one has a greater number."""


class Sink(Protocol):
    """Takes the rows of a batch.

    Both methods may be called again for a version that was written, or even committed, by a run
    that died before it could say so; the outcome must be as if it was once.
    """

    def check(self, schema: StructType) -> None:
        """Raise :class:`~anabranch.PlanError` if rows of this schema cannot be taken."""
        ...

    def write(self, frame: DataFrame, delivery: Delivery) -> None:
        """Take the rows. May be called several times for one version; the last one counts."""
        ...

    def commit(self, delivery: Delivery) -> None:
        """Make what was written last visible."""
        ...


@runtime_checkable
class Replaceable(Sink, Protocol):
    """A sink whose newest batches can be taken back, and given again in another division.

    Results of such a sink need not be flushed with every batch: after a power failure everything
    after the newest checkpoint is taken back and computed again.
    """

    @property
    def local(self) -> bool:
        """Whether what was written last may be lost with the power of this machine."""
        ...

    def flush(self) -> None:
        """Have everything that was committed so far on disk. Called beside the next batches."""
        ...

    def resume(self, query: str, after: Version) -> None:
        """Take over from a run that died, whose results after a version may not be flushed."""
        ...

    def take_back(self, query: str, after: Version) -> None:
        """Remove the results of a query's batches after a version."""
        ...


@runtime_checkable
class PartSink(Sink, Protocol):
    """A sink that writes inside the task that produced the rows, without a detour over the JVM."""

    def part_writer(self, delivery: Delivery) -> PartWriter:
        """A function for the worker: takes the rows of one partition, yields what it wrote."""
        ...

    @property
    def written(self) -> StructType:
        """The schema of what a part writer yields."""
        ...

    def accept(self, frame: DataFrame, delivery: Delivery) -> None:
        """Run the writers: ``frame`` is the output of part writers."""
        ...
