"""The canonical bytes of lists, structs and maps: equal values, and only those, have equal bytes.

Every value starts with a flag, 1, or 0 for null. Then come, little-endian:

- fixed-width values: their 64-bit words (zeros for null);
- strings and binary values: length (4 bytes), bytes (neither for null);
- structs: the fields in order (for null zeros if the size of the fields is constant, else nothing);
- lists: count (4 bytes), the size of each element (4 bytes, only if it is not constant), the
  elements (none of it for null). A map is the list of its entries, in their order.

Sizes stand before the elements so that all elements of all lists can be found, and then be read,
in one pass over each type instead of one over each list.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from anabranch.kernels import encode as kernels
from anabranch.state import fixed
from anabranch.state.keytypes import is_bytes, is_fixed
from anabranch.state.strings import (
    Strings,
    as_lens,
    frozen,
    offset_bytes,
    offsets_of,
    strings_of,
    to_arrow,
)

Array = npt.NDArray[Any]


def encode(array: pa.Array) -> Strings:
    """The bytes of each value of a list, struct or map array."""
    values = _values(array)
    sizes = np.where(values.valid, values.sizes, 0)
    starts = np.cumsum(sizes) - sizes
    lens = as_lens(sizes, values.valid)
    data = np.zeros(sizes.sum(), dtype=np.uint8)
    values.write(np.where(values.valid, starts, -1), data)
    return Strings(starts, lens, data)


def decode(kind: pa.DataType, strings: Strings) -> pa.Array:
    """The array of this type whose values have these bytes."""
    array, _ = _read(kind, frozen(strings.data), np.where(strings.lens >= 0, strings.starts, -1))
    return array


def constant_size(kind: pa.DataType) -> int | None:
    """The number of bytes of every value of a type, or None if they differ."""
    if is_fixed(kind):
        return 1 + 8 * fixed.word_count(kind)
    if types.is_struct(kind):
        sizes = [constant_size(field.type) for field in kind.fields]
        return None if None in sizes else 1 + sum(size or 0 for size in sizes)
    return None


class _Values(ABC):
    """Values of one type that know their encoded sizes and can be written at given positions."""

    valid: Array
    sizes: Array

    @abstractmethod
    def write(self, at: Array, out: Array) -> None:
        """Write every value with a position of at least 0 into zeroed bytes."""


def _values(array: pa.Array) -> _Values:
    if is_fixed(array.type):
        return _Words(array)
    if is_bytes(array.type):
        return _Bytes(array)
    if types.is_struct(array.type):
        return _Structs(array)
    return _Lists(array)


class _Words(_Values):
    def __init__(self, array: pa.Array) -> None:
        self.valid = _valid(array)
        self._words = np.zeros((len(array), fixed.word_count(array.type)), dtype=np.int64)
        fixed.to_words(array, self.valid, self._words)
        self.sizes = np.full(len(array), constant_size(array.type), dtype=np.int64)

    def write(self, at: Array, out: Array) -> None:
        kernels.write_words(self.valid, self._words, at, out)


class _Bytes(_Values):
    def __init__(self, array: pa.Array) -> None:
        self._strings = Strings(*map(frozen, strings_of(array)))
        self.valid = self._strings.lens >= 0
        self.sizes = np.where(self.valid, 5 + self._strings.lens.astype(np.int64), 1)

    def write(self, at: Array, out: Array) -> None:
        kernels.write_strings(*self._strings, at, out)


class _Structs(_Values):
    def __init__(self, array: pa.Array) -> None:
        self.valid = _valid(array)
        self._fields = [_values(array.field(i)) for i in range(array.type.num_fields)]
        self.sizes = np.ones(len(array), dtype=np.int64)
        for field in self._fields:
            self.sizes += field.sizes
        if constant_size(array.type) is None:
            self.sizes[~self.valid] = 1

    def write(self, at: Array, out: Array) -> None:
        there = (at >= 0) & self.valid
        out[at[there]] = 1
        position = at + 1
        for field in self._fields:
            field.write(np.where(there, position, -1), out)
            position = position + field.sizes


class _Lists(_Values):
    def __init__(self, array: pa.Array) -> None:
        self.valid = _valid(array)
        offsets = offsets_of(array)
        elements = _elements(array, int(offsets[0]), int(offsets[-1]))
        self._offsets = offsets.astype(np.int64) - offsets[0]
        self._elements = _values(elements)
        self._table = constant_size(elements.type) is None
        self.sizes = np.empty(len(array), dtype=np.int64)
        kernels.list_sizes(self.valid, self._offsets, self._elements.sizes, self._table, self.sizes)

    def write(self, at: Array, out: Array) -> None:
        element_at = np.empty(self._offsets[-1], dtype=np.int64)
        kernels.write_lists(
            self.valid, self._offsets, self._elements.sizes, self._table, at, out, element_at
        )
        self._elements.write(element_at, out)


def _elements(array: pa.Array, first: int, last: int) -> pa.Array:
    if types.is_map(array.type):
        keys, items = array.keys[first:last], array.items[first:last]
        return pa.StructArray.from_arrays([keys, items], ["key", "value"])
    return array.values[first:last]


def _valid(array: pa.Array) -> Array:
    valid = fixed.validity(array)
    return np.ones(len(array), dtype=np.bool_) if valid is None else valid


def _read(kind: pa.DataType, data: Array, at: Array) -> tuple[pa.Array, Array]:
    """The values at some positions (null at -1), and the positions just after those there are."""
    if is_fixed(kind):
        return _read_words(kind, data, at)
    if is_bytes(kind):
        starts, lens, ends = np.empty_like(at), np.empty(len(at), np.int32), np.empty_like(at)
        kernels.read_strings(data, at, starts, lens, ends)
        return to_arrow(kind, Strings(starts, lens, data)), ends
    if types.is_struct(kind):
        return _read_structs(kind, data, at)
    return _read_lists(kind, data, at)


def _read_words(kind: pa.DataType, data: Array, at: Array) -> tuple[pa.Array, Array]:
    valid = np.empty(len(at), dtype=np.bool_)
    words = np.empty((len(at), fixed.word_count(kind)), dtype=np.int64)
    kernels.read_words(data, at, valid, words)
    return fixed.from_words(kind, words, valid), at + constant_size(kind)


def _read_structs(kind: pa.DataType, data: Array, at: Array) -> tuple[pa.Array, Array]:
    valid = np.zeros(len(at), dtype=np.bool_)
    there = at >= 0
    valid[there] = data[at[there]] == 1
    position = at + 1
    children = []
    for field in kind.fields:
        child, position = _read(field.type, data, np.where(valid, position, -1))
        children.append(child)
    size = constant_size(kind)
    ends = np.where(valid, position, at + 1) if size is None else at + size
    array = pa.Array.from_buffers(kind, len(at), [fixed.validity_buffer(valid)], children=children)
    return array, ends


def _read_lists(kind: pa.DataType, data: Array, at: Array) -> tuple[pa.Array, Array]:
    of = _entry_type(kind) if types.is_map(kind) else kind.value_type
    valid = np.empty(len(at), dtype=np.bool_)
    offsets = np.empty(len(at) + 1, dtype=np.int64)
    kernels.read_counts(data, at, valid, offsets)
    size = constant_size(of)
    element_at, ends = np.empty(offsets[-1], dtype=np.int64), np.empty_like(at)
    kernels.read_elements(data, at, valid, offsets, -1 if size is None else size, element_at, ends)
    elements, _ = _read(of, data, element_at)
    buffers = [fixed.validity_buffer(valid), offset_bytes(kind, offsets)]
    return pa.Array.from_buffers(kind, len(at), buffers, children=[elements]), ends


def _entry_type(kind: pa.DataType) -> pa.DataType:
    return pa.struct([kind.key_field, kind.item_field])
