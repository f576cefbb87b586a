"""The reference against the definitions written as searches, and what it does with requests."""

from random import Random
from typing import Any

from brute import World
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import balance, crowd, drive, expenditure, in_time, report, stand, tell

from anabranch_linearroad import Expected, guarantees, history_table, reference

Rows = list[dict[str, int]]

HALF = 2640
"""Cars in these worlds move by half a segment, so that they often meet."""


def trips(rng: Random, vid: int) -> Rows:
    """One or two trips of a vehicle near one end of the road."""
    rows: Rows = []
    start = rng.randint(0, 200)
    for _ in range(rng.randint(1, 2)):
        dir, xway = rng.choice([(0, 0), (0, 0), (0, 0), (1, 0), (0, 1)])
        at, lane = rng.randint(190, 194) * HALF, 0
        for i in range(rng.randint(1, 10)):
            pos = at if dir == 0 else 527_999 - at
            row = report(start + 30 * i, vid, pos // 5280, lane=lane, dir=dir, xway=xway)
            rows.append(row | {"Pos": pos, "Spd": rng.randint(0, 60)})
            at = min(at + rng.choice([0, HALF]), 199 * HALF)
            lane = lane if lane and rng.random() < 0.9 else rng.randint(1, 3)
        if rows[-1]["Lane"] and rng.random() < 0.5:
            rows[-1]["Lane"] = 4
        start = rows[-1]["Time"] + rng.randint(61, 120)
    return rows


def standing(rng: Random, vid: int) -> Rows:
    """Cars that stand, most of them at the same place, some long enough and some not."""
    seg, dir = rng.choice([(95, 0), (97, 0), (98, 0), (4, 1)])
    rows: Rows = []
    for car in range(vid, vid + rng.randint(2, 3)):
        start, lane = rng.randint(0, 90), rng.choice([0, 1, 1, 1, 2])
        rows.append(report(start, car, seg, lane=0, dir=dir))
        rows += stand(car, start + 30, rng.randint(3, 8), seg, lane=lane, dir=dir)
    return rows


def world(seed: int) -> Rows:
    rng = Random(seed)
    rows = [row for vid in range(12) for row in trips(rng, vid)]
    for vid in range(50, rng.choice([50, 55, 60]), 5):
        rows += standing(rng, vid)
    for _ in range(4):
        minute, seg, spd = rng.randint(2, 6), rng.randint(95, 98), rng.randint(20, 45)
        rows += crowd(rng.randint(49, 55), minute, seg, spd=spd)
    rows += [balance(rng.randint(0, 700), rng.randint(0, 12), qid) for qid in range(10)]
    rng.shuffle(rows)
    return rows


SEEDS = st.integers(0, 2**32)


def answers(expected: Expected) -> set[tuple[Any, ...]]:
    names = {
        0: ("VID", "Time", "Spd", "Toll"),
        1: ("VID", "Time", "Seg"),
        2: ("QID", "Time", "Bal"),
    }
    rows = expected.answers.to_pylist()
    assert len(rows) == len({tuple(row.values()) for row in rows})
    return {(row["Type"], *(row[name] for name in names[row["Type"]])) for row in rows}


@settings(max_examples=40)
@given(SEEDS)
def test_it_is_what_the_definitions_say(seed: int) -> None:
    rows = world(seed)
    table = in_time(rows)
    assert guarantees(table) == []
    assert answers(reference(table, history_table())) == World(rows).answers()


@settings(max_examples=20)
@given(SEEDS)
def test_the_order_within_a_second_carries_no_meaning(seed: int) -> None:
    rows = world(seed)
    before = answers(reference(in_time(rows), history_table()))
    Random(seed + 1).shuffle(rows)
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
