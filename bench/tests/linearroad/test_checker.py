"""What a check accepts and what it finds."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import balance, crowd, drive, expenditure, stand, tell

from anabranch_linearroad import Answer, Expected, Verdict, answer_table, check

ROWS = [
    *crowd(60, 1, 5),
    *crowd(54, 3, 7),
    *drive(1, 60, [5, 6, 7]),
    *drive(1, 200, [7, 8]),
    *stand(3, 0, 6, 30),
    *stand(4, 5, 6, 30),
    *drive(5, 130, [28, 29]),
    balance(100, 1, 1),
    balance(240, 1, 2),
    balance(5, 77, 3),
    expenditure(100, 1, 5, 0, 4),
]
EXPECTED = tell(ROWS, history=[{"VID": 1, "Day": 5, "XWay": 0, "Toll": 7}]).expected
KINDS = [row["Type"] for row in EXPECTED.answers.to_pylist()]
INDEX = st.integers(0, len(KINDS) - 1)


def judge(rows: list[dict[str, Any]]) -> Verdict:
    return check(answer_table(rows), EXPECTED)


def changed(at: int, **columns: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = EXPECTED.answers.to_pylist()
    rows[at] |= columns
    return rows


def counts(verdict: Verdict) -> dict[str, int]:
    return {name: fault.count for name, fault in verdict.faults.items() if fault.count}


def test_the_answers_have_all_types() -> None:
    assert set(KINDS) == set(Answer)


@given(st.permutations(range(len(KINDS))))
def test_right_answers_pass_in_any_order(order: list[int]) -> None:
    verdict = check(EXPECTED.answers.take(pa.array(order)), EXPECTED)
    assert verdict.passed
    assert verdict.expected == verdict.received == verdict.untimed == len(KINDS)
    assert str(verdict).startswith("passed")


@given(INDEX)
def test_a_missing_answer_is_found(at: int) -> None:
    rows = EXPECTED.answers.to_pylist()
    gone = rows.pop(at)
    verdict = judge(rows)
    assert counts(verdict) == {"missing": 1}
    assert f"Time {gone['Time']}" in str(verdict) or f"QID {gone['QID']}" in str(verdict)


@given(INDEX, st.integers(1, 3))
def test_a_duplicate_is_found_even_if_it_is_right(at: int, times: int) -> None:
    rows = EXPECTED.answers.to_pylist()
    verdict = judge(rows + times * [rows[at]])
    assert counts(verdict) == {"duplicate": times}


@given(INDEX, st.sampled_from([-1, 1, None, 10_000]))
def test_any_other_content_is_found(at: int, by: int | None) -> None:
    row = EXPECTED.answers.to_pylist()[at]
    content = {0: ("Spd", "Toll"), 1: ("Seg",), 2: ("Bal", "Time"), 3: ("Bal", "Time")}
    for name in content[row["Type"]]:
        verdict = judge(changed(at, **{name: None if by is None else row[name] + by}))
        assert counts(verdict) == {"wrong": 1}


@given(INDEX, st.sampled_from([-1, 1_000_000, None]))
def test_an_answer_to_nothing_is_found(at: int, to: int | None) -> None:
    name = "VID" if KINDS[at] in (0, 1) else "QID"
    assert counts(judge(changed(at, **{name: to}))) == {"missing": 1, "extra": 1}


@pytest.mark.parametrize("kind", [-1, 4, None])
def test_an_unknown_type_is_found(kind: int | None) -> None:
    rows = EXPECTED.answers.to_pylist()
    verdict = judge([*rows, {"Type": kind, "VID": 1, "Time": 60}])
    assert counts(verdict) == {"extra": 1}
    assert verdict.extra.examples == (f"type {kind}",)


@given(INDEX, st.sampled_from([0.0, 1, 5, 5.5, 6, 10, 10.5, 11]))
def test_late_answers_are_found(at: int, delay: float) -> None:
    row = EXPECTED.answers.to_pylist()[at]
    verdict = judge(changed(at, Emit=row["Time"] + delay))
    limit = 10 if row["Type"] == 3 else 5
    assert counts(verdict) == ({"late": 1} if delay > limit else {})
    assert verdict.slowest == {row["Type"]: delay}
    assert verdict.untimed == len(KINDS) - 1


def request(qid: int) -> int:
    return next(
        at
        for at, row in enumerate(EXPECTED.answers.to_pylist())
        if row["Type"] == Answer.BALANCE and row["QID"] == qid
    )


@pytest.mark.parametrize(
    ("when", "bal", "passes"),
    [
        (240, 250, True),  # 2 * 10**2 at 90, nothing at 120, 2 * 5**2 at 230
        (230, 250, True),
        (229, 200, True),
        (180, 200, True),
        (240, 200, False),
        (229, 250, False),
        (179, 200, False),  # too long ago
        (241, 250, False),  # not yet
        (None, 250, False),
    ],
)
def test_any_balance_of_the_last_minute_is_right(when: int | None, bal: int, passes: bool) -> None:
    verdict = judge(changed(request(2), ResultTime=when, Bal=bal))
    assert counts(verdict) == ({} if passes else {"wrong": 1})


@pytest.mark.parametrize("when", [-55, 0, 5])
def test_the_last_minute_may_reach_back_before_the_beginning(when: int) -> None:
    assert judge(changed(request(3), ResultTime=when)).passed


def test_columns_that_an_answer_does_not_use_do_not_matter() -> None:
    rows = [{**row, "VID": row["VID"] or 5} for row in EXPECTED.answers.to_pylist()]
    assert judge(rows).passed


def test_no_answers_at_all() -> None:
    verdict = judge([])
    assert counts(verdict) == {"missing": len(KINDS)}
    assert len(verdict.missing.examples) == 3
    assert check(answer_table(), tell([]).expected).passed
    extra = check(EXPECTED.answers, tell([]).expected)
    assert counts(extra) == {"extra": len(KINDS)}


def test_the_examples_say_what_was_right() -> None:
    at = KINDS.index(Answer.TOLL)
    row = EXPECTED.answers.to_pylist()[at]
    text = str(judge(changed(at, Toll=123_456)))
    assert "wrong 1" in text
    assert f"Toll 123456; right is Spd {row['Spd']}, Toll {row['Toll']}" in text
    assert "Bal 3; right is Time 240, Bal 250 at 240" in str(judge(changed(request(2), Bal=3)))


@settings(max_examples=20)
@given(st.data())
def test_faults_do_not_hide_each_other(data: st.DataObject) -> None:
    rows = EXPECTED.answers.to_pylist()
    tolls = [at for at, kind in enumerate(KINDS) if kind == Answer.TOLL]
    dropped, bad, twice = data.draw(st.permutations(tolls))[:3]
    rows[bad]["Toll"] += 1
    given = [row for at, row in enumerate(rows) if at != dropped] + [rows[twice] | {"Emit": 9e9}]
    expected = {"missing": 1, "wrong": 1, "duplicate": 1, "late": 1}
    assert counts(judge(given)) == expected


def test_what_is_expected_can_be_kept(tmp_path: Path) -> None:
    EXPECTED.write(tmp_path / "kept")
    again = Expected.read(tmp_path / "kept")
    assert again == EXPECTED
    assert check(again.answers, again).passed


def test_a_million_answers_take_seconds() -> None:
    n = 1_000_000
    vids = np.random.default_rng(1).permutation(n).astype(np.int32)
    columns = {"VID": vids, "Time": vids % 1000, "Spd": vids % 60, "Toll": vids % 7}
    empty = answer_table()
    table = pa.table(
        {
            name: pa.array(columns[name], field.type)
            if name in columns
            else pa.array(np.zeros(n), field.type)
            if name == "Type"
            else pa.nulls(n, field.type)
            for name, field in zip(empty.column_names, empty.schema, strict=True)
        }
    )
    expected = Expected(table, EXPECTED.charges, EXPECTED.requests)
    assert check(table.slice(1), expected).missing.count == 1
