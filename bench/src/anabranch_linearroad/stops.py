"""Cars that stand: accidents, and what only looks like one.

A stop begins with one moving car that halts where it is. Cars that would pass that place later are
caught there until there are enough of them, and all go on when the stop is over, some before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anabranch_linearroad.cars import Array, Crowd
from anabranch_linearroad.rows import REPORT_EVERY, SEGMENT, SEGMENTS

_NEEDED = 3  # a car has stopped once it has said so three times again
_SHARES = {"accident": 0.5, "alone": 0.2, "side by side": 0.2, "brief": 0.1}
_BEHIND = (0.25, 0.5, 0.75)  # what an accident leaves of the speed in its mile, and before it


@dataclass
class _Stop:
    road: int
    at: int
    lane: int
    until: int
    missing: int
    kind: str

    @property
    def blocks(self) -> bool:
        return self.kind == "accident" and not self.missing


class Stops:
    """All stops of a run, which begin at so many per second on average."""

    def __init__(self, per_second: float, rng: np.random.Generator) -> None:
        self._per_second = per_second
        self._rng = rng
        self._stops: list[_Stop] = []

    def hold(self, time: int, cars: Array, to: Array, crowd: Crowd) -> None:
        """Make some of the cars that are about to move ``to`` some place stand instead.

        What it decides is written into ``to`` and into the lanes and holds of the cars.
        """
        before = [stop for stop in self._stops if stop.blocks]
        self._stops = [stop for stop in self._stops if time < stop.until]
        for stop in self._stops:
            if stop.missing:
                self._catch(stop, time, cars, to)
        for _ in range(self._rng.poisson(self._per_second)):
            self._begin(time, cars, to)
        blocking = [stop for stop in self._stops if stop.blocks]
        if blocking != before:
            _slow(crowd, blocking)

    def _begin(self, time: int, cars: Array, to: Array) -> None:
        moving = np.flatnonzero(
            (cars["held"] == 0) & (cars["lane"] > 0) & (to > cars["at"]) & (to < cars["goal"])
        )
        if not len(moving):
            return
        car = self._rng.choice(moving)
        kind = str(self._rng.choice(list(_SHARES), p=list(_SHARES.values())))
        others = 0 if kind == "alone" else 1
        if kind == "accident":
            others += int(self._rng.choice(3, p=(0.6, 0.25, 0.15)))
        stop = _Stop(
            road=int(cars["road"][car]),
            at=int(to[car]),
            lane=int(cars["lane"][car]),
            until=time + int(self._rng.integers(8, 28)) * REPORT_EVERY,
            missing=others,
            kind=kind,
        )
        self._stops.append(stop)
        self._stand(stop, car, time, cars, to)

    def _catch(self, stop: _Stop, time: int, cars: Array, to: Array) -> None:
        passing = np.flatnonzero(
            (cars["road"] == stop.road)
            & (cars["at"] < stop.at)
            & (to >= stop.at)
            & (cars["goal"] > stop.at)
            & (cars["lane"] > 0)
        )
        for car in passing[: stop.missing]:
            stop.missing -= 1
            cars["lane"][car] = stop.lane
            if stop.kind == "side by side":
                cars["lane"][car] = stop.lane % 3 + 1
            self._stand(stop, car, time, cars, to)

    def _stand(self, stop: _Stop, car: int, time: int, cars: Array, to: Array) -> None:
        to[car] = stop.at
        reports = max((stop.until - time) // REPORT_EVERY, _NEEDED)
        if stop.kind == "brief":
            reports = _NEEDED - 1
        elif reports > _NEEDED and self._rng.random() < 0.3:
            reports = int(self._rng.integers(_NEEDED, reports))
        # One more than it will stand, as the report of its arrival counts down too.
        cars["held"][car] = reports + 1


def _slow(crowd: Crowd, stops: list[_Stop]) -> None:
    crowd.open[:] = 1.0
    for stop in stops:
        for behind, share in enumerate(_BEHIND):
            mile = stop.at // SEGMENT - behind
            if mile >= 0:
                stretch = stop.road * SEGMENTS + mile
                crowd.open[stretch] = min(crowd.open[stretch], share)
