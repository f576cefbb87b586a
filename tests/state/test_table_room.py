"""How much room a table takes, and what it does when there is none."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from anabranch.errors import StateError, StateFull
from anabranch.state import maintenance, schema
from anabranch.state.keys import KeyLayout
from anabranch.state.table import StateTable, TableLayout
from anabranch.units import Version

NUMBERS = TableLayout(
    KeyLayout([pa.field("key", pa.int64(), nullable=False)]),
    schema.schema(n=schema.int64, text=schema.string),
)


def numbered(numbers: np.ndarray) -> object:
    hashes = numbers.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    return NUMBERS.key.encode([pa.array(numbers)], hashes ^ (hashes >> np.uint64(31)))


def test_a_full_disk_is_an_error_and_not_a_crash(small_disk: Path) -> None:
    table = StateTable.create(small_disk / "t", NUMBERS)
    expected = 0
    with pytest.raises(StateFull, match=rf"{small_disk}.*bytes are free"):  # noqa: PT012
        for version in range(100):
            table.begin(Version(version), 1)
            at = table.rows(numbered(np.arange(version * 5000, version * 5000 + 5000)))
            table.set("text", at, ["x" * 20] * 5000)
            table.finish()
            expected += 5000
    with pytest.raises(StateError, match="roll it back"):
        table.rows(numbered(np.arange(1)))
    assert expected > 0
    table.rollback()
    table.validate()
    assert table.count == expected
    # There is a way out: what is deleted gives its room to what comes next.
    version = Version(table.version + 1)
    table.begin(version, 1, track_dirty=False)
    table.delete(table.live()[:300])
    table.finish()
    table.begin(Version(version + 1), 1)
    table.set("text", table.rows(numbered(-1 - np.arange(300))), ["y"] * 300)
    table.finish()
    table.validate()
    assert table.count == expected
    table.close()


def test_no_room_for_a_table_at_all(folder: Path) -> None:
    full = OSError(28, "No space left on device")
    with mock.patch("os.posix_fallocate", side_effect=full), pytest.raises(StateFull):
        StateTable.create(folder / "t", NUMBERS)
    assert not (folder / "t").exists()


def test_no_room_for_housekeeping_does_not_stop_a_version(folder: Path) -> None:
    table = StateTable.create(folder / "t", NUMBERS)
    table.begin(Version(0), 1, track_dirty=False)
    at = table.rows(numbered(np.arange(100)))
    table.delete(at[10:])
    table.finish()
    with (
        mock.patch.object(maintenance, "compact", side_effect=StateFull("full")),
        mock.patch.object(maintenance, "_COMPACT_FROM", 4),
    ):
        table.begin(Version(1), 1)
    table.validate()
    assert table.count == 10
    assert np.array_equal(table.find(numbered(np.arange(10))), at[:10])
    table.close()


def test_deleted_rows_give_their_memory_back(folder: Path) -> None:
    table = StateTable.create(folder / "t", NUMBERS)
    count = 300_000
    table.begin(Version(0), 1, track_dirty=False)
    at = table.rows(numbered(np.arange(count)))
    table.set("n", at, np.arange(count))
    table.set("text", at, pa.array(np.arange(count)).cast(pa.string()))
    table.finish()
    full = table.bytes
    table.begin(Version(1), 1, track_dirty=False)
    table.delete(at[np.arange(count) % 100 > 0])
    table.finish()
    for version in range(2, 60):
        table.begin(Version(version), 1, track_dirty=False)
        kept = table.rows(numbered(np.arange(0, count, 100)))
        assert table.count == count // 100
        assert table.get("n", kept).tolist() == list(range(0, count, 100))
        table.finish()
    table.validate()
    assert table.get("text", kept).to_pylist() == [str(i) for i in range(0, count, 100)]
    assert kept.max() < 1 << 17, "rows were not moved down"
    assert table.bytes < full / 3
    table.close()


def test_overwritten_strings_give_their_memory_back(folder: Path) -> None:
    table = StateTable.create(folder / "t", NUMBERS)
    sizes = []
    for version in range(40):
        table.begin(Version(version), 1)
        at = table.rows(numbered(np.arange(2000)))
        table.set("text", at, [f"{version} {'x' * 500}"] * len(at))
        table.mark_clean()
        table.finish()
        sizes.append(table.bytes)
    table.validate()
    assert set(table.get("text", at).to_pylist()) == {f"39 {'x' * 500}"}
    assert max(sizes[20:]) < 1.3 * max(sizes[10:20]), "it grows with every version"
    assert sizes[-1] < 10 * 2000 * 500
    table.close()


def test_a_growing_table_never_rehashes_much_at_once(folder: Path) -> None:
    table = StateTable.create(folder / "t", NUMBERS)
    shares, before, batch = [], 0, 20_000
    for version in range(40):
        table.begin(Version(version), 1)
        table.rows(numbered(np.arange(version * batch, (version + 1) * batch)))
        table.finish()
        rehashed = table._storage.index.rehashed
        shares.append((rehashed - before) / table.count)
        before = rehashed
    # A table that doubles as a whole would rehash half of itself in one of these batches.
    growth = [1 / (version + 1) for version in range(40)]
    assert all(share <= 2.5 * grown for share, grown in zip(shares[10:], growth[10:], strict=True))
    assert sum(shares[10:]) > 0
    table.close()
