"""Notifications, tolls and charges, clause by clause."""

import pytest
from worlds import ASKER, balance, crowd, drive, report, tell


def test_the_first_report_of_a_trip_is_told_and_nothing_is_known_in_minute_one() -> None:
    told = tell(crowd(60, 1, 5), report(59, ASKER, 5, lane=0))
    assert told.asked(59) == (-1, 0)


def test_only_reports_that_enter_a_segment_are_told() -> None:
    told = tell(drive(1, 0, [5, 5, 6, 6, 6, 7]))
    assert [time for _, time in told.notices] == [0, 60, 150]


def test_a_trip_that_ended_without_the_exit_ramp_is_over() -> None:
    told = tell(drive(1, 0, [5, 5]), drive(1, 91, [5, 6]))
    assert [time for _, time in told.notices] == [0, 91, 121]


def test_a_later_trip_may_be_on_another_expressway_the_other_way() -> None:
    told = tell(drive(1, 0, [5, 6]), drive(1, 200, [6, 5], xway=3, dir=1))
    assert [time for _, time in told.notices] == [0, 30, 200, 230]
    assert [(vid, time) for vid, time, _ in told.charged] == [(1, 30), (1, 230)]


def test_the_exit_ramp_is_not_told_but_charges() -> None:
    rows = crowd(52, 1, 5) + drive(1, 60, [5]) + [report(90, 1, 6, lane=4)]
    told = tell(rows)
    assert told.notices[1, 60] == (20, 8)
    assert (1, 90) not in told.notices
    assert told.charged == [(1, 90, 8)]


def test_the_exit_ramp_of_the_same_segment_charges_nothing() -> None:
    told = tell(crowd(52, 1, 5), drive(1, 60, [5]), report(90, 1, 5, lane=4), balance(99, 1))
    assert told.charged == []
    assert told.balances == {1: 0}


def test_every_vehicle_weighs_the_same_in_the_average() -> None:
    one = [report(5, 1, 5, spd=10, lane=0), report(35, 1, 5, spd=20)]
    told = tell(one, report(6, 2, 5, spd=40, lane=0), report(60, ASKER, 5, lane=0))
    assert told.asked(60)[0] == 27  # 23 if readings were pooled


def test_minutes_without_cars_are_left_out_of_the_average() -> None:
    rows = crowd(1, 1, 5, spd=30) + crowd(1, 5, 5, spd=50)
    assert tell(rows, report(300, ASKER, 5, lane=0)).asked(300)[0] == 40
    assert tell(rows, report(360, ASKER, 5, lane=0)).asked(360)[0] == 50


def test_after_five_minutes_without_cars_nothing_is_known() -> None:
    rows = crowd(1, 1, 5, spd=30)
    assert tell(rows, report(359, ASKER, 5, lane=0)).asked(359)[0] == 30
    assert tell(rows, report(360, ASKER, 5, lane=0)).asked(360)[0] == -1


@pytest.mark.parametrize(("minute", "lav"), [(2, 10), (3, 15), (4, 20), (6, 30), (7, 40)])
def test_as_many_of_five_minutes_as_there_are(minute: int, lav: int) -> None:
    rows = [row for m in range(1, 7) for row in crowd(1, m, 5, spd=10 * m)]
    at = (minute - 1) * 60
    assert tell(rows, report(at + 1, ASKER, 5, lane=0)).asked(at + 1)[0] == lav


def test_the_floor_is_of_the_exact_value() -> None:
    minutes = [[37, 60, 37], [30], [14, 45, 23]]
    assert sum(sum(speeds) / len(speeds) for speeds in minutes) / 3 < 34, "34 but for rounding"
    rows = [
        row
        for minute, speeds in enumerate(minutes, 1)
        for spd in speeds
        for row in crowd(1, minute, 5, spd=spd)
    ]
    assert tell(rows, report(180, ASKER, 5, lane=0)).asked(180)[0] == 34


def test_a_report_never_counts_in_its_own_minute() -> None:
    told = tell(crowd(60, 2, 5), report(119, ASKER, 5, lane=0), drive(1, 120, [5]))
    assert told.asked(119) == (-1, 0)
    assert told.notices[1, 120] == (20, 2 * 11**2)  # the one who asks is one of the 61


