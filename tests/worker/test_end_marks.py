"""Rows that stop before their end are not taken for all of them."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import PythonException
from pyspark.sql import SparkSession

from anabranch.errors import CutOff
from anabranch.worker.end_marks import read_to_end
from anabranch.worker.packing import read_values

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
# A body whose last bytes look like the mark of the end.
BATCHES = [
    pa.record_batch({"n": np.full(size, 0xFFFFFFFF), "text": ["a"] * size}, SCHEMA)
    for size in (3, 1, 4)
]


def stream_of(batches: list[pa.RecordBatch]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def message_ends() -> list[int]:
    """Where each message of the stream ends, but for the mark of its end."""
    return [len(stream_of(BATCHES[:count])) - 8 for count in range(len(BATCHES) + 1)]


def through_socket(data: bytes) -> list[pa.RecordBatch]:
    """The batches that a worker reads from a connection that ends after these bytes."""
    left, right = socket.socketpair()

    def send() -> None:
        left.sendall(data)
        left.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with os.fdopen(os.dup(right.fileno()), "rb", 65536) as stream:
            return list(read_to_end(stream, "the rows"))
    finally:
        sender.join()
        left.close()
        right.close()


@pytest.mark.parametrize("end", message_ends())
def test_a_connection_that_ends_between_messages_is_no_end(end: int) -> None:
    data = stream_of(BATCHES)[:end]
    assert list(pa.ipc.open_stream(io.BytesIO(data))) is not None, "Arrow takes it for complete"
    with pytest.raises(CutOff, match="without Arrow's end-of-stream mark"):
        through_socket(data)


def test_a_connection_that_ends_anywhere_else_is_no_end() -> None:
    data = stream_of(BATCHES)
    for end in set(range(len(data))) - set(message_ends()):
        with pytest.raises(CutOff, match="in the middle of an Arrow message"):
            list(read_to_end(io.BytesIO(data[:end]), "the rows"))


def test_whole_streams_are_read_as_they_are() -> None:
    assert through_socket(stream_of(BATCHES)) == BATCHES
    assert through_socket(stream_of([])) == []
    # What follows on the same connection is left there.
    stream = io.BytesIO(stream_of(BATCHES) + b"more")
    assert list(read_to_end(stream, "the rows")) == BATCHES
    assert stream.read() == b"more"


def test_what_is_no_arrow_stream_says_so() -> None:
    with pytest.raises(OSError, match="Invalid flatbuffers"):
        list(read_to_end(io.BytesIO(b"\xff\xff\xff\xff\x08\0\0\0" + b"nonsense" * 9), "the rows"))


@pytest.mark.parametrize("end", message_ends())
def test_a_packed_value_that_was_cut_off_is_refused(end: int) -> None:
    def values(data: bytes) -> Iterator[pa.RecordBatch]:
        return iter([pa.record_batch({"packed": pa.array([data, None], pa.binary())})])

    whole = stream_of(BATCHES)
    assert list(read_values("packed", SCHEMA, values(whole))) == BATCHES
    with pytest.raises(
        ValueError, match="'packed' is an Arrow stream without its end-of-stream mark"
    ):
        list(read_values("packed", SCHEMA, values(whole[:end])))


@pytest.mark.spark
def test_a_task_whose_input_fails_does_not_come_to_an_end(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark ends the connection to the worker, between two messages, when a row cannot be made."""
    ended, seen = tmp_path / "ended", tmp_path / "seen"

    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        deadline = time.monotonic() + 60
        while not seen.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        raise ValueError("oh no")

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import anabranch.worker.task  # noqa: F401

        try:
            for _ in batches:
                seen.touch()
        except BaseException as error:
            ended.write_text(type(error).__name__)
            raise
        ended.write_text("complete")
        yield from ()

    rows = spark.range(0, 1_000_000, 1, 1).mapInArrow(fail, "id long")
    with pytest.raises(PythonException, match="oh no"):
        rows.mapInArrow(run, "id long").collect()
    assert seen.exists(), "no row came before the failure"
    assert ended.read_text() == "CutOff"
