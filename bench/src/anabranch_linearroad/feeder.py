"""The data feeder: a streaming source that replays an input at the pace of the clock.

>>> from anabranch_linearroad.feeder import Feed
>>> Feed("input", copies=350, paced_from=10_200, pace=1.0).options()["copies"]
'350'
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from anabranch_linearroad.clock import SLICES, Clock
from anabranch_linearroad.copies import Copies, rows_before

ROWS = "rows"
"""The one column of the source: each value is many rows, see :meth:`anabranch.Stream.unpack`."""

_SCHEMA = pa.schema([(ROWS, pa.binary())])


@dataclass(frozen=True)
class Feed:
    """What is fed, and how fast."""

    path: str
    """A Parquet file or folder in the format of the specification, in the order of time."""
    copies: int = 1
    """How many copies, each with vehicles and expressways of its own."""
    vehicles: int = 0
    requests: int = 0
    expressways: int = 0
    """By how much the numbers of one copy are ahead of those of the one before."""
    start: int = 0
    """The second of the stream to begin with."""
    end: int | None = None
    """The second to end before; None is the end of the input."""
    paced_from: int = 0
    """The second from which on the clock is followed; what is before comes as fast as it can."""
    pace: float = 1.0
    """Seconds of the stream to a second of the clock; 0 is as fast as it can, to the end."""
    most_rows: int = 2_000_000
    """Rows of a batch, at most."""
    partitions: int = 2
    clock: str = ""
    """A file for the clock, which is started with the first paced slice; see :class:`Clock`."""

    def options(self) -> dict[str, str]:
        """As options of the source."""
        return {name: str(value) for name, value in asdict(self).items() if value not in (None, "")}

    @classmethod
    def from_options(cls, options: dict[str, str]) -> Feed:
        """The inverse of :meth:`options`; Spark does not keep upper case in their names."""
        given: dict[str, Any] = {}
        for field in fields(cls):
            if (text := options.get(field.name)) is not None:
                number = float if field.name == "pace" else int
                given[field.name] = text if field.name in ("path", "clock") else number(text)
        return cls(**given)

    def stream(self, spark: SparkSession) -> DataFrame:
        """The streaming DataFrame of one column, :data:`ROWS`."""
        spark.dataSource.register(LinearRoad)
        return spark.readStream.format(LinearRoad.name()).options(**self.options()).load()


class LinearRoad(DataSource):
    """The source that Spark knows as ``linearroad``; :class:`Feed` has its options."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "linearroad"

    def schema(self) -> str:
        """One column of packed rows."""
        return f"{ROWS} binary"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """What Spark reads from."""
        return Feeder(Feed.from_options(dict(self.options)))


@dataclass
class _Part(InputPartition):
    copies: Copies
    start: int
    end: int


class Feeder(DataSourceStreamReader):
    """Releases slices of the input as their time comes; see :class:`Feed`.

    An offset is the number of slices before it. The rows of a slice are always the same.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._clock: Clock | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """The first slice."""
        return {"slice": self._feed.start * SLICES}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:  # noqa: N802
        """The slices whose time has come, and no more rows than a batch may have."""
        feed, at = self._feed, start["slice"]
        before = rows_before(feed.path)
        end = min(len(before) - 1, SLICES * feed.end if feed.end is not None else len(before))
        most = int(np.searchsorted(before, before[at] + feed.most_rows / feed.copies, "right")) - 1
        come = end
        if at >= feed.paced_from * SLICES and feed.pace:
            come = self._running_clock().slices(time.time())
        elif feed.pace:
            come = feed.paced_from * SLICES
        return {"slice": max(at, min(end, come, max(most, at + 1)))}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Some copies each."""
        feed = self._feed
        count = min(feed.partitions, feed.copies)
        cuts = [feed.copies * number // count for number in range(count + 1)]
        spans = (feed.vehicles, feed.requests, feed.expressways)
        return [
            _Part(Copies(feed.path, first, last, spans), start["slice"], end["slice"])
            for first, last in pairwise(cuts)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Packed rows."""
        assert isinstance(partition, _Part)
        for rows in partition.copies.between(partition.start, partition.end):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, rows.schema) as stream:
                stream.write_batch(rows)
            data = sink.getvalue()
            offsets = pa.py_buffer(np.array([0, data.size], np.int32).tobytes())
            value = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, data])
            yield pa.RecordBatch.from_arrays([value], schema=_SCHEMA)

    def _running_clock(self) -> Clock:
        """The clock that is on record, or one that starts now."""
        if self._clock is None:
            feed = self._feed
            file = Path(feed.clock) if feed.clock else None
            self._clock = Clock.read(file) if file is not None else None
            if self._clock is None:
                self._clock = Clock(time.time(), feed.paced_from, feed.pace)
                if file is not None:
                    self._clock.write(file)
        return self._clock
