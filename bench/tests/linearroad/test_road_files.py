"""Tables come back from files as they were written."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import PlanError
from anabranch_linearroad import (
    ANSWERS,
    INPUT,
    Traffic,
    answer_table,
    input_table,
    make_history,
    read_answers,
    read_history,
    read_input,
    write_answers,
    write_history,
    write_input,
)

TRAFFIC = Traffic(seed=2, seconds=400, rates=(10, 10), requests=0.2)
ROWS = TRAFFIC.table()
ANSWER_ROWS = [
    {"Type": 0, "VID": 5, "Time": 60, "Emit": 61.5, "Spd": -1, "Toll": 0},
    {"Type": 1, "VID": 5, "Time": 60, "Emit": 62, "Seg": 9},
    {"Type": 2, "QID": 1, "Time": 70, "ResultTime": 69, "Bal": 2**40},
    {"Type": 3, "QID": 2, "Time": 70, "Bal": 0},
]


@pytest.mark.parametrize("name", ["in.parquet", "in.csv", "in"])
def test_input_comes_back(tmp_path: Path, name: str) -> None:
    done: list[int] = []
    write_input(tmp_path / name, TRAFFIC.minutes(), tick=done.append)
    assert read_input(tmp_path / name).equals(ROWS)
    assert done == [60, 120, 180, 240, 300, 360, 420]


def test_a_folder_has_a_file_for_some_minutes_and_a_row_group_for_each(tmp_path: Path) -> None:
    write_input(tmp_path, ROWS, minutes=2)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [
        f"{second:06}.parquet" for second in (0, 120, 240, 360)
    ]
    assert [pq.read_metadata(file).num_row_groups for file in files] == [2, 2, 2, 1]
    for file in files:
        times = pq.read_table(file)["Time"].to_numpy()
        assert (times[1:] >= times[:-1]).all()


@settings(max_examples=20)
@given(start=st.integers(0, 420), length=st.integers(0, 420))
def test_a_window_is_read_without_the_rest(
    tmp_path_factory: pytest.TempPathFactory, start: int, length: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "window"
    if not folder.exists():
        write_input(folder / "parts", ROWS, minutes=1)
        write_input(folder / "one.csv", ROWS)
    times = ROWS["Time"].to_numpy()
    expected = ROWS.filter((times >= start) & (times < start + length))
    assert read_input(folder / "parts", start, start + length).equals(expected)
    assert read_input(folder / "one.csv", start, start + length).equals(expected)


def test_csv_without_header_and_compressed(tmp_path: Path) -> None:
    plain = tmp_path / "plain.csv"
    pa_csv.write_csv(ROWS, plain, pa_csv.WriteOptions(include_header=False))
    assert read_input(plain).equals(ROWS)
    packed = tmp_path / "packed.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_input(packed).equals(ROWS)


def test_columns_of_a_header_may_be_in_any_order(tmp_path: Path) -> None:
    pa_csv.write_csv(ROWS.select(INPUT.names[::-1]), tmp_path / "x.csv")
    assert read_input(tmp_path / "x.csv").equals(ROWS)


def test_parts_as_spark_writes_them(tmp_path: Path) -> None:
    wide = ROWS.cast(pa.schema([(name, pa.int64()) for name in INPUT.names]))
    pq.write_table(wide.slice(0, 100), tmp_path / "part-00000-ab.snappy.parquet")
    pq.write_table(wide.slice(100), tmp_path / "part-00001-ab.snappy.parquet")
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".part-00000.crc").write_bytes(b"x")
    assert read_input(tmp_path).equals(ROWS)


@pytest.mark.parametrize("name", ["h.parquet", "h.csv"])
def test_history_comes_back(tmp_path: Path, name: str) -> None:
    history = make_history(ROWS, seed=1)
    write_history(tmp_path / name, history)
    assert read_history(tmp_path / name).equals(history)


@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_answers_come_back_with_their_nulls(tmp_path: Path, name: str) -> None:
    answers = answer_table(ANSWER_ROWS)
    write_answers(tmp_path / name, answers)
    assert read_answers(tmp_path / name).equals(answers)


def test_answers_may_lack_columns_and_come_in_parts(tmp_path: Path) -> None:
    tolls = answer_table(ANSWER_ROWS[:1])
    pa_csv.write_csv(tolls.select(["VID", "Type", "Time", "Spd", "Toll"]), tmp_path / "0.csv")
    pa_csv.write_csv(answer_table(ANSWER_ROWS[2:]), tmp_path / "1.csv")
    (tmp_path / "2.csv").touch()
    assert read_answers(tmp_path).to_pylist() == [
        {**row, "Emit": None}
        for row in answer_table([ANSWER_ROWS[0], *ANSWER_ROWS[2:]]).to_pylist()
    ]


def test_no_answers(tmp_path: Path) -> None:
    write_answers(tmp_path / "none.csv", answer_table())
    assert read_answers(tmp_path / "none.csv").equals(ANSWERS.empty_table())


@pytest.mark.parametrize(
    ("write", "say"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.mkdir(), "a folder of files of one kind"),
        (lambda path: path.write_text("x"), "give a .parquet or .csv"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, write: Any, say: str) -> None:
    write(tmp_path / "x")
    with pytest.raises(PlanError, match=say):
        read_input(tmp_path / "x")


def test_missing_columns_and_numbers_out_of_range_are_refused(tmp_path: Path) -> None:
    pq.write_table(ROWS.drop_columns(["Lane", "Pos"]), tmp_path / "few.parquet")
    with pytest.raises(PlanError, match="there is no column Lane, Pos"):
        read_input(tmp_path / "few.parquet")
    big = pa.table({"VID": [2**40], "Day": [1], "XWay": [0], "Toll": [1]})
    pq.write_table(big, tmp_path / "big.parquet")
    with pytest.raises(PlanError, match=r"big\.parquet"):
        read_history(tmp_path / "big.parquet")
    with pytest.raises(PlanError, match=r"name a \.parquet or \.csv file"):
        write_answers(tmp_path / "answers", answer_table())


def test_rows_by_hand_name_their_columns() -> None:
    with pytest.raises(PlanError, match="no column Vid"):
        input_table([{"Type": 0, "Vid": 1}])
