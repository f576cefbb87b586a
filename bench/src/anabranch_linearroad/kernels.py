"""The loops of Linear Road, compiled.

All of the state of the roads is in *cells* of four numbers, one cell to a row of the state:

========= ================== ============= ================= =================================
cell of   0                  1             2                 3
========= ================== ============= ================= =================================
a vehicle time of its report its position  the toll that it  segment, lane, speed and how often
                                           was told last     it has been at the same place
a minute  minus the minute   vehicles      sum of speeds     whether it has shown an accident
a notice  minus the minute   average speed toll              segment of the nearest accident
a place   time of a report   its vehicle   time of another   its vehicle
========= ================== ============= ================= =================================

A *minute* is one of one segment; the sum of speeds is twice that of the means of its vehicles, and
so a whole number, because a vehicle reports once or twice in a minute. A *notice* is what vehicles
are told that enter a segment. A *place* is one where vehicles stand.
New cells are ``NEW`` throughout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels._jit import kernel
from anabranch.kernels._prefetch import prefetch
from anabranch_linearroad.rows import EXIT_LANE, REPORT_EVERY, SEGMENTS

Array = npt.NDArray[Any]

_int: Any = np.int64  # as Any, so that its results count as int for the type checker

KEPT = 6
"""Minutes of a segment: the current one and the five before it."""

STOPPED = 4
"""A vehicle has stopped that reports from one place so many times."""

NEW = -(10**9)
"""Long before any time, and nobody's number."""

_NOWHERE = -1
_AHEAD = 16
_RANGE = 5


