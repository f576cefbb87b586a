"""The heap: a ring of records, cleaned from behind."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from table_tools import eager_housekeeping, encode, table_of

from anabranch.errors import StateError, StateFull
from anabranch.state.table import StateTable
from anabranch.units import Version

RING = 1 << 14
KEYS = [(f"key {i}", i) for i in range(20)]


def heap_of(table: StateTable, name: str) -> tuple[object, object]:
    which = table._storage.heap_of[name]
    counters = table._counters()
    return table._storage.heaps[which], counters.heaps[which]


@pytest.mark.parametrize("seed", range(3))
def test_a_ring_goes_round_and_round(folder: Path, seed: int) -> None:
    random = Random(seed)
    expected: dict[int, str | None] = {}
    with eager_housekeeping(RING):
        table = table_of(folder)
        for version in range(150):
            table.begin(Version(version), 1)
            at = table.rows(encode(KEYS))
            some = random.sample(range(20), 8)
            lengths = random.choices([0, 1, 7, 8, 9, 100, 300], k=8)
            values = [None if n == 1 else f"{version:03}" + "x" * n for n in lengths]
            table.set("text", at[some], values)
            expected |= dict(zip(some, values, strict=True))
            if version % 5 == 4:
                table.rollback()
                table.begin(Version(version), 1)
                table.set("text", at[some], values)
            assert table.get("text", at).to_pylist() == [expected.get(i) for i in range(20)]
            table.finish()
            table.validate()
        _, counters = heap_of(table, "text")
        assert counters.tail > 4 * RING
        assert counters.tail - counters.head < RING
        table.destroy()


def test_a_ring_that_is_full_says_so_and_the_values_stay(folder: Path) -> None:
    with eager_housekeeping(RING):
        table = table_of(folder)
        table.begin(Version(0), 1)
        at = table.rows(encode(KEYS))
        table.set("text", at, ["x" * 100] * 20)
        table.finish()
        table.begin(Version(1), 1)
        with pytest.raises(StateFull, match="heap text"):
            table.set("text", at, ["y" * 1000] * 20)
        with pytest.raises(StateError, match="roll it back"):
            table.set("text", at, ["z"] * 20)
        table.rollback()
        assert table.get("text", at).to_pylist() == ["x" * 100] * 20
        table.begin(Version(1), 1)
        table.set("text", at, ["z"] * 20)
        table.finish()
        table.validate()
        table.destroy()


def test_cleaning_is_a_bounded_step(folder: Path) -> None:
    table = table_of(folder)
    table.begin(Version(0), 1)
    at = table.rows(encode([("k", i) for i in range(40_000)]))
    table.set("text", at, pa.array(["x" * 200]).take(pa.array(np.zeros(len(at), np.int64))))
    table.finish()
    table.begin(Version(1), 1)
    table.set("text", at[4000:], pa.nulls(len(at) - 4000))
    table.finish()
    heads = []
    for version in range(2, 20):
        table.begin(Version(version), 1)
        heads.append(heap_of(table, "text")[1].head)
        table.finish()
    steps = np.diff([0, *heads])
    assert steps[0] > 0
    assert steps.max() <= (1 << 20) + 208
    assert (steps > 0).sum() >= 7
    assert steps[-1] == 0, "it does not end"
    table.validate()
    assert table.get("text", at[:4001]).to_pylist() == ["x" * 200] * 4000 + [None]
    table.destroy()


def test_too_many_bytes_for_one_array(folder: Path) -> None:
    table = table_of(folder)
    table.begin(Version(0), 1)
    at = table.rows(encode([("k", 1)]))
    table.set("raw", at, [b"x" * (1 << 20)])
    with pytest.raises(StateError, match="fewer rows at a time"):
        table.get("raw", np.repeat(at, 2048))
    assert len(table.get("raw", np.repeat(at, 3))) == 3
    table.destroy()
