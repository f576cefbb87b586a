"""The operators of the query against the reference, however the input is cut into batches."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from driving import SCRATCH, Drive, answers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reference import world
from worlds import drive, in_time, report

from anabranch_linearroad import (
    ANSWERS,
    Expected,
    Traffic,
    check,
    history_table,
    make_history,
    reference,
)
from anabranch_linearroad.files import shaped


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), batches=st.integers(1, 60))
def test_little_worlds(seed: int, batches: int) -> None:
    rows = in_time(world(seed))
    found = answers(rows, history_table(), seed=seed, batches=batches)
    verdict = check(shaped(found, ANSWERS, "answers"), reference(rows, history_table()))
    assert verdict.passed, verdict


@pytest.fixture(scope="module")
def busy() -> tuple[pa.Table, pa.Table, Expected]:
    traffic = Traffic(seed=5, expressways=2, seconds=900, rates=(150.0, 300.0), accidents=200.0)
    rows = traffic.table()
    history = make_history(rows, seed=5)
    return rows, history, reference(rows, history)


@pytest.mark.parametrize("batches", [3, 40, 200])
def test_traffic_with_many_accidents(
    busy: tuple[pa.Table, pa.Table, Expected], batches: int
) -> None:
    rows, history, expected = busy
    found = answers(rows, history, seed=batches, batches=batches, tables=3)
    verdict = check(shaped(found, ANSWERS, "answers"), expected)
    assert verdict.passed, verdict


def test_vehicles_that_are_gone_leave_the_state() -> None:
    """By the ramp at once, and without it after a while."""
    gone = [*drive(1, 0, [3, 4]), report(60, 1, 4, lane=4), *drive(2, 0, [3, 4, 5])]
    goes_on = [row for at in range(300) for row in drive(100 + at, 10 * at, [7, 7])]
    rows = in_time(gone + goes_on)
    given = rows.append_column("Slice", rows["Time"])
    with TemporaryDirectory(dir=SCRATCH) as folder:
        drives = Drive(history_table(), given.schema, Path(folder), tables=1)
        counts = []
        for start in range(0, len(given), 2):
            drives.batch(given.slice(start, 2))
            counts.append(drives.state_rows)
    segments = 7 * 100
    assert segments < min(counts[20:]) <= max(counts) < segments + 150
    assert counts[-1] < segments + 150
