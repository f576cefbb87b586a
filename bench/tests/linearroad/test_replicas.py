"""Copies of an expressway: nothing of two copies meets, and the answers are copies too."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import balance, drive, expenditure, in_time

from anabranch.errors import PlanError
from anabranch_linearroad import (
    INPUT,
    Traffic,
    check,
    guarantees,
    history_table,
    make_history,
    reference,
    replicate,
    write_input,
)

ONE = Traffic(seed=4, seconds=150, rates=(10, 10), accidents=400, requests=0.2).table()


def all_rows(source: Any, copies: int, *window: int | None) -> pa.Table:
    tables = [table for _, table in replicate(source, copies).seconds(*window)]
    return pa.concat_tables([INPUT.empty_table(), *tables])


def bag(table: pa.Table) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in table.to_pylist())


def test_every_copy_has_every_row_with_numbers_of_its_own() -> None:
    rows = in_time([*drive(3, 0, [1, 2]), balance(5, 3, 8), expenditure(6, 3, 7, 0, 9)])
    spans = {"VID": 4, "QID": 10, "XWay": 1}
    assert replicate(rows, 3).spans == spans
    expected = [
        {name: v + copy * spans.get(name, 0) if v >= 0 else v for name, v in row.items()}
        for copy in range(3)
        for row in rows.to_pylist()
    ]
    assert bag(all_rows(rows, 3)) == sorted(tuple(row.values()) for row in expected)


def test_copies_of_traffic_keep_to_the_guarantees() -> None:
    rows = all_rows(ONE, 5)
    assert rows.num_rows == 5 * ONE.num_rows
    assert guarantees(rows) == []


def test_one_copy_is_the_same() -> None:
    assert all_rows(ONE, 1).equals(ONE.combine_chunks())


@settings(max_examples=30)
@given(st.integers(0, 160), st.integers(0, 160), st.integers(1, 4))
def test_a_window_is_the_rows_of_its_seconds(start: int, end: int, copies: int) -> None:
    some = dict(replicate(ONE, copies).seconds(start, end))
    assert list(some) == list(range(start, end))
    for second, rows in some.items():
        assert set(rows["Time"].to_numpy()) <= {second}
    times = ONE["Time"].to_numpy()
    assert sum(map(len, some.values())) == copies * ((times >= start) & (times < end)).sum()


@settings(max_examples=10)
@given(st.integers(0, 4))
def test_copies_can_be_shared_out(cut: int) -> None:
    replicas = replicate(ONE, 4)
    parts = [
        table
        for copies in (range(cut), range(cut, 4))
        for _, table in replicas.seconds(copies=copies)
    ]
    assert bag(pa.concat_tables(parts)) == bag(all_rows(ONE, 4))


def test_they_are_read_from_files_too(tmp_path: Path) -> None:
    write_input(tmp_path / "in", ONE, minutes=1)
    assert replicate(tmp_path / "in", 3).spans == replicate(ONE, 3).spans
    assert bag(all_rows(str(tmp_path / "in"), 3, 50, 130)) == bag(all_rows(ONE, 3, 50, 130))


def test_the_answers_to_copies_are_copies_of_the_answers() -> None:
    replicas = replicate(ONE, 3)
    history = make_history(ONE, seed=4)
    expected = replicas.expected(reference(ONE, history))
    histories = pa.concat_tables(replicas.history(history))
    assert histories.num_rows == 3 * history.num_rows
    direct = reference(all_rows(ONE, 3), histories)
    assert bag_of_answers(direct.answers) == bag_of_answers(expected.answers)
    assert bag(direct.charges) == bag(expected.charges)
    assert check(direct.answers, expected).passed


def bag_of_answers(table: pa.Table) -> list[str]:
    return sorted(str(row) for row in table.to_pylist())


@pytest.mark.parametrize("copies", [0, 10_000_000])
def test_copies_must_fit(copies: int) -> None:
    with pytest.raises(PlanError, match="copies: give 1 to"):
        replicate(ONE, copies)


def test_a_history_of_other_vehicles_is_refused() -> None:
    replicas = replicate(in_time([balance(5, 3, 8)]), 2)
    row = {"Day": 1, "XWay": 0, "Toll": 1}
    copies = list(replicas.history(history_table([{"VID": 3, **row}])))
    assert [copy["VID"].to_pylist() for copy in copies] == [[3], [7]]
    with pytest.raises(PlanError, match="VID 4"):
        list(replicas.history(history_table([{"VID": 4, **row}])))