@pytest.mark.parametrize(("cars", "toll"), [(50, 0), (51, 2), (52, 8), (150, 20_000)])
def test_more_than_fifty_vehicles(cars: int, toll: int) -> None:
    assert tell(crowd(cars, 1, 5), report(60, ASKER, 5, lane=0)).asked(60) == (20, toll)


@pytest.mark.parametrize(("spd", "toll"), [(39, 2), (40, 0)])
def test_slower_than_forty(spd: int, toll: int) -> None:
    assert tell(crowd(51, 1, 5, spd=spd), report(60, ASKER, 5, lane=0)).asked(60) == (spd, toll)


def test_vehicles_of_the_minute_before_only() -> None:
    told = tell(crowd(60, 1, 5), report(120, ASKER, 5, lane=0))
    assert told.asked(120) == (20, 0)


def test_a_vehicle_counts_once_in_a_minute_and_in_all_lanes() -> None:
    twice = [row for i in range(26) for row in drive(100 + i, 0, [5, 5])]
    told = tell(twice, report(60, ASKER, 5, lane=0))
    assert told.asked(60) == (30, 0)
    ramps = [report(70, 200 + i, 5, lane=4) for i in range(20)] + crowd(31, 2, 5)
    assert tell(ramps, report(120, ASKER, 5, lane=0)).asked(120)[1] == 2


def test_a_vehicle_counts_in_every_segment_that_it_was_in() -> None:
    rows = crowd(50, 3, 5) + drive(1, 120, [5, 6])
    assert tell(rows, report(180, ASKER, 5, lane=0)).asked(180)[1] == 2
    assert tell(rows, report(180, ASKER, 6, lane=0)).asked(180) == (30, 0)


def test_directions_and_expressways_do_not_mix() -> None:
    rows = crowd(60, 1, 5)
    assert tell(rows, report(60, ASKER, 5, lane=0, dir=1)).asked(60) == (-1, 0)
    assert tell(rows, report(60, ASKER, 5, lane=0, xway=1)).asked(60) == (-1, 0)
    assert tell(rows, report(60, ASKER, 6, lane=0)).asked(60) == (-1, 0)


def test_the_charge_is_what_was_told_on_entering_not_what_is_true_now() -> None:
    rows = crowd(52, 1, 5) + crowd(60, 2, 5)
    told = tell(rows, drive(1, 60, [5, 5, 5, 6]))
    assert told.charged == [(1, 150, 8)]


def test_every_segment_charges_what_was_told_on_entering_it() -> None:
    rows = crowd(52, 1, 5) + crowd(53, 1, 6) + crowd(54, 2, 7)
    told = tell(rows, drive(1, 60, [5, 6, 7, 7, 8]))
    assert told.charged == [(1, 90, 8), (1, 120, 18), (1, 180, 32)]


def test_the_last_segment_of_a_trip_is_never_charged() -> None:
    rows = crowd(52, 1, 5) + crowd(52, 1, 6)
    told = tell(rows, drive(1, 60, [5, 6]), drive(1, 300, [7, 8]), balance(400, 1))
    assert told.charged == [(1, 90, 8), (1, 330, 0)]
    assert told.balances == {1: 8}


def test_balances_run_across_trips_and_expressways() -> None:
    rows = crowd(52, 1, 5) + crowd(53, 5, 7, xway=2, dir=1)
    trips = drive(1, 60, [5, 6]) + drive(1, 300, [7, 6], xway=2, dir=1)
    told = tell(rows, trips, balance(329, 1, 1), balance(330, 1, 2), balance(400, 1, 3))
    assert told.balances == {1: 8, 2: 8 + 18, 3: 8 + 18}


def test_a_balance_has_the_charges_of_its_own_second_whatever_comes_first() -> None:
    told = tell(crowd(52, 1, 5), balance(90, 1, 1), drive(1, 60, [5, 6]), balance(90, 1, 2))
    assert told.balances == {1: 8, 2: 8}
    assert tell(crowd(52, 1, 5), drive(1, 60, [5, 6]), balance(89, 1)).balances == {1: 0}


def test_the_balance_of_an_unknown_or_uncharged_vehicle_is_nothing() -> None:
    told = tell(drive(1, 0, [5]), balance(50, 1, 1), balance(50, 2, 2))
    assert told.balances == {1: 0, 2: 0}
    answers = told.expected.answers.to_pylist()
    assert [row["ResultTime"] for row in answers if row["Type"] == 2] == [50, 50]