@kernel
def by_half_minute(kind: Array, time: Array, first: int, order: Array, starts: Array) -> None:
    """Put the positions of reports into the order of their half minutes, counted from ``first``.

    Half minute h is ``order[starts[h]:starts[h + 1]]``. In a half minute of the clock a vehicle
    reports once, and a minute ends only where one ends.
    """
    count = time.shape[0]
    for i in range(count):
        if kind[i] == 0:
            starts[_int(time[i]) // REPORT_EVERY - first + 2] += 1
    for h in range(2, starts.shape[0]):
        starts[h] += starts[h - 1]
    for i in range(count):
        if kind[i] == 0:
            half = _int(time[i]) // REPORT_EVERY - first + 1
            order[starts[half]] = i
            starts[half] += 1


@kernel
def find_roads(
    xway: Array, direction: Array, order: Array, numbers: Array, road: Array, firsts: Array
) -> int:
    """Number the roads that reports come from as they appear.

    ``road`` gets the number of each report, ``firsts`` the first report of each road. ``numbers``
    is as long as there can be roads, and -1 everywhere.
    """
    found = 0
    for i in range(order.shape[0]):
        row = order[i]
        name = 2 * _int(xway[row]) + _int(direction[row])
        number = numbers[name]
        if number < 0:
            number = found
            numbers[name] = number
            firsts[number] = i
            found += 1
        road[i] = number
    return found


@kernel
def announce(
    cells: Array, notices: Array, minutes: Array, directions: Array, minute: int, stale: Array
) -> None:
    """Work out what vehicles are told in a minute, for the roads in ``stale``.

    ``notices`` has the row of each road and segment, ``minutes`` that of each of its minutes: the
    one of minute m is at ``m % KEPT``.
    """
    for at in range(stale.shape[0]):
        road = stale[at]
        for seg in range(SEGMENTS):
            averages, known = 0.0, 0
            for before in range(1, KEPT):
                past = minutes[(minute - before) % KEPT, road, seg]
                if cells[past, 0] == before - minute and cells[past, 1] > 0:
                    averages += cells[past, 2] / (2.0 * cells[past, 1])
                    known += 1
            latest = _int(np.floor(averages / known + 1e-9)) if known > 0 else -1
            accident = _NOWHERE
            ahead = seg
            for _ in range(_RANGE):
                if accident == _NOWHERE and 0 <= ahead < SEGMENTS:
                    past = minutes[(minute - 1) % KEPT, road, ahead]
                    if cells[past, 0] == 1 - minute and cells[past, 3] != 0:
                        accident = ahead
                ahead += 1 - 2 * directions[road]
            past = minutes[(minute - 1) % KEPT, road, seg]
            vehicles = _int(cells[past, 1]) if cells[past, 0] == 1 - minute else 0
            toll = 0
            if latest < 40 and vehicles > 50 and accident == _NOWHERE:
                toll = 2 * (vehicles - 50) ** 2
            notice = notices[road, seg]
            cells[notice, 0] = -minute
            cells[notice, 1] = latest
            cells[notice, 2] = toll
            cells[notice, 3] = accident


@kernel
def begin_minute(cells: Array, rows: Array, minute: int) -> None:
    """Let the cells of a minute that has not been seen yet count from nothing."""
    for i in range(rows.shape[0]):
        row = rows[i]
        if cells[row, 0] != -minute:
            cells[row, 0] = -minute
            cells[row, 1] = 0
            cells[row, 2] = 0
            cells[row, 3] = 0


@kernel
def drive(
    cells: Array,
    order: Array,
    at: Array,
    road: Array,
    time: Array,
    spd: Array,
    lane: Array,
    seg: Array,
    pos: Array,
    notices: Array,
    minutes: Array,
    told: Array,
    results: Array,
    stopped: Array,
    left: Array,
) -> tuple[int, int, int]:
    """Take the reports of a half minute, at most one of each vehicle, in any order.

    Who is told or charged something goes into ``told``, and what into ``results``: the average
    speed, the toll (-1: is told nothing), the segment of an accident or -1, and the charge.
    ``stopped`` gets the reports of vehicles that stand in a lane for travel, ``left`` the rows of
    vehicles on an exit ramp. Returns how many there are of each.
    """
    flat = cells.reshape(-1)
    count = order.shape[0]
    tellings = stops = exits = 0
    for i in range(count):
        if i + _AHEAD < count:
            prefetch(flat, 4 * at[i + _AHEAD])
        row, vehicle = order[i], at[i]
        now, here, speed, track = time[row], _int(seg[row]), _int(spd[row]), _int(lane[row])
        known = _int(cells[vehicle, 3])
        goes_on = cells[vehicle, 0] == now - REPORT_EVERY
        stays = goes_on and known & 127 == here
        minute = minutes[road[i], here]
        if stays and now % 60 >= REPORT_EVERY:
            # The mean of its two reports takes the place of the first.
            cells[minute, 2] += speed - ((known >> 7) & 127)
        else:
            cells[minute, 1] += 1
            cells[minute, 2] += 2 * speed
        times = 1
        if stays and cells[vehicle, 1] == pos[row] and (known >> 14) & 7 == track:
            times = min((known >> 17) + 1, STOPPED)
            if times == STOPPED and 1 <= track <= 3:
                stopped[stops] = i
                stops += 1
        if not stays:
            notice = notices[road[i], here]
            charge = _int(cells[vehicle, 2]) if goes_on else 0
            cells[vehicle, 2] = cells[notice, 2]
            if track != EXIT_LANE or charge > 0:
                told[tellings] = row
                results[0, tellings] = cells[notice, 1]
                results[1, tellings] = cells[notice, 2] if track != EXIT_LANE else -1
                results[2, tellings] = cells[notice, 3]
                results[3, tellings] = charge
                tellings += 1
        cells[vehicle, 0] = now
        cells[vehicle, 1] = pos[row]
        cells[vehicle, 3] = here | speed << 7 | track << 14 | times << 17
        if track == EXIT_LANE:
            left[exits] = vehicle
            exits += 1
    return tellings, stops, exits


@kernel
def crash(cells: Array, places: Array, minutes: Array, times: Array, vehicles: Array) -> None:
    """Take reports of vehicles that have stopped: two of them at one place are an accident.

    Of each place the last reports of two vehicles are kept, the later one first. A third need not
    be: whenever it could be half of a pair, one of the two can.
    """
    for i in range(places.shape[0]):
        place, now, vehicle = places[i], times[i], vehicles[i]
        for k in range(0, 4, 2):
            other = cells[place, k + 1]
            if other != vehicle and abs(now - cells[place, k]) < REPORT_EVERY:
                cells[minutes[i], 3] = 1
        if cells[place, 1] == vehicle:
            cells[place, 0] = now
        elif now >= cells[place, 0]:
            cells[place, 2], cells[place, 3] = cells[place, 0], cells[place, 1]
            cells[place, 0], cells[place, 1] = now, vehicle
        elif cells[place, 3] == vehicle or now >= cells[place, 2]:
            cells[place, 2], cells[place, 3] = now, vehicle


@kernel
def expired(cells: Array, rows: Array, before: int, out: Array) -> int:
    """List the vehicles and places among some rows of which nothing was heard since a time."""
    count = 0
    for i in range(rows.shape[0]):
        time = cells[rows[i], 0]
        if 0 <= time < before:
            out[count] = rows[i]
            count += 1
    return count


@kernel
def settle(
    books: Array, order: Array, at: Array, time: Array, amount: Array, balance: Array
) -> None:
    """Charge vehicles and look up what they have been charged, in the order of time.

    A book is: all that was charged, the time of the last charge, and its amount. An ``amount`` of
    -1 asks for the balance up to the second before.
    """
    for i in range(order.shape[0]):
        event = order[i]
        row = at[event]
        if amount[event] >= 0:
            books[row, 0] += amount[event]
            books[row, 1] = time[event]
            books[row, 2] = amount[event]
        elif row < 0:
            balance[event] = 0
        else:
            since = books[row, 2] if books[row, 1] >= max(time[event], 1) else 0
            balance[event] = books[row, 0] - since
