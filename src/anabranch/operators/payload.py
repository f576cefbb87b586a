"""Input columns kept in the state, nulls included, and restored exactly.

State columns of fixed width cannot be null, so a nullable one gets a boolean column beside it,
``<name>_null``. Decimals are two words; lists, structs and maps are bytes in the encoding of
:mod:`anabranch.state.nested` (in which all NaNs are one, and so are the two zeros).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from anabranch.errors import PlanError
from anabranch.operators.rows import Rows
from anabranch.state import fixed, nested, schema
from anabranch.state.keytypes import is_bytes, is_fixed, plain, signature
from anabranch.state.schema import RESERVED, Column, StateType
from anabranch.state.strings import strings_of, to_arrow
from anabranch.state.view import State

Array = npt.NDArray[Any]


class Payload:
    """Some columns of the input as state columns.

    ``columns`` are the state columns to declare; their names are those of the input, or with
    underscores behind where a name is already ``taken``.

    >>> Payload([pa.field("speed", pa.float64())], taken=["car"]).columns[1].name
    'speed_null'
    """

    def __init__(self, fields: Sequence[pa.Field], taken: Iterable[str]) -> None:
        names = {*taken, *(field.name for field in fields)}
        self.fields = [field.with_type(plain(field.type)) for field in fields]
        self._stored: list[_Stored] = []
        occupied = set(taken)
        for field in self.fields:
            _check(field)
            name = _unused(field.name, occupied)
            flag = None
            if field.nullable and is_fixed(field.type):
                flag = _unused(f"{field.name}_null", occupied | names)
            occupied |= {name, flag or name}
            self._stored.append(_Stored(field, name, flag, _state_type(field.type)))

    @property
    def columns(self) -> list[Column]:
        """The state columns that hold the values."""
        found = []
        for stored in self._stored:
            found.append(Column(stored.name, stored.type))
            if stored.flag:
                found.append(Column(stored.flag, schema.bool_))
        return found

    def write(self, state: State, at: Array, arrays: Sequence[pa.Array]) -> None:
        """Put one array per column into state rows, each row named at most once."""
        for stored, array in zip(self._stored, arrays, strict=True):
            valid = fixed.validity(array)
            state.set(stored.name, at, stored.encode(array, valid))
            if stored.flag:
                state.set(stored.flag, at, np.zeros(len(at), bool) if valid is None else ~valid)
            elif valid is not None and is_fixed(stored.field.type):
                raise ValueError(
                    f"column {stored.field.name!r} is declared never to be null and has nulls"
                )

    def read(self, state: State, at: Array) -> list[pa.Array]:
        """The arrays that were written into these state rows."""
        return [stored.read(state, at) for stored in self._stored]

    def read_one(self, state: State, name: str, at: Array) -> pa.Array:
        """One of the arrays of :meth:`read`, by the name of its column in the input."""
        return self._by_name(name).read(state, at)

    def pick(self, state: State, at: Array, rows: Rows, entries: Array) -> list[pa.Array]:
        """The columns of *entries*, which are numbered through some state rows and then ``rows``.

        The entry -1 is null.
        """
        stored = (entries >= 0) & (entries < len(at))
        used, place = np.unique(entries[stored], return_inverse=True)
        position = entries - len(at) + len(used)
        position[stored] = place
        index = pa.array(position, mask=entries < 0)
        arrays = []
        for field, before in zip(self.fields, self.read(state, at[used]), strict=True):
            after = rows.arrow(field.name)
            after = after if after.type == field.type else after.cast(field.type)
            arrays.append(pa.concat_arrays([before, after]).take(index))
        return arrays

    def copy(self, state: State, source: Array, target: Array) -> None:
        """Copy the values of some state rows to others."""
        for column in self.columns:
            state.set(column.name, target, state[column.name][source])

    def stored_as(self, name: str) -> str:
        """The state column that holds the values of a column of the input."""
        return self._by_name(name).name

    def _by_name(self, name: str) -> _Stored:
        return next(stored for stored in self._stored if stored.field.name == name)


@dataclass(frozen=True)
class _Stored:
    field: pa.Field
    name: str
    flag: str | None
    type: StateType

    def read(self, state: State, at: Array) -> pa.Array:
        valid = ~state[self.flag][at] if self.flag else np.ones(len(at), bool)
        return self.decode(state[self.name][at], valid)

    def encode(self, array: pa.Array, valid: Array | None) -> Any:
        kind = self.field.type
        if array.type != kind:
            array = array.cast(kind)
        if is_bytes(kind):
            return array.cast(self.type.arrow)
        if not is_fixed(kind):
            return to_arrow(pa.binary(), nested.encode(array))
        if types.is_boolean(kind):
            values = np.array(array.fill_null(False).to_numpy(zero_copy_only=False))
        elif len(array) == 0:
            return self._empty()
        else:
            width = self.type.width
            values = np.frombuffer(array.buffers()[1], dtype=self.type.dtype)
            values = values[array.offset * width : (array.offset + len(array)) * width]
            values = values.reshape(len(array), width) if width > 1 else values
        if valid is not None:
            values = values.copy()
            values[~valid] = 0  # what stands under a null must not make equal states differ
        return values

    def decode(self, values: Any, valid: Array) -> pa.Array:
        kind = self.field.type
        if is_bytes(kind):
            return values.cast(kind)
        if not is_fixed(kind):
            return nested.decode(kind, strings_of(values))
        if types.is_boolean(kind):
            return pa.array(values, mask=~valid)
        data = pa.py_buffer(np.ascontiguousarray(values).reshape(-1))
        return pa.Array.from_buffers(kind, len(values), [fixed.validity_buffer(valid), data])

    def _empty(self) -> Array:
        width = self.type.width
        return np.empty((0, width) if width > 1 else 0, dtype=self.type.dtype)


def _check(field: pa.Field) -> None:
    if field.name.startswith(RESERVED):
        raise PlanError(f"column {field.name!r}: names with '__' are reserved; rename it")
    unsupported = types.is_null(field.type)
    try:
        signature(field.name, field.type)
    except PlanError:
        unsupported = True
    if unsupported:
        raise PlanError(
            f"column {field.name!r} of type {field.type} cannot be kept in the state; "
            "drop it before this step or cast it, for instance to a string"
        )


def _state_type(kind: pa.DataType) -> StateType:
    if types.is_string(kind) or types.is_large_string(kind):
        return schema.string
    if not is_fixed(kind):
        return schema.binary
    if kind in schema.NUMBERS:
        return schema.NUMBERS[kind]
    if kind.bit_width <= 32:
        return schema.int32
    words = kind.bit_width // 64
    return schema.int64 if words == 1 else schema.vector(schema.int64, words)


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name
