"""Timers: what is due, in order, and at what cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_tools import decoded, encode, table_of

from anabranch.errors import StateError
from anabranch.kernels import timers as kernels
from anabranch.state import schema
from anabranch.state.groups import KeyGroups
from anabranch.state.keys import KeyLayout
from anabranch.state.table import StateTable, TableLayout
from anabranch.state.view import State
from anabranch.units import Version

NOW = 1_700_000_000_000_000
HOUR = 3_600_000_000
scales = st.sampled_from([1, 1 << 18, 1 << 26, 1 << 30, 1 << 36, 1 << 40, 1 << 50, 1 << 52])
times = st.builds(lambda scale, n: NOW + scale * n, scales, st.integers(-40, 40))


class Wheel:
    """The kernels alone, over a hundred rows."""

    def __init__(self) -> None:
        self.times = np.full(100, kernels.NEVER, np.int64)
        self.lists = np.zeros(2 * kernels.LISTS, np.int32)
        self.links = np.zeros(200, np.int32)
        self.clock = np.zeros(2, np.int64)

    def put(self, rows: list[int], given: list[int]) -> None:
        arrays = np.array(rows, np.int64), np.array(given, np.int64)
        kernels.put(self.times, self.lists, self.links, self.clock, *arrays)

    def due(self, upto: int) -> list[int]:
        if upto > self.clock[0]:
            kernels.advance(self.times, self.lists, self.links, self.clock, upto)
        found, at = [], int(self.lists[0])
        while at > 0:
            out = np.zeros(7, np.int64)
            count, at, _ = kernels.due(self.times, self.links, upto, at, out)
            found += out[:count].tolist()
        return sorted(found)


@given(
    st.lists(
        st.one_of(
            times,
            st.lists(st.tuples(st.integers(0, 99), st.one_of(st.none(), times)), max_size=20),
        ),
        max_size=30,
    )
)
def test_the_wheel_agrees_with_a_dictionary(steps: list[object]) -> None:
    wheel = Wheel()
    expected: dict[int, int] = {}
    for step in steps:
        if isinstance(step, int):
            due = sorted(row for row, time in expected.items() if time <= step)
            assert wheel.due(step) == due
        elif step:
            rows = [row for row, _ in step]
            wheel.put(rows, [kernels.NEVER if t is None else t for _, t in step])
            for row, time in step:
                expected.pop(row, None)
                if time is not None:
                    expected[row] = time


def test_due_is_in_order_of_time_and_hash(folder: Path) -> None:
    table = table_of(folder)
    table.begin(Version(0), 1)
    keys = encode([("k", i) for i in range(3000)])
    at = table.rows(keys)
    given_times = NOW + np.random.default_rng(1).integers(0, 50, 3000)
    table.set_timer(at, given_times)
    due = table.due(NOW + 25)
    times, hashes = table.timers(due).to_numpy(), table.hashes(due)
    order = list(zip(times, hashes, strict=True))
    assert order == sorted(order)
    assert len(due) == (given_times <= NOW + 25).sum()
    assert np.array_equal(table.due(NOW + 25), due), "asking takes nothing away"
    table.clear_timer(due)
    assert len(table.due(NOW + 25)) == 0
    assert len(table.due(NOW + HOUR)) == 3000 - len(due)
    table.destroy()


def test_the_last_timer_of_a_row_named_twice_counts(folder: Path) -> None:
    table = table_of(folder)
    table.begin(Version(0), 1)
    at = table.rows(encode([("a", 1), ("b", 1), ("a", 1)]))
    table.set_timer(at, np.array([NOW, NOW, NOW + 9]))
    assert table.timers(at).to_pylist() == [NOW + 9, NOW, NOW + 9]
    assert decoded(table, table.due(NOW + 5)) == [("b", 1)]
    table.destroy()


def test_asking_for_an_earlier_time_after_a_later_one(folder: Path) -> None:
    table = table_of(folder)
    table.begin(Version(0), 1)
    at = table.rows(encode([("k", i) for i in range(5000)]))
    table.set_timer(at[:1], np.array([NOW + 100 * HOUR]))
    table.set_timer(at[1:], NOW + np.arange(1, 5000))
    for upto, expected in ((NOW, 0), (NOW + 10, 10), (NOW + 7, 7), (NOW + HOUR, 4999), (NOW, 0)):
        assert len(table.due(upto)) == expected
        table.validate()
    table.destroy()


def test_the_work_is_in_what_is_due(folder: Path) -> None:
    """Counted in list entries looked at, not in time: of 200,000 timers few are near."""
    table = table_of(folder)
    table.begin(Version(0), 1)
    at = table.rows(encode([("k", i) for i in range(200_000)]))
    table.set_timer(at, NOW + np.arange(200_000) * 1_000_000)
    lists = table._storage.timers._lists
    before = lists.copy()
    total = 0
    for second in range(1, 60):
        total += len(table.due(NOW + second * 1_000_000))
    moved = int((lists != before).sum())
    assert total == sum(range(2, 61))
    # A second is four fine lists; a minute's list may have been dealt out on the way.
    assert moved < 60 * 4 + 200
    table.destroy()


def test_a_table_without_timers_says_so(folder: Path) -> None:
    layout = TableLayout(KeyLayout([pa.field("k", pa.int64())]), schema.schema(n=schema.int64))
    table = StateTable.create(folder / "t", layout)
    table.begin(Version(0), 1)
    at = table.rows(layout.key.encode([pa.array([1])], np.array([1])))
    with pytest.raises(StateError, match="timers = True"):
        table.due(5)
    with pytest.raises(StateError, match="timers = True"):
        table.set_timer(at, np.array([5]))
    table.destroy()


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 9)), max_size=60),
    st.sets(st.integers(0, 127)),
    st.integers(0, 9),
)
def test_rows_of_groups_that_have_left_are_not_seen(
    tmp_path_factory: pytest.TempPathFactory,
    timers: list[tuple[int, int]],
    left: set[int],
    upto: int,
) -> None:
    table = table_of(tmp_path_factory.mktemp("table"))
    wanted = {(f"key {number}", number): at for number, at in timers}
    keys = list(wanted)
    with table.lock(timeout=1):
        table.begin(Version(0), 1)
        rows = table.rows(encode(keys))
        table.set_timer(rows, np.array(list(wanted.values()), np.int64))
        groups = dict(zip(keys, table.groups(rows).tolist(), strict=True))
        state = State(table, ("name",), KeyGroups.of(sorted(left)))
        stay = {key for key in keys if groups[key] not in left}
        due = {key for key in stay if wanted[key] <= upto}
        assert sorted(decoded(table, state.due(upto))) == sorted(due)
        assert sorted(decoded(table, state.part(0, 1))) == sorted(stay)
    table.close()
