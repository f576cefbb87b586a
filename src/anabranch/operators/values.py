"""Converting values of input columns to state columns and back."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from anabranch.state import schema
from anabranch.state.schema import StateType

Array = npt.NDArray[Any]


def storage(kind: pa.DataType) -> StateType | None:
    """The state type that holds every value of an Arrow type, None if there is none."""
    if types.is_timestamp(kind) and kind.unit == "us":
        return schema.timestamp
    if types.is_floating(kind):
        return schema.float64
    if types.is_string(kind) or types.is_large_string(kind):
        return schema.string
    if types.is_binary(kind) or types.is_large_binary(kind):
        return schema.binary
    whole = types.is_integer(kind) and not types.is_uint64(kind)
    times = types.is_temporal(kind) and not types.is_interval(kind)
    return schema.int64 if whole or times or types.is_boolean(kind) else None


def stored(column: pa.Array) -> Any:
    """The values of a column without nulls in their state type.

    A read-only numpy array of int64 or float64, or an Arrow array for strings and bytes.
    """
    kind = column.type
    if types.is_large_string(kind):
        return column.cast(pa.string())
    if types.is_large_binary(kind):
        return column.cast(pa.binary())
    if types.is_string(kind) or types.is_binary(kind):
        return column
    if types.is_floating(kind):
        column = column.cast(pa.float64())
    elif types.is_temporal(kind):
        column = column.view(pa.int32() if kind.bit_width == 32 else pa.int64()).cast(pa.int64())
    elif types.is_boolean(kind):
        column = column.cast(pa.int8()).cast(pa.int64())
    else:
        column = column.cast(pa.int64())
    return readonly(column.to_numpy(zero_copy_only=False))


def restored(values: Any, valid: Array, kind: pa.DataType) -> pa.Array:
    """A column of this type from values in their state type, null where not valid."""
    if isinstance(values, pa.Array):
        return values.cast(kind)
    column = pa.array(values, mask=~valid)
    if types.is_temporal(kind):
        return column.cast(pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)
    return column.cast(kind)


def readonly(values: Array) -> Array:
    """A contiguous read-only view: one array type for the compiler, so one compilation."""
    view = np.ascontiguousarray(values).view()
    view.flags.writeable = False
    return view
