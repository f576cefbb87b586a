"""Tables whose key groups leave, a bounded number of rows at a time, against a dictionary."""

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
    precondition,
    rule,
    run_state_machine_as_test,
)
from table_tools import LAYOUT, Key, content, decoded, eager_housekeeping, encode, scattered

from anabranch.errors import StateError
from anabranch.state import changes, maintenance
from anabranch.state.capture import capture
from anabranch.state.groups import KeyGroups
from anabranch.state.header import NONE
from anabranch.state.table import StateTable
from anabranch.units import Version

GROUPS = 128
ALL = KeyGroups.all(GROUPS)
NAMES = [None, "", "a", "b", "long " * 9]
keys = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 9)), max_size=25)
LOOK_AT = 2


def group(key: Key) -> int:
    return scattered(key) % GROUPS


def groups_of(names: list[Key]) -> KeyGroups:
    return KeyGroups.of([group(key) for key in names])


class Model:
    """What the table should have of the groups that stay, and what of the others there still is."""

    def __init__(self) -> None:
        self.rows: dict[Key, int] = {}
        self.dirty: set[Key] = set()
        self.clean = -1
        self.others: set[Key] = set()
        self.leaving = KeyGroups()
        self.told: int | None = None
        """What the last call to shed these groups has told."""
        self.whole = True
        """Whether the table has no rows but of the groups that stay, and of those that it sheds."""


class SheddingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.housekeeping = ExitStack()
        self.housekeeping.enter_context(eager_housekeeping(ring=1 << 17))
        self.housekeeping.enter_context(mock.patch.object(changes, "_LOOK_AT", LOOK_AT))
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.path = Path(self.folder.name) / "table"
        self.now = Model()

    @initialize()
    def create(self) -> None:
        self.table = StateTable.create(self.path, LAYOUT)
        self.begin(0)

    def begin(self, version: int) -> None:
        self.table.begin(Version(version), 1)
        self.version = version
        self.before = copy.deepcopy(self.now)
        self.gone_now: set[Key] = set()

    @property
    def staying(self) -> KeyGroups:
        return ALL - self.now.leaving

    @rule(names=keys, value=st.integers(0, 99))
    def put(self, names: list[Key], value: int) -> None:
        names = [key for key in names if group(key) in self.staying]
        at = self.table.rows(encode(names))
        self.table.set("n", at, np.full(len(at), value))
        self.table.set("text", at, ["x" * value] * len(at))
        self.table.set_timer(at, np.full(len(at), value + 1))
        self.now.rows |= dict.fromkeys(names, value)
        self.now.dirty |= set(names)

    @rule(names=keys)
    def delete(self, names: list[Key]) -> None:
        names = [key for key in names if key in self.now.rows]
        self.table.delete(self.table.find(encode(names)))
        for key in set(names):
            del self.now.rows[key]
            self.now.dirty.add(key)

    @rule(names=keys)
    def leave(self, names: list[Key]) -> None:
        """Groups are routed to another slice; their rows are not looked at from then on."""
        now, groups = self.now, groups_of(names)
        if groups <= now.leaving:
            return
        now.leaving |= groups
        now.told, now.whole = None, False
        now.others |= {key for key in now.rows if group(key) in groups}
        now.rows = {key: value for key, value in now.rows.items() if group(key) not in groups}
        now.dirty = {key for key in now.dirty if group(key) not in groups}

    @precondition(lambda self: hasattr(self, "now") and self.now.leaving)
    @rule(most=st.sampled_from([1, 1, 2, 5, 40]))
    def shed(self, most: int) -> None:
        now, count, rows = self.now, self.table.count, self.table._counters().rows
        left = self.table.shed(now.leaving, most)
        there = {key for key in decoded(self.table, self.table.live()) if key in now.others}
        assert count - self.table.count == len(now.others - there) <= most
        assert len(there) <= left
        if now.told is not None:
            last = min(now.told, rows)
            assert max(0, last - LOOK_AT * most) <= left <= max(0, last - 1), "no row is seen twice"
        self.gone_now |= now.others - there
        now.others, now.told, now.whole = there, left or None, True
        if left == 0:
            assert not there

    @precondition(lambda self: hasattr(self, "now") and self.now.leaving)
    @rule()
    def come_back(self) -> None:
        """All of them are gone, and their rows come from somewhere else again."""
        while self.table.shed(self.now.leaving, 40):
            pass
        self.now.others, self.now.told, self.now.whole = set(), None, True
        self.go_on(1, checkpoint=True, reopen=False)
        self.now.leaving = KeyGroups()

    @rule(turns=st.integers(1, 4), checkpoint=st.booleans(), reopen=st.booleans())
    def go_on(self, turns: int, checkpoint: bool, reopen: bool) -> None:
        for _ in range(turns):
            if checkpoint:
                self.check_captures()
                self.table.mark_clean()
                self.now.dirty, self.now.clean = set(), self.version
            self.table.finish()
            if reopen:
                self.table.close()
                self.table = StateTable.open(self.path, LAYOUT)
            self.check()
            self.begin(self.version + 1)

    @rule(reopen=st.booleans(), explicit=st.booleans(), finish=st.booleans())
    def go_back(self, reopen: bool, explicit: bool, finish: bool) -> None:
        if finish:
            self.table.finish()
        if reopen:
            self.table = StateTable.open(self.path, LAYOUT)
        # What leaves is not for the table to know: the coordinator goes on shedding.
        leaving, self.now = self.now.leaving, self.before
        others = {key for key in self.now.rows if group(key) in leaving}
        if leaving != self.now.leaving:
            self.now.told, self.now.whole = None, False
        self.now.leaving = leaving
        self.now.others |= others
        self.now.rows = {k: v for k, v in self.now.rows.items() if k not in others}
        self.now.dirty = {key for key in self.now.dirty if group(key) not in leaving}
        if explicit:
            self.table.rollback()
            self.check()
        self.begin(self.version)

    @invariant()
    def is_as_expected(self) -> None:
        if hasattr(self, "table"):
            self.check()

    def check(self) -> None:
        table, now = self.table, self.now
        table.validate()
        found = {key: row[0] for key, row in content(table).items()}
        assert found.keys() - now.rows.keys() == now.others
        assert {key: found[key] for key in now.rows} == now.rows
        due = decoded(table, table.due(1 << 40))
        assert set(due) == now.rows.keys() | now.others
        assert table.clean_since == now.clean
        live, gone = table.dirty()
        kept = [len(table.of_groups(some, self.staying)) for some in (live, gone)]
        assert table.dirty_count <= len(live) + len(gone)
        assert sum(kept) == len(now.dirty) <= table.dirty_count

    @rule()
    def check_captures(self) -> None:
        table, now = self.table, self.now
        for whole in (False, True) if now.whole else (False,):
            full = capture(table, "op", 0, groups=self.staying, base=None, whole=whole)
            assert rows_of(full) == (now.rows, set())
            base = Version(now.clean)
            since = capture(table, "op", 0, groups=self.staying, base=base, whole=whole)
            changed = {key: now.rows[key] for key in now.dirty if key in now.rows}
            assert rows_of(since) == (changed, now.dirty - changed.keys())
            assert since.groups == self.staying
        some = KeyGroups.of([each for each in self.staying if each % 3 == 0])
        part = capture(table, "op", 0, groups=some, base=None)
        assert rows_of(part)[0] == {k: v for k, v in now.rows.items() if group(k) in some}
        with pytest.raises(
            StateError, match=r"since version 1099511627776 cannot .* since version -?\d+$"
        ):
            capture(table, "op", 0, groups=self.staying, base=Version(1 << 40))

    def teardown(self) -> None:
        self.table.close()
        self.folder.cleanup()
        self.housekeeping.close()


def rows_of(taken: Any) -> tuple[dict[Key, int], set[Key]]:
    columns = [taken.rows.column(name).to_pylist() for name in ("name", "window", "n")]
    found, gone = {}, set()
    for name, window, n, deleted in zip(*columns, taken.deleted(), strict=True):
        assert (name, window) not in found.keys() | gone, "a key occurs twice"
        if deleted:
            gone.add((name, window))
        else:
            found[(name, window)] = n
    return found, gone


