"""The index: keys that look alike, segments that grow and shrink."""

from __future__ import annotations

from pathlib import Path
from random import Random
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_tools import Hash, decoded, encode, same, same_tag, scattered, table_of

from anabranch.kernels import index as kernels
from anabranch.kernels import segments
from anabranch.state import index, schema
from anabranch.state.keys import KeyBatch, KeyLayout
from anabranch.state.table import StateTable, TableLayout
from anabranch.units import Version

PLAIN = TableLayout(KeyLayout([pa.field("key", pa.int64(), nullable=False)]), schema.schema())


def plain(numbers: np.ndarray, hashes: np.ndarray) -> KeyBatch:
    return PLAIN.key.encode([pa.array(numbers.astype(np.int64))], hashes.astype(np.uint64))


def test_tags_of_different_hashes_can_be_the_same() -> None:
    hashes = {same_tag((str(i), 0)) for i in range(50)}
    assert len(hashes) == 50
    assert len({int(segments.tag_of(np.uint64(hash_))) for hash_ in hashes}) == 1


@pytest.mark.parametrize("hashing", [scattered, same, same_tag])
def test_different_keys_never_share_a_row(folder: Path, hashing: Hash) -> None:
    # Parts of different length, with the same bytes when put together, and null.
    names = [None, *("a" * i for i in range(20)), *("b" + "a" * i for i in range(20)), "ab"]
    keys = [(name, window) for name in names for window in (0, 1, -1)]
    table = table_of(folder)
    table.begin(Version(0), 1)
    at = table.rows(encode(keys + keys, hashing))
    assert len(set(at.tolist())) == len(keys)
    assert np.array_equal(at[: len(keys)], at[len(keys) :])
    assert decoded(table, at) == keys + keys
    table.delete(at[1 : len(keys) : 2])
    assert table.find(encode(keys[1::2], hashing)).max() == -1
    assert np.array_equal(table.find(encode(keys[::2], hashing)), at[: len(keys) : 2])
    table.finish()
    table.validate()
    table.destroy()


def test_parts_of_a_key_do_not_run_into_each_other(folder: Path) -> None:
    fields = [pa.field("one", pa.string()), pa.field("two", pa.string())]
    layout = TableLayout(KeyLayout(fields), schema.schema(n=schema.int64))
    table = StateTable.create(folder / "t", layout)
    pairs = [("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc"), ("abc", None), (None, "abc")]
    columns = [pa.array(values, pa.string()) for values in zip(*pairs, strict=True)]
    keys = layout.key.encode(columns, np.zeros(len(pairs), np.uint64))
    table.begin(Version(0), 1)
    at = table.rows(keys)
    assert sorted(at) == list(range(6))
    assert [column.to_pylist() for column in table.keys(at)] == [c.to_pylist() for c in columns]
    table.destroy()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=200), st.integers(0, 2**63))
def test_removal_leaves_every_other_key_to_be_found(
    steps: list[tuple[bool, int]], seed: int
) -> None:
    """Straight at the kernels, in one crowded segment, where removal has to close gaps."""
    random = Random(seed)
    slots = np.zeros(1 << 16, np.uint64)
    directory = np.zeros(segments.DIRECTORY_WORDS, np.int64)
    segments.clear(directory)
    head = np.zeros(64 * 3, np.uint64)
    tags = [random.randrange(1 << 6) | (5 << 22) for _ in range(31)]
    inverse = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
    hashes = np.array([(tag << 32) * inverse % (1 << 64) for tag in tags], np.uint64)
    numbers = np.arange(31, dtype=np.int64)
    present: dict[int, int] = {}
    free = np.arange(63, -1, -1, dtype=np.int32)
    count = 64
    nothing = np.zeros(8, np.uint8)

    def lookup(some: np.ndarray) -> np.ndarray:
        keys = plain(some, hashes[some])
        out, missing = np.zeros((2, len(some)), np.int64)
        kernels.find(slots, directory, head, 3, nothing, keys.hashes, keys.words,
                     keys.starts, keys.lens, keys.data, out, missing)  # fmt: skip
        return out

    for insert, number in steps:
        if insert and number not in present:
            some = np.array([number])
            keys = plain(some, hashes[some])
            out, born, revived = np.zeros((3, 1), np.int64)
            cursor = np.array([0, 64, count, 0, 0, 0, 0], np.int64)
            done = kernels.insert(
                slots, len(slots), directory, head, 3, nothing, nothing.view(np.uint64), free,
                keys.hashes, keys.groups, keys.words, keys.starts, keys.lens, keys.data,
                np.zeros(1, np.int64), cursor, out, born, revived, np.zeros((99, 2), np.int64),
            )  # fmt: skip
            assert done
            present[number] = int(out[0])
            count = int(cursor[2])
        elif not insert and number in present:
            row = np.array([present.pop(number)])
            assert segments.remove(slots, directory, head, 3, row) == 1
            head[row * 3 + 1] = 0
            free[count] = row[0]
            count += 1
        expected = [present.get(number, -1) for number in range(31)]
        assert lookup(numbers).tolist() == expected
        assert int(directory[segments.SEGMENTS : 2 * segments.SEGMENTS].sum()) == len(present)


