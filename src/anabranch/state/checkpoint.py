"""The file of a capture: an Arrow IPC stream, followed by a checksum.

A batch waits until it is written, so its rows are in the order of the table. Stored parts are in
another form: see :mod:`anabranch.state.part_file`.

Any Arrow reader can open the file as a stream. The library adds a trailer after the stream::

    Arrow stream   the rows; a JSON header in the metadata of the schema
    8 bytes        length of the stream, little endian
    16 bytes       mark and format number
    8 bytes        xxh3_64 of everything before, little endian

A file is used only after its length and checksum were verified.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from anabranch.errors import CheckpointCorrupt, SchemaChanged
from anabranch.state.capture import Capture, CaptureInfo, CheckpointSchema, TableCapture
from anabranch.state.groups import KeyGroups
from anabranch.units import Version

_MARK = b"anabranch ckpt 1"
TRAILER = struct.Struct("<Q16sQ")
"""The end of a file: a length, the mark of its format, and a checksum."""
_HEADER = b"anabranch"


def write(capture: Capture) -> pa.Buffer:
    """The bytes of a checkpoint file. This is slow, and must be off the critical path."""
    measure = pa.MockOutputStream()  # so that the rows are copied once, into a buffer that fits
    _stream(measure, capture)
    data = pa.allocate_buffer(measure.size() + TRAILER.size)
    _stream(pa.FixedSizeBufferWriter(data), capture)
    seal(memoryview(data).cast("B"))
    return data


def save(capture: Capture | TableCapture, path: Path) -> None:
    """Write the same bytes to a local file, atomically.

    They are never in memory together: neither does it grow with the state, nor is a large block
    allocated, which can take the system longer than all other steps. Only this user can read the
    file.
    """
    half = path.with_name(f".{path.name}.half")
    try:
        os.close(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600))
        with pa.OSFile(str(half), "wb") as sink:
            _stream(sink, capture)
            sink.write(bytes(TRAILER.size))
        with (
            half.open("r+b") as file,
            mmap.mmap(file.fileno(), 0) as mapped,
            memoryview(mapped) as view,
        ):
            seal(view)
        half.replace(path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise


def described(capture: CaptureInfo) -> dict[str, Any]:
    """All of a capture but its rows, for :mod:`json`."""
    return {
        "operator": capture.operator,
        "instance": capture.instance,
        "version": capture.version,
        "base": capture.base,
        "groups": str(capture.groups),
        "schema": capture.schema.to_json(),
    }


def _stream(sink: pa.NativeFile, capture: Capture | TableCapture) -> None:
    header = {_HEADER: json.dumps(described(capture)).encode()}
    with pa.ipc.new_stream(sink, capture.schema.arrow().with_metadata(header)) as stream:
        for batch in capture.batches():
            stream.write_batch(batch)


def seal(view: memoryview) -> None:
    """Close the file whose Arrow stream is in these bytes, up to the room for the trailer."""
    stream = len(view) - TRAILER.size
    TRAILER.pack_into(view, stream, stream, _MARK, 0)
    digest = xxhash.xxh3_64_intdigest(view[:-8])
    struct.pack_into("<Q", view, len(view) - 8, digest)


def checksum(data: pa.Buffer) -> str:
    """The checksum in a checkpoint file, in hexadecimal, without verifying it."""
    return f"{int.from_bytes(data[-8:].to_pybytes(), 'little'):016x}"


def read(
    data: pa.Buffer,
    *,
    name: str,
    schema: CheckpointSchema | None = None,
    groups: KeyGroups | None = None,
) -> Capture:
    """The capture in the bytes of a checkpoint file, or its rows of the given groups.

    ``name`` is that of the file, for messages. Everything is verified before anything is used:
    :class:`~anabranch.errors.CheckpointCorrupt` if the bytes are not the ones written, and
    :class:`~anabranch.errors.SchemaChanged` if the columns are not those of ``schema``.
    """
    size = _verified(data, name)
    try:
        with pa.ipc.open_stream(data[:size]) as stream:
            header = json.loads(stream.schema.metadata[_HEADER])
            rows = stream.read_all().replace_schema_metadata(None)
        written = CheckpointSchema.from_json(header["schema"])
        capture = capture_of(header, written, rows)
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(
            f"{name}: the checksum is right, but the checkpoint cannot be read: {error}"
        ) from error
    capture = as_expected(capture, schema, name)
    return capture if groups is None else capture.select(groups)


def as_expected(capture: Capture, schema: CheckpointSchema | None, name: str) -> Capture:
    """A capture in the expected columns. SchemaChanged if it has others."""
    written = capture.schema
    if schema is None or schema == written:
        return capture
    if schema.fingerprint() != written.fingerprint():
        raise SchemaChanged(f"{name} was written with the columns {written}; expected {schema}")
    # The same values in another Arrow type, such as strings with wider offsets.
    return replace(capture, schema=schema, rows=capture.rows.cast(schema.arrow()))


def is_capture_file(tail: pa.Buffer) -> bool:
    """Whether bytes are the end of such a file."""
    if tail.size < TRAILER.size:
        return False
    _, mark, _ = TRAILER.unpack(tail[-TRAILER.size :])
    return bool(mark == _MARK)


def trailer(data: pa.Buffer, mark: bytes, name: str) -> tuple[int, int]:
    """The length and the checksum at the end of a file of this mark.

    CheckpointCorrupt if these bytes are not the end of one.
    """
    if data.size < TRAILER.size:
        raise CheckpointCorrupt(f"{name}: truncated; {data.size} bytes are too few to be a file")
    length, found, digest = TRAILER.unpack(data[-TRAILER.size :])
    if found != mark:
        raise CheckpointCorrupt(
            f"{name}: truncated, or not a checkpoint; it ends in {found!r} instead of {mark!r}"
        )
    return int(length), int(digest)


def _verified(data: pa.Buffer, name: str) -> int:
    """The length of the stream, after verifying that the file is complete and unchanged."""
    size, digest = trailer(data, _MARK, name)
    if size != data.size - TRAILER.size:
        raise CheckpointCorrupt(
            f"{name}: should have {size + TRAILER.size} bytes and has {data.size}"
        )
    found = xxhash.xxh3_64_intdigest(data[:-8])
    if found != digest:
        raise CheckpointCorrupt(
            f"{name}: the checksum is {found:016x} instead of {digest:016x}, so its bytes changed"
        )
    return size


def capture_of(header: dict[str, Any], schema: CheckpointSchema, rows: pa.Table) -> Capture:
    """The capture that :func:`described` describes, with its rows."""
    base = header["base"]
    return Capture(
        operator=str(header["operator"]),
        instance=int(header["instance"]),
        version=Version(int(header["version"])),
        base=None if base is None else Version(int(base)),
        groups=KeyGroups.parse(header["groups"]),
        schema=schema,
        rows=rows,
    )
