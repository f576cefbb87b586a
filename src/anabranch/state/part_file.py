"""The file of a part: rows in the order of their key groups, and an index of them.

A reader needs only the *segments* of the groups that it wants: record batches of consecutive key
groups, each with a checksum of its own. Any Arrow reader can open the file as a stream::

    schema         Arrow message
    segments       Arrow messages, each a record batch
    end            marker of the end of an Arrow stream
    index          JSON: what was captured, and the groups, place and checksum of each segment
    8 bytes        length of the index, little endian
    16 bytes       mark and format number
    8 bytes        xxh3_64 of the index, its length and the mark, little endian

Files of format 1, which have rows in any order and one checksum, are read as well; see
:mod:`anabranch.state.checkpoint`.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from anabranch.errors import CheckpointCorrupt
from anabranch.state import checkpoint
from anabranch.state.capture import Capture, CaptureInfo, CheckpointSchema
from anabranch.state.group_order import in_order
from anabranch.state.groups import KeyGroups

Array = npt.NDArray[Any]

_SEGMENT, _SEGMENTS = 4 << 20, 64
"""About how many bytes a segment has at most, and how many of them a smaller file has, so that a
few groups are read without many others. A large group has several segments, and many small ones
share one."""
_LEAST_SEGMENT = 1 << 15
_LEAST_TAIL, _TAIL = 1 << 14, 1 << 18
"""So much is read from the end of a file: all of a small one, else in most cases the index."""
_MARK = b"anabranch part 2"
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class Source(Protocol):
    """The bytes of a stored file, of which any range can be read."""

    @property
    def size(self) -> int:
        """How many there are."""

    def read(self, offset: int, length: int) -> pa.Buffer:
        """Some of them; fewer if the file ends before."""


@dataclass(frozen=True, slots=True)
class BufferSource:
    """A file that is in memory, or mapped."""

    data: pa.Buffer

    @property
    def size(self) -> int:
        """See :class:`Source`."""
        return int(self.data.size)

    def read(self, offset: int, length: int) -> pa.Buffer:
        """See :class:`Source`."""
        start = min(offset, self.data.size)
        return self.data.slice(start, min(length, self.data.size - start))


@dataclass(frozen=True, slots=True)
class _Segment:
    """A record batch of the file: the first and the last of its groups, its place, its checksum."""

    first: int
    last: int
    offset: int
    length: int
    checksum: str

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class _Index:
    """What the end of a file says of the rest."""

    described: dict[str, Any]
    schema: CheckpointSchema
    groups: KeyGroups
    head: _Segment
    segments: tuple[_Segment, ...]
    end: int
    """Where the Arrow stream ends."""

    @property
    def rows_end(self) -> int:
        """Where the last segment ends."""
        return self.segments[-1].end if self.segments else self.head.end


def save(capture: Capture, path: Path, segment: int | None = None) -> None:
    """Write the file of a part. Only this user can read it.

    ``segment`` is about how many bytes a segment is to have, if not what suits the number of rows.
    """
    with writing(path, capture, capture.rows.nbytes if segment is None else 0) as file:
        if segment is not None:
            file.segment = segment
        file.add(capture.rows)


@contextmanager
def writing(path: Path, of: CaptureInfo, size: int) -> Iterator[Writer]:
    """Write the file of a part, of which only the rows are missing yet, with about so many bytes.

    It is whole when the body ends without an error.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600))
    with pa.OSFile(str(path), "wb") as sink:
        with pa.ipc.new_stream(sink, of.schema.arrow()) as stream:
            writer = Writer(of, sink, stream, max(_LEAST_SEGMENT, min(_SEGMENT, size // _SEGMENTS)))
            yield writer
        sink.write(_index(of, path, writer.places, sink))


class Writer:
    """The file of a part that is being written; :func:`writing` makes one."""

    def __init__(self, of: CaptureInfo, sink: pa.NativeFile, stream: Any, segment: int) -> None:
        self.segment = segment
        self.rows = 0
        """How many there are so far."""
        self.places: list[tuple[int, int, int, int]] = []
        """The first and the last group, the offset and the length of each segment."""
        self._of = of
        self._sink = sink
        self._stream = stream
        self._at = of.schema.arrow().serialize().size

    def add(self, rows: pa.Table) -> None:
        """Write rows, in any order, of groups that come after all that were written before."""
        column = self._of.schema.key_count + 1
        for batch in in_order(rows, column, self._of.schema.key_groups, self.segment):
            groups = batch.column(column)
            self._stream.write_batch(batch)
            first, last, end = groups[0].as_py(), groups[-1].as_py(), self._sink.tell()
            self.places.append((first, last, self._at, end - self._at))
            self.rows += batch.num_rows
            self._at = end


def _index(
    of: CaptureInfo, path: Path, places: Sequence[tuple[int, int, int, int]], sink: pa.NativeFile
) -> bytes:
    """The index and the trailer of a file whose stream is written."""
    sink.flush()
    head = places[0][2] if places else sink.tell() - len(_END)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        memoryview(mapped) as view,
    ):
        digests = [_digest(view[offset : offset + length]) for _, _, offset, length in places]
        value = checkpoint.described(of) | {
            "head": [0, head, _digest(view[:head])],
            "segments": [[*place, found] for place, found in zip(places, digests, strict=True)],
        }
    index = json.dumps(value).encode()
    trailer = checkpoint.TRAILER.pack(len(index), _MARK, 0)[:-8]
    return index + trailer + xxhash.xxh3_64_digest(index + trailer)[::-1]


def _digest(data: memoryview | pa.Buffer) -> str:
    return str(xxhash.xxh3_64_hexdigest(data))


def checksum(source: Source) -> str:
    """The checksum at the end of a file, in hexadecimal, without verifying anything."""
    return checkpoint.checksum(source.read(source.size - 8, 8))


def read(
    source: Source,
    *,
    name: str,
    schema: CheckpointSchema | None = None,
    groups: KeyGroups | None = None,
    expected: str | None = None,
) -> Capture:
    """The capture in a file, or its rows of some groups, of which only the segments are read.

    ``name`` is that of the file, for messages. Everything is verified before anything is used:
    :class:`~anabranch.errors.CheckpointCorrupt` if the bytes are not the ones written, or if their
    checksum is not the expected one, and :class:`~anabranch.errors.SchemaChanged` if the columns
    are not those of ``schema``.
    """
    return opened(source, name=name, schema=schema, expected=expected).read(groups)


def opened(
    source: Source,
    *,
    name: str,
    schema: CheckpointSchema | None = None,
    expected: str | None = None,
) -> PartFile:
    """A file of which the end was read and verified. The errors are those of :func:`read`."""
    tail = _tail(source)
    found: PartFile
    if checkpoint.is_capture_file(tail):
        found = _CaptureFile(source, name, schema)
    else:
        found = _SegmentFile(source, tail, name, schema)
    if expected is not None and checkpoint.checksum(tail) != expected:
        raise CheckpointCorrupt(
            f"{name}: an undamaged checkpoint file, but not the one in the manifest: its checksum "
            f"is {checkpoint.checksum(tail)}, not {expected}"
        )
    return found


class PartFile(Protocol):
    """The file of a part, to be read some groups at a time."""

    def sizes(self) -> Array:
        """About how many bytes the rows of each key group have."""

    def read(self, groups: KeyGroups | None = None) -> Capture:
        """The rows of some groups, or all. The errors are those of the function :func:`read`."""


class _CaptureFile:
    """A file of format 1, which is read as a whole."""

    def __init__(self, source: Source, name: str, schema: CheckpointSchema | None) -> None:
        data = source.read(0, source.size)
        self._capture = checkpoint.read(data, name=name, schema=schema)

    def sizes(self) -> Array:
        """See :class:`PartFile`."""
        rows, schema = self._capture.rows, self._capture.schema
        groups = rows.column(schema.key_count + 1).to_numpy()
        counts = np.bincount(groups, minlength=schema.key_groups)
        found: Array = counts * (rows.nbytes // max(1, len(groups)))
        return found

    def read(self, groups: KeyGroups | None = None) -> Capture:
        """See :class:`PartFile`."""
        return self._capture if groups is None else self._capture.select(groups)


class _SegmentFile:
    """A file with an index."""

    def __init__(
        self, source: Source, tail: pa.Buffer, name: str, schema: CheckpointSchema | None
    ) -> None:
        self._source = BufferSource(tail) if tail.size == source.size else source
        self._name = name
        self._schema = schema
        self._index = _read_index(source, tail, name)

    def sizes(self) -> Array:
        """See :class:`PartFile`."""
        found = np.zeros(self._index.schema.key_groups, np.int64)
        for each in self._index.segments:
            found[each.first : each.last + 1] += each.length // (each.last + 1 - each.first)
        return found

    def read(self, groups: KeyGroups | None = None) -> Capture:
        """See :class:`PartFile`."""
        index = self._index
        wanted = index.groups if groups is None else index.groups & groups
        rows = _read_rows(self._source, index, wanted, self._name)
        capture = checkpoint.capture_of(index.described, index.schema, rows)
        capture = checkpoint.as_expected(capture, self._schema, self._name)
        return capture if groups is None else capture.select(groups)


def _tail(source: Source) -> pa.Buffer:
    length = max(_LEAST_TAIL, min(_TAIL, source.size // _SEGMENTS))
    return source.read(max(0, source.size - length), length)


def _read_index(source: Source, tail: pa.Buffer, name: str) -> _Index:
    length, digest = checkpoint.trailer(tail, _MARK, name)
    end = source.size - checkpoint.TRAILER.size - length
    if end < 0:
        raise CheckpointCorrupt(f"{name}: truncated; its index should have {length} bytes")
    sealed = length + checkpoint.TRAILER.size
    found = tail[-sealed:] if sealed <= tail.size else source.read(end, sealed)
    actual = xxhash.xxh3_64_intdigest(found[:-8])
    if actual != digest:
        raise CheckpointCorrupt(
            f"{name}: the checksum is {actual:016x} instead of {digest:016x}, so its bytes changed"
        )
    try:
        value = json.loads(found[:length].to_pybytes())
        index = _Index(
            value,
            CheckpointSchema.from_json(value["schema"]),
            KeyGroups.parse(value["groups"]),
            _Segment(0, 0, *value["head"]),
            tuple(_Segment(*each) for each in value["segments"]),
            end,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(
            f"{name}: the checksum is right, but the index cannot be read: {error}"
        ) from error
    if index.rows_end + len(_END) != end:
        raise CheckpointCorrupt(
            f"{name}: has {end} bytes before its index instead of {index.rows_end + len(_END)}"
        )
    return index


def _read_rows(source: Source, index: _Index, groups: KeyGroups, name: str) -> pa.Table:
    """The rows of all segments that have some of these groups."""
    schema = index.schema.arrow()
    if groups == index.groups:
        _verify_rest(source, index, name)
    batches = []
    for run in _runs([each for each in index.segments if _has(each, groups)]):
        length = run[-1].end - run[0].offset
        data = source.read(run[0].offset, length)
        if data.size != length:
            raise CheckpointCorrupt(
                f"{name}: truncated; of {length} bytes from {run[0].offset} {data.size} can be read"
            )
        for each in run:
            found = data.slice(each.offset - run[0].offset, each.length)
            _verify(found, each, name)
            try:
                batches.append(pa.ipc.read_record_batch(found, schema))
            except (pa.ArrowException, OSError) as error:
                raise CheckpointCorrupt(
                    f"{name}: the checksum is right, but the rows cannot be read: {error}"
                ) from error
    return pa.Table.from_batches(batches, schema)


def _has(segment: _Segment, groups: KeyGroups) -> bool:
    return bool(KeyGroups(((segment.first, segment.last + 1),)) & groups)


def _runs(segments: Sequence[_Segment]) -> Iterator[list[_Segment]]:
    """The segments, those together that follow each other in the file."""
    run: list[_Segment] = []
    for each in segments:
        if run and run[-1].end != each.offset:
            yield run
            run = []
        run.append(each)
    if run:
        yield run


def _verify(found: pa.Buffer, segment: _Segment, name: str) -> None:
    digest = _digest(found)
    if digest != segment.checksum:
        raise CheckpointCorrupt(
            f"{name}: the {segment.length} bytes from {segment.offset} have the checksum {digest} "
            f"instead of {segment.checksum}, so they changed"
        )


def _verify_rest(source: Source, index: _Index, name: str) -> None:
    """Verify what only other readers need: the schema, and the marker at the end."""
    _verify(source.read(0, index.head.length), index.head, name)
    if source.read(index.rows_end, len(_END)).to_pybytes() != _END:
        raise CheckpointCorrupt(f"{name}: its bytes changed after the rows")
