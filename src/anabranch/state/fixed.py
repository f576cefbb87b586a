"""Arrow columns of fixed-width values to and from 64-bit words."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

Array = npt.NDArray[Any]


def word_count(kind: pa.DataType) -> int:
    """How many 64-bit words a value of a fixed-width type takes."""
    return 0 if types.is_null(kind) else -(-kind.bit_width // 64)


def is_word(kind: pa.DataType) -> bool:
    """Whether the Arrow buffer of a type already holds the words."""
    return bool(kind.bit_width == 64 and not types.is_floating(kind))


def one_word(array: pa.Array) -> Array:
    """The words of an array without nulls whose type :func:`is_word`, not copied."""
    return (values(array) if len(array) else np.zeros(0, np.int64)).reshape(-1, 1)


def validity(array: pa.Array) -> Array | None:
    """True where values are not null; None when none is null."""
    if array.null_count == 0:
        return None
    if types.is_null(array.type):
        return np.zeros(len(array), dtype=np.bool_)
    return _bits(array.buffers()[0], array.offset, len(array))


def validity_buffer(valid: Array) -> pa.Buffer | None:
    """The Arrow bitmap for a mask of valid values; None when all are."""
    if valid.all():
        return None
    return pa.py_buffer(np.packbits(valid.view(np.uint8), bitorder="little"))


def to_words(array: pa.Array, valid: Array | None, out: Array) -> None:
    """Write values into ``out`` (int64, one row per value), zeros for nulls."""
    if len(array) == 0 or types.is_null(array.type):
        return
    found = values(array)
    if found.dtype.kind == "f":
        found = unified(found).view(f"u{found.dtype.itemsize}")
    out[:] = found.reshape(len(array), -1)
    if valid is not None:
        out[~valid] = 0


def from_words(kind: pa.DataType, words: Array, valid: Array | None) -> pa.Array:
    """The Arrow array whose values were written as these words; without ``valid`` none is null."""
    if types.is_null(kind):
        return pa.nulls(len(words))
    if types.is_boolean(kind):
        data = np.packbits(words[:, 0].astype(np.uint8), bitorder="little")
    elif kind.bit_width < 64:
        data = words[:, 0].astype(f"u{kind.bit_width // 8}")
    else:
        data = np.ascontiguousarray(words)
    return pa.Array.from_buffers(
        kind,
        len(words),
        [None if valid is None else validity_buffer(valid), pa.py_buffer(data.reshape(-1))],
    )


def unified(numbers: Array) -> Array:
    """Floating-point numbers with one form for those that Spark takes for one key: the two zeros,
    and all NaNs.
    """
    numbers = numbers + numbers.dtype.type(0)
    numbers[np.isnan(numbers)] = np.nan
    return numbers


def values(array: pa.Array) -> Array:
    """The values in the buffer of a fixed-width array: signed, unsigned, floating or boolean.

    Types of more than 64 bits have several numbers per value.
    """
    kind, buffer = array.type, array.buffers()[1]
    if types.is_boolean(kind):
        return _bits(buffer, array.offset, len(array))
    if types.is_floating(kind):
        code, step = f"f{kind.bit_width // 8}", 1
    elif types.is_unsigned_integer(kind):
        code, step = f"u{kind.bit_width // 8}", 1
    else:
        code, step = f"i{min(8, kind.bit_width // 8)}", max(1, kind.bit_width // 64)
    found = np.frombuffer(buffer, dtype=code)
    return found[array.offset * step : (array.offset + len(array)) * step]


def _bits(buffer: pa.Buffer, offset: int, length: int) -> Array:
    first, last = offset // 8, (offset + length + 7) // 8
    packed = np.frombuffer(buffer, dtype=np.uint8)[first:last]
    unpacked = np.unpackbits(packed, bitorder="little")
    return unpacked[offset - 8 * first :][:length].view(np.bool_)
