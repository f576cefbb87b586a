"""Verifying that the input of a task is complete, by Arrow's end-of-stream mark.

Spark's JVM sends rows to a Python worker as an Arrow stream, and writes Arrow's end-of-stream mark
after the last row. If the JVM fails or dies before, the connection ends. Arrow's reader accepts a
stream that ends between two messages, and PySpark does not check it, so a task would take a part of
its rows for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.pandas.serializers import ArrowStreamSerializer

from anabranch.errors import CutOff

_MARK = b"\0\0\0\0"
"""The last four bytes of Arrow's mark, which its reader asks for by themselves: the length of a
message that is not there."""


_ROWS = (
    "the executor, or the step before this one, has failed, and Spark runs the task again: the "
    "rows that it sends to the task"
)


class _Watched:
    """A stream that remembers what was read last. Arrow reads whole messages, never rows."""

    __slots__ = ("_read", "_stream", "asked", "last")

    def __init__(self, stream: Any) -> None:
        self._stream, self._read = stream, stream.read
        self.asked, self.last = 0, b""

    @property
    def closed(self) -> bool:
        return bool(self._stream.closed)

    def read(self, size: int) -> bytes:
        self.asked, self.last = size, b""
        self.last = data = self._read(size)
        return data  # type: ignore[no-any-return]

    @property
    def stopped(self) -> bool:
        """Whether the stream had fewer bytes than the last read wanted."""
        return len(self.last) < self.asked


def read_to_end(stream: Any, what: str) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow stream. CutOff if it ends without its end-of-stream mark."""
    watched = _Watched(stream)
    try:
        yield from pa.ipc.open_stream(watched)
    except (pa.ArrowException, OSError) as error:
        if watched.stopped:
            raise CutOff(f"{what} ended in the middle of an Arrow message: {error}") from error
        raise
    if watched.last != _MARK:
        raise CutOff(f"{what} ended without Arrow's end-of-stream mark")


def watch() -> None:
    """Let every task of this Python worker refuse input that was cut off."""
    if getattr(ArrowStreamSerializer.load_stream, "__module__", None) != __name__:
        ArrowStreamSerializer.load_stream = _load_stream  # type: ignore[method-assign]


_unwatched = ArrowStreamSerializer.load_stream


def _load_stream(self: ArrowStreamSerializer, stream: Any) -> Iterator[pa.RecordBatch]:
    if TaskContext.get() is None:
        return _unwatched(self, stream)
    return read_to_end(stream, _ROWS)
