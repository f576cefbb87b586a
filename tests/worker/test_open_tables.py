"""The tables that a Python worker keeps open from batch to batch."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from task_runs import Running

from anabranch.errors import StateFull
from anabranch.state import schema
from anabranch.state.hashing import hash_keys
from anabranch.state.keys import KeyLayout
from anabranch.state.table import StateTable, TableLayout
from anabranch.units import Version
from anabranch.worker.open_tables import OpenTables

LAYOUT = TableLayout(
    KeyLayout([pa.field("key", pa.int64(), nullable=False)]), schema.schema(n=schema.int64)
)


def make(folder: Path) -> Path:
    StateTable.create(folder, LAYOUT).close()
    return folder


def test_a_table_is_kept_until_it_is_gone(tmp_path: Path) -> None:
    tables = OpenTables()
    first, second, third = (make(tmp_path / name) for name in ("first", "second", "third"))
    ended, going_on = tables.get(first, LAYOUT), tables.get(second, LAYOUT)
    assert tables.get(first, LAYOUT) is ended
    (first / "table").unlink()
    tables.get(third, LAYOUT)
    assert ended.closed
    assert not going_on.closed
    assert tables.get(second, LAYOUT) is going_on
    assert len(tables) == 2

    make(first)
    assert tables.get(first, LAYOUT) is not ended
    tables.close()
    assert going_on.closed


def test_the_tables_used_longest_ago_are_closed_first(tmp_path: Path) -> None:
    folders = [make(tmp_path / str(number)) for number in range(5)]
    one = StateTable.open(folders[0], LAYOUT)
    tables = OpenTables(addresses=3 * one.addresses)
    one.close()
    a, b, c = (tables.get(folder, LAYOUT) for folder in folders[:3])
    assert tables.get(folders[0], LAYOUT) is a
    tables.get(folders[3], LAYOUT)
    assert (a.closed, b.closed, c.closed) == (False, True, False)
    tables.get(folders[4], LAYOUT)
    assert (a.closed, c.closed) == (False, True)
    few = OpenTables(tables=2)
    kept = [few.get(folder, LAYOUT) for folder in folders[:3]]
    assert [table.closed for table in kept] == [True, False, False]
    tables.close()
    few.close()


def test_tables_in_use_are_not_closed_for_others(tmp_path: Path) -> None:
    folders = [make(tmp_path / str(number)) for number in range(5)]
    tables = OpenTables(tables=2)
    idle = tables.get(folders[0], LAYOUT)
    beside = {str(folder) for folder in folders[1:]}
    used = [tables.get(folder, LAYOUT, beside=beside) for folder in folders[1:]]
    assert idle.closed
    assert [table.closed for table in used] == [False] * 4, "though there are too many"
    assert [tables.get(folder, LAYOUT, beside=beside) for folder in folders[1:]] == used
    tables.get(folders[0], LAYOUT)
    assert [table.closed for table in used] == [True, True, True, False]
    tables.close()


def test_a_process_without_addresses_closes_other_tables(tmp_path: Path) -> None:
    folders = [make(tmp_path / str(number)) for number in range(8)]
    one = StateTable.open(folders[0], LAYOUT)
    limit = 3 * one.addresses + (8 << 30)
    one.close()
    done = subprocess.run(
        [sys.executable, __file__, str(limit), *map(str, folders)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    kept, message = done.stdout.splitlines()
    assert 1 <= int(kept) <= 3
    assert "ulimit -v" in message


def test_hundreds_of_tables_on_a_large_file_system_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes addresses for all that could be there, and a process has not enough for all."""
    large = SimpleNamespace(f_blocks=(1 << 39) // 4096, f_frsize=4096)
    with monkeypatch.context() as within:
        within.setattr(os, "statvfs", lambda folder: large)
        folders = [make(tmp_path / str(number)) for number in range(160)]
    # In a process of its own: what other tests map takes addresses, too.
    done = subprocess.run(
        [sys.executable, __file__, "in turn", *map(str, folders)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *kept, counted = done.stdout.splitlines()
    assert all(50 < int(each) < len(folders) for each in kept)
    assert (len(kept), counted) == (2, "[2, 2, 2]")


@pytest.mark.spark
def test_two_operators_of_a_hundred_instances(spark: SparkSession, tmp_path: Path) -> None:
    operators = [Running(spark, tmp_path, 100, 128, name) for name in ("first", "second")]
    ids = list(range(1_000))
    for version in range(2):
        for operator in operators:
            operator.batch(ids, version, fence=version).collect()
    for operator in operators:
        assert operator.counts() == dict.fromkeys(ids, 2)


def _limited(limit: int, folders: list[str]) -> None:
    """In a process of its own: more tables than it has addresses for."""
    tables = OpenTables()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for folder in folders:
        tables.get(Path(folder), LAYOUT)
    print(len(tables))
    tables.close()
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, limit))
    try:
        tables.get(Path(folders[0]), LAYOUT)
    except StateFull as error:
        print(error)


def _in_turn(folders: list[str]) -> None:
    keys = [pa.array([1, 2, 3], pa.int64())]
    batch = LAYOUT.key.encode(keys, hash_keys(keys, 3))
    tables = OpenTables()
    for version in range(2):
        for folder in folders:
            table = tables.get(Path(folder), LAYOUT)
            table.begin(Version(version), version + 1)
            rows = table.rows(batch)
            table.set("n", rows, table.get("n", rows) + 1)
            table.finish()
        print(len(tables))
    counts = set()
    for folder in folders:
        table = tables.get(Path(folder), LAYOUT)
        counts.add(tuple(table.get("n", table.find(batch)).tolist()))
    print(*map(list, counts), sep="; ")
    tables.close()


if __name__ == "__main__":
    if sys.argv[1] == "in turn":
        _in_turn(sys.argv[2:])
    else:
        _limited(int(sys.argv[1]), sys.argv[2:])
