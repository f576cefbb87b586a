"""What a table promises, one promise at a time."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from table_tools import LAYOUT, content, decoded, eager_housekeeping, encode, table_of

from anabranch.errors import (
    Fenced,
    SchemaChanged,
    StateError,
    StateLocked,
    StateMissing,
)
from anabranch.state import capture as captures
from anabranch.state import schema
from anabranch.state.groups import KeyGroups
from anabranch.state.keys import KeyLayout
from anabranch.state.lock import locked
from anabranch.state.maintenance import NO_UPKEEP, Upkeep
from anabranch.state.table import StateTable, TableLayout
from anabranch.units import NO_VERSION, Version


@pytest.fixture
def table(folder: Path) -> Iterator[StateTable]:
    table = table_of(folder)
    yield table
    if not table.closed:
        table.validate()
        table.close()


# Making, opening, removing


def test_a_new_table_is_empty(table: StateTable) -> None:
    assert (table.version, table.previous, table.unfinished) == (NO_VERSION, None, None)
    assert table.count == 0
    assert table.live().tolist() == []
    assert table.find(encode([("a", 1)])).tolist() == [-1]
    assert table.groups_count().tolist() == [0] * 128


def test_create_refuses_an_existing_table(table: StateTable) -> None:
    with pytest.raises(StateError, match="already"):
        StateTable.create(table.folder, LAYOUT)
    assert [path.name for path in table.folder.iterdir()] == ["table"]


def test_open_needs_a_table(folder: Path) -> None:
    with pytest.raises(StateMissing, match="no state table"):
        StateTable.open(folder, LAYOUT)
    (folder / "table").write_bytes(b"something else")
    with pytest.raises(StateMissing, match="too short"):
        StateTable.open(folder, LAYOUT)
    (folder / "table").write_bytes(b"x" * (1 << 17))
    with pytest.raises(StateMissing, match="no state table"):
        StateTable.open(folder, LAYOUT)


def test_open_refuses_another_layout_and_names_both(table: StateTable) -> None:
    other = TableLayout(LAYOUT.key, schema.schema(n=schema.int32), timers=True)
    with pytest.raises(SchemaChanged, match=r"n int64, text string.*opened as.*n int32"):
        StateTable.open(table.folder, other)
    for same_values in (
        TableLayout(LAYOUT.key, LAYOUT.values, timers=False),
        TableLayout(KeyLayout([pa.field("name", pa.binary())], ["window"]), LAYOUT.values, True),
    ):
        with pytest.raises(SchemaChanged):
            StateTable.open(table.folder, same_values)


def test_a_table_made_in_place_of_another_is_not_mistaken_for_it(table: StateTable) -> None:
    StateTable.open(table.folder, LAYOUT).destroy()
    StateTable.create(table.folder, LAYOUT).close()
    with pytest.raises(StateMissing, match="open it again"):
        table.begin(Version(0), 1)


def test_destroy_removes_everything(table: StateTable) -> None:
    with table.lock(1):
        pass
    table.destroy()
    assert not table.folder.exists()


# Versions


def test_begin_wants_the_version_before(table: StateTable) -> None:
    with pytest.raises(StateMissing, match=r"needs the state of version 4.* has version -1"):
        table.begin(Version(5), 1)
    table.begin(Version(0), 1)
    table.finish()
    assert (table.version, table.previous) == (0, -1)
    with pytest.raises(StateMissing, match="has version 0 and can go back to -1"):
        table.begin(Version(2), 1)


def test_changes_need_a_version(table: StateTable) -> None:
    with pytest.raises(StateError, match="begin one first"):
        table.rows(encode([("a", 1)]))
    with pytest.raises(StateError, match="begin one first"):
        table.finish()


def test_a_table_can_start_at_any_version(folder: Path) -> None:
    table = StateTable.create(folder / "t", LAYOUT, version=Version(41))
    table.begin(Version(42), 1)
    table.finish()
    assert table.version == 42
    table.close()


def test_an_older_attempt_is_fenced_off(table: StateTable) -> None:
    zombie = StateTable.open(table.folder, LAYOUT)
    zombie.begin(Version(0), 3)
    zombie.rows(encode([("zombie", 1)]))
    table.begin(Version(0), 4)
    table.rows(encode([("a", 1)]))
    with pytest.raises(Fenced, match="attempt 4"):
        zombie.finish()
    table.finish()
    with pytest.raises(Fenced, match=r"attempt 4.*attempt 3 .*must give up"):
        zombie.begin(Version(1), 3)
    assert list(content(table)) == [("a", 1)]
    table.rollback()
    with pytest.raises(Fenced):
        table.begin(Version(0), 3)
    table.begin(Version(0), 4)


def test_the_fence_holds_although_the_version_did_not_fit(table: StateTable) -> None:
    with pytest.raises(StateMissing):
        table.begin(Version(7), 9)
    with pytest.raises(Fenced):
        table.begin(Version(0), 8)


def test_rollback_needs_a_journal(table: StateTable) -> None:
    with pytest.raises(StateMissing, match="no journal"):
        table.rollback()


# The lock


def _hold(folder: Path, held: object, end: object) -> None:
    with locked(folder, 10):
        held.set()  # type: ignore[attr-defined]
        end.wait(60)  # type: ignore[attr-defined]


def test_the_lock_keeps_another_process_out_until_it_dies(table: StateTable) -> None:
    fork = multiprocessing.get_context("fork")
    held, end = fork.Event(), fork.Event()
    holder = fork.Process(target=_hold, args=(table.folder, held, end), daemon=True)
    holder.start()
    assert held.wait(60)
    started = time.monotonic()
    with pytest.raises(StateLocked, match=f"process {holder.pid}"), table.lock(0.2):
        pass
    assert 0.2 <= time.monotonic() - started < 30
    holder.kill()
    holder.join()
    with table.lock(10):
        pass


def test_the_lock_is_held_by_one_of_two_tables_in_a_process(table: StateTable) -> None:
    other = StateTable.open(table.folder, LAYOUT)
    with table.lock(1), pytest.raises(StateLocked), other.lock(0.05):
        pass
    with other.lock(1):
        pass


def test_a_lock_on_a_removed_folder_is_no_lock(folder: Path) -> None:
    with locked(folder / "t", 1):
        (folder / "t" / "lock").unlink()
        with locked(folder / "t", 1):  # another file by now: taken, not waited for
            pass


# Rows and columns


def test_new_rows_have_defaults_also_in_used_places(table: StateTable) -> None:
    table.begin(Version(0), 1, track_dirty=False)
    at = table.rows(encode([("a", 1), ("b", 1)]))
    table.set("small", at, [1, 2])
    table.set("text", at, ["x", "y"])
    table.set_timer(at, np.array([5, 6]))
    table.delete(at)
    table.finish()
    table.begin(Version(1), 1)
    again = table.rows(encode([("c", 1), ("a", 1)]))
    assert sorted(again) == sorted(at)
    assert set(content(table).values()) == {(0, None, 7, (0.0, 0.0, 0.0), None, None)}


def test_row_numbers_are_checked(table: StateTable) -> None:
    table.begin(Version(0), 1)
    at = table.rows(encode([("a", 1)]))
    for bad in (np.array([-1]), at + 1):
        for call in (table.touch, table.delete, table.keys, table.clear_timer):
            with pytest.raises(IndexError, match="no row"):
                call(bad)
        with pytest.raises(IndexError, match="no row"):
            table.get("n", bad)
        with pytest.raises(IndexError, match="no row"):
            table.set("n", bad, [1])


def test_columns_are_checked(table: StateTable) -> None:
    table.begin(Version(0), 1)
    at = table.rows(encode([("a", 1)]))
    with pytest.raises(KeyError, match=r"no state column 'm'; there are \['n'"):
        table.get("m", at)
    with pytest.raises(StateError, match="variable length"):
        table.column("text")
    with pytest.raises(StateError, match="2 values for 1 rows"):
        table.set("text", at, ["a", "b"])


def test_vectors_and_views(table: StateTable) -> None:
    table.begin(Version(0), 1)
    at = table.rows(encode([("a", 1), ("b", 1), ("a", 1)]))
    table.set("numbers", at[:2], np.array([[1, 2, 3], [4, 5, 6]], np.float32))
    assert table.get("numbers", at).tolist() == [[1, 2, 3], [4, 5, 6], [1, 2, 3]]
    view = table.column("n")
    table.touch(at)
    view[at[1]] = 9
    assert table.get("n", at).tolist() == [0, 9, 0]


def test_any_text_array_can_be_set(table: StateTable) -> None:
    table.begin(Version(0), 1)
    at = table.rows(encode([("a", 1), ("b", 1)]))
    for values in (
        pa.array(["x", None], pa.large_string()),
        pa.chunked_array([["x"], [None]]),
        pa.array(["x", None]).dictionary_encode(),
        ["x", None],
        pa.array(["_", "x", None])[1:],
    ):
        table.set("text", at, pa.nulls(2))
        table.set("text", at, values)
        assert table.get("text", at).to_pylist() == ["x", None]
    assert table.get("text", at).type == pa.string()


def test_changed_is_in_order_of_first_touch_whatever_was_there_before(table: StateTable) -> None:
    table.begin(Version(0), 1)
    at = table.rows(encode([("old", 1), ("dead", 1), ("kept", 1)]))
    table.finish()
    table.begin(Version(1), 1)
    table.delete(at[1:2])
    table.finish()
    table.begin(Version(2), 1)
    keys = [("new", 1), ("dead", 1), ("old", 1), ("newer", 1), ("dead", 1), ("newest", 1)]
    rows = table.rows(encode(keys))
    # Only looking a row up does not change it.
    expected = [("new", 1), ("dead", 1), ("newer", 1), ("newest", 1)]
    assert decoded(table, table.changed()) == expected
    table.touch(rows)
    table.delete(rows[:1])
    assert decoded(table, table.changed()) == [*expected[1:], ("old", 1)]


def test_scan_gives_live_rows_that_match(table: StateTable) -> None:
    table.begin(Version(0), 1)
    at = table.rows(encode([("k", i) for i in range(1000)]))
    table.set("n", at, np.arange(1000))
    table.delete(at[::2])
    with mock.patch("anabranch.state.table._SCAN_ROWS", 64):
        found = table.scan(lambda columns: columns["n"] % 5 == 0)
    assert sorted(table.get("n", found)) == list(range(5, 1000, 10))
    assert len(table.scan(lambda columns: columns["n"] < 0)) == 0


def test_groups_and_hashes(table: StateTable) -> None:
    table.begin(Version(0), 1)
    keys = encode([("k", i) for i in range(500)])
    at = table.rows(keys)
    assert np.array_equal(table.hashes(at), keys.hashes)
    assert np.array_equal(table.groups(at), keys.groups)
    assert table.groups(at).dtype == np.uint16
    expected = np.bincount(keys.groups, minlength=128)
    assert np.array_equal(table.groups_count(), expected)


def test_dirty_starts_again_inside_a_version(table: StateTable) -> None:
    table.begin(Version(0), 1)
    at = table.rows(encode([("a", 1), ("b", 1)]))
    table.mark_clean()
    assert [rows.tolist() for rows in table.dirty()] == [[], []]
    table.set("n", at[:1], [1])
    live, gone = table.dirty()
    assert (live.tolist(), gone.tolist()) == (at[:1].tolist(), [])
    table.finish()
    table.begin(Version(1), 1)
    table.delete(at)
    live, gone = table.dirty()
    assert (live.tolist(), sorted(gone)) == ([], sorted(at))
    assert decoded(table, at) == [("a", 1), ("b", 1)]


def test_a_table_says_what_was_done_to_it(table: StateTable) -> None:
    def version(number: int, change: Callable[[], object]) -> Upkeep:
        table.begin(Version(number), 1)
        change()
        table.mark_clean()
        table.finish()
        return table.upkeep

    def fill() -> None:
        at = table.rows(encode([(f"k{i}", i) for i in range(200)]))
        table.set("text", at, ["a text that is not short"] * 200)

    with eager_housekeeping(ring=1 << 20):
        assert version(0, fill) == NO_UPKEEP
        assert version(1, lambda: table.delete(table.live()[20:])) == NO_UPKEEP
        done = [version(number, lambda: None) for number in range(2, 150)]
    assert sum(each.compacted_rows for each in done) == 200 - table._storage.header.load().rows > 0
    assert sum(each.cleaned_bytes for each in done) > 150 * 24
    assert done[-1] == NO_UPKEEP, "there is nothing left to do"
    table.validate()


def test_bytes_is_what_the_file_takes(table: StateTable) -> None:
    assert table.bytes == (table.folder / "table").stat().st_blocks * 512
    assert table.bytes < 2_000_000


def test_a_few_long_rows_are_captured_in_batches_of_the_usual_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short most rows are: the texts of a batch must fit into one Arrow array."""
    monkeypatch.setattr(captures, "_CHUNK_BYTES", 1 << 14)
    texts = ["short"] * 3000
    texts[1000:1100] = ["long" * 1000] * 100
    table = StateTable.create(tmp_path / "t", LAYOUT)
    with table.lock(0):
        table.begin(Version(0), 0)
        rows = table.rows(encode([(f"{n}", 0) for n in range(3000)]))
        table.set("text", rows, texts)
        taken = captures.capturing(table, "op", 0, groups=KeyGroups.all(128), base=None)
        batches = list(taken.batches())
        table.finish()
    assert max(batch.nbytes for batch in batches) < 4 << 14
    rows_of = pa.Table.from_batches(batches)
    assert sorted(rows_of["text"].to_pylist()) == sorted(texts)
    assert table.text_bytes(rows).tolist() == [len(text) for text in texts]
    table.close()
