"""Accidents and alerts, clause by clause."""

import pytest
from worlds import ASKER, Rows, crowd, drive, report, stand, tell


def asks(minute: int, seg: int, dir: int = 0) -> dict[str, int]:
    return report((minute - 1) * 60 + 10, ASKER, seg, lane=0, dir=dir)


def alert(rows: Rows, minute: int, seg: int, dir: int = 0) -> int | None:
    """The segment of the alert that a car gets which enters a segment in a minute."""
    told = tell(rows, asks(minute, seg, dir))
    assert (ASKER, (minute - 1) * 60 + 10) in told.notices
    return told.alerts.get((ASKER, (minute - 1) * 60 + 10))


TWO = stand(1, 0, 4, 50) + stand(2, 10, 4, 50)
"""Their fourth reports are at 90 and 100, in minute 2."""


def test_an_accident_is_seen_in_the_minute_after_it_and_only_then() -> None:
    assert [alert(TWO, minute, 50) for minute in (1, 2, 3, 4)] == [None, None, 50, None]


def test_it_begins_in_the_minute_of_the_fourth_report_of_the_later_car() -> None:
    rows = stand(1, 0, 10, 50) + stand(2, 31, 4, 50)  # stopped at 121, minute 3
    assert [alert(rows, minute, 50) for minute in (2, 3, 4, 5)] == [None, None, 50, None]


def test_three_equal_reports_are_not_enough() -> None:
    assert alert(stand(1, 0, 4, 50) + stand(2, 10, 3, 50), 3, 50) is None


def test_it_lasts_as_long_as_two_cars_stand() -> None:
    rows = stand(1, 0, 20, 50) + stand(2, 10, 9, 50)  # the last pair is at 250 and 270, minute 5
    seen = {minute: alert(rows, minute, 50) for minute in range(2, 9)}
    assert seen == {2: None, 3: 50, 4: 50, 5: 50, 6: 50, 7: None, 8: None}


def test_the_last_report_of_a_car_still_pairs_with_the_next_of_the_other() -> None:
    rows = stand(1, 0, 20, 50) + stand(2, 10, 10, 50)  # at 280, minute 5, and 300, minute 6
    assert [alert(rows, minute, 50) for minute in (6, 7, 8)] == [50, 50, None]


def test_three_cars_of_which_one_leaves_are_still_an_accident() -> None:
    rows = stand(1, 0, 4, 50) + stand(2, 10, 12, 50) + stand(3, 20, 12, 50)
    assert [alert(rows, minute, 50) for minute in (3, 4, 5, 6, 7, 8)] == [50] * 5 + [None]


def test_one_car_is_no_accident() -> None:
    assert alert(stand(1, 0, 12, 50), 4, 50) is None


@pytest.mark.parametrize(
    "other",
    [
        {"lane": 3},
        {"feet": 101},
        {"dir": 1},
        {"xway": 1},
    ],
)
def test_cars_at_different_places_are_no_accident(other: dict[str, int]) -> None:
    assert alert(stand(1, 0, 12, 50) + stand(2, 10, 12, 50, **other), 4, 50) is None


@pytest.mark.parametrize(("lane", "seen"), [(0, None), (1, 50), (2, 50), (3, 50), (4, None)])
def test_accidents_are_in_travel_lanes_only(lane: int, seen: int | None) -> None:
    assert alert(stand(1, 0, 8, 50, lane=lane) + stand(2, 10, 8, 50, lane=lane), 4, 50) == seen


@pytest.mark.parametrize(("later", "seen"), [(0, 50), (29, 50), (30, None)])
def test_the_reports_are_less_than_thirty_seconds_apart(later: int, seen: int | None) -> None:
    rows = stand(1, 0, 4, 50) + stand(2, later, 4, 50)
    assert {alert(rows, minute, 50) for minute in (3, 4)} == {seen, None}


def test_it_counts_in_the_minute_of_the_later_report() -> None:
    rows = stand(1, 20, 4, 50) + stand(2, 40, 4, 50)  # stopped at 110, minute 2, and 130, minute 3
    assert [alert(rows, minute, 50) for minute in (3, 4, 5)] == [None, 50, None]


def test_speed_is_not_consulted() -> None:
    rows = stand(1, 0, 4, 50, spd=60) + stand(2, 10, 4, 50, spd=7)
    assert alert(rows, 3, 50) == 50


def test_a_change_of_lane_or_a_new_trip_begins_the_count_again() -> None:
    moved = stand(2, 10, 2, 50, lane=1) + stand(2, 70, 3, 50)
    assert alert(stand(1, 0, 12, 50) + moved, 4, 50) is None
    again = stand(2, 10, 3, 50) + stand(2, 132, 3, 50)
    assert {alert(stand(1, 0, 12, 50) + again, minute, 50) for minute in range(2, 7)} == {None}


@pytest.mark.parametrize(
    ("dir", "seg", "seen"),
    [
        (0, 45, None),
        (0, 46, 50),
        (0, 50, 50),
        (0, 51, None),
        (1, 55, None),
        (1, 54, 50),
        (1, 50, 50),
        (1, 49, None),
    ],
)
def test_five_segments_ahead_are_in_range(dir: int, seg: int, seen: int | None) -> None:
    rows = stand(1, 0, 4, 50, dir=dir) + stand(2, 10, 4, 50, dir=dir)
    assert alert(rows, 3, seg, dir) == seen


def test_accidents_the_other_way_do_not_matter() -> None:
    assert alert(TWO, 3, 50, dir=1) is None


@pytest.mark.parametrize(("dir", "first", "last"), [(0, 96, 99), (1, 3, 0)])
def test_the_range_is_cut_at_the_end_of_the_road(dir: int, first: int, last: int) -> None:
    rows = stand(1, 0, 4, last, dir=dir) + stand(2, 10, 4, last, dir=dir)
    assert alert(rows, 3, first, dir) == last
    assert alert(rows, 3, last, dir) == last
    far = 99 - last  # the other end of the road
    there = stand(1, 0, 4, far, dir=dir) + stand(2, 10, 4, far, dir=dir)
    assert alert(there, 3, first, dir) is None


@pytest.mark.parametrize(("dir", "seg", "nearest"), [(0, 48, 49), (1, 53, 52)])
def test_the_nearest_is_told_and_only_one(dir: int, seg: int, nearest: int) -> None:
    rows = [
        row
        for vid, place in enumerate((49, 51, 52), 1)
        for car in (vid, vid + 100)
        for row in stand(car, 0, 4, place, dir=dir)
    ]
    assert alert(rows, 3, seg, dir) == nearest


def test_an_alert_comes_with_a_toll_of_nothing() -> None:
    rows = crowd(60, 2, 48)
    assert tell(rows, asks(3, 48)).notices[ASKER, 130] == (20, 2 * 10**2)
    told = tell(rows, TWO, asks(3, 48))
    assert told.notices[ASKER, 130] == (20, 0)
    assert told.alerts[ASKER, 130] == 50


def test_only_those_who_enter_and_do_not_leave_are_alerted() -> None:
    told = tell(TWO, drive(7, 92, [48, 49, 49]), drive(8, 93, [48]), report(123, 8, 49, lane=4))
    assert {key for key in told.alerts if key[0] in (7, 8)} == {(7, 122)}
    assert (8, 93) in told.notices
    assert (8, 123) not in told.notices
