import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from arrow_values import (
    any_types,
    arrays,
    assert_one_to_one,
    encode,
    identities,
    leaf_types,
    stored,
    values_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import PlanError, StateError
from anabranch.state.keys import KeyBatch, KeyLayout, combine_hash

BIT_TYPES = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
    *(pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("us", "Europe/London")),
    *(pa.duration("s"), pa.duration("ns"), pa.month_day_nano_interval()),
    *(pa.decimal32(9, 2), pa.decimal64(18, 0), pa.decimal128(38, 10), pa.decimal256(76, 3)),
]


def decoded(layout: KeyLayout, batch: KeyBatch) -> list[pa.Array]:
    return layout.decode(batch.words, batch.starts, batch.lens, batch.data)


def hashes(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int64) - count // 2


@given(arrays(leaf_types), st.booleans())
@settings(max_examples=200, deadline=None)
def test_one_column_comes_back_and_is_one_to_one(array: pa.Array, declared: bool) -> None:
    nullable = declared or array.null_count > 0 or pa.types.is_null(array.type)
    layout, batch = encode(array, nullable)
    assert batch.words.shape == (len(array), layout.words)
    assert batch.lens.shape == (len(array), layout.parts)
    (back,) = decoded(layout, batch)
    back.validate(full=True)
    assert back.type == array.type
    assert identities(back) == identities(array)
    assert_one_to_one(identities(array), stored(batch))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_columns_of_any_types_together(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(any_types, min_size=1, max_size=5))
    count = data.draw(st.integers(0, 6))
    skip = data.draw(st.integers(0, 3))
    columns = [
        pa.array(
            data.draw(st.lists(values_of(kind), min_size=count + skip, max_size=count + skip)), kind
        )[skip:]
        for kind in kinds
    ]
    sub = [np.array(data.draw(st.lists(st.integers(-2, 2), min_size=count, max_size=count)), int)]
    fields = [pa.field(f"c{i}", kind) for i, kind in enumerate(kinds)]
    layout = KeyLayout(fields, sub=["slot"])
    batch = layout.encode(columns, hashes(count), sub)
    expected = [*columns, pa.array(sub[0], pa.int64())]
    back = decoded(layout, batch)
    assert [identities(array) for array in back] == [identities(array) for array in expected]
    rows = list(zip(*map(identities, expected), strict=True))
    assert_one_to_one(rows, stored(batch))


@given(st.sampled_from(BIT_TYPES), st.data())
@settings(max_examples=200, deadline=None)
def test_every_bit_of_a_fixed_width_value_is_kept(kind: pa.DataType, data: st.DataObject) -> None:
    count, size = data.draw(st.integers(1, 9)), kind.bit_width // 8
    raw = np.frombuffer(data.draw(st.binary(min_size=count * size, max_size=count * size)), "u1")
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    start = data.draw(st.integers(0, count - 1))
    bits = pa.py_buffer(np.packbits(mask, bitorder="little"))
    array = pa.Array.from_buffers(kind, count, [bits, pa.py_buffer(raw)])[start:]
    layout, batch = encode(array)
    (back,) = decoded(layout, batch)
    assert back.type == kind
    assert back.equals(array)
    values = raw.reshape(count, size)[start:]
    rows = [value.tobytes() if ok else None for value, ok in zip(values, mask[start:], strict=True)]
    assert_one_to_one(rows, stored(batch))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_zeros_are_one_key_and_so_are_all_nans(dtype: str) -> None:
    nans = np.array([np.nan, -np.nan, np.inf], dtype)
    nans.view(f"u{nans.itemsize}")[1] ^= 5
    _, batch = encode(pa.array(np.concatenate([np.array([0.0, -0.0], dtype), nans])))
    keys = stored(batch)
    assert keys[0] == keys[1]
    assert keys[2] == keys[3]
    assert len(set(keys)) == 3


def test_what_lies_under_a_null_does_not_count() -> None:
    bits = pa.py_buffer(np.array([0b001], np.uint8))
    numbers = pa.Array.from_buffers(
        pa.int64(), 3, [bits, pa.py_buffer(np.array([0, 7, 9], np.int64))]
    )
    texts = pa.Array.from_buffers(
        pa.string(),
        3,
        [bits, pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"abc")],
    )
    layout = KeyLayout([pa.field("n", pa.int64()), pa.field("t", pa.string())])
    keys = stored(layout.encode([numbers, texts], hashes(3)))
    assert keys[1] == keys[2] != keys[0]


def test_a_null_is_not_zero_and_nulls_of_two_columns_differ() -> None:
    layout = KeyLayout([pa.field("x", pa.int32()), pa.field("y", pa.bool_())])
    x, y = pa.array([0, None, 0, None], pa.int32()), pa.array([False, False, None, None])
    assert len(set(stored(layout.encode([x, y], hashes(4))))) == 4


