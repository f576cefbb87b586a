"""The 64-bit hash of keys, the same as Spark's ``xxhash64`` over the same columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from anabranch.kernels import xxhash as kernels
from anabranch.state import fixed
from anabranch.state.keytypes import is_bytes
from anabranch.state.strings import frozen, strings_of

Array = npt.NDArray[Any]

_SEED = 42


def can_hash(kind: pa.DataType) -> bool:
    """Whether :func:`hash_keys` knows columns of this type. Nested ones are for Spark to hash."""
    if types.is_decimal128(kind):
        return bool(kind.precision <= 18)
    # Spark has no unsigned types, and its times are of microseconds.
    return bool(
        is_bytes(kind)
        or types.is_signed_integer(kind)
        or types.is_boolean(kind)
        or types.is_float32(kind)
        or types.is_float64(kind)
        or types.is_date32(kind)
        or ((types.is_timestamp(kind) or types.is_duration(kind)) and kind.unit == "us")
    )


def hash_keys(columns: Sequence[pa.Array], count: int) -> Array:
    """The hash of each of ``count`` keys (uint64).

    >>> hash_keys([pa.array([1, 2]), pa.array(["a", None])], 2).view(np.int64).tolist()
    [-8527884376001292090, -3341702809300393011]
    """
    hashes = np.full(count, _SEED, np.uint64)
    for column in columns:
        if is_bytes(column.type):
            found = strings_of(column)
            kernels.strings(frozen(found.starts), frozen(found.lens), frozen(found.data), hashes)
        elif count:
            _hash_fixed(column, hashes)
    return hashes


def _hash_fixed(column: pa.Array, hashes: Array) -> None:
    valid = fixed.validity(column)
    present = frozen(np.empty(0, np.bool_) if valid is None else valid)
    values = fixed.values(column)
    if values.dtype.kind == "f":
        values = fixed.unified(values)
    elif types.is_decimal(column.type):
        values = values.reshape(len(column), -1)[:, 0]
    if values.dtype.itemsize == 8:
        kernels.longs(frozen(values.view(np.int64)), present, hashes)
    else:
        if values.dtype.itemsize < 4:
            values = values.astype(np.int32)
        kernels.ints(frozen(values.view(np.uint32)), present, hashes)
