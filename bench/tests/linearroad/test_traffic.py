"""Traffic keeps to the guarantees, follows its load, and has in it what is to be found."""

from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import balance, drive, expenditure, in_time, report

from anabranch.errors import PlanError
from anabranch_linearroad import Traffic, guarantees, history_table, make_history, reference
from anabranch_linearroad.reference import observe

BUSY = Traffic(seed=3, expressways=2, seconds=1800, rates=(15.0, 30.0), accidents=150.0)


@pytest.fixture(scope="module")
def busy() -> pa.Table:
    return BUSY.table()


def of_vehicles(rows: pa.Table) -> dict[int, list[dict[str, int]]]:
    """The reports of each vehicle, in the order of time."""
    vehicles: dict[int, list[dict[str, int]]] = defaultdict(list)
    for row in rows.filter(pc.field("Type") == 0).to_pylist():
        vehicles[row["VID"]].append(row)
    return vehicles


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    expressways=st.integers(1, 3),
    seconds=st.integers(1, 500),
    rates=st.tuples(st.floats(0, 150), st.floats(0, 150)),
    accidents=st.floats(0, 4000),
    requests=st.floats(0, 1),
)
def test_traffic_keeps_to_the_guarantees(**parameters: Any) -> None:
    rows = Traffic(**parameters).table()
    assert guarantees(rows) == []
    assert rows["XWay"].to_numpy().max(initial=-1) < parameters["expressways"]


def test_long_traffic_keeps_to_them_too(busy: pa.Table) -> None:
    assert guarantees(busy) == []


def test_the_same_seed_gives_the_same_traffic_and_another_one_does_not() -> None:
    first, again, other = (Traffic(seed, seconds=90).table() for seed in (1, 1, 2))
    assert first.equals(again)
    assert not first.equals(other)


