"""The reference against the definitions written as searches, and what it does with requests."""

from typing import Any

from brute import World
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import balance, drive, expenditure, in_time, report, tell

from anabranch.linearroad import Expected, guarantees, history_table, reference

Rows = list[dict[str, int]]

HALF = 2640
"""Cars in these worlds move by half a segment, so that they often meet."""


@st.composite
def trips(draw: st.DrawFn, vid: int) -> Rows:
    """One or two trips of a vehicle near one end of the road."""
    rows: Rows = []
    start = draw(st.integers(0, 100))
    for _ in range(draw(st.integers(1, 2))):
        dir, xway = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 1)]))
        at, lane = draw(st.integers(190, 194)) * HALF, 0
        for i in range(draw(st.integers(1, 10))):
            time = start + 30 * i
            spd = draw(st.integers(0, 60))
            pos = at if dir == 0 else 527_999 - at
            rows.append(
                report(time, vid, pos // 5280, spd=spd, lane=lane, dir=dir, xway=xway)
                | {"Pos": pos}
            )
            if draw(st.integers(0, 4)) == 0:
                at = min(at + HALF, 199 * HALF)
            lane = lane if lane and draw(st.integers(0, 9)) else draw(st.integers(1, 2))
        if draw(st.booleans()):
            rows[-1]["Lane"] = 4 if rows[-1]["Lane"] else 0
        start = rows[-1]["Time"] + draw(st.integers(61, 120))
    return rows


@st.composite
def worlds(draw: st.DrawFn) -> Rows:
    rows = [row for vid in range(draw(st.integers(1, 6))) for row in draw(trips(vid))]
    for _ in range(draw(st.integers(0, 3))):
        minute, seg = draw(st.integers(1, 6)), draw(st.integers(95, 99))
        spd = draw(st.integers(20, 45))
        base = 100 + len(rows)
        rows += [
            report(minute * 60 - 60 + i % 60, base + i, seg, spd=spd, lane=0)
            for i in range(draw(st.integers(49, 55)))
        ]
    rows += [
        balance(draw(st.integers(0, 400)), draw(st.integers(0, 6)), qid)
        for qid in range(draw(st.integers(0, 3)))
    ]
    order = draw(st.randoms(use_true_random=False))
    order.shuffle(rows)
    return rows


def answers(expected: Expected) -> set[tuple[Any, ...]]:
    names = {
        0: ("VID", "Time", "Spd", "Toll"),
        1: ("VID", "Time", "Seg"),
        2: ("QID", "Time", "Bal"),
    }
    rows = expected.answers.to_pylist()
    assert len(rows) == len({tuple(row.values()) for row in rows})
    return {(row["Type"], *(row[name] for name in names[row["Type"]])) for row in rows}


@settings(max_examples=60)
@given(worlds())
def test_it_is_what_the_definitions_say(rows: Rows) -> None:
    table = in_time(rows)
    assert guarantees(table) == []
    assert answers(reference(table, history_table())) == World(rows).answers()


@settings(max_examples=40)
@given(worlds(), st.randoms(use_true_random=False))
def test_the_order_within_a_second_carries_no_meaning(rows: Rows, order: Any) -> None:
    before = answers(reference(in_time(rows), history_table()))
    order.shuffle(rows)
    assert answers(reference(in_time(rows), history_table())) == before


def test_daily_expenditure_is_the_sum_of_what_there_is() -> None:
    history = [
        {"VID": 1, "Day": 5, "XWay": 0, "Toll": 7},
        {"VID": 1, "Day": 5, "XWay": 0, "Toll": 30},
        {"VID": 1, "Day": 6, "XWay": 0, "Toll": 100},
        {"VID": 1, "Day": 5, "XWay": 1, "Toll": 200},
        {"VID": 2, "Day": 5, "XWay": 0, "Toll": 400},
    ]
    asks = [
        expenditure(10, 1, 5, 0, qid=1),
        expenditure(10, 1, 6, 0, qid=2),
        expenditure(11, 1, 69, 0, qid=3),
        expenditure(11, 3, 5, 0, qid=4),
        expenditure(12, 1, 5, 0, qid=5),
    ]
    assert tell(asks, history=history).spent == {1: 37, 2: 100, 3: 0, 4: 0, 5: 37}


def test_travel_times_are_not_answered() -> None:
    travel = {"Type": 4, "Time": 3, "VID": 1, "QID": 1, "XWay": 0, "Sinit": 1, "Send": 2}
    assert tell(travel | {"DOW": 1, "TOD": 1}).expected.answers.num_rows == 0


def test_nothing_in_nothing_out() -> None:
    assert tell([]).expected.answers.num_rows == 0


def test_charges_come_in_the_order_of_vehicles_and_times() -> None:
    told = tell(drive(2, 0, [1, 2, 3]), drive(1, 7, [5, 6]), drive(2, 400, [1, 2]))
    assert [(vid, time) for vid, time, _ in told.charged] == [(1, 37), (2, 30), (2, 60), (2, 430)]
