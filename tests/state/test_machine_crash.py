"""A crash of the machine: pages of a table on a disk were written in any order, or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from random import Random
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch import boot
from anabranch.backup.files import Files
from anabranch.errors import StateMissing
from anabranch.nodes.local import LocalNode
from anabranch.nodes.node import Deadline
from anabranch.nodes.requests import Inspect, TableName
from anabranch.state import schema
from anabranch.state.files import HEADER_BYTES, PAGE
from anabranch.state.hashing import hash_keys
from anabranch.state.keys import KeyLayout
from anabranch.state.table import StateTable, TableLayout
from anabranch.units import Version

LAYOUT = TableLayout(
    KeyLayout([pa.field("key", pa.string())]), schema.schema(n=schema.int64, text=schema.string)
)
OTHER_BOOT = "5" * 32

Pages = dict[int, bytes]
Batch = dict[str, int]


def pages(file: Path) -> Pages:
    """All of a file that is not a hole."""
    found, at = {}, 0
    with file.open("rb") as opened:
        fd, size = opened.fileno(), file.stat().st_size
        while at < size:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:
                break
            at = os.lseek(fd, start, os.SEEK_HOLE)
            for offset in range(start // PAGE * PAGE, at, PAGE):
                found[offset] = os.pread(fd, PAGE, offset)
    return found


def write_pages(file: Path, size: int, content: Pages) -> None:
    file.parent.mkdir()
    with file.open("wb") as opened:
        opened.truncate(size)
        for offset, page in content.items():
            os.pwrite(opened.fileno(), page, offset)


def run(table: StateTable, version: int, batch: Batch) -> None:
    columns = [pa.array(list(batch), pa.string())]
    table.begin(Version(version), 1)
    rows = table.rows(LAYOUT.key.encode(columns, hash_keys(columns, len(batch))))
    numbers = table.get("n", rows) + np.array(list(batch.values()), np.int64)
    table.set("n", rows, numbers)
    table.set("text", rows, [str(number) for number in numbers])
    table.finish()


def total(table: StateTable) -> int:
    return int(table.get("n", table.live()).sum())


batches = st.lists(
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(1, 99), max_size=30),
    min_size=1,
    max_size=6,
)


def crashed(home: Path, history: list[Batch], flushed: int, random: Random) -> tuple[Path, int]:
    """A table whose pages are, each by itself, those of the end or of some time before."""
    folder = home / "table"
    table = StateTable.create(folder, LAYOUT)
    times = [{}, pages(folder / "table")]
    for version, batch in enumerate(history):
        run(table, version, batch)
        if version >= flushed:
            times.append(pages(folder / "table"))
    size, total_ = (folder / "table").stat().st_size, total(table)
    table.close()
    written = {}
    for offset in times[-1]:
        page = random.choice(times).get(offset)
        if page is not None:
            written[offset] = page
    write_pages(home / "crashed" / "table", size, written)
    return home / "crashed", total_


@settings(max_examples=60)
@given(batches, st.integers(0, 5), st.integers(0, 1 << 32))
def test_no_table_of_before_a_crash_is_used(history: list[Batch], flushed: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as home:
        folder, _ = crashed(Path(home), history, flushed, Random(seed))
        store, table = Files(home).open(), TableName("op/0-0")
        node = LocalNode(Path(home), lambda request, deadline: store)
        with (
            mock.patch.object(boot, "boot_id", return_value=OTHER_BOOT),
            mock.patch.object(LocalNode, "path", return_value=folder),
            mock.patch.object(LocalNode, "_tables", return_value=[table]),
        ):
            with pytest.raises(StateMissing):
                StateTable.open(folder, LAYOUT)
            assert node.ask(Inspect(layouts={table: LAYOUT}), Deadline(60)) == {table: ()}


def test_without_the_boot_a_wrong_sum_would_come_out(tmp_path: Path) -> None:
    """The header was written, and the rows were not."""
    table = StateTable.create(tmp_path / "table", LAYOUT)
    file = tmp_path / "table" / "table"
    run(table, 0, {str(key): 1_000 for key in range(42)})
    before = pages(file)
    run(table, 1, {str(key): 500 for key in range(42)})
    after, right = pages(file), total(table)
    table.close()
    written = before | {at: page for at, page in after.items() if at < HEADER_BYTES}
    write_pages(tmp_path / "crashed" / "table", file.stat().st_size, written)

    wrong = StateTable.open(tmp_path / "crashed", LAYOUT)
    assert wrong.version == 1
    assert total(wrong) == 42_000 != right == 63_000
    wrong.close()
    with (
        mock.patch.object(boot, "boot_id", return_value=OTHER_BOOT),
        pytest.raises(StateMissing, match=r"made before the machine was last started.* restored"),
    ):
        StateTable.open(tmp_path / "crashed", LAYOUT)


def test_a_table_that_is_whole_is_not_used_either_after_a_start(tmp_path: Path) -> None:
    table = StateTable.create(tmp_path / "table", LAYOUT)
    run(table, 0, {"a": 1})
    table.close()
    with (
        mock.patch.object(boot, "boot_id", return_value=OTHER_BOOT),
        pytest.raises(StateMissing, match="before the machine was last started"),
    ):
        StateTable.open(tmp_path / "table", LAYOUT)
    StateTable.open(tmp_path / "table", LAYOUT).close()
