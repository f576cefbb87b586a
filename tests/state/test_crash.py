"""Processes that die in the middle: killed for real, and stopped at every single line."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import pytest
from table_tools import LAYOUT, Key, content, eager_housekeeping, encode, table_of

import anabranch.state
from anabranch.state.header import Counters, Header, HeapCounters
from anabranch.state.table import StateTable
from anabranch.units import Version

Rows = dict[Key, tuple[Any, ...]]
SOURCE = str(Path(anabranch.state.__file__).parent)


def key_of(number: int) -> Key:
    return (None if number % 97 == 0 else f"key {number}" * (1 + number % 3), number % 5)


class Work:
    """What each version does, to a table and to a dictionary; only seed and version decide."""

    def __init__(self, seed: int, keys: int, batch: int) -> None:
        self.seed, self.keys, self.batch = seed, keys, batch

    def choose(self, version: int) -> tuple[list[Key], list[str | None], list[int], list[Key]]:
        random = Random(f"{self.seed} {version}")
        names = [key_of(random.randrange(self.keys)) for _ in range(self.batch)]
        texts = [random.choice([None, "", "short", f"{version} " * 9]) for _ in names]
        times = [random.choice([9, 1 << 30, 1 << 50]) + random.randrange(1 << 20) for _ in names]
        ended = self.keys if version % 4 == 0 else self.keys // 10
        gone = [key_of(number) for number in random.sample(range(self.keys), ended)]
        return names, texts, times, gone[ended // 20 :]

    def apply(self, table: StateTable, version: int) -> None:
        names, texts, times, gone = self.choose(version)
        at = table.find(encode(gone))
        table.delete(at[at >= 0])
        at = table.rows(encode(names))
        table.touch(at)
        np.add.at(table.column("n"), at, 1)
        table.set("text", at, texts)
        table.set_timer(at, np.array(times))
        if version % 3 == 0:
            table.mark_clean()

    def predict(self, rows: Rows, version: int) -> Rows:
        names, texts, times, gone = self.choose(version)
        rows = dict(rows)
        for key in gone:
            rows.pop(key, None)
        for key, text, timer in zip(names, texts, times, strict=True):
            n = rows[key][0] if key in rows else 0
            rows[key] = (n + 1, text, 7, (0.0, 0.0, 0.0), None, timer)
        return rows


def check(table: StateTable, expected: Rows) -> None:
    table.validate()
    assert content(table) == expected
    due = table.due(1 << 51)
    assert len(due) == len(expected), "a timer is lost"


@pytest.mark.chaos
def test_a_killed_process_leaves_a_committed_version(folder: Path) -> None:
    seed = int(os.environ.get("CRASH_SEED", time.time_ns() % 1_000_000))
    print(f"CRASH_SEED={seed}")
    random = Random(seed)
    work = Work(seed, keys=3000, batch=1500)
    models: dict[int, Rows] = {-1: {}}
    met = set()
    with eager_housekeeping(ring=1 << 22):
        table_of(folder).close()
        for kill in range(int(os.environ.get("CRASH_KILLS", "25"))):
            _run_and_kill(folder / "table", work, random)
            table = StateTable.open(folder / "table", LAYOUT)
            version = table.version
            for at in range(max(models) + 1, version + 1):
                models[at] = work.predict(models[at - 1], at)
            met.add("unfinished" if table.unfinished is not None else "finished")
            if table.unfinished is not None or (kill % 3 == 0 and table.previous is not None):
                version = version if table.unfinished is not None else Version(version - 1)
                table.rollback()
                assert table.version == version
                check(table, models[version])
            table.begin(Version(version + 1), 1)
            check(table, models[version])
            work.apply(table, version + 1)
            table.finish()
            models[version + 1] = work.predict(models[version], version + 1)
            check(table, models[version + 1])
            table.close()
    assert "unfinished" in met, "no process was ever killed inside a version"


def _run_and_kill(folder: Path, work: Work, random: Random) -> None:
    """Let a child work until a random moment after it has begun its first version."""
    fork = multiprocessing.get_context("fork")
    ready, begun = fork.Pipe(duplex=False)

    def go_on() -> None:
        table = StateTable.open(folder, LAYOUT)
        version = table.version
        while True:
            version = Version(version + 1)
            table.begin(version, 1)
            begun.send(version)
            work.apply(table, version)
            table.finish()

    child = fork.Process(target=go_on, daemon=True)
    child.start()
    assert ready.poll(60), "the child did not begin"
    time.sleep(random.uniform(0, 0.05))
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode == -signal.SIGKILL


def test_counters_are_written_beside_those_in_use() -> None:
    words = np.zeros(8192, np.int64)
    header = Header(words, heaps=1)
    first, second = (Counters(version, heaps=[HeapCounters(version)]) for version in (1, 2))
    header.flip(first)
    selector = words[2]
    header.flip(second)
    assert header.load() == second
    words[2] = selector  # as if the process had died before the last store
    assert header.load() == first


class Crash(BaseException):
    """Stands for the death of the process: nothing catches it and nothing is cleaned up."""


def crash_at(line: int, action: Callable[[], None]) -> bool:
    """Stop an action before the given line of the state package that it runs; False if it ended."""
    left = line

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise Crash
        return trace

    sys.settrace(trace)
    try:
        action()
    except Crash:
        return True
    finally:
        sys.settrace(None)
    return False


STEP = 8


def _prepared(folder: Path, work: Work) -> tuple[StateTable, Rows, Rows]:
    """A table whose next version has rows to release and to move, and heaps to clean.

    Returns also what it has, and what it had a version ago.
    """
    table = table_of(folder)
    rows: Rows = {}
    before = rows
    for version in range(STEP):
        table.begin(Version(version), 1)
        before = rows
        if version < STEP - 1:
            work.apply(table, version)
            rows = work.predict(rows, version)
        if version >= STEP - 2:
            # Twice, so that some rows are free already and others are to be freed.
            some = table.live()[: -12 if version == STEP - 2 else 2]
            gone = set(zip(*(c.to_pylist() for c in table.keys(some)), strict=True))
            table.delete(some)
            rows = {key: row for key, row in rows.items() if key not in gone}
            table.mark_clean()
        table.finish()
    return table, rows, before


def test_a_stop_at_any_line_leaves_a_committed_version(folder: Path) -> None:
    work = Work(seed=1, keys=60, batch=20)
    random = Random(1)
    line, taken_back = 1, 0
    with eager_housekeeping():
        while True:
            place = folder / str(line)
            table, rows, before = _prepared(place, work)

            def step(table: StateTable = table) -> None:
                table.begin(Version(STEP), 1)
                work.apply(table, STEP)
                table.finish()

            crashed = crash_at(line, step)
            again = StateTable.open(place / "table", LAYOUT)
            if again.previous == STEP - 2:
                # It did not get far: the version before could still be taken back.
                taken_back += 1
                if taken_back % 2:
                    again.rollback()
                    check(again, before)
                    again.destroy()
                    line += 1
                    continue
            if line % 2:
                # The recovery is stopped as well, somewhere.
                crash_at(random.randrange(1, 200), lambda: again.begin(Version(STEP), 2))  # noqa: B023
                again = StateTable.open(place / "table", LAYOUT)
            again.begin(Version(STEP), 2)
            check(again, rows)
            work.apply(again, STEP)
            again.finish()
            check(again, work.predict(rows, STEP))
            again.destroy()
            if not crashed:
                break
            line += random.randrange(1, 12)
    assert taken_back > 5
    assert line > 300, "the step is too short to be a test"


def test_a_stop_while_rows_are_released_and_others_move(folder: Path) -> None:
    """The last dead rows are freed in the same version in which rows could move into free ones."""
    names: list[Key] = [("k" * 3 * number, 0) for number in range(1, 17)]
    line, moved = 1, 0
    with eager_housekeeping():
        while True:
            place = folder / str(line)
            table = table_of(place)
            table.begin(Version(0), 1)
            table.rows(encode(names))
            table.finish()
            table.begin(Version(1), 1)
            table.delete(table.find(encode(names[1:-3])))
            table.mark_clean()
            table.finish()
            expected = content(table)
            crashed = crash_at(line, lambda: table.begin(Version(2), 1))  # noqa: B023
            again = StateTable.open(place / "table", LAYOUT)
            for version in range(2, 5):
                again.begin(Version(version), 2)
                again.validate()
                assert content(again) == expected
                again.finish()
            moved += int(again.live().max() < len(names) - 1)
            again.destroy()
            if not crashed:
                break
            line += 1
    assert moved == line, "no row has ever moved"