def test_more_than_64_fixed_columns() -> None:
    count = 70
    layout = KeyLayout([pa.field(f"c{i}", pa.int8()) for i in range(count)])
    columns = [
        pa.array([None if row == i else 0 for row in range(count)], pa.int8()) for i in range(count)
    ]
    batch = layout.encode(columns, hashes(count))
    assert layout.words == count + 2
    assert len(set(stored(batch))) == count
    assert [a.to_pylist() for a in decoded(layout, batch)] == [c.to_pylist() for c in columns]


def test_one_string_column_is_not_copied() -> None:
    array = pa.array(["x" * 10, None, "y" * 20, "z"])[1:]
    _, batch = encode(array)
    assert batch.data.ctypes.data == array.buffers()[2].address
    assert batch.lens.tolist() == [[-1], [20], [1]]
    assert batch.starts.tolist() == [[10], [10], [30]]


def test_one_integer_column_is_not_copied() -> None:
    array = pa.array([1, 2, 3], pa.timestamp("us"))[1:]
    _, batch = encode(array, nullable=False)
    assert batch.words.ctypes.data == array.buffers()[1].address + 8
    assert batch.words.tolist() == [[2], [3]]


def test_two_slices_bring_only_their_own_bytes() -> None:
    texts = pa.array([str(i) * 100 for i in range(10)])
    layout = KeyLayout([pa.field("x", pa.string()), pa.field("y", pa.string())])
    assert len(layout.encode([texts[2:4], texts[5:7]], hashes(2)).data) == 400


@pytest.mark.parametrize(
    "convert",
    [
        lambda a: a.dictionary_encode(),
        lambda a: a.cast(pa.large_string()),
        lambda a: a.cast(pa.string_view()),
        lambda a: a.dictionary_encode().cast(pa.dictionary(pa.int8(), pa.large_string())),
    ],
)
def test_other_arrow_forms_of_strings_are_the_same_keys(convert: object) -> None:
    texts = pa.array(["b", None, "longer than twelve bytes", "b", ""])
    other = convert(texts)[1:]  # type: ignore[operator]
    _, expected = encode(texts[1:])
    layout = KeyLayout([pa.field("key", pa.string())])
    batch = layout.encode([other], hashes(4))
    assert stored(batch) == stored(expected)
    own, same = encode(other)
    assert stored(same) == stored(expected)
    assert decoded(own, same)[0].to_pylist() == texts[1:].to_pylist()
    assert own.fingerprint() == layout.fingerprint()


def test_dictionaries_and_views_inside_nested_types() -> None:
    texts = pa.array(["b", None, "longer than twelve bytes", "b"])
    offsets = pa.array([0, 1, 4], pa.int32())
    expected = pa.ListArray.from_arrays(offsets, texts)
    for form in (texts.dictionary_encode(), texts.cast(pa.string_view())):
        layout, batch = encode(pa.ListArray.from_arrays(offsets, form)[1:])
        assert stored(batch) == stored(encode(expected[1:])[1])
        assert decoded(layout, batch)[0].equals(expected[1:])


def test_a_batch_in_another_time_zone_has_the_same_keys() -> None:
    london = pa.array([0, 1, None], pa.timestamp("us", "Europe/London"))
    layout = KeyLayout([pa.field("at", pa.timestamp("us", "UTC"))])
    batch = layout.encode([london], hashes(3))
    assert decoded(layout, batch)[0].type == pa.timestamp("us", "UTC")
    assert decoded(layout, batch)[0].equals(london.cast(pa.timestamp("us", "UTC")))


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_take_picks_rows(data: st.DataObject) -> None:
    texts = pa.array(["a", None, "", "dddd"])
    numbers = pa.array([1, 2, None, 4])
    layout = KeyLayout([pa.field("t", pa.string()), pa.field("n", pa.int64())], key_groups=7)
    batch = layout.encode([texts, numbers], hashes(4))
    picks = np.array(data.draw(st.lists(st.integers(0, 3))), dtype=np.int64)
    some = batch.take(picks)
    assert len(some) == len(picks)
    assert stored(some) == [stored(batch)[i] for i in picks]
    assert some.hashes.tolist() == batch.hashes[picks].tolist()
    assert some.groups.tolist() == batch.groups[picks].tolist()


