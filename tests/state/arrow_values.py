"""Random Arrow types and values that are as easy to mistake for one another as possible."""

import datetime
import decimal
import struct
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from anabranch.state.keys import KeyBatch, KeyLayout

UTC = datetime.UTC
TIMES = [
    datetime.datetime(1970, 1, 1),
    datetime.datetime(1969, 12, 31, 23, 59, 59, 999999),
    datetime.datetime(2262, 4, 11),
]
TEXTS = ["", "\x00", "\x00\x00", "a", "a\x00", "aa", "\x01", "é", "\x01\x00\x00\x00", "b" * 300]

LEAVES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): st.sampled_from([-128, -1, 0, 1, 127]),
    pa.uint64(): st.sampled_from([0, 1, 2**63, 2**64 - 1]),
    pa.int64(): st.sampled_from([-(2**63), -1, 0, 1, 256, 2**63 - 1]),
    pa.bool_(): st.booleans(),
    pa.float32(): st.sampled_from([0.0, -0.0, 1.5, float("inf"), float("-inf"), float("nan")]),
    pa.float64(): st.sampled_from([0.0, -0.0, 1e300, -1.0, float("nan")]),
    pa.date32(): st.sampled_from([datetime.date(1970, 1, 1), datetime.date(1, 1, 1)]),
    pa.timestamp("us"): st.sampled_from(TIMES),
    pa.timestamp("us", "UTC"): st.sampled_from([t.replace(tzinfo=UTC) for t in TIMES]),
    pa.duration("us"): st.sampled_from(
        [datetime.timedelta(0), datetime.timedelta(-1), datetime.timedelta(days=4)]
    ),
    pa.decimal128(38, 2): st.sampled_from(
        [
            decimal.Decimal(x)
            for x in ("0.00", "-0.01", "1.00", f"{10**36 - 1}.99", f"-{10**36 - 1}")
        ]
    ),
    pa.null(): st.none(),
    pa.string(): st.sampled_from(TEXTS),
    pa.large_string(): st.sampled_from(TEXTS),
    pa.binary(): st.sampled_from([text.encode() for text in TEXTS] + [b"\xff"]),
}


def _nest(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    names = st.sampled_from("xyz")
    keys = st.sampled_from([pa.string(), pa.int64(), pa.struct([("k", pa.binary())])])
    return st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        st.dictionaries(names, inner, max_size=3).map(lambda d: pa.struct(list(d.items()))),
        st.builds(pa.map_, keys, inner),
    )


leaf_types = st.sampled_from(list(LEAVES))
any_types = st.recursive(leaf_types, _nest, max_leaves=4)
nested_types = _nest(any_types)


def values_of(kind: pa.DataType, nulls: bool = True) -> st.SearchStrategy[Any]:
    """Python values of an Arrow type."""
    if kind in LEAVES:
        values = LEAVES[kind]
    elif pa.types.is_map(kind):
        pair = st.tuples(values_of(kind.key_type, nulls=False), values_of(kind.item_type))
        values = st.lists(pair, max_size=3)
    elif pa.types.is_struct(kind):
        values = st.fixed_dictionaries({f.name: values_of(f.type) for f in kind.fields})
    else:
        values = st.lists(values_of(kind.value_type), max_size=3)
    return st.one_of(st.none(), values) if nulls else values


@st.composite
def arrays(draw: st.DrawFn, types: st.SearchStrategy[pa.DataType], length: int = 8) -> pa.Array:
    """An Arrow array that is often a slice out of the middle of another one."""
    kind = draw(types)
    values = draw(st.lists(values_of(kind), max_size=length))
    start = draw(st.integers(0, len(values)))
    stop = draw(st.integers(start, len(values)))
    return pa.array(values, kind)[start:stop]


def identity(value: Any) -> Any:
    """Something hashable that is equal for values that are the same key, and only for those."""
    if isinstance(value, float):
        return struct.pack("d", float("nan") if value != value else value + 0.0)
    if isinstance(value, dict):
        return ("struct", *((name, identity(each)) for name, each in value.items()))
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(identity, value))
    return value


def identities(array: pa.Array) -> list[Any]:
    return [identity(value) for value in array.to_pylist()]


def encode(array: pa.Array, nullable: bool = True) -> tuple[KeyLayout, KeyBatch]:
    layout = KeyLayout([pa.field("key", array.type, nullable=nullable)])
    return layout, layout.encode([array], np.zeros(len(array), np.int64))


def stored(batch: KeyBatch) -> list[Any]:
    """What the table compares when it compares keys, row by row."""
    return [
        (
            words.tobytes(),
            tuple(
                batch.data[start : start + size].tobytes() if size >= 0 else None
                for start, size in zip(starts, lens, strict=True)
            ),
        )
        for words, starts, lens in zip(batch.words, batch.starts, batch.lens, strict=True)
    ]


def assert_one_to_one(values: list[Any], encoded: list[Any]) -> None:
    """Equal values have equal encodings and different values different ones."""
    assert len(values) == len(encoded)
    for i in range(len(values)):
        for j in range(i):
            assert (values[i] == values[j]) == (encoded[i] == encoded[j]), (values[i], values[j])
