"""Strings and binary values as positions and lengths in shared bytes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import StateError
from anabranch.kernels import encode as kernels
from anabranch.state import fixed
from anabranch.state.keytypes import has_long_offsets

Array = npt.NDArray[Any]

MAX_BYTES = (1 << 31) - 1
NO_BYTES: Array = np.zeros(0, dtype=np.uint8)


class Strings(NamedTuple):
    """Some byte strings: ``data[starts[i]:starts[i] + lens[i]]``, null where ``lens`` is -1."""

    starts: Array
    lens: Array
    data: Array


def frozen(array: Array) -> Array:
    """A C-contiguous, read-only view.

    Kernels read through these alone: to the compiler a writable array is of another type, and
    every type costs a compilation.
    """
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def offsets_of(array: pa.Array) -> Array:
    """The offsets of a string, binary, list or map array: one more than it has values."""
    code = np.int64 if has_long_offsets(array.type) else np.int32
    if len(array) == 0:
        return np.zeros(1, dtype=code)
    offsets = np.frombuffer(array.buffers()[1], dtype=code)
    return offsets[array.offset : array.offset + len(array) + 1]


def strings_of(array: pa.Array) -> Strings:
    """The values of a string or binary array, without copying their bytes."""
    offsets = offsets_of(array)
    lens = as_lens(np.diff(offsets), fixed.validity(array))
    buffer = array.buffers()[2]
    data = NO_BYTES if buffer is None else np.frombuffer(buffer, dtype=np.uint8)
    return Strings(offsets[:-1].astype(np.int64), lens, data)


def as_lens(sizes: Array, valid: Array | None) -> Array:
    """Sizes as int32, -1 where not valid; refuses what is too long for that."""
    if sizes.dtype != np.int32:
        if len(sizes) and sizes.max() > MAX_BYTES:
            raise StateError(f"a key of {sizes.max()} bytes; the longest possible is {MAX_BYTES}")
        sizes = sizes.astype(np.int32)
    if valid is not None:
        sizes[~valid] = -1
    return sizes


def to_arrow(kind: pa.DataType, strings: Strings) -> pa.Array:
    """The string or binary array of this type with these values."""
    offsets, data = gathered(strings)
    offset_buffer = offset_bytes(kind, offsets)
    return pa.Array.from_buffers(
        kind,
        len(strings.lens),
        [fixed.validity_buffer(strings.lens >= 0), offset_buffer, pa.py_buffer(data)],
    )


def gathered(strings: Strings) -> tuple[Array, Array]:
    """Offsets and bytes with the strings one after the other."""
    offsets = np.zeros(len(strings.lens) + 1, dtype=np.int64)
    np.cumsum(np.maximum(strings.lens, 0), out=offsets[1:])
    data = np.empty(offsets[-1], dtype=np.uint8)
    kernels.gather_bytes(
        frozen(strings.starts), frozen(strings.lens), frozen(strings.data), offsets, data
    )
    return offsets, data


def offset_bytes(kind: pa.DataType, offsets: Array) -> pa.Buffer:
    """The Arrow buffer of offsets for a variable-length type."""
    if has_long_offsets(kind):
        return pa.py_buffer(offsets)
    if offsets[-1] > MAX_BYTES:
        raise StateError(
            f"{len(offsets) - 1} keys are too many for one {kind} array; ask for fewer"
        )
    return pa.py_buffer(offsets.astype(np.int32))


def join(parts: Sequence[Strings], count: int) -> tuple[Array, Array, Array]:
    """Columns of strings side by side over one run of bytes: starts, lens, data."""
    if len(parts) == 1:
        only = parts[0]
        return only.starts.reshape(count, 1), only.lens.reshape(count, 1), only.data
    starts = np.zeros((count, len(parts)), dtype=np.int64)
    lens = np.zeros((count, len(parts)), dtype=np.int32)
    windows = [NO_BYTES]
    position = 0
    for i, part in enumerate(parts):
        if count == 0:
            break
        # A slice of a large array brings only its own bytes along.
        first = int(part.starts[0])
        last = int(part.starts[-1]) + max(0, int(part.lens[-1]))
        windows.append(part.data[first:last])
        starts[:, i] = part.starts + (position - first)
        lens[:, i] = part.lens
        position += last - first
    return starts, lens, np.concatenate(windows)