@given(st.integers(1, 1 << 16), st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_groups_are_the_remainder_of_the_users_hash(key_groups: int, given: list[int]) -> None:
    layout = KeyLayout([pa.field("n", pa.int64())], sub=["slot"], key_groups=key_groups)
    user = np.array(given, dtype=np.int64)
    count = len(given)
    batch = layout.encode([pa.nulls(count, pa.int64())], user, [np.arange(count)])
    assert batch.groups.tolist() == [h % key_groups for h in given]
    assert batch.groups.dtype == np.uint16


def test_every_array_is_of_one_kind_for_the_compiler() -> None:
    layout = KeyLayout([pa.field("s", pa.string()), pa.field("l", pa.list_(pa.int8()))], ["w"])
    two = layout.encode(
        [pa.array(["a"]), pa.array([[1]], pa.list_(pa.int8()))], hashes(1), [np.ones(1, np.int64)]
    )
    for batch in (two, two.take(np.zeros(1, int)), encode(pa.array(["a"]))[1]):
        for name, dtype in [
            ("hashes", "u8"),
            ("groups", "u2"),
            ("words", "u8"),
            ("starts", "i8"),
            ("lens", "i4"),
            ("data", "u1"),
        ]:
            array = getattr(batch, name)
            assert array.dtype == np.dtype(dtype)
            assert array.flags.c_contiguous
            assert not array.flags.writeable


def test_hash_of_a_key_without_sub_key_is_the_users() -> None:
    user = np.array([-1, 5], dtype=np.int64)
    assert combine_hash(user, []).tolist() == [2**64 - 1, 5]


def test_sub_keys_spread_over_all_bits_of_the_hash() -> None:
    starts = np.arange(4096, dtype=np.int64) * 30_000_000
    mixed = combine_hash(np.full(4096, 12345, np.int64), [starts])
    assert len(set(mixed.tolist())) == 4096
    for shift in range(0, 64, 8):
        share = Counter(((mixed >> np.uint64(shift)) & np.uint64(255)).tolist())
        assert len(share) == 256
        assert max(share.values()) < 50
    there = combine_hash(mixed, [starts, starts + 1])
    assert there.tolist() != combine_hash(mixed, [starts + 1, starts]).tolist()


def test_fingerprints_tell_layouts_apart() -> None:
    def mark(kind: pa.DataType, name: str = "k", **more: object) -> str:
        return KeyLayout([pa.field(name, kind)], **more).fingerprint()  # type: ignore[arg-type]

    different = [
        mark(pa.int64()),
        mark(pa.int32()),
        mark(pa.int64(), "other"),
        mark(pa.int64(), sub=["w"]),
        mark(pa.int64(), key_groups=64),
        mark(pa.string()),
        mark(pa.binary()),
        mark(pa.timestamp("us")),
        mark(pa.timestamp("us", "UTC")),
        mark(pa.list_(pa.string())),
        mark(pa.struct([("a", pa.string())])),
        mark(pa.struct([("b", pa.string())])),
        mark(pa.map_(pa.string(), pa.string())),
        KeyLayout([pa.field("k", pa.int64(), nullable=False)]).fingerprint(),
    ]
    assert len(set(different)) == len(different)


def test_fingerprints_do_not_depend_on_the_form() -> None:
    def mark(kind: pa.DataType) -> str:
        return KeyLayout([pa.field("k", kind)]).fingerprint()

    strict = pa.struct([pa.field("a", pa.string(), nullable=False)])
    assert mark(strict) == mark(pa.struct([("a", pa.large_string())]))
    assert mark(pa.timestamp("us", "UTC")) == mark(pa.timestamp("us", "Asia/Tokyo"))
    assert mark(pa.list_(pa.field("element", pa.int8()))) == mark(pa.list_(pa.int8()))


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (pa.float16(), "halffloat"),
        (pa.list_(pa.int8(), 3), "fixed_size_list"),
        (pa.struct([("x", pa.list_(pa.float16()))]), "in it: halffloat"),
        (pa.dense_union([pa.field("a", pa.int8())]), "union"),
    ],
)
def test_types_that_cannot_be_keys_are_named(kind: pa.DataType, named: str) -> None:
    with pytest.raises(PlanError, match=f"'colour'.*{re.escape(named)}"):
        KeyLayout([pa.field("colour", kind)])


def test_layouts_that_make_no_sense_are_refused() -> None:
    number = pa.field("n", pa.int64())
    with pytest.raises(PlanError, match="twice"):
        KeyLayout([number], sub=["n"])
    for key_groups in (0, (1 << 16) + 1):
        with pytest.raises(PlanError, match=str(key_groups)):
            KeyLayout([number], key_groups=key_groups)


def test_columns_that_do_not_fit_are_refused() -> None:
    layout = KeyLayout([pa.field("n", pa.int64(), nullable=False)], sub=["w"])
    numbers, slot = pa.array([1, 2]), [np.zeros(2, np.int64)]
    cases = [
        ([numbers, numbers], slot, "got 2 key and 1 sub-key"),
        ([numbers], [], "got 1 key and 0 sub-key"),
        ([pa.array(["a", "b"])], slot, "'n' has type string, the keys int64"),
        ([numbers[1:]], slot, "'n' has 1 rows of 2"),
        ([numbers], [slot[0][:1]], "'w' has 1 rows of 2"),
        ([pa.array([1, None])], slot, "'n' is declared never to be null"),
        ([pa.chunked_array([numbers])], slot, "chunked"),
    ]
    for columns, sub, message in cases:
        with pytest.raises(StateError, match=message):
            layout.encode(columns, hashes(2), sub)
