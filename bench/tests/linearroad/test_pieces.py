"""Answers checked some seconds at a time are judged as when they are checked all at once."""

import operator
import tempfile
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch_linearroad import Traffic, Verdict, check, history_table, reference, replicate
from anabranch_linearroad.accounts import ANSWERED
from anabranch_linearroad.answers import Answers
from anabranch_linearroad.clock import SLICES, Clock
from anabranch_linearroad.rows import Answer

ONE = Traffic(seed=4, seconds=150, rates=(10, 10), accidents=400, requests=0.2).table()
EXPECTED = reference(ONE, history_table())
REPLICAS = replicate(ONE, 3)
ROWS = REPLICAS.expected(EXPECTED).answers.to_pylist()
CLOCK = Clock(started=1000.0, second=0, pace=1.0)


def stored(folder: Path, rows: list[dict[str, Any]], per_file: int) -> Answers:
    """Answers in files, each file committed six seconds after the file before it."""
    commits = {}
    for version, at in enumerate(range(0, len(rows), per_file)):
        some = [
            {name: row.get(name) for name in ANSWERED.names} | {"Slice": SLICES * version}
            for row in rows[at : at + per_file]
        ]
        commits[version] = 1000.0 + 6 * version
        table = pa.Table.from_pylist(some, ANSWERED)
        pq.write_table(table, folder / f"part-q-{version:010d}-00000.parquet")
    return Answers(folder, commits, CLOCK)


def judged(answers: Answers, most: int) -> tuple[Verdict, Verdict]:
    """In pieces, and as a whole."""
    pieces = [
        check(answers.during(seconds), REPLICAS.expected(piece))
        for seconds, piece in EXPECTED.pieces(most)
    ]
    whole = check(pa.concat_tables(answers.timed()), REPLICAS.expected(EXPECTED))
    return reduce(operator.add, pieces), whole


CHANGES = st.sampled_from(["gone", "twice", "Bal", "Toll", "Seg", "ResultTime"])
MOST = st.integers(40, 2 * len(EXPECTED.answers))
PER_FILE = st.integers(100, 10_000)
WHERE = st.integers(0, len(ROWS) - 1)


@settings(max_examples=20, deadline=None)
@given(MOST, PER_FILE, st.dictionaries(WHERE, CHANGES, max_size=8))
def test_faults_are_counted_alike(most: int, per_file: int, damage: dict[int, str]) -> None:
    rows = []
    for at, row in enumerate(ROWS):
        change = damage.get(at)
        if change == "gone":
            continue
        if change not in (None, "twice") and row[change] is not None:
            row = row | {change: row[change] + 1}
        rows += [row] * (2 if change == "twice" else 1)
    with tempfile.TemporaryDirectory() as folder:
        pieces, whole = judged(stored(Path(folder), rows, per_file), most)
    for name, fault in whole.faults.items():
        assert pieces.faults[name].count == fault.count, name
    assert pieces.slowest == whole.slowest
    assert pieces.received == whole.received == len(rows)
    assert pieces.expected == whole.expected == len(ROWS)


@settings(max_examples=20, deadline=None)
@given(MOST, PER_FILE, WHERE, st.sampled_from([None, -1, 99, 149, 100_000]))
def test_an_answer_of_any_second_is_seen(
    most: int, per_file: int, at: int, second: int | None
) -> None:
    rows = [*ROWS[:at], ROWS[at] | {"Time": second}, *ROWS[at + 1 :]]
    with tempfile.TemporaryDirectory() as folder:
        pieces, whole = judged(stored(Path(folder), rows, per_file), most)
    assert pieces.received == whole.received == len(ROWS)
    assert (pieces.incorrect > 0) == (whole.incorrect > 0) == (rows[at] != ROWS[at])


def test_a_piece_takes_along_only_what_its_balances_need() -> None:
    late = EXPECTED.answers.filter(pc.field("Time") >= 100)
    asked = late.filter(pc.field("Type") == int(Answer.BALANCE))
    for seconds, piece in replace(EXPECTED, answers=late).pieces(len(late) // 2):
        here = asked.filter(seconds.of("Time"))
        assert sorted(piece.requests["QID"].to_pylist()) == sorted(here["QID"].to_pylist())
        assert set(piece.charges["VID"].to_pylist()) <= set(piece.requests["VID"].to_pylist())
    tolls = late.filter(pc.field("Type") == int(Answer.TOLL))
    for _, piece in replace(EXPECTED, answers=tolls).pieces(len(tolls) // 2):
        assert len(piece.requests) == len(piece.charges) == 0
