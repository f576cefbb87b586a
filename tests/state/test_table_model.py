"""The table against a dictionary, under everything that can be done to it."""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from table_tools import (
    LAYOUT,
    Hash,
    content,
    decoded,
    eager_housekeeping,
    encode,
    same,
    same_tag,
    scattered,
)

from anabranch.errors import StateError, StateFull, StateMissing
from anabranch.state import maintenance
from anabranch.state.table import StateTable
from anabranch.units import Version

NEW = (0, None, 7, (0.0, 0.0, 0.0), None, None)
keys = st.lists(
    st.tuples(st.sampled_from([None, "", "a", "b", "long " * 9]), st.integers(0, 4)), max_size=12
)
texts = st.one_of(st.none(), st.text(max_size=3), st.sampled_from(["x" * 20, "y" * 100]))
times = st.one_of(
    st.integers(-5, 5), st.integers(0, 1 << 20), st.integers(1 << 50, (1 << 50) + (1 << 42))
)


class Model:
    """What the table should have, as dictionaries."""

    def __init__(self) -> None:
        self.rows: dict[Any, tuple[Any, ...]] = {}
        self.dirty: set[Any] = set()


class TableMachine(RuleBasedStateMachine):
    """One table, in and out of versions, with crashes that lose everything in the process."""

    hashing: Hash = staticmethod(scattered)

    def __init__(self) -> None:
        super().__init__()
        self.housekeeping = eager_housekeeping()
        self.housekeeping.__enter__()
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.path = Path(self.folder.name) / "table"
        self.now = Model()
        self.before = Model()
        self.touched: set[Any] = set()

    @initialize()
    def create(self) -> None:
        self.table = StateTable.create(self.path, LAYOUT)
        self.begin(0)

    def rows(self, names: list[Any]) -> np.ndarray:
        found = self.table.rows(encode(names, self.hashing))
        for key in names:
            if key not in self.now.rows:
                self.now.rows[key] = NEW
                self.touch(key)
        return found

    def touch(self, key: Any) -> None:
        self.touched.add(key)
        self.now.dirty.add(key)

    def store(self, name: str, at: np.ndarray, values: list[Any]) -> bool:
        """Set values; if the ring, which is small here, has no room, go back and say so."""
        try:
            self.table.set(name, at, values)
        except StateFull:
            with pytest.raises(StateError, match="roll it back"):
                self.table.finish()
            self.go_back(reopen=False, explicit=True, finish=False)
            return False
        return True

    def update(self, key: Any, column: int, value: Any) -> None:
        row = list(self.now.rows[key])
        row[column] = value
        self.now.rows[key] = tuple(row)
        self.touch(key)

    # Versions: the machine is always in one

    def begin(self, version: int) -> None:
        self.table.begin(Version(version), 1)
        self.version = version
        self.before = copy.deepcopy(self.now)
        self.touched = set()

    @rule(
        turns=st.integers(1, 4),
        checkpoint=st.booleans(),
        track=st.booleans(),
        reopen=st.booleans(),
    )
    def go_on(self, turns: int, checkpoint: bool, track: bool, reopen: bool) -> None:
        for _ in range(turns):
            if checkpoint:
                self.checkpoint()
            if not track:
                self.table.rollback()
                self.now = self.before
                self.table.begin(Version(self.version), 1, track_dirty=False)
                self.now.dirty = set()
            self.table.finish()
            assert (self.table.version, self.table.previous) == (self.version, self.version - 1)
            assert self.table.unfinished is None
            if reopen:
                self.table.close()
                self.table = StateTable.open(self.path, LAYOUT)
            self.check()
            self.begin(self.version + 1)

    @rule(reopen=st.booleans(), explicit=st.booleans(), finish=st.booleans())
    def go_back(self, reopen: bool, explicit: bool, finish: bool) -> None:
        """A crash, an explicit roll-back, or a finished version that is repeated."""
        if finish:
            self.table.finish()
        if reopen:
            self.table = StateTable.open(self.path, LAYOUT)
        self.now = self.before
        if explicit:
            self.table.rollback()
            assert self.table.version == self.version - 1
            assert self.table.previous is None
            self.check()
        self.begin(self.version)

    @rule()
    def repeat_without_changes(self) -> None:
        """After a roll-back there is no journal, and the same version can be begun all the same."""
        self.table.rollback()
        self.now = self.before
        with pytest.raises(StateMissing):
            self.table.rollback()
        self.begin(self.version)

    # Rows

    @rule(names=keys, values=st.lists(texts, min_size=12, max_size=12))
    def upsert(self, names: list[Any], values: list[str | None]) -> None:
        at = self.rows(names)
        values = values[: len(names)]
        raw = [None if value is None else value.encode()[::-1] for value in values]
        if not (self.store("text", at, values) and self.store("raw", at, raw)):
            return
        self.table.set("n", at, np.arange(len(names)))
        for i, (key, value) in enumerate(zip(names, values, strict=True)):
            self.update(key, 1, value)
            self.update(key, 4, None if value is None else value.encode()[::-1])
            self.update(key, 0, i)

    @rule(names=keys)
    def only_look_up_or_make(self, names: list[Any]) -> None:
        at = self.rows(names)
        assert decoded(self.table, at) == names

    @rule(names=keys)
    def add_in_place(self, names: list[Any]) -> None:
        at = self.rows(names)
        self.table.touch(at)
        np.add.at(self.table.column("n"), at, 3)
        self.table.column("numbers")[at, 1] = 1.5
        for key in names:
            self.update(key, 0, self.now.rows[key][0] + 3)
            self.update(key, 3, (0.0, 1.5, 0.0))

    @rule(names=keys)
    def delete(self, names: list[Any]) -> None:
        at = self.table.find(encode(names, self.hashing))
        self.table.delete(at[at >= 0])
        for key in names:
            if self.now.rows.pop(key, None) is not None:
                self.touch(key)

    @rule(names=keys, given=st.lists(times, min_size=12, max_size=12))
    def set_timers(self, names: list[Any], given: list[int]) -> None:
        at = self.rows(names)
        given = given[: len(names)]
        self.table.set_timer(at, np.array(given, np.int64))
        for key, time in zip(names, given, strict=True):
            self.update(key, 5, time)

    @rule(names=keys)
    def clear_timers(self, names: list[Any]) -> None:
        at = self.table.find(encode(names, self.hashing))
        self.table.clear_timer(at[at >= 0])
        for key in names:
            if key in self.now.rows:
                self.update(key, 5, None)

    @rule(keep=st.integers(0, 3))
    def delete_nearly_all(self, keep: int) -> None:
        self.delete(list(self.now.rows)[keep:])

    @rule(length=st.integers(0, 500))
    def fill(self, length: int) -> None:
        names = [(name, window) for name in (None, "", "a", "b") for window in range(8)]
        at = self.rows(names)
        if self.store("text", at, ["x" * length] * len(at)):
            for key in names:
                self.update(key, 1, "x" * length)

    @rule(upto=times)
    def due(self, upto: int) -> None:
        found = decoded(self.table, self.table.due(upto))
        timed = [(row[5], key) for key, row in self.now.rows.items() if row[5] is not None]
        expected = [key for time, key in timed if time <= upto]
        assert sorted(found, key=repr) == sorted(expected, key=repr)
        order = [(self.now.rows[key][5], self.hashing(key)) for key in found]
        assert order == sorted(order)

    @rule()
    def checkpoint(self) -> None:
        self.check_dirty()
        self.table.mark_clean()
        self.now.dirty = set()

    # What always holds

    @invariant()
    def is_as_expected(self) -> None:
        if hasattr(self, "table"):
            self.check()
            found = decoded(self.table, self.table.changed())
            touched = [key for key in self.touched if key in self.now.rows]
            assert sorted(found, key=repr) == sorted(touched, key=repr)

    def check(self) -> None:
        self.table.validate()
        assert content(self.table) == self.now.rows
        self.check_dirty()

    def check_dirty(self) -> None:
        live, gone = self.table.dirty()
        expected = {key for key in self.now.dirty if key in self.now.rows}
        found = decoded(self.table, live)
        assert len(found) == len(set(found))
        assert set(found) == expected
        ended = decoded(self.table, gone)
        assert len(ended) == len(set(ended))
        assert set(ended) == self.now.dirty - expected

    def teardown(self) -> None:
        self.table.close()
        self.folder.cleanup()
        self.housekeeping.__exit__(None, None, None)


