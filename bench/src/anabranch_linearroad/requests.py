"""The requests that some reports carry."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from anabranch_linearroad.cars import Array
from anabranch_linearroad.rows import DAYS, SEGMENTS, UNUSED, Row

_SHARES = {Row.BALANCE: 0.5, Row.EXPENDITURE: 0.1, Row.TRAVEL_TIME: 0.4}
_STRANGERS = 0.01  # of the requests, those of vehicles that never drive


class Requests:
    """Makes requests, each with a number of its own."""

    def __init__(
        self,
        share: float,
        expressways: int,
        strangers: Callable[[int], Array],
        rng: np.random.Generator,
    ) -> None:
        self._share = share
        self._expressways = expressways
        self._strangers = strangers
        self._rng = rng
        self._qids = 0

    def on(self, times: Array, vids: Array) -> dict[str, Array]:
        """The requests that go with some of these reports, as columns of the input."""
        rng = self._rng
        carry = rng.random(len(times)) < self._share
        n = int(carry.sum())
        strange = rng.random(n) < _STRANGERS
        who = vids[carry]
        who[strange] = self._strangers(int(strange.sum()))
        kind = rng.choice([int(row) for row in _SHARES], n, p=list(_SHARES.values()))
        expenditure, travel = kind == Row.EXPENDITURE, kind == Row.TRAVEL_TIME
        self._qids += n

        def only(where: Array, low: int, high: int) -> Array:
            return np.where(where, rng.integers(low, high, n), UNUSED)

        return {
            "Type": kind,
            "Time": times[carry],
            "VID": who,
            "QID": np.arange(self._qids - n, self._qids),
            "XWay": only(expenditure | travel, 0, self._expressways),
            "Day": only(expenditure, 1, DAYS + 1),
            "Sinit": only(travel, 0, SEGMENTS),
            "Send": only(travel, 0, SEGMENTS),
            "DOW": only(travel, 1, 8),
            "TOD": only(travel, 1, 1441),
        }
