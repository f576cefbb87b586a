"""The stored form of keys: fixed-width words, and byte strings of any length.

Every key column becomes either a few 64-bit words or one part of variable length, so that two
keys are equal exactly when their words and the bytes of their parts are. Numbers, booleans, times
and decimals are words; strings and binary values are their own bytes; lists, structs and maps are
bytes in the encoding of :mod:`anabranch.state.nested`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from anabranch.errors import PlanError, StateError
from anabranch.kernels import encode as kernels
from anabranch.state import fixed, nested
from anabranch.state.groups import MAX_KEY_GROUPS, group_of
from anabranch.state.keytypes import is_bytes, is_fixed, plain, signature
from anabranch.state.strings import Strings, frozen, join, strings_of, to_arrow

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class KeyBatch:
    """Keys ready for the table, one per row. The arrays are C-contiguous and read-only."""

    hashes: Array
    """uint64[n]: hash of the whole state key, sub-key included."""
    groups: Array
    """uint16[n]: key group, from the hash of the user's key alone."""
    words: Array
    """uint64[n, W]: all fixed-width parts."""
    starts: Array
    """int64[n, K]: where each part of variable length starts in ``data``."""
    lens: Array
    """int32[n, K]: its length in bytes, -1 for null."""
    data: Array
    """uint8[...]: the bytes; for a single string column those of the Arrow array itself."""

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, frozen(getattr(self, field.name)))

    def __len__(self) -> int:
        return len(self.hashes)

    def take(self, indices: Array) -> "KeyBatch":
        """The keys at these positions (or where a mask is true), over the same bytes."""
        return KeyBatch(
            self.hashes[indices],
            self.groups[indices],
            self.words[indices],
            self.starts[indices],
            self.lens[indices],
            self.data,
        )