def test_it_comes_minute_by_minute() -> None:
    minutes = list(Traffic(seed=1, seconds=150).minutes())
    assert [
        (part["Time"][0].as_py() // 60, part["Time"][-1].as_py() // 60) for part in minutes
    ] == [(0, 0), (1, 1), (2, 2)]


def test_a_full_run_climbs_from_15_to_1700_rows_per_second() -> None:
    full = Traffic(seed=1)
    assert full.load(1) == pytest.approx(15, rel=0.01)
    assert full.load(10_800) - full.load(10_799) == pytest.approx(1700, rel=0.01)
    assert 9e6 < full.load(10_800) < 12e6


def test_the_load_is_met_in_every_second(busy: pa.Table) -> None:
    seconds = np.bincount(busy["Time"].to_numpy(), minlength=BUSY.seconds)
    wanted = np.diff([BUSY.load(t) for t in range(BUSY.seconds + 1)])
    assert abs(seconds.sum() / wanted.sum() - 1) < 0.005
    assert np.abs(seconds - wanted).max() < 8  # the requests of a second vary


def test_the_order_within_a_second_is_shuffled(busy: pa.Table) -> None:
    time, kind = busy["Time"].to_numpy(), busy["Type"].to_numpy()
    start = np.searchsorted(time, np.arange(BUSY.seconds))
    size = np.bincount(time, minlength=BUSY.seconds)
    asks = np.flatnonzero(kind != 0)
    place = (asks - start[time[asks]]) / size[time[asks]]
    assert 0.4 < place.mean() < 0.6


def test_one_in_a_hundred_reports_carries_a_request(busy: pa.Table) -> None:
    kinds = Counter(busy["Type"].to_pylist())
    asked = kinds[2] + kinds[3] + kinds[4]
    assert asked / kinds[0] == pytest.approx(0.01, rel=0.1)
    assert [kinds[kind] / asked for kind in (2, 3, 4)] == pytest.approx([0.5, 0.1, 0.4], abs=0.06)
    reports = set(of_vehicles(busy))
    strangers = [
        row["VID"]
        for row in busy.filter(pc.field("Type") > 0).to_pylist()
        if row["VID"] not in reports
    ]
    assert 0 < len(strangers) < asked / 20


def test_trips_end_on_the_ramp_or_without_it_and_some_are_repeated(busy: pa.Table) -> None:
    ends: Counter[bool] = Counter()
    roads: Counter[bool] = Counter()
    lengths = set()
    for reports in of_vehicles(busy).values():
        begun = reports[0]["Time"]
        for one, two in pairwise(reports):
            if two["Time"] - one["Time"] != 30:
                ends[one["Lane"] == 4] += 1
                roads[(one["XWay"], one["Dir"]) == (two["XWay"], two["Dir"])] += 1
                lengths.add((one["Time"] - begun) // 30)
                begun = two["Time"]
    assert ends[True] > ends[False] > 20
    assert roads[False] > roads[True] > 20
    assert {1, 2, 3, 10, 20} <= lengths


def test_speeds_are_those_that_the_positions_show(busy: pa.Table) -> None:
    for reports in list(of_vehicles(busy).values())[:200]:
        for one, two in pairwise(reports):
            if two["Time"] - one["Time"] == 30:
                assert abs(two["Pos"] - one["Pos"]) // 44 == two["Spd"]


def test_accidents_happen_and_what_only_looks_like_one(busy: pa.Table) -> None:
    standing: dict[tuple[int, int, int], dict[int, set[int]]] = defaultdict(dict)
    brief = 0
    for vid, reports in of_vehicles(busy).items():
        places = [(r["XWay"], r["Dir"], r["Pos"], r["Lane"]) for r in reports]
        for place, times in Counter(places).items():
            brief += times == 3
            if times >= 4:
                standing[place[:3]].setdefault(place[3], set()).add(vid)
    cars = Counter(
        len(vids)
        for lanes in standing.values()
        for lane, vids in lanes.items()
        if lane in (1, 2, 3)
    )
    assert min(cars[1], cars[2], cars[3]) >= 5
    assert sum(len(lanes) == 2 for lanes in standing.values()) >= 5, "side by side"
    assert sum(len(lanes.get(0, ())) == 2 for lanes in standing.values()) >= 3, "on a ramp"
    assert brief >= 3
    accidents = observe(busy).accidents
    assert len({key for key, _ in accidents}) >= 20
    assert {key.dir for key, _ in accidents} == {0, 1}
    alerts = reference(busy, history_table()).answers.filter(pc.field("Type") == 1)
    assert alerts.num_rows > 100


def test_without_accidents_there_are_none() -> None:
    assert not observe(Traffic(seed=3, seconds=900, rates=(40, 40), accidents=0).table()).accidents


def test_dense_traffic_pays() -> None:
    rows = Traffic(seed=5, seconds=180, rates=(800, 800)).table()
    tolls = reference(rows, history_table()).answers.filter(pc.field("Type") == 0)["Toll"]
    assert 0.05 < np.mean(tolls.to_numpy() > 0) < 0.95


def test_dense_traffic_is_slow() -> None:
    few, many = (
        list(Traffic(seed=5, seconds=240, rates=(rate, rate)).minutes())[-1] for rate in (50, 1700)
    )
    assert pc.mean(many["Spd"]).as_py() < 0.8 * pc.mean(few["Spd"]).as_py()


@pytest.mark.parametrize(
    "bad",
    [{"expressways": 0}, {"seconds": 0}, {"rates": (-1, 5)}, {"accidents": -1}, {"requests": 2}],
)
def test_traffic_that_cannot_be_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="at least 1"):
        Traffic(**{"seed": 1, **bad})


def test_what_is_asked_for_has_no_one_or_several_rows_in_the_history(busy: pa.Table) -> None:
    history = make_history(BUSY.minutes(), seed=3)
    assert history.equals(make_history(busy, seed=3))
    rows = Counter((row["VID"], row["Day"], row["XWay"]) for row in history.to_pylist())
    asked = busy.filter(pc.field("Type") == 3).to_pylist()
    times = Counter(rows[row["VID"], row["Day"], row["XWay"]] for row in asked)
    assert min(times[0], times[1], times[2]) > 5
    assert set(history["Day"].to_pylist()) == set(range(1, 70))
    assert set(history["XWay"].to_pylist()) == {0, 1}
    assert pc.min(history["Toll"]).as_py() > 0


def test_a_history_of_nothing_is_empty() -> None:
    assert make_history(in_time([]), seed=1).num_rows == 0


TRIP = drive(1, 0, [5, 5, 6])
"""Rows that break each guarantee in turn; the trip itself is fine."""


@pytest.mark.parametrize(
    ("rows", "say"),
    [
        ([report(90, 1, 8)], "a segment is skipped"),
        ([report(90, 1, 5)], "a vehicle goes backwards"),
        ([report(90, 1, 6, xway=1)], "XWay or Dir changes"),
        ([report(90, 1, 6, dir=1)], "XWay or Dir changes"),
        ([report(61, 1, 6)], "neither 30 s nor more than 60 s"),
        ([report(120, 1, 6, lane=0)], "neither 30 s nor more than 60 s"),
        ([report(60, 1, 6)], "reports twice in a second"),
        ([report(121, 1, 6)], "does not start in lane 0"),
        ([report(90, 1, 6, lane=4), report(120, 1, 6)], "goes on after lane 4"),
        ([report(90, 1, 6, lane=5)], "Lane is not in 0..4"),
        ([report(90, 1, 6, spd=101)], "Spd is not in 0..100"),
        ([report(90, 1, 6) | {"Seg": 7}], "Seg is not that of Pos"),
        ([report(90, 1, 6) | {"QID": 7}], "QID is used"),
        ([balance(5, 1, 2), balance(6, 3, 2)], "the QID has been used"),
        ([balance(5, 1, -1)], "a request has no QID"),
        ([balance(5, 1) | {"XWay": 0}], "XWay is used"),
        ([expenditure(5, 1, 70, 0)], "Day is not in 1..69"),
        ([expenditure(5, 1, 0, 0)], "Day is not in 1..69"),
        ([expenditure(5, 1, 3, -1)], "there is no XWay"),
        ([balance(5, -1)], "there is no VID"),
        ([balance(10_800, 1)], "Time is not in 0..10799"),
        ([{"Type": 1, "Time": 5, "VID": 1}], "Type is unknown"),
    ],
)
def test_what_breaks_a_guarantee_is_found(rows: list[dict[str, int]], say: str) -> None:
    found = guarantees(in_time(TRIP + rows))
    assert any(say in sentence for sentence in found), found


def test_rows_out_of_order_are_found() -> None:
    table = in_time(TRIP).take(pa.array([1, 0, 2]))
    assert any("Time goes back" in sentence for sentence in guarantees(table))


def test_what_is_allowed_is_not_found() -> None:
    rows = [*TRIP, report(90, 1, 6, lane=4), report(151, 1, 50, lane=0, dir=1, xway=3)]
    assert guarantees(in_time(rows)) == []
    assert guarantees(in_time(rows).slice(1), whole=False) == []
    assert guarantees(in_time([])) == []
