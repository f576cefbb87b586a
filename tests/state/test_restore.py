"""From a table into captures and back into a table."""

import os
import shutil
import signal
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import CheckpointError, SchemaChanged, StateError, StateMissing
from anabranch.state import schema as types
from anabranch.state.capture import Capture, CheckpointSchema, capture
from anabranch.state.checkpoint import read, write
from anabranch.state.groups import KeyGroups, assign
from anabranch.state.keys import KeyLayout
from anabranch.state.partition import merge, partition
from anabranch.state.restore import advance, restore
from anabranch.state.table import StateTable, TableLayout
from anabranch.units import Version

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
GROUPS = 8
ALL = KeyGroups.all(GROUPS)
VALUES = types.schema(
    count=types.int64,
    small=types.uint8,
    share=types.float32,
    flag=types.bool_,
    at=types.timestamp,
    pair=types.vector(types.float64, 2),
    flags=types.vector(types.bool_, 3),
    note=types.string,
    raw=types.binary,
)
LAYOUT = TableLayout(
    KeyLayout(
        [
            pa.field("word", pa.string()),
            pa.field("n", pa.int32()),
            pa.field("tags", pa.list_(pa.string())),
        ],
        ["slot"],
        GROUPS,
    ),
    VALUES,
    timers=True,
)
Key = tuple[str | None, int | None, tuple[str, ...] | None, int]
Value = tuple[Any, ...]

USER_KEYS: list[tuple[str | None, int | None, tuple[str, ...] | None]] = [
    (word, n, tags)
    for word in (None, "", "a", "river")
    for n in (None, 0, -1)
    for tags in (None, (), ("x", "yy"))
]


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir=MEMORY))
    yield made
    shutil.rmtree(made)


def keys_of(keys: list[Key]) -> Any:
    """Few hashes for many keys: nearly every lookup meets a key of the same hash."""
    hashes = [zlib.crc32(repr(key[:3]).encode()) % 13 for key in keys]
    columns = [
        pa.array([key[0] for key in keys], pa.string()),
        pa.array([key[1] for key in keys], pa.int32()),
        pa.array([key[2] for key in keys], pa.list_(pa.string())),
    ]
    sub = [np.array([key[3] for key in keys], np.int64)]
    return LAYOUT.key.encode(columns, np.array(hashes, np.uint64), sub)


def value_of(seed: int) -> Value:
    pair, flags = (seed / 3, -float(seed)), (seed % 2 == 0, True, seed % 3 == 0)
    note = None if seed % 4 == 0 else "ä" * (seed % 9)
    raw = None if seed % 5 == 0 else bytes([seed % 256]) * (seed % 7)
    timer = None if seed % 3 else seed * 7
    return (seed - 2**62, seed % 256, seed / 4, seed % 2 == 1, -seed, pair, flags, note, raw, timer)


class Run:
    """A table that goes through versions, and a dictionary that says what it must hold."""

    def __init__(self, folder: Path) -> None:
        self.table = StateTable.create(folder, LAYOUT)
        self.model: dict[Key, Value] = {}
        self.version = -1

    def step(
        self, changes: dict[Key, int | None], base: int | None, captured: bool = True
    ) -> Capture | None:
        """One version: keys get the value of a seed, or are deleted."""
        self.version += 1
        table, taken = self.table, None
        with table.lock(0):
            table.begin(Version(self.version), 0)
            gone = [key for key, seed in changes.items() if seed is None and key in self.model]
            if gone:
                table.delete(table.find(keys_of(gone)))
            kept = {key: value_of(seed) for key, seed in changes.items() if seed is not None}
            if kept:
                put(table, kept)
            for key in gone:
                del self.model[key]
            self.model |= kept
            if captured:
                since = None if base is None else Version(base)
                taken = capture(table, "counter", 0, groups=ALL, base=since)
                table.mark_clean()
            table.finish()
        return taken


def put(table: StateTable, values: dict[Key, Value]) -> None:
    rows = table.rows(keys_of(list(values)))
    columns = list(zip(*values.values(), strict=True))
    for column, given_values in zip(VALUES, columns, strict=False):
        table.set(column.name, rows, list(given_values))
    times = columns[-1]
    timed = np.array([time is not None for time in times])
    table.clear_timer(rows[~timed])
    table.set_timer(rows[timed], np.array([t for t in times if t is not None], np.int64))


def content(table: StateTable) -> dict[Key, Value]:
    rows = table.live()
    keys = [column.to_pylist() for column in table.keys(rows)]
    values = [table.get(column.name, rows).tolist() for column in VALUES]
    values.append(table.timers(rows).to_pylist())
    found = {}
    for (word, n, tags, slot), value in zip(
        zip(*keys, strict=True), zip(*values, strict=True), strict=True
    ):
        key = (word, n, None if tags is None else tuple(tags), slot)
        found[key] = tuple(tuple(v) if isinstance(v, list) else v for v in value)
    assert len(found) == table.count
    return found


