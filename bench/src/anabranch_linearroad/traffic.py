"""Traffic for Linear Road, the same for the same seed.

Cars are kept in thirty groups, by the second of the half minute in which they report. In each
second one group moves: its cars go on, stop or leave, and as many enter as the load of that second
asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from anabranch.errors import PlanError
from anabranch_linearroad.cars import CAR, FEET, Array, Crowd, joined, positions, stretches
from anabranch_linearroad.requests import Requests
from anabranch_linearroad.rows import (
    ENTRY_LANE,
    EXIT_LANE,
    HOURS3,
    INPUT,
    LENGTH,
    REPORT_EVERY,
    SEGMENT,
    SEGMENTS,
    UNUSED,
    Row,
)
from anabranch_linearroad.stops import Stops

_MILES = 11.0  # of a trip, on average
_RETURNING = 0.45  # share of cars that make another trip
_PAUSE = 61  # seconds that a car is away at least
_AWAY = 900.0  # seconds that it is away longer than that, on average
_BY_RAMP = 0.8  # share of trips that end with a report from the exit ramp
_SLOWEST = 3  # miles per hour of a car that does not stand
_TWO_ON_A_RAMP = 1 / 300  # per second and expressway
_REPORT = np.dtype(
    [
        ("time", np.int32),
        ("vid", np.int32),
        ("road", np.int32),
        ("at", np.int32),
        ("spd", np.int8),
        ("lane", np.int8),
    ]
)


@dataclass(frozen=True)
class Traffic:
    """The cars of some expressways over some time.

    The load climbs evenly from the first to the second of ``rates``, in rows per second and
    expressway. Set ``accidents`` and ``rates`` higher for a short run in which much happens.

    >>> first = next(Traffic(seed=1).minutes())
    >>> first["Time"][0].as_py(), first["Time"][-1].as_py(), set(first["Lane"][:15].to_pylist())
    (0, 59, {0})
    """

    seed: int
    expressways: int = 1
    seconds: int = HOURS3
    rates: tuple[float, float] = (15.0, 1700.0)
    accidents: float = 24.0
    """Per hour and expressway; as many stops again are decoys that must not count as one."""
    requests: float = 0.01
    """Of the reports, how many carry a request."""

    def __post_init__(self) -> None:
        low = min(*self.rates, self.accidents, self.requests)
        if self.expressways < 1 or self.seconds < 1 or low < 0 or self.requests > 1:
            raise PlanError(
                f"{self!r}: expressways and seconds must be at least 1, no value negative, "
                "and requests at most 1"
            )

    def minutes(self) -> Iterator[pa.Table]:
        """The rows, minute by minute, sorted by time and shuffled within each second."""
        drive = _Drive(self)
        shuffle = np.random.default_rng([self.seed, 2])
        requests = Requests(
            self.requests, self.expressways, drive.unseen, np.random.default_rng([self.seed, 1])
        )
        for start in range(0, self.seconds, 60):
            seconds = range(start, min(start + 60, self.seconds))
            reports = joined(*(drive.second(time) for time in seconds))
            asked = requests.on(reports["time"], reports["vid"])
            yield _shuffled(_columns(reports), asked, shuffle)

    def table(self) -> pa.Table:
        """All rows at once."""
        return pa.concat_tables(self.minutes())

    def load(self, time: float) -> float:
        """Rows up to a time, in expectation."""
        first, last = self.rates
        return self.expressways * (first * time + (last - first) * time**2 / 2 / self.seconds)


class _Drive:
    """The cars that are on the way."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._rng = np.random.default_rng([traffic.seed, 0])
        roads = 2 * traffic.expressways
        self._crowd = Crowd(roads)
        self._stops = Stops(2 * traffic.accidents * traffic.expressways / 3600, self._rng)
        self._groups = [np.zeros(0, CAR) for _ in range(REPORT_EVERY)]
        self._attraction = _attraction(roads, self._rng)
        self._returns: dict[int, list[Array]] = {}
        self._waiting = np.zeros(0, np.int32)
        self._vids = 0

    def unseen(self, n: int) -> Array:
        """Vehicles that never drove and never will."""
        self._vids += n
        return np.arange(self._vids - n, self._vids, dtype=np.int32)

    def second(self, time: int) -> Array:
        """The reports of one second."""
        cars = self._groups[time % REPORT_EVERY]
        self._crowd.add(cars, -1)
        cars, speeds, gone = self._move(time, cars)
        self._away(time, cars["vid"][gone])
        said = ~gone | cars["ramp"]
        new = self._enter(time, self._wanted(time) - int(said.sum()))
        stay = joined(cars.compress(~gone), new)
        self._crowd.add(stay)
        self._groups[time % REPORT_EVERY] = stay
        slow = self._rng.integers(8, 36, len(new))
        return _report(
            time,
            joined(cars.compress(said), new),
            np.concatenate([speeds[said], np.where(new["held"] > 0, 0, slow)]),
        )

    def _wanted(self, time: int) -> int:
        reports = 1 / (1 + self._traffic.requests)
        load = self._traffic.load
        return int(load(time + 1) * reports) - int(load(time) * reports)

    def _move(self, time: int, cars: Array) -> tuple[Array, Array, Array]:
        """The cars after half a minute, the speeds they made, and which of them have left."""
        rng, n = self._rng, len(cars)
        pace = self._crowd.pace()[stretches(cars["road"], cars["at"])]
        speeds = np.rint(pace * cars["temper"] * rng.normal(1.0, 0.06, n)).astype(np.int32)
        speeds = np.clip(speeds, _SLOWEST, 100)
        speeds[cars["held"] > 0] = 0
        to = cars["at"] + FEET * speeds
        self._stops.hold(time, cars, to, self._crowd)
        gone = to >= cars["goal"]
        to = np.minimum(to, cars["goal"])
        speeds = (to - cars["at"]) // FEET
        moving = to > cars["at"]
        lanes = rng.integers(1, 4, n)
        changing = moving & (rng.random(n) < 0.1) & (cars["held"] == 0)
        enters = moving & (cars["lane"] == ENTRY_LANE)
        cars["lane"] = np.where(changing | enters, lanes, cars["lane"])
        cars["lane"][gone] = EXIT_LANE
        cars["at"] = to
        cars["held"] = np.maximum(cars["held"] - 1, 0)
        return cars, speeds, gone

    def _enter(self, time: int, n: int) -> Array:
        """New cars on the entry ramps, fewer where the road is full already."""
        rng, n = self._rng, max(n, 0)
        cars = np.zeros(n, CAR)
        odds = np.cumsum(self._attraction * np.maximum(self._crowd.room(), 0.02))
        stretch = np.searchsorted(odds, rng.random(n) * odds[-1], side="right")
        cars["vid"] = self._vehicles(time, n)
        cars["road"] = stretch // SEGMENTS
        cars["at"] = stretch % SEGMENTS * SEGMENT + rng.integers(0, SEGMENT, n)
        miles = rng.exponential(_MILES * SEGMENT, n) + FEET
        last = LENGTH - 1 - rng.integers(0, SEGMENT // 2, n)
        cars["goal"] = np.minimum(cars["at"] + miles, np.maximum(last, cars["at"])).astype(np.int32)
        cars["temper"] = rng.normal(1.0, 0.1, n).clip(0.7, 1.4)
        cars["ramp"] = rng.random(n) < _BY_RAMP
        if n > 1 and rng.random() < _TWO_ON_A_RAMP * self._traffic.expressways:
            for field in ("road", "at", "goal"):
                cars[field][1] = cars[field][0]
            cars["held"][:2] = rng.integers(4, 15, 2)
        return cars

    def _vehicles(self, time: int, n: int) -> Array:
        """Who drives: first those that come back, then those that were never seen."""
        self._waiting = np.concatenate([self._waiting, *self._returns.pop(time, [])])
        back, self._waiting = self._waiting[:n], self._waiting[n:]
        return np.concatenate([back, self.unseen(n - len(back))])

    def _away(self, time: int, vids: Array) -> None:
        again = vids[self._rng.random(len(vids)) < _RETURNING]
        pauses = _PAUSE + self._rng.exponential(_AWAY, len(again)).astype(np.int64)
        for vid, pause in zip(again, pauses.tolist(), strict=True):
            self._returns.setdefault(time + pause, []).append(vid[None])


def _attraction(roads: int, rng: np.random.Generator) -> Array:
    """How many cars enter at each stretch: every road has busy parts, and no two are the same."""
    miles = np.arange(SEGMENTS) / SEGMENTS
    waves = rng.random((roads, 3, 1))
    busy = sum(np.sin(2 * np.pi * (k + 1) * (miles + waves[:, k])) for k in range(3))
    attraction: Array = np.exp(0.45 * np.asarray(busy) + rng.normal(0, 0.2, (roads, SEGMENTS)))
    # Nobody enters where the road is about to end.
    attraction[:, -1] = attraction[:, -1] / 10
    return attraction.ravel()


def _report(time: int, cars: Array, speeds: Array) -> Array:
    reports = np.empty(len(cars), _REPORT)
    reports["time"] = time
    reports["spd"] = speeds
    for field in ("vid", "road", "at", "lane"):
        reports[field] = cars[field]
    return reports


def _columns(reports: Array) -> dict[str, Array]:
    pos = positions(reports["road"], reports["at"])
    return {
        "Type": np.full(len(reports), Row.REPORT),
        "Time": reports["time"],
        "VID": reports["vid"],
        "Spd": reports["spd"],
        "XWay": reports["road"] // 2,
        "Lane": reports["lane"],
        "Dir": reports["road"] % 2,
        "Seg": pos // SEGMENT,
        "Pos": pos,
    }


def _shuffled(
    reports: dict[str, Array], asked: dict[str, Array], rng: np.random.Generator
) -> pa.Table:
    time = np.concatenate([reports["Time"], asked["Time"]]).astype(np.int64)
    order = np.argsort(time << 32 | rng.integers(0, 1 << 32, len(time)))
    columns = []
    for field in INPUT:
        column = np.full(len(time), UNUSED, field.type.to_pandas_dtype())
        if field.name in reports:
            column[: len(reports["Time"])] = reports[field.name]
        if field.name in asked:
            column[len(reports["Time"]) :] = asked[field.name]
        columns.append(pa.array(column[order]))
    return pa.table(columns, schema=INPUT)
