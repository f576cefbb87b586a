"""Which m and k a state gets, from what was measured and what is preferred."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from anabranch.errors import PlanError
from anabranch.fragments import models
from anabranch.fragments.code import LARGEST
from anabranch.fragments.layout import row_for
from anabranch.fragments.models import Rates
from anabranch.units import Duration, Size, byte_count, microseconds


class Prefer(Enum):
    """What is made as good as possible within the limits."""

    RECOVERY = "recovery"
    """The time to recover a state."""
    STORAGE = "storage"
    """The bytes that are stored and sent."""
    RELIABILITY = "reliability"
    """The probability that a state can be recovered from its fragments."""


@dataclass(frozen=True)
class Adapt:
    """Choose m and k for each round of checkpoints from what was measured.

    ``reliability`` is the least probability that a state can be recovered from its fragments,
    ``overhead`` the limit of the bytes stored on top of those of the state, as a share of them, and
    ``seconds`` that of the time to recover it. If they cannot be kept all at once, reliability
    comes first, then overhead.

    >>> Adapt(prefer=Prefer.STORAGE, overhead=0.5).overhead
    0.5
    """

    prefer: Prefer = Prefer.RECOVERY
    reliability: float = 0.999999
    overhead: float = 2.0
    seconds: Duration | None = None
    store: Size | None = None
    """What a shared store, with which ``Files`` could be used instead, takes and gives in a second,
    such as ``"12.5 MB"``. The query tells when it would be better."""
    limit: float = field(init=False, repr=False)
    """``seconds`` as a number; infinite if there is no limit."""
    store_rate: int | None = field(init=False, repr=False)
    """``store`` as a number."""

    def __post_init__(self) -> None:
        if not isinstance(self.prefer, Prefer):
            raise PlanError(
                f"Adapt(prefer={self.prefer!r}): give one of {', '.join(map(str, Prefer))}"
            )
        if not _is_number(self.reliability) or not 0 <= self.reliability < 1:
            raise PlanError(
                f"Adapt(reliability={self.reliability!r}): give a probability below 1, such as "
                "0.999999; nothing is certain"
            )
        if not _is_number(self.overhead) or not self.overhead > 0:
            raise PlanError(
                f"Adapt(overhead={self.overhead!r}): give a positive share, such as 0.5 for half "
                "the state on top of it"
            )
        limit = math.inf
        if self.seconds is not None:
            limit = microseconds(self.seconds, what="Adapt(seconds)") / 1e6
            if limit <= 0:
                raise PlanError(f"Adapt(seconds={self.seconds!r}): give a positive time")
        object.__setattr__(self, "limit", limit)
        rate = None if self.store is None else byte_count(self.store, what="Adapt(store)")
        if rate == 0:
            raise PlanError(f"Adapt(store={self.store!r}): give bytes per second, or None")
        object.__setattr__(self, "store_rate", rate)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Measured:
    """What was measured in the rounds before."""

    size: int
    """The bytes of a state."""
    nodes: int
    """How many nodes can hold a fragment: those of the leaf set, without the owner."""
    up: float
    """Bytes per second that a node sends."""
    down: float
    """Bytes per second that a node receives."""
    encode: Rates = field(default_factory=Rates)
    recompute: Rates = field(default_factory=Rates)
    store: float | None = None
    """Bytes per second of the link of a shared store, if there is one."""
    failures: float = 0.01
    """Per node and hour; see :func:`~anabranch.fragments.models.failures_per_hour`."""
    interval: float = 5.0
    """Seconds between checkpoints."""
    detection: float = 3.0
    """Seconds until a lost node is noticed."""
    repair: float = 0.0
    """Seconds until its fragments are made again."""
    at_once: int = 1
    """How many states are saved, or recovered, at the same time."""
    pieces: int = 1
    """How many parts a state is in, each coded for itself."""

    def __post_init__(self) -> None:
        rates = (self.up, self.down, *(() if self.store is None else (self.store,)))
        times = (self.interval, self.detection, self.repair)
        counts = (self.at_once, self.pieces)
        if min(rates) <= 0 or min(*times, self.failures, self.size) < 0 or min(counts) < 1:
            raise PlanError(f"{self!r}: rates must be positive, and nothing negative")

    @property
    def exposure(self) -> float:
        """For how many seconds a lost fragment stays lost."""
        return self.interval + self.detection + self.repair

    @property
    def p(self) -> float:
        """The probability that a holder is lost and its fragments not yet made again."""
        return models.failure(self.failures, self.exposure)


@dataclass(frozen=True)
class Expected:
    """What the models say of one m and k."""

    data: int
    parity: int
    saving: float
    """Seconds to code a state and send its fragments."""
    recovery: float
    """Seconds to retrieve a state and recompute it."""
    overhead: float
    unreliability: float
    """The probability that a state cannot be recovered from its fragments."""


@dataclass(frozen=True)
class Choice:
    """The m, k and stripe size of the next round, and why."""

    data: int
    parity: int
    row: int
    """The bytes of a row: ``data`` times that is a stripe."""
    expected: Expected
    files: bool
    """Whether a shared store is better."""
    reason: str

    @property
    def stripe(self) -> int:
        """The bytes of the state in a stripe."""
        return self.data * self.row


def expect(measured: Measured, data: int, parity: int) -> Expected:
    """What the models say of one m and k: the sums of equation 2, and what goes over each link."""
    return _expected(measured, data, parity, models.unreliability(data, parity, measured.p))


def choose(
    measured: Measured,
    adapt: Adapt,
    *,
    now: tuple[int, int] | None = None,
    row: int | None = None,
) -> Choice:
    """The m and k to use, and why.

    With ``now``, the m and k of the last round, another choice must be better by a tenth, so that
    noise in what was measured changes nothing. The length of rows is a power of two, and that of
    the last round, ``row``, stays unless it is more than twice too long or four times too short.
    PlanError if there are not two nodes for fragments.

    >>> measured = Measured(size=128_000_000, nodes=31, up=12.5e6, down=12.5e6, failures=0.5)
    >>> choose(measured, Adapt(prefer=Prefer.STORAGE)).reason
    '28 + 3 stores least within the limits: recovery in 10.3 s, overhead 0.11, lost with a \
probability of 5e-08.'
    """
    largest = min(measured.nodes, LARGEST)
    if largest < 2:
        raise PlanError(
            f"Fragments: {measured.nodes} nodes can hold fragments, and two are needed; add nodes "
            "or use Files"
        )
    tails = {n: models.tails(n, measured.p) for n in range(2, largest + 1)}
    options = [_expected(measured, n - k, k, tails[n][k]) for n in tails for k in range(1, n)]
    least = min(_excess(one, adapt) for one in options)
    options = [one for one in options if _excess(one, adapt) == least]
    goal = min(_goal(one, adapt.prefer) for one in options)
    best = min(
        (one for one in options if _goal(one, adapt.prefer) <= goal + _EQUAL * abs(goal)),
        key=lambda one: (one.saving, one.unreliability),
    )
    kept = next((one for one in options if (one.data, one.parity) == now), None)
    misses = _misses(best, adapt)
    if kept is not None and kept != best and _is_near(kept, best, adapt.prefer):
        best, why = kept, "was used before, and no other is better by a tenth"
    elif misses:
        why = "comes closest to the limits"
    else:
        why = _SUPERLATIVES[adapt.prefer]
    files, compared = _files(measured, best, adapt.prefer)
    return Choice(
        data=best.data,
        parity=best.parity,
        row=_row(measured.size // measured.pieces, best.data, best.parity, row),
        expected=best,
        files=files,
        reason=f"{best.data} + {best.parity} {why}: {_figures(best)}.{misses}{compared}",
    )


_EQUAL = 0.01
"""Times that differ by less are the same; then the one that stores less is taken."""

_SUPERLATIVES = {
    Prefer.RECOVERY: "recovers fastest within the limits",
    Prefer.STORAGE: "stores least within the limits",
    Prefer.RELIABILITY: "is the most reliable within the limits",
}

_NEAR = 0.1
_STRIPES = 8
"""A state that is large enough has so many, so that all holders are used evenly."""

_SMALLEST_ROW = 4096
"""Below it the calls for a row take longer than its bytes."""


def _expected(measured: Measured, data: int, parity: int, unreliability: float) -> Expected:
    size = measured.size
    recompute = measured.recompute.of(data, models.lost_rows(data, parity))
    retrieval = models.retrieval(
        size, data, parity, up=measured.up, down=measured.down, at_once=measured.at_once
    )
    return Expected(
        data=data,
        parity=parity,
        saving=size / measured.encode.of(data, parity)
        + models.saving(size, data, parity, up=measured.up),
        recovery=retrieval + size / recompute,
        overhead=models.overhead(data, parity),
        unreliability=unreliability,
    )


def _excess(one: Expected, adapt: Adapt) -> tuple[float, float, float]:
    """By how much the limits are exceeded, the most important one first."""
    allowed = 1 - adapt.reliability
    return (
        max(0.0, _log(one.unreliability) - _log(allowed)),
        max(0.0, one.overhead - adapt.overhead),
        max(0.0, one.recovery - adapt.limit),
    )


def _goal(one: Expected, prefer: Prefer) -> float:
    """What should be small."""
    match prefer:
        case Prefer.RECOVERY:
            return one.recovery
        case Prefer.STORAGE:
            return one.overhead
        case Prefer.RELIABILITY:
            return _log(one.unreliability)


def _is_near(one: Expected, best: Expected, prefer: Prefer) -> bool:
    goal, target = _goal(one, prefer), _goal(best, prefer)
    return goal <= target + _NEAR * abs(target) and one.saving <= (1 + _NEAR) * best.saving


def _log(probability: float) -> float:
    return math.log10(max(probability, 1e-300))


def _row(size: int, data: int, parity: int, now: int | None) -> int:
    fits = min(row_for(data + parity), max(_SMALLEST_ROW, size // (_STRIPES * data)))
    if now is not None and now // 2 <= fits < 4 * now:
        return now
    return 1 << (fits.bit_length() - 1)


def _figures(one: Expected) -> str:
    return (
        f"recovery in {one.recovery:.3g} s, overhead {one.overhead:.2g}, lost with a probability "
        f"of {one.unreliability:.1g}"
    )


def _misses(one: Expected, adapt: Adapt) -> str:
    """Which limits are not kept, as no m and k keeps them all."""
    unreliable, large, slow = (excess > 0 for excess in _excess(one, adapt))
    missed = [
        *([f"a reliability of {adapt.reliability:g}"] if unreliable else []),
        *([f"an overhead of {adapt.overhead:g}"] if large else []),
        *([f"a recovery in {adapt.limit:g} s"] if slow else []),
    ]
    return f" No m and k on these nodes has {' and '.join(missed)}." if missed else ""


def _files(measured: Measured, one: Expected, prefer: Prefer) -> tuple[bool, str]:
    """Whether a shared store is better, by equation 1 over the one link of the store."""
    if measured.store is None:
        return False, ""
    stored = measured.at_once * models.checkpoint_recovery(measured.size, measured.store)
    if prefer is Prefer.RECOVERY:
        what, ours, theirs = "recovers", one.recovery, stored
    else:
        what, ours, theirs = "saves and recovers", one.saving + one.recovery, 2 * stored
    if theirs < ours:
        return True, f" Files is better: it {what} in {theirs:.3g} s instead of {ours:.3g} s."
    return False, f" Files is not better: it {what} in {theirs:.3g} s instead of {ours:.3g} s."