def reopened(folder: Path) -> StateTable:
    table = StateTable.open(folder, LAYOUT)
    table.validate()
    return table


KEYS = st.tuples(st.sampled_from(USER_KEYS), st.integers(0, 1)).map(lambda k: (*k[0], k[1]))
CHANGES = st.dictionaries(KEYS, st.none() | st.integers(0, 200), max_size=12)
STEPS = st.lists(st.tuples(CHANGES, st.sampled_from(["full", "changes", "none"])), max_size=6)


@settings(max_examples=40)
@given(CHANGES, STEPS, st.integers(1, 3))
def test_a_restored_chain_is_the_table(
    first: dict[Key, int | None], steps: list[tuple[dict[Key, int | None], str]], instances: int
) -> None:
    """Full captures, changes, versions without any; whole, and partitioned over instances."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        run = Run(Path(folder) / "run")
        taken = run.step(first, None)
        captures, last, expected = [taken], 0, dict(run.model)
        for changes, kind in steps:
            base = None if kind == "full" else last
            taken = run.step(changes, base, captured=kind != "none")
            if taken is not None:
                captures, last, expected = [*captures, taken], run.version, dict(run.model)
        files = [read(write(c), name="f", schema=CheckpointSchema.of(LAYOUT)) for c in captures]

        together = {}
        routing = dict(enumerate(assign(GROUPS, instances)))
        for instance, part in partition(files, routing).items():
            place = Path(folder) / str(instance)
            restore(place, LAYOUT, part)
            table = reopened(place)
            assert table.version == last
            assert [len(rows) for rows in table.dirty()] == [0, 0]
            rows = table.live()
            assert KeyGroups.of(table.groups(rows)) <= routing[instance]
            together |= content(table)
            table.close()
        assert together == expected

        place = Path(folder) / "whole"
        restore(place, LAYOUT, captures)
        table = reopened(place)
        assert content(table) == expected
        again = capture(table, "counter", 0, groups=ALL, base=None)
        merged = merge(captures)
        assert sorted(map(repr, again.rows.to_pylist())) == sorted(
            map(repr, merged.rows.to_pylist())
        )
        table.close()
        run.table.close()


@settings(max_examples=40)
@given(
    CHANGES,
    st.lists(st.tuples(CHANGES, st.booleans()), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_changes_bring_a_restored_table_to_the_present(
    first: dict[Key, int | None],
    steps: list[tuple[dict[Key, int | None], bool]],
    instances: int,
    at_once: int,
) -> None:
    """The changes since it was restored, several captures at a time, after a batch undone."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        run = Run(Path(folder) / "run")
        full = run.step(first, None)
        assert full is not None
        captures, last = [], 0
        for number, (changes, captured) in enumerate(steps):
            taken = run.step(changes, last, captured=captured or number == len(steps) - 1)
            if taken is not None:
                captures, last = [*captures, taken], run.version
        together = {}
        routing = dict(enumerate(assign(GROUPS, instances)))
        for instance, groups in routing.items():
            place = Path(folder) / str(instance)
            restore(place, LAYOUT, partition([full], {instance: groups})[instance])
            table = reopened(place)
            with table.lock(0):
                table.begin(Version(1), 1)
                put(table, {(*USER_KEYS[0], 9): value_of(3)})
                table.finish()
                table.rollback()
                for start in range(0, len(captures), at_once):
                    some = captures[start : start + at_once]
                    advance(table, some, groups, some[-1].version, 2)
            table.validate()
            assert table.version == last
            assert [len(rows) for rows in table.dirty()] == [0, 0]
            together |= content(table)
            table.close()
        assert together == run.model
        run.table.close()


def test_only_changes_since_its_version_bring_a_table_further(folder: Path) -> None:
    run = Run(folder / "run")
    full = run.step({(*USER_KEYS[0], 0): 1}, None)
    changes = run.step({(*USER_KEYS[1], 0): 1}, 0)
    late = run.step({(*USER_KEYS[1], 0): 2}, 1)
    assert full
    assert changes
    assert late
    restore(folder / "a", LAYOUT, [full])
    table = reopened(folder / "a")
    with table.lock(0):
        with pytest.raises(CheckpointError, match=r"groups 0-7 to version 0; .* at version 2"):
            advance(table, [late], ALL, Version(2), 0)
        with pytest.raises(CheckpointError, match=r"groups 0-7 to version 0; .* at version 1"):
            advance(table, [full], ALL, Version(1), 0)
        assert table.version == 0
        advance(table, [changes, late], ALL, Version(2), 0)
        assert (table.version, table.previous) == (2, 0)
    assert content(table) == run.model
    table.close()
    run.table.close()


