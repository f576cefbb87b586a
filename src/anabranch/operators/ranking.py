"""Values of a column as int64 codes in the same order, so that one compiled loop ranks them all."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from anabranch.errors import PlanError
from anabranch.state import fixed

Array = npt.NDArray[Any]

_SIGN = np.int64(np.iinfo(np.int64).min)


def check(column: str, kind: pa.DataType) -> None:
    """Raise :class:`PlanError` unless values of the type can be ranked."""
    if types.is_decimal(kind) and kind.precision > 18:
        raise PlanError(
            f"column {column!r} of type {kind} cannot be ranked: cast it to a decimal of at most "
            "18 digits or to a double"
        )
    if not (
        types.is_integer(kind)
        or types.is_boolean(kind)
        or types.is_float32(kind)
        or types.is_float64(kind)
        or types.is_decimal(kind)
        or (types.is_temporal(kind) and not types.is_interval(kind))
    ):
        raise PlanError(
            f"column {column!r} of type {kind} cannot be ranked: "
            "it must be a number, a boolean, a date or a time"
        )


def codes(array: pa.Array) -> Array:
    """Codes that compare as the values do in Spark: NaN is the greatest, the zeros are equal."""
    if types.is_float32(array.type):
        array = array.cast(pa.float64())
    words = np.zeros((len(array), fixed.word_count(array.type)), dtype=np.int64)
    fixed.to_words(array, fixed.validity(array), words)
    found = np.ascontiguousarray(words[:, 0])
    if types.is_floating(array.type):
        found ^= (found >> 63) & ~_SIGN
    elif array.type == pa.uint64():
        found ^= _SIGN
    return found
