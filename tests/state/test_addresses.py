"""The addresses that tables take in a process, whatever is in them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from anabranch.errors import StateFull
from anabranch.state import schema
from anabranch.state.hashing import hash_keys
from anabranch.state.keys import KeyBatch, KeyLayout
from anabranch.state.table import StateTable, TableLayout
from anabranch.units import Version

TEXTS = TableLayout(
    KeyLayout([pa.field("key", pa.string())]),
    schema.schema(a=schema.string, b=schema.string, c=schema.binary),
    timers=True,
)


def encode(keys: list[str]) -> KeyBatch:
    columns = [pa.array(keys, pa.string())]
    return TEXTS.key.encode(columns, hash_keys(columns, len(keys)))


def room(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let every file system have this size."""
    found = SimpleNamespace(f_blocks=size // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda folder: found)


def test_hundreds_of_tables_are_open_and_written(folder: Path) -> None:
    """What two operators of a hundred instances have on one machine."""
    keys = encode(["some", "keys"])
    tables = []
    for number in range(200):
        table = StateTable.create(folder / str(number), TEXTS)
        table.begin(Version(0), 1)
        rows = table.rows(keys)
        for name in ("a", "b", "c"):
            table.set(name, rows, ["x", "y" * number])
        table.finish()
        tables.append(table)
    for number, table in enumerate(tables):
        assert table.get("b", table.find(keys)).to_pylist() == ["x", "y" * number]
        table.close()


def test_a_table_takes_addresses_for_its_file_system(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    for size in (1 << 26, 1 << 33, 1 << 36, 1 << 50, 0):
        room(monkeypatch, size)
        table = StateTable.create(folder / str(size), TEXTS)
        taken.append(table.addresses)
        table.close()
    small, middle, large, enormous, unknown = taken
    assert small < 1 << 31
    assert middle < 1 << 37
    assert large < 1 << 40
    assert enormous == unknown < 1 << 41


def test_a_table_is_opened_with_the_limits_it_was_made_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room(monkeypatch, 1 << 33)
    made = StateTable.create(folder / "table", TEXTS)
    made.begin(Version(0), 1)
    made.set("a", made.rows(encode(["key"])), ["text"])
    made.finish()
    room(monkeypatch, 1 << 40)
    opened = StateTable.open(folder / "table", TEXTS)
    assert opened.addresses == made.addresses
    assert opened.get("a", opened.find(encode(["key"]))).to_pylist() == ["text"]
    opened.validate()
    opened.close()
    made.close()


def test_a_table_that_outgrows_what_it_was_made_for_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room(monkeypatch, 1 << 20)
    table = StateTable.create(folder / "table", TEXTS)
    table.begin(Version(0), 1)
    rows = table.rows(encode([str(number) for number in range(1_000)]))
    table.set("a", rows, ["x" * 900] * 1_000)
    with pytest.raises(StateFull, match=r"for which it was made.* scaling or restoring"):
        table.set("a", rows, ["x" * 900] * 1_000)
    table.rollback()
    table.begin(Version(0), 2)
    assert table.count == 0
    table.close()
