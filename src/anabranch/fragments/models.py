"""How long fragments take, what they survive, and when a shared store is better.

The equations are those of A-FP4S. A state of s bytes is in n = m + k fragments, ``data`` is m and
``parity`` is k. Rates are in bytes per second, h of a shared store, eta of a link and c of
recomputing; p is the probability that a node is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from anabranch.errors import PlanError


def checkpoint_recovery(size: float, store: float) -> float:
    """Equation 1: seconds to read a state from a shared store, s / h.

    >>> checkpoint_recovery(128e6, store=12.5e6)
    10.24
    """
    return size / store


def fragment_recovery(size: float, link: float, recompute: float) -> float:
    """Equation 2: seconds to retrieve a state and to recompute it, s / eta + s / c.

    >>> fragment_recovery(128e6, link=12.5e6, recompute=6.4e9)
    10.26
    """
    return size / link + size / recompute


def reliability(data: int, parity: int, p: float) -> float:
    """Equation 3: the probability that no more than k of the n holders are lost.

    >>> round(reliability(4, 2, p=0.1), 5)
    0.98415
    """
    return 1 - unreliability(data, parity, p)


def unreliability(data: int, parity: int, p: float) -> float:
    """The probability that more than k of the n holders are lost, exact where it is tiny.

    >>> f"{unreliability(10, 10, p=1e-3):.2g}"
    '1.7e-28'
    """
    return tails(data + parity, p)[parity]


def tails(n: int, p: float) -> list[float]:
    """The probabilities that more than i of n nodes are lost, for each i up to n.

    >>> tails(2, p=0.5)
    [0.75, 0.25, 0.0]
    """
    exactly = (math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(n, -1, -1))
    # From the least probable to the most, so that small ones are not lost in the sum.
    more = [0.0, *accumulate(exactly)]
    return [min(1.0, tail) for tail in reversed(more[:-1])]


def fastest_store(link: float, recompute: float) -> float:
    """Equation 4: fragments recover faster than a shared store that is slower than this.

    >>> round(fastest_store(link=12.5e6, recompute=65e6))
    10483871
    """
    return recompute * link / (recompute + link)


def overhead(data: int, parity: int) -> float:
    """The bytes stored on top of those of the state, as a share of them: (n - m) / m."""
    return parity / data


def uploaded(size: float, data: int, parity: int) -> float:
    """The bytes that each provider sends, m B / (m + k - 1), where B = s / m is a fragment.

    All holders but one send equally much, in turn.

    >>> uploaded(128e6, 10, 10) == 128e6 / 19
    True
    """
    return data * (size / data) / (data + parity - 1)


def retrieval(
    size: float, data: int, parity: int, *, up: float, down: float, at_once: int = 1
) -> float:
    """Seconds until a state has come: through the link of each provider, and the receiver's.

    ``at_once`` states are retrieved by as many nodes from the same providers. A single one over
    equal links takes s / eta, as in equation 2.

    >>> retrieval(128e6, 10, 10, up=12.5e6, down=12.5e6)
    10.24
    >>> round(retrieval(128e6, 10, 10, up=12.5e6, down=12.5e6, at_once=32), 2)
    17.25
    """
    return max(size / down, at_once * uploaded(size, data, parity) / up)


def saving(size: float, data: int, parity: int, *, up: float) -> float:
    """Seconds to send the fragments through the owner's link: s n / m.

    >>> saving(128e6, 10, 10, up=12.5e6)
    20.48
    """
    return size * (data + parity) / data / up


def lost_rows(data: int, parity: int) -> float:
    """How many rows of data of a stripe are computed, if all holders send in turn: m k / n."""
    return data * parity / (data + parity)


def failure(per_hour: float, exposure: float) -> float:
    """The probability that a node is lost within so many seconds.

    >>> round(failure(0.01, exposure=3600), 5)
    0.00995
    """
    return -math.expm1(-per_hour * exposure / 3600)


def failures_per_hour(failures: int, node_hours: float) -> float:
    """The failures per node and hour, from those that were counted.

    None in a short time does not mean that none will come: half a failure is added.

    >>> failures_per_hour(0, node_hours=50)
    0.01
    """
    return (failures + 0.5) / node_hours


@dataclass(frozen=True)
class Sample:
    """A state was coded, or computed again, at a rate."""

    data: int
    rows: float
    """How many rows of each stripe were computed: all parity, or the lost rows of data."""
    rate: float


@dataclass(frozen=True)
class Rates:
    """The rate of coding by m and by the number of rows that are computed, from samples.

    It is that of the nearest samples, and elsewhere follows the work to be done. Without samples it
    is that of one slow core.

    >>> rates = Rates((Sample(10, 10, 5e9), Sample(10, 20, 4e9)))
    >>> [round(rates.of(10, rows) / 1e9, 1) for rows in (10, 20, 40)]
    [5.0, 4.0, 2.2]
    """

    samples: tuple[Sample, ...] = ()

    def __post_init__(self) -> None:
        if any(sample.rate <= 0 or sample.data < 1 or sample.rows < 0 for sample in self.samples):
            raise PlanError(f"{self!r}: rates and m must be positive")

    def of(self, data: int, rows: float) -> float:
        """Bytes of the state per second."""
        weights, total = 0.0, 0.0
        for sample in self.samples:
            weight = 1 / (1e-9 + _distance(sample, data, rows))
            weights += weight
            total += weight * math.log(sample.rate * _work(sample.data, sample.rows))
        speed = math.exp(total / weights) if self.samples else _SLOW
        return speed / _work(data, rows)


_SLOW = 2e9


def _work(data: int, rows: float) -> float:
    """The work for a byte of the state, in that of a checksum and a copy of it.

    The rows are as many products, and as many to be written, of 1 / m of the state each. The
    factors are those of ``anabranch bench fragments`` on a core with AVX-512 and GFNI.
    """
    return 1 + 0.09 * rows + 0.4 * rows / data


def _distance(sample: Sample, data: int, rows: float) -> float:
    by_m = math.log(sample.data / data)
    by_rows = math.log((1 + sample.rows) / (1 + rows))
    return by_m * by_m + by_rows * by_rows
