"""Cars as rows of an array, and the roads that they are on.

A *road* is one direction of an expressway; roads are numbered, ``2 * XWay + Dir``. On each of them
a car moves forward: ``at`` counts feet from where its direction begins, and only when reports are
made is it turned into a position from the west end. A *stretch* is one mile of a road.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch_linearroad.rows import LENGTH, REPORT_EVERY, SEGMENT, SEGMENTS

Array = npt.NDArray[Any]

CAR = np.dtype(
    [
        ("vid", np.int32),
        ("road", np.int32),
        ("at", np.int32),
        ("goal", np.int32),  # where it leaves
        ("lane", np.int8),
        ("temper", np.float32),  # how fast it goes, of what the others do
        ("held", np.int16),  # for how many more reports it stands
        ("ramp", np.bool_),  # whether it leaves by the ramp, or is just not heard of again
    ],
    align=True,
)

FEET = 5280 * REPORT_EVERY // 3600
"""Feet that one mile per hour makes between two reports."""


def joined(*groups: Array) -> Array:
    """Groups of records as one; numpy itself would copy them field by field."""
    return np.concatenate([group.view(np.uint8) for group in groups]).view(groups[0].dtype)


def stretches(roads: Array, at: Array) -> Array:
    """The number of the stretch, over all roads, that each car is on."""
    numbers: Array = roads * SEGMENTS + at // SEGMENT
    return numbers


def positions(roads: Array, at: Array) -> Array:
    """Feet from the west end, as reports have them.

    >>> positions(np.array([0, 1]), np.array([10, 10])).tolist()
    [10, 527989]
    """
    return np.where(roads % 2 == 0, at, LENGTH - 1 - at)


class Crowd:
    """How many cars each stretch has, and how fast they can go there.

    Speed falls with the number of cars on a stretch or on the next, so that queues grow backwards.
    """

    FREE = 66.0
    """Miles per hour on an empty road."""
    JAM = 620
    """Cars on a mile of three lanes that hardly move."""
    CRAWL = 0.24
    """Of the free speed, what is left in a jam."""

    def __init__(self, roads: int) -> None:
        self._cars = np.zeros(roads * SEGMENTS, np.int64)
        self.open = np.ones(roads * SEGMENTS)
        """Of the speed, what an accident on the stretch or ahead leaves."""

    def add(self, cars: Array, sign: int = 1) -> None:
        """Count cars in, or out again."""
        on = stretches(cars["road"], cars["at"])
        self._cars += sign * np.bincount(on, minlength=len(self._cars))

    def room(self) -> Array:
        """How empty each stretch is, from 1 down to 0."""
        room: Array = np.clip(1 - self._cars / self.JAM, 0.0, 1.0)
        return room

    def pace(self) -> Array:
        """Miles per hour that an average car makes on each stretch."""
        ahead = self._cars.reshape(-1, SEGMENTS).copy()
        ahead[:, :-1] = np.maximum(ahead[:, :-1], 0.85 * ahead[:, 1:])
        share = np.maximum(1 - ahead.ravel() / self.JAM, self.CRAWL)
        pace: Array = self.FREE * share * self.open
        return pace
