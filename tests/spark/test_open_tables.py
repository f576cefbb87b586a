"""The tables that a Python worker keeps open from batch to batch."""

from pathlib import Path

import pyarrow as pa
import pytest

from anabranch.spark import task
from anabranch.state import schema
from anabranch.state.keys import KeyLayout
from anabranch.state.table import StateTable, TableLayout

LAYOUT = TableLayout(
    KeyLayout([pa.field("key", pa.int64(), nullable=False)]), schema.schema(n=schema.int64)
)


def make(folder: Path) -> Path:
    StateTable.create(folder, LAYOUT).close()
    return folder


def test_a_table_is_kept_until_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "_open", {})
    first, second, third = (make(tmp_path / name) for name in ("first", "second", "third"))
    ended, going_on = task._opened(first, LAYOUT), task._opened(second, LAYOUT)
    assert task._opened(first, LAYOUT) is ended
    (first / "table").unlink()
    newest = task._opened(third, LAYOUT)
    assert ended.closed
    assert not going_on.closed
    assert task._opened(second, LAYOUT) is going_on
    assert set(task._open) == {str(second), str(third)}

    make(first)
    anew = task._opened(first, LAYOUT)
    assert anew is not ended
    for table in (going_on, newest, anew):
        table.close()