def test_keys_of_one_group_are_spread_over_the_index(folder: Path) -> None:
    """All of them have the same remainder, as the keys of a small instance do."""
    table = StateTable.create(folder / "t", PLAIN)
    count = 50_000
    random = np.random.default_rng(1)
    hashes = random.integers(0, 1 << 57, count).astype(np.uint64) * np.uint64(128) + np.uint64(5)
    table.begin(Version(0), 1)
    table.rows(plain(np.arange(count), hashes))
    sizes = table._storage.index._directory[segments.SEGMENTS : segments.TAIL]
    assert sizes.sum() == count
    assert sizes.max() < 2 * count / segments.SEGMENTS
    tags = (hashes * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    homes = np.unique(tags & np.uint64(0xFFFF))
    assert len(homes) > 0.4 * (1 << 16)
    table.destroy()


def test_rebuild_and_shrink_keep_every_key(folder: Path) -> None:
    table = StateTable.create(folder / "t", PLAIN)
    count = 400_000
    hashes = np.random.default_rng(2).integers(0, 1 << 63, count).astype(np.uint64)
    keys = plain(np.arange(count), hashes)
    table.begin(Version(0), 1, track_dirty=False)
    at = table.rows(keys)
    table._storage.index.rebuild(count)
    assert np.array_equal(table.find(keys), at)
    large = table._storage.index._size()
    table.delete(at[4000:])
    table.finish()
    kept = keys.take(np.arange(4000))
    with mock.patch.object(index, "_REBUILD_ROWS", 0):  # as if it were too large for that
        for version in range(1, 40):
            table.begin(Version(version), 1, track_dirty=False)
            found = table.find(kept)
            assert np.array_equal(table.keys(found)[0].to_numpy(), np.arange(4000))
            table.finish()
    page_each = segments.SEGMENTS * 512
    assert table._storage.index._size() <= page_each < large
    table.begin(Version(40), 1, track_dirty=False)
    assert table._storage.index._size() < page_each / 8
    assert table.find(kept).min() >= 0
    assert table.find(keys.take(np.arange(4000, count))).max() == -1
    table.validate()
    table.destroy()


def test_an_index_at_the_end_of_its_array_is_made_anew(folder: Path) -> None:
    table = StateTable.create(folder / "t", PLAIN)
    table.begin(Version(0), 1)
    hashes = np.random.default_rng(3).integers(0, 1 << 63, 20_000).astype(np.uint64)
    first = table.rows(plain(np.arange(10_000), hashes[:10_000]))
    directory = table._storage.index._directory
    end = table._storage.arena.regions["index slots"].items
    directory[segments.TAIL] = end - 8
    second = table.rows(plain(np.arange(10_000, 20_000), hashes[10_000:]))
    assert directory[segments.TAIL] < end / 2
    assert np.array_equal(
        table.find(plain(np.arange(20_000), hashes)), np.concatenate([first, second])
    )
    table.validate()
    table.destroy()