class KeyLayout:
    """How the key columns of one operator are laid out; made once from their Arrow fields.

    ``sub`` names the int64 columns that the operator adds to the user's key, such as the start of
    a window. ``words`` and ``parts`` say how many 64-bit words and variable parts a key has.
    """

    def __init__(
        self, fields: Sequence[pa.Field], sub: Sequence[str] = (), key_groups: int = 128
    ) -> None:
        if not 1 <= key_groups <= MAX_KEY_GROUPS:
            raise PlanError(f"key_groups is {key_groups}; it must be from 1 to {MAX_KEY_GROUPS}")
        names = [field.name for field in fields] + list(sub)
        if len(set(names)) != len(names):
            raise PlanError(f"key columns {names}: a name occurs twice")
        self.signatures = tuple(signature(field.name, field.type) for field in fields)
        self.fields = tuple(field.with_type(plain(field.type)) for field in fields)
        self.sub = tuple(sub)
        self.key_groups = key_groups
        of_words = [field for field in self.fields if is_fixed(field.type)]
        nullable = any(field.nullable for field in of_words)
        self._null_words = -(-len(of_words) // 64) if nullable else 0
        widths = sum(fixed.word_count(field.type) for field in of_words)
        self.words = widths + self._null_words + len(self.sub)
        self.parts = len(self.fields) - len(of_words)
        alone = widths == self.words == len(self.fields) == 1
        self._one_word = alone and fixed.is_word(self.fields[0].type)

    def __repr__(self) -> str:
        columns = ", ".join(
            f"{f.name} {s}" for f, s in zip(self.fields, self.signatures, strict=True)
        )
        return f"KeyLayout({columns}; sub={list(self.sub)}, key_groups={self.key_groups})"

    def fingerprint(self) -> str:
        """A short text that differs when stored keys could not be read with this layout."""
        names = [field.name for field in self.fields]
        text = repr((names, self.signatures, self.sub, self._null_words, self.key_groups))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def encode(
        self, columns: Sequence[pa.Array], user_hashes: Array, sub: Sequence[Array] = ()
    ) -> KeyBatch:
        """The keys of some rows.

        ``user_hashes`` is Spark's xxhash64 of the user's key columns, as int64 or uint64.
        """
        count = len(user_hashes)
        arrays = self._checked(columns, sub, count)
        parts = [
            strings_of(array) if is_bytes(array.type) else nested.encode(array)
            for array in arrays
            if not is_fixed(array.type)
        ]
        hashes = user_hashes.view(np.uint64)
        starts, lens, data = join(parts, count)
        return KeyBatch(
            hashes=combine_hash(hashes, sub),
            groups=group_of(hashes, self.key_groups),
            words=self._words(arrays, sub, count).view(np.uint64),
            starts=starts,
            lens=lens,
            data=data,
        )

    def decode(self, words: Array, starts: Array, lens: Array, data: Array) -> list[pa.Array]:
        """The key columns as typed arrays, followed by the sub-key columns as int64."""
        signed = words.view(np.int64)
        first_sub = self.words - len(self.sub)
        null_bits = signed[:, first_sub - self._null_words : first_sub]
        nulls = bool(null_bits.any())
        columns: list[pa.Array] = []
        word = nth = part = 0
        for field in self.fields:
            if is_fixed(field.type):
                width = fixed.word_count(field.type)
                valid = (null_bits[:, nth // 64] >> (nth % 64)) & 1 == 0 if nulls else None
                columns.append(fixed.from_words(field.type, signed[:, word : word + width], valid))
                word += width
                nth += 1
            else:
                found = Strings(starts[:, part], lens[:, part], data)
                read = to_arrow if is_bytes(field.type) else nested.decode
                columns.append(read(field.type, found))
                part += 1
        return columns + [pa.array(signed[:, first_sub + i]) for i in range(len(self.sub))]

    def _words(self, arrays: Sequence[pa.Array], sub: Sequence[Array], count: int) -> Array:
        if self._one_word and arrays[0].null_count == 0:
            return fixed.one_word(arrays[0])
        words = np.zeros((count, self.words), dtype=np.int64)
        first_sub = self.words - len(self.sub)
        null_bits = words[:, first_sub - self._null_words : first_sub]
        word = nth = 0
        for field, array in zip(self.fields, arrays, strict=True):
            if not is_fixed(field.type):
                continue
            valid = fixed.validity(array)
            width = fixed.word_count(field.type)
            fixed.to_words(array, valid, words[:, word : word + width])
            if valid is not None:
                if not self._null_words:
                    raise StateError(
                        f"key column {field.name!r} is declared never to be null and has nulls"
                    )
                null_bits[:, nth // 64] |= (~valid).astype(np.int64) << (nth % 64)
            word += width
            nth += 1
        for i, values in enumerate(sub):
            words[:, first_sub + i] = values
        return words

    def _checked(
        self, columns: Sequence[pa.Array], sub: Sequence[Array], count: int
    ) -> list[pa.Array]:
        if len(columns) != len(self.fields) or len(sub) != len(self.sub):
            raise StateError(f"got {len(columns)} key and {len(sub)} sub-key columns for {self!r}")
        for name, values in zip(self.sub, sub, strict=True):
            if len(values) != count:
                raise StateError(f"sub-key {name!r} has {len(values)} rows of {count}")
        arrays = []
        for field, expected, array in zip(self.fields, self.signatures, columns, strict=True):
            if isinstance(array, pa.ChunkedArray):
                raise StateError(f"key column {field.name!r} is chunked; pass one Arrow array")
            if array.type != field.type:
                if signature(field.name, array.type) != expected:
                    raise StateError(
                        f"key column {field.name!r} has type {array.type}, the keys {field.type}"
                    )
                array = _materialised(array)
            if len(array) != count:
                raise StateError(f"key column {field.name!r} has {len(array)} rows of {count}")
            arrays.append(array)
        return arrays


def combine_hash(user_hashes: Array, sub: Sequence[Array]) -> Array:
    """The hash of a whole state key (uint64), from that of the user's key and the sub-key."""
    hashes = user_hashes.view(np.uint64)
    for values in sub:
        mixed = np.empty(len(hashes), dtype=np.uint64)
        kernels.mix(frozen(hashes), np.ascontiguousarray(values, dtype=np.int64), mixed)
        hashes = mixed
    return hashes


def _materialised(array: pa.Array) -> pa.Array:
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    target = plain(array.type)
    return array if array.type == target else array.cast(target)
