"""The rows of the soak: generated from a seed, second by second of event time.

No result may depend on where batches begin and end, since faults and backlogs decide that. So no
row is ever late, and where the order of rows counts they are in one file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import PlanError

Array = npt.NDArray[Any]

SCHEMA = "at timestamp, kind int, id string, device int, amount bigint, note string"
READING, ORDER, PAYMENT, PING, ACCOUNT = range(5)

SECOND = 1_000_000
START = 1_700_000_000 * SECOND // (60 * SECOND) * (60 * SECOND)
"""Event time begins here, in microseconds since the epoch: at a full minute."""
WINDOW = 10 * SECOND
"""Readings of a device are added up over windows this long."""
DELAY = 15 * SECOND
"""How far watermarks stay behind."""
DISORDER = 4 * SECOND
"""How old a row can be compared with the ones around it."""
BEFORE, AFTER = 1 * SECOND, 8 * SECOND
"""A payment is taken if it is at most so much before or after its order."""
SILENCE = 20 * SECOND
"""A trip is over when there was no ping for so long."""
TTL = 60 * SECOND
"""The id of a ping is remembered for so long."""
QUIET = 40 * SECOND
"""Event time without rows, after which everything but ids is over."""

ACCOUNTS, DEVICES, REGIONS, SLOTS, IDS = 1_000_000, 20_000, 500, 10, 200_000
_TRIP = 10 * SECOND
_SHARES = {READING: 0.30, ORDER: 0.08, PING: 0.20, ACCOUNT: 0.35}
_MOST_RATE = int(IDS / (_SHARES[PING] * (TTL + 20 * SECOND) / SECOND))
"""With more, the ids of pings would come again while they are remembered."""
_COPIES, _RIVALS = 0.05, 0.03
_UNPAID, _PAID_TWICE = 0.25, 0.15


class Traffic:
    """Makes the rows. The same seed and the same calls give the same rows."""

    def __init__(self, seed: int, rate: int) -> None:
        if not 100 <= rate <= _MOST_RATE:
            raise PlanError(f"rate={rate}: between 100 and {_MOST_RATE} rows a second can be made")
        self._numbers = np.random.default_rng(seed)
        self._rate = rate
        self.clock = START
        self._since = START
        self._pings = self._orders = self._accounts = 0
        self._copies = _empty()
        self._payments = _empty()

    def fill(self, part: int, parts: int) -> pa.Table:
        """A row for every account, a part of them at a time."""
        accounts = np.arange(ACCOUNTS)[part::parts]
        at = np.full(len(accounts), self.clock)
        return _table(at, ACCOUNT, device=accounts, amount=accounts % 97)

    def make(self, seconds: float) -> pa.Table:
        """The rows of the next seconds of event time."""
        begin = self.clock
        self.clock = end = begin + int(seconds * SECOND)
        counts = {kind: int(self._rate * seconds * share) for kind, share in _SHARES.items()}
        orders = self._make_orders(begin, end, counts[ORDER])
        pings = self._make_pings(begin, end, counts[PING])
        parts = [
            self._make_readings(begin, end, counts[READING]),
            orders,
            self._due_payments(end),
            pings,
            self._copies,
            self._rivals(pings, end),
            self._make_accounts(begin, end, counts[ACCOUNT]),
        ]
        copied = self._numbers.random(pings.num_rows) < _COPIES
        self._copies = pings.filter(pa.array(copied))
        return pa.concat_tables(parts)

    def close(self) -> int:
        """Let event time pass without rows; everything before the time that is returned is over."""
        self.clock = -(-(self.clock + QUIET) // WINDOW) * WINDOW
        self._copies = self._payments = _empty()
        boundary, self._since = self.clock, self.clock
        self.clock += DELAY
        return boundary

    def markers(self, number: int) -> pa.Table:
        """One row for each operator with a watermark, which then says that what was is over."""
        at = np.full(1, self.clock)
        name = pa.array([f"marker-{self.clock}-{number}"])
        return pa.concat_tables(
            [
                _table(at, READING, device=np.array([DEVICES])),
                _table(at, ORDER, id=pa.concat_arrays([name])),
                _table(at, PAYMENT, id=pa.array([f"other-{name[0]}"])),
                _table(at, PING, id=name, note=pa.array([f"marker-{self.clock}"])),
            ]
        )

    def _times(self, begin: int, end: int, count: int) -> Array:
        """Most rows are of now, some are older; none is of before the last close."""
        at = self._numbers.integers(begin, end, count)
        old = self._numbers.random(count) < 0.1
        at[old] -= self._numbers.integers(0, DISORDER, int(old.sum()))
        return np.maximum(at, self._since)

    def _make_readings(self, begin: int, end: int, count: int) -> pa.Table:
        device = self._numbers.zipf(1.2, count) % DEVICES
        amount = self._numbers.integers(1, 100, count)
        return _table(self._times(begin, end, count), READING, device=device, amount=amount)

    def _make_accounts(self, begin: int, end: int, count: int) -> pa.Table:
        # Half of them one after the other, so that no page of the state is ever left alone.
        account = self._numbers.integers(0, ACCOUNTS, count)
        half = count // 2
        account[:half] = (self._accounts + np.arange(half)) % ACCOUNTS
        self._accounts += half
        amount = self._numbers.integers(-50, 100, count)
        return _table(self._times(begin, end, count), ACCOUNT, device=account, amount=amount)

    def _make_orders(self, begin: int, end: int, count: int) -> pa.Table:
        number = self._orders + np.arange(count)
        self._orders += count
        at = self._times(begin, end, count)
        ids = _texts("order-", number, number % 23)
        notes = _texts("note ", number, self._numbers.integers(0, 60, count))
        amount = self._numbers.integers(1, 10_000, count)
        orders = _table(at, ORDER, id=ids, amount=amount, note=notes)
        self._owe(orders, at)
        return orders

    def _owe(self, orders: pa.Table, at: Array) -> None:
        """Payments of orders; some come before their order, some too late to be taken."""
        chance = self._numbers.random(len(at))
        first = np.flatnonzero(chance >= _UNPAID)
        second = np.flatnonzero(chance >= 1 - _PAID_TWICE)
        which = np.concatenate([first, second])
        when = at[which] + self._numbers.integers(-BEFORE, AFTER + 4 * SECOND, len(which))
        when = np.maximum(when, self._since)
        ids = orders["id"].take(pa.array(which)).combine_chunks()
        amount = self._numbers.integers(1, 10_000, len(which))
        owed = _table(when, PAYMENT, id=ids, amount=amount)
        self._payments = pa.concat_tables([self._payments, owed])

    def _due_payments(self, end: int) -> pa.Table:
        due = self._payments["at"].to_numpy().astype("datetime64[us]").view(np.int64) < end
        now = self._payments.filter(pa.array(due))
        self._payments = self._payments.filter(pa.array(~due)).combine_chunks()
        return now

    def _make_pings(self, begin: int, end: int, count: int) -> pa.Table:
        at = self._times(begin, end, count)
        number = self._pings + np.arange(count)
        self._pings += count
        # Numbers come again, long after the time for which they are remembered.
        number %= IDS
        ids = _texts("ping-", number, number % 17)
        amount = self._numbers.integers(0, 1000, count)
        return _table(at, PING, id=ids, amount=amount, note=self._trips(at))

    def _trips(self, at: Array) -> pa.Array:
        """A trip has a few pings within some seconds, and is never heard of again."""
        most = max(1, int(self._rate * _SHARES[PING] * _TRIP / SECOND / 5))
        trip = self._numbers.integers(0, most, len(at))
        return _texts("trip ", at // _TRIP * most + trip, trip % 40)

    def _rivals(self, pings: pa.Table, end: int) -> pa.Table:
        """Other rows under the id of one before them in the same file, a little later."""
        chosen = np.flatnonzero(self._numbers.random(pings.num_rows) < _RIVALS)
        at = pings["at"].to_numpy().astype("datetime64[us]").view(np.int64)[chosen]
        at = np.minimum(at + self._numbers.integers(0, SECOND, len(at)), end - 1)
        ids = pings["id"].take(pa.array(chosen)).combine_chunks()
        amount = self._numbers.integers(0, 1000, len(at))
        return _table(at, PING, id=ids, amount=amount, note=self._trips(at))


def _texts(prefix: str, numbers: Array, lengths: Array) -> pa.Array:
    """Texts of different lengths, one for each number."""
    return pa.array(
        [
            f"{prefix}{number:x}{'.' * int(length)}"
            for number, length in zip(numbers.tolist(), lengths.tolist(), strict=True)
        ],
        pa.string(),
    )


def _table(
    at: Array,
    kind: int,
    *,
    id: pa.Array | None = None,
    device: Array | None = None,
    amount: Array | None = None,
    note: pa.Array | None = None,
) -> pa.Table:
    count = len(at)
    zeros = np.zeros(count, np.int64)
    return pa.table(
        {
            "at": pa.array(at).cast(pa.timestamp("us", tz="UTC")),
            "kind": pa.array(np.full(count, kind), pa.int32()),
            "id": pa.nulls(count, pa.string()) if id is None else id,
            "device": pa.array(zeros if device is None else device, pa.int32()),
            "amount": pa.array(zeros if amount is None else amount, pa.int64()),
            "note": pa.nulls(count, pa.string()) if note is None else note,
        }
    )


def _empty() -> pa.Table:
    return _table(np.empty(0, np.int64), READING)