def test_a_table_sheds_groups_as_a_dictionary_does() -> None:
    run_state_machine_as_test(
        SheddingMachine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )


def test_a_table_sheds_groups_on_long_walks() -> None:
    """With everything that only happens late: rows are released, moved and used again."""
    done: Counter[str] = Counter()

    def counted(of: Any, name: str) -> Any:
        original = getattr(of, name)

        def call(*args: Any) -> Any:
            done[name] += 1
            if name == "compact" and args[1].shedding != NONE:
                done["compact while shedding"] += 1
            return original(*args)

        return mock.patch.object(of, name, call)

    with ExitStack() as stack:
        for name in ("release", "compact", "clean", "_renumber"):
            stack.enter_context(counted(maintenance, name))
        for seed in range(4):
            long_walk(SheddingMachine(), seed, 400, done)
    assert len(done) == 7
    assert min(done.values()) > 10, f"too little happened to be a test: {done}"


def long_walk(machine: SheddingMachine, seed: int, steps: int, done: Counter[str]) -> None:
    random = Random(seed)

    def names(most: int) -> list[Key]:
        return [(random.choice(NAMES), random.randrange(10)) for _ in range(random.randrange(most))]

    def flag() -> bool:
        return random.random() < 0.5

    def shed() -> None:
        if machine.now.leaving:
            before = len(machine.now.others)
            machine.shed(random.choice([1, 1, 1, 2, 5]))
            done["shed"] += before - len(machine.now.others)

    def come_back() -> None:
        if len(machine.now.leaving) > 9:
            machine.come_back()
            done["came back"] += 1

    actions = [
        *3 * [lambda: machine.put(names(25), random.randrange(99))],
        lambda: machine.delete(names(25)),
        lambda: machine.delete(list(machine.now.rows)[random.randrange(9) :]),
        lambda: machine.leave(names(4)),
        *2 * [shed],
        come_back,
        shed,
        *3 * [lambda: machine.go_on(random.randrange(1, 6), random.random() < 0.8, flag())],
        lambda: machine.go_back(flag(), flag(), flag()),
        machine.check_captures,
    ]
    try:
        machine.create()
        for _ in range(steps):
            random.choice(actions)()
            machine.is_as_expected()
    finally:
        machine.teardown()


def test_rows_shed_are_free_without_a_checkpoint(tmp_path: Path) -> None:
    table = StateTable.create(tmp_path / "table", LAYOUT)
    names: list[Key] = [(f"k{i}", 0) for i in range(2000)]
    table.begin(Version(0), 0)
    table.rows(encode(names))
    table.finish()
    leaving = KeyGroups.parse("0-31")
    out = sum(group(key) in leaving for key in names)
    version, calls = 1, 0
    while True:
        table.begin(Version(version), 0)
        left = table.shed(leaving, 100)
        table.finish()
        version, calls = version + 1, calls + 1
        if left == 0:
            break
    assert calls <= out // 100 + 2000 // (100 * changes._LOOK_AT) + 1
    assert table.dirty_count == len(names) - out, "shed rows are no changes"
    table.begin(Version(version), 0)
    counters = table._counters()
    assert (counters.dead, counters.free, counters.live) == (0, out, len(names) - out)
    more: list[Key] = [(f"m{i}", 0) for i in range(5000) if group((f"m{i}", 0)) not in leaving]
    at = table.rows(encode(more[:out]))
    assert table._counters().rows == len(names), "they are used again"
    assert set(at.tolist()) <= set(range(len(names)))
    table.validate()
    _, gone = table.dirty()
    assert len(gone) == 0
    assert table.dirty_count == len(names)
    back = [key for key in names if group(key) in leaving]
    table.rows(encode(back))
    table.finish()
    table.begin(Version(version + 1), 0)
    while table.shed(leaving, 100):
        pass
    assert len(table.of_groups(table.live(), leaving)) == 0, "they left once more"
    with pytest.raises(ValueError, match="at least one"):
        table.shed(leaving, 0)
    table.close()
