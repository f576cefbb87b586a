"""A block of bytes as a stream of Arrow batches, one chunk in each, and back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import xxhash

from anabranch.errors import DidNotHappen

CHUNK = 1 << 20
_BYTES = b"bytes"
_COLUMN = pa.field("chunk", pa.binary(), nullable=False)
SCHEMA = pa.schema([_COLUMN])


def schema_of(size: int) -> pa.Schema:
    """The schema of a stream that says how many bytes will come."""
    return SCHEMA.with_metadata({_BYTES: str(size)})


def size_in(schema: pa.Schema, what: str) -> int:
    """The number of bytes that :func:`schema_of` announced; ``what`` heads the error."""
    try:
        return int((schema.metadata or {})[_BYTES])
    except (KeyError, ValueError) as error:
        raise DidNotHappen(f"{what}: the stream does not say how many bytes it has") from error


def split(data: pa.Buffer, schema: pa.Schema = SCHEMA) -> Iterator[pa.RecordBatch]:
    """The bytes in chunks, which are views of ``data``."""
    for start in range(0, data.size, CHUNK):
        chunk = data[start : start + CHUNK]
        offsets = pa.py_buffer(np.array([0, chunk.size], np.int32))
        column = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, chunk])
        yield pa.RecordBatch.from_arrays([column], schema=schema)


def checksum_of(data: pa.Buffer) -> str:
    """What is sent with the bytes to tell whether they came as they were."""
    return str(xxhash.xxh3_64_hexdigest(data))


class Gathering:
    """Chunks put together again; never more bytes than were announced.

    ``what`` is being done stands at the head of every error.
    """

    def __init__(self, size: int, what: str) -> None:
        self._what = what
        self._data = np.empty(size, np.uint8)
        self._count = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Take the next batch of the stream."""
        if not batch.schema.equals(SCHEMA) or batch.num_rows != 1:
            raise DidNotHappen(f"{self._what}: a chunk is one row of one binary column")
        # What comes over the network may point beyond its own buffers.
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise DidNotHappen(f"{self._what}: a chunk is malformed: {error}") from error
        chunk = batch.column(0)[0].as_buffer()
        if chunk is None or self._count + chunk.size > self._data.size:
            raise DidNotHappen(
                f"{self._what}: more bytes than the {self._data.size} that were announced"
            )
        self._data[self._count : self._count + chunk.size] = np.frombuffer(chunk, np.uint8)
        self._count += chunk.size

    def finish(self, checksum: str | None = None) -> pa.Buffer:
        """All of the bytes, if they came, and have this checksum."""
        if self._count != self._data.size:
            raise DidNotHappen(f"{self._what}: only {self._count} of {self._data.size} bytes came")
        data = pa.py_buffer(self._data)
        if checksum is not None and (found := checksum_of(data)) != checksum:
            raise DidNotHappen(
                f"{self._what}: the checksum of the bytes that came is {found}, not {checksum}"
            )
        return data
