"""What a check of answers has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from anabranch_linearroad.rows import Answer

LIMITS: Mapping[Answer, int] = {
    Answer.TOLL: 5,
    Answer.ALERT: 5,
    Answer.BALANCE: 5,
    Answer.EXPENDITURE: 10,
}
"""Seconds within which each type of answer must leave the system."""


@dataclass(frozen=True)
class Fault:
    """How often something is not as it should be, and where, for example."""

    count: int = 0
    examples: tuple[str, ...] = ()

    def __add__(self, other: Fault) -> Fault:
        """Both counted together, with the examples of the first if it has any."""
        return Fault(self.count + other.count, self.examples or other.examples)


@dataclass(frozen=True)
class Verdict:
    """Whether answers are complete, right and in time.

    >>> print(Verdict(expected=2, received=1, missing=Fault(1, ("type 0, VID 7, Time 30",))))
    FAILED: 2 answers expected, 1 received
      missing 1
        type 0, VID 7, Time 30
    """

    expected: int
    received: int
    missing: Fault = Fault()
    """Expected, and not there."""
    extra: Fault = Fault()
    """There, and not expected."""
    wrong: Fault = Fault()
    """Of a report or request that there is, with something else in it than is right."""
    duplicate: Fault = Fault()
    """There more than once; the first one does not count."""
    late: Fault = Fault()
    """Sent after their limit."""
    untimed: int = 0
    """Answers without ``Emit``, of which nobody can say whether they were in time."""
    slowest: Mapping[Answer, float] = field(default_factory=dict)
    """The longest that an answer of each type took, in seconds."""

    @property
    def faults(self) -> dict[str, Fault]:
        """All kinds of faults by name, those that did not occur included."""
        names = ("missing", "extra", "wrong", "duplicate", "late")
        return {name: getattr(self, name) for name in names}

    @property
    def incorrect(self) -> int:
        """How many faults there are, apart from answers that came late."""
        return sum(fault.count for fault in self.faults.values()) - self.late.count

    @property
    def passed(self) -> bool:
        """Whether there are no faults."""
        return not any(fault.count for fault in self.faults.values())

    def __add__(self, other: Verdict) -> Verdict:
        """Of two checks of different answers, the verdict on all of them."""
        return Verdict(
            self.expected + other.expected,
            self.received + other.received,
            **{name: fault + other.faults[name] for name, fault in self.faults.items()},
            untimed=self.untimed + other.untimed,
            slowest={
                kind: max(of.slowest[kind] for of in (self, other) if kind in of.slowest)
                for kind in Answer
                if kind in self.slowest or kind in other.slowest
            },
        )

    def __str__(self) -> str:
        lines = [
            f"{'passed' if self.passed else 'FAILED'}: {self.expected:,} answers expected, "
            f"{self.received:,} received"
        ]
        for name, fault in self.faults.items():
            if fault.count:
                lines.append(f"  {name} {fault.count:,}")
                lines += [f"    {example}" for example in fault.examples]
        if self.slowest:
            slowest = ", ".join(f"type {kind} {s:g} s" for kind, s in sorted(self.slowest.items()))
            lines.append(f"  slowest: {slowest}")
        if self.untimed:
            lines.append(f"  {self.untimed:,} without Emit, not checked for time")
        return "\n".join(lines)
