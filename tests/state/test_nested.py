import numpy as np
import pyarrow as pa
import pytest
from arrow_values import (
    arrays,
    assert_one_to_one,
    encode,
    identities,
    identity,
    nested_types,
    stored,
    values_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.state import nested
from anabranch.state.strings import Strings


@given(arrays(nested_types))
@settings(max_examples=200, deadline=None)
def test_decode_gives_back_what_was_encoded(array: pa.Array) -> None:
    layout, batch = encode(array)
    (back,) = layout.decode(batch.words, batch.starts, batch.lens, batch.data)
    back.validate(full=True)
    assert back.type == array.type
    assert identities(back) == identities(array)


@given(arrays(nested_types, length=16))
@settings(max_examples=200, deadline=None)
def test_two_values_have_the_same_bytes_only_if_they_are_equal(array: pa.Array) -> None:
    _, batch = encode(array)
    assert_one_to_one(identities(array), stored(batch))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_bytes_do_not_depend_on_the_neighbours_or_on_the_slice(data: st.DataObject) -> None:
    kind = data.draw(nested_types)
    value = data.draw(values_of(kind))
    before = data.draw(st.lists(values_of(kind), max_size=10))
    after = data.draw(st.lists(values_of(kind), max_size=3))
    _, alone = encode(pa.array([value], kind))
    _, among = encode(pa.array([*before, value, *after], kind)[len(before) : len(before) + 1])
    assert stored(alone) == stored(among)


@given(arrays(nested_types, length=12), st.data())
@settings(max_examples=100, deadline=None)
def test_bytes_can_be_read_in_any_order_and_more_than_once(
    array: pa.Array, data: st.DataObject
) -> None:
    layout, batch = encode(array)
    picks = data.draw(st.lists(st.integers(0, len(array) - 1)) if len(array) else st.just([]))
    some = batch.take(np.array(picks, dtype=np.int64))
    (back,) = layout.decode(some.words, some.starts, some.lens, some.data)
    assert identities(back) == [identity(array[i].as_py()) for i in picks]


def covered(array: pa.Array, hidden: list[bool]) -> pa.Array:
    """The same array with some values marked null while their contents stay in the buffers."""
    bits = np.packbits(~np.array(hidden, dtype=bool), bitorder="little")
    if pa.types.is_struct(array.type):
        offsets, children = [], array.flatten()
    else:
        offsets = [array.buffers()[1]]
        children = [array.values]
    return pa.Array.from_buffers(
        array.type, len(array), [pa.py_buffer(bits), *offsets], children=children
    )


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_what_lies_under_a_null_does_not_count(data: st.DataObject) -> None:
    kind = data.draw(nested_types.filter(lambda t: not pa.types.is_map(t)))
    values = data.draw(st.lists(values_of(kind, nulls=False), min_size=1, max_size=6))
    hidden = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    seen = [None if hide else value for value, hide in zip(values, hidden, strict=True)]
    array = covered(pa.array(values, kind), hidden)
    outer = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), array)
    for given_array, expected in (
        (array, pa.array(seen, kind)),
        (outer, pa.array([seen], pa.list_(kind))),
    ):
        assert stored(encode(given_array)[1]) == stored(encode(expected)[1])


@pytest.mark.parametrize(
    ("kind", "left", "right"),
    [
        (pa.list_(pa.string()), [""], []),
        (pa.list_(pa.string()), [None], []),
        (pa.list_(pa.string()), ["ab", ""], ["a", "b"]),
        (pa.list_(pa.int64()), [0], [None]),
        (pa.list_(pa.list_(pa.null())), [[], [None]], [[None], []]),
        (pa.struct([("x", pa.int64())]), {"x": None}, {"x": 0}),
        (pa.struct([("x", pa.string()), ("y", pa.string())]), ("a", None), (None, "a")),
        (pa.map_(pa.string(), pa.int64()), [("a", None)], []),
        (pa.list_(pa.struct([("x", pa.int64())])), [None], [{"x": None}]),
    ],
)
def test_values_that_look_alike_differ(kind: pa.DataType, left: object, right: object) -> None:
    first, second = stored(encode(pa.array([left, right], kind))[1])
    assert first != second


def test_a_constant_size_needs_no_table_of_sizes() -> None:
    pairs = pa.list_(pa.struct([("x", pa.int32()), ("y", pa.decimal128(38, 0))]))
    strings = nested.encode(pa.array([[None, {"x": 1, "y": None}], []], pairs))
    pair = nested.constant_size(pairs.value_type)
    assert pair == 1 + (1 + 8) + (1 + 16)
    assert strings.lens.tolist() == [1 + 4 + 2 * pair, 1 + 4]


def test_large_lists_come_back_with_long_offsets() -> None:
    array = pa.array([["a"], None, []], pa.large_list(pa.large_string()))
    back = nested.decode(array.type, nested.encode(array))
    assert back.equals(array)


def test_bytes_are_read_from_where_the_table_put_them() -> None:
    array = pa.array([[1, None], None, [3]], pa.list_(pa.int16()))
    starts, lens, data = nested.encode(array)
    heap = np.concatenate([np.full(13, 255, np.uint8), data, np.full(5, 7, np.uint8)])
    assert nested.decode(array.type, Strings(starts + 13, lens, heap)).equals(array)


def test_a_large_array_comes_back() -> None:
    count = 200_000
    offsets = pa.array(np.arange(0, 2 * count + 1, 2, dtype=np.int32))
    array = pa.ListArray.from_arrays(offsets, pa.array(np.arange(2 * count)).cast(pa.string()))
    assert nested.decode(array.type, nested.encode(array)).equals(array)
