"""Several attempts at the same versions: late ones, repeated ones, and ones that die."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from anabranch.errors import Fenced, Reshaped, StateMissing
from anabranch.state import schema
from anabranch.state.hashing import hash_keys
from anabranch.state.keys import KeyBatch, KeyLayout
from anabranch.state.table import StateTable, TableLayout
from anabranch.units import Version

LAYOUT = TableLayout(
    KeyLayout([pa.field("key", pa.int64(), nullable=False)]), schema.schema(n=schema.int64)
)
KEYS = 40

Content = dict[int, int]


def encode(keys: list[int]) -> KeyBatch:
    columns = [pa.array(keys, pa.int64())]
    return LAYOUT.key.encode(columns, hash_keys(columns, len(keys)))


def content(table: StateTable) -> Content:
    rows = table.live()
    keys = table.keys(rows)[0].to_pylist()
    return dict(zip(keys, table.get("n", rows).tolist(), strict=True))


def changes(version: int, fence: int) -> Content:
    """What an attempt at a batch does: every task of it does the same, other attempts do not."""
    random = np.random.default_rng((version, fence))
    keys = random.choice(KEYS, 12, replace=False).tolist()
    return dict.fromkeys(keys, 1000 * version + fence)


def write(table: StateTable, some: Content) -> None:
    rows = table.rows(encode(list(some)))
    table.set("n", rows, np.array(list(some.values()), np.int64))


@dataclass
class Task:
    version: int
    fence: int
    attempt: int
    table: StateTable | None = None

    @property
    def pair(self) -> tuple[int, int]:
        return self.fence, self.attempt


class Attempts(RuleBasedStateMachine):
    """A driver that starts, repeats and commits batches, over tasks that come when they like."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.folder = self.home / "table"
        StateTable.create(self.folder, LAYOUT).close()
        self.committed = -1
        self.states: dict[int, Content] = {-1: {}}
        self.fence, self.next_attempt = 0, 0
        self.waiting: list[Task] = []
        self.running: Task | None = None
        self.reported: set[tuple[int, int, int]] = set()
        self.newest = (-1, -1)

    def teardown(self) -> None:
        self.dies()
        shutil.rmtree(self.home)

    @rule()
    def repeats_batch(self) -> None:
        self.fence += 1

    @rule()
    def starts_task(self) -> None:
        self.waiting.append(Task(self.committed + 1, self.fence, self.next_attempt))
        self.next_attempt += 1

    @precondition(lambda self: self.waiting and self.running is None)
    @rule(which=st.integers(0, 1 << 20))
    def begins(self, which: int) -> None:
        task = self.waiting.pop(which % len(self.waiting))
        table = StateTable.open(self.folder, LAYOUT)
        late, ahead = task.version <= self.committed, task.pair > self.newest
        try:
            table.begin(Version(task.version), *task.pair)
        except Fenced:
            assert not ahead, f"{task} is the newest, and was refused"
            table.close()
            return
        except StateMissing:
            self.newest = max(self.newest, task.pair)
            table.close()
            assert late, f"{task} finds no version {self.committed}"
            return
        assert not late, f"{task} began version {self.committed} again, which is committed"
        assert ahead, f"{task} came after {self.newest}, and was let in"
        self.newest = task.pair
        assert content(table) == self.states[task.version - 1]
        task.table, self.running = table, task

    @precondition(lambda self: self.running is not None)
    @rule(upto=st.integers(1, 12))
    def writes_some(self, upto: int) -> None:
        assert self.running is not None
        assert self.running.table is not None
        all_ = changes(self.running.version, self.running.fence)
        write(self.running.table, dict(list(all_.items())[:upto]))

    @precondition(lambda self: self.running is not None)
    @rule()
    def finishes(self) -> None:
        task = self.running
        assert task is not None
        assert task.table is not None
        write(task.table, changes(task.version, task.fence))
        task.table.finish()
        task.table.validate()
        self.reported.add((task.version, *task.pair))
        task.table.close()
        self.running = None

    @rule()
    def dies(self) -> None:
        if self.running is not None and self.running.table is not None:
            self.running.table.close()
        self.running = None

    @rule()
    def commits(self) -> None:
        done = [r for r in self.reported if r[:2] == (self.committed + 1, self.fence)]
        # The driver waits for the tasks of its jobs, also for those that are yet to begin.
        tasks = [*self.waiting, *([self.running] if self.running else [])]
        if not done or any(task.fence == self.fence for task in tasks):
            return
        table = StateTable.open(self.folder, LAYOUT)
        if table.version != self.committed + 1:
            table.close()
            return
        table.close()
        self.committed += 1
        done_by = changes(self.committed, self.fence)
        self.states[self.committed] = self.states[self.committed - 1] | done_by
        self.fence += 1

    @precondition(lambda self: self.running is None and self.committed >= 0)
    @rule()
    def is_restored(self) -> None:
        """The table was lost, and is made anew of a checkpoint: it knows no attempts."""
        shutil.rmtree(self.folder)
        table = StateTable.create(self.folder, LAYOUT, version=Version(self.committed - 1))
        table.begin(Version(self.committed), 0)
        # The table was empty at the version before, so all rows are changes.
        write(table, self.states[self.committed])
        table.finish()
        table.forget_previous()
        table.close()
        self.newest = (-1, -1)


Attempts.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
test_a_committed_version_never_changes = Attempts.TestCase


def at_first(folder: Path, attempt: int) -> StateTable:
    table = StateTable.create(folder / "table", LAYOUT)
    table.begin(Version(0), 7, attempt)
    write(table, {1: 1, 2: 2})
    table.finish()
    return table


def test_a_late_attempt_of_the_same_batch_is_refused_before_anything_changes(folder: Path) -> None:
    table = at_first(folder, attempt=5)
    with pytest.raises(Fenced, match="task 5"):
        table.begin(Version(0), 7, 4)
    assert table.version == 0
    assert content(table) == {1: 1, 2: 2}
    table.begin(Version(0), 7, 6)
    assert content(table) == {}
    write(table, {3: 3})
    table.finish()
    assert content(table) == {3: 3}
    table.close()


def test_the_newer_batch_counts_more_than_the_newer_task(folder: Path) -> None:
    table = at_first(folder, attempt=900)
    table.begin(Version(1), 8, 3)
    with pytest.raises(Fenced):
        StateTable.open(table.folder, LAYOUT).begin(Version(1), 7, 901)
    table.finish()
    assert table.version == 1
    table.close()


@pytest.mark.parametrize("finished", [True, False])
def test_a_task_that_runs_a_version_twice_has_merged_partitions(
    folder: Path, finished: bool
) -> None:
    table = at_first(folder, attempt=5)
    table.begin(Version(1), 7, 5)
    write(table, {1: 10})
    if finished:
        table.finish()
    with pytest.raises(Reshaped, match=r"version 1 .* twice.*coalesce"):
        StateTable.open(table.folder, LAYOUT).begin(Version(1), 7, 5)
    again = StateTable.open(table.folder, LAYOUT)
    again.begin(Version(1), 7, 6)
    assert content(again) == {1: 1, 2: 2}
    again.close()
    table.close()


def test_what_is_taken_over_does_not_finish(folder: Path) -> None:
    table = at_first(folder, attempt=5)
    table.begin(Version(1), 7, 6)
    other = StateTable.open(table.folder, LAYOUT)
    other.begin(Version(1), 7, 7)
    with pytest.raises(Fenced, match=r"by attempt 7 \(task 7\) while attempt 7 \(task 6\)"):
        table.finish()
    other.finish()
    assert other.version == 1
    other.close()
    table.close()