def test_a_restored_table_goes_on(folder: Path) -> None:
    """Changes taken from it build on the version it was restored at; hashes and groups are kept."""
    run = Run(folder / "run")
    keys: list[Key] = [(*key, 0) for key in USER_KEYS]
    first = run.step(dict.fromkeys(keys, 7), None)
    assert first is not None
    restore(folder / "a", LAYOUT, [first])
    run.table.close()
    run.table = reopened(folder / "a")
    second = run.step({keys[0]: 9, keys[1]: None, (*USER_KEYS[0], 5): 1}, 0)
    assert second is not None
    assert second.rows.num_rows == 3
    run.table.validate()
    restore(folder / "b", LAYOUT, [first, second])
    table = reopened(folder / "b")
    assert content(table) == run.model
    table.close()
    run.table.close()


def test_a_restored_table_cannot_be_rolled_back(folder: Path) -> None:
    """The version before it is not an empty table: it is not there."""
    run = Run(folder / "run")
    run.step({(*USER_KEYS[0], 0): 1}, None)
    taken = run.step({(*USER_KEYS[1], 0): 1}, None)
    assert taken is not None
    restore(folder / "a", LAYOUT, [taken])
    table = reopened(folder / "a")
    assert (table.version, table.previous, table.unfinished) == (1, None, None)
    with table.lock(0), pytest.raises(StateMissing):
        table.begin(Version(1), 0)
    with table.lock(0), pytest.raises(StateMissing):
        table.rollback()
    assert table.count == 2
    table.close()
    run.table.close()


def test_restore_refuses(folder: Path) -> None:
    run = Run(folder / "run")
    full = run.step({(*USER_KEYS[0], 0): 1}, None)
    changes = run.step({(*USER_KEYS[1], 0): 1}, 0)
    late = run.step({(*USER_KEYS[1], 0): 2}, 1)
    assert full
    assert changes
    assert late
    place = folder / "a"
    with pytest.raises(CheckpointError, match="only the changes since version 0"):
        restore(place, LAYOUT, [changes])
    with pytest.raises(CheckpointError, match="does not follow on version 0"):
        restore(place, LAYOUT, [full, late])
    other = TableLayout(LAYOUT.key, types.schema(count=types.int64), timers=True)
    with pytest.raises(SchemaChanged, match="not word string"):
        restore(place, other, [full, changes])
    with pytest.raises(StateError, match="already exists"):
        restore(folder / "run", LAYOUT, [full])
    assert sorted(path.name for path in folder.iterdir()) == ["run"]
    run.table.close()


def test_a_failed_restore_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(folder / "run")
    full = run.step({(*USER_KEYS[0], 0): 1}, None)
    assert full
    for step in (
        "append",
        "set",
        "set_timer",
        "reindex",
        "mark_clean",
        "finish",
        "forget_previous",
    ):

        def failing(*_: object) -> None:
            raise OSError("no more")

        with monkeypatch.context() as patch:
            patch.setattr(StateTable, step, failing)
            with pytest.raises(OSError, match="no more"):
                restore(folder / "a", LAYOUT, [full])
        assert sorted(path.name for path in folder.iterdir()) == ["run"]
    run.table.close()


def test_a_killed_restore_is_no_table(folder: Path) -> None:
    run = Run(folder / "run")
    full = run.step({(*key, 0): 5 for key in USER_KEYS}, None)
    assert full
    steps = ("append", "set_timer", "reindex", "mark_clean", "finish", "forget_previous", "close")
    for step in steps:
        if (child := os.fork()) == 0:
            real = getattr(StateTable, step)

            def killed(*given: Any, real: Any = real) -> None:
                real(*given)
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(StateTable, step, killed)
            restore(folder / "a", LAYOUT, [full])
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert not (folder / "a").exists()
        with pytest.raises(StateMissing):
            StateTable.open(folder / "a", LAYOUT)
    restore(folder / "a", LAYOUT, [full])
    table = reopened(folder / "a")
    assert content(table) == run.model
    assert sorted(path.name for path in folder.iterdir()) == ["a", "run"]
    table.close()
    run.table.close()


def test_a_capture_shares_no_memory_with_the_table(folder: Path) -> None:
    run = Run(folder / "run")
    keys: list[Key] = [(*key, 0) for key in USER_KEYS]
    taken = run.step(dict.fromkeys(keys, 7), None)
    assert taken is not None
    before = taken.rows.to_pylist()
    for seed in (8, 9, 10):
        run.step(dict.fromkeys(keys, seed) | dict.fromkeys(keys[:5]), None)
    assert taken.rows.to_pylist() == before
    run.table.close()