class SameHashMachine(TableMachine):
    hashing = staticmethod(same)


class SameTagMachine(TableMachine):
    hashing = staticmethod(same_tag)


def long_walk(machine: TableMachine, seed: int, steps: int) -> None:
    """Many more steps than hypothesis takes, with all that only happens late: rows released and
    moved, heaps cleaned, rings gone round."""
    print(f"seed {seed}")
    random = Random(seed)
    texts = [None, "", "é", "x" * 20, "y" * 100]

    def names() -> list[Any]:
        pool = [None, "", "a", "b", "c" * 30]
        return [(random.choice(pool), random.randrange(9)) for _ in range(random.randrange(13))]

    def some_times() -> list[int]:
        return [random.choice([5, 1 << 20, 1 << 50]) + random.randrange(99) for _ in range(12)]

    def flag() -> bool:
        return random.random() < 0.5

    actions = [
        lambda: machine.upsert(names(), random.choices(texts, k=12)),
        lambda: machine.upsert(names(), random.choices(texts, k=12)),
        lambda: machine.only_look_up_or_make(names()),
        lambda: machine.add_in_place(names()),
        lambda: machine.delete(names()),
        lambda: machine.delete_nearly_all(random.randrange(6)),
        lambda: machine.fill(random.randrange(120)),
        lambda: machine.set_timers(names(), some_times()),
        lambda: machine.clear_timers(names()),
        lambda: machine.due(some_times()[0]),
        *3 * [lambda: machine.go_on(random.randrange(1, 4), random.random() < 0.7, True, flag())],
        lambda: machine.go_on(1, flag(), False, flag()),
        lambda: machine.go_back(flag(), flag(), flag()),
        lambda: machine.repeat_without_changes(),
    ]
    try:
        machine.create()
        for _ in range(steps):
            random.choice(actions)()
            machine.is_as_expected()
    finally:
        machine.teardown()


@pytest.mark.parametrize("machine", [TableMachine, SameHashMachine, SameTagMachine])
def test_agrees_with_a_dictionary_on_long_walks(machine: type[TableMachine]) -> None:
    done: Counter[str] = Counter()

    def counted(of: Any, name: str) -> Any:
        original = getattr(of, name)

        def call(*args: Any) -> Any:
            done[name] += 1
            return original(*args)

        return mock.patch.object(of, name, call)

    with ExitStack() as stack:
        for name in ("release", "compact", "clean", "_renumber"):
            stack.enter_context(counted(maintenance, name))
        for seed in range(3):
            long_walk(machine(), seed, steps=250)
    assert min(done.values()) > 20, f"too little happened to be a test: {done}"


@pytest.mark.parametrize("machine", [TableMachine, SameHashMachine, SameTagMachine])
def test_agrees_with_a_dictionary(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=25, stateful_step_count=30, deadline=None)
    )
