"""Whether a series of samples grows, whatever saw-tooth it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from anabranch_bench.soak.samples import ROLES, SPARED, Sample

MIB = 2.0**20
TOLERANCE = 0.10
"""How much of its level a series may gain in all the time that it is looked at."""
WARM = 600.0
"""Seconds at the beginning that are not looked at."""
_BUCKET = 60.0
_FEWEST = 30
"""Minutes below which nothing can be said: what faults do in a minute looks like growth."""
_FEWEST_SPARED = 10
"""The same for processes to which nothing is done."""
MUST_JUDGE = 60.0
"""Minutes from which on a run is long enough for every series: one that could not be judged is a
problem then."""

JUDGED: dict[str, float] = {
    "driver private": 48 * MIB,
    "driver jvm private": 48 * MIB,
    "executor private": 48 * MIB,
    "agent private": 48 * MIB,
    "python worker private": 48 * MIB,
    "soak private": 48 * MIB,
    "executor shared": 48 * MIB,
    "agent shared": 64 * MIB,
    "python worker shared": 64 * MIB,
    "unlinked bytes": 64 * MIB,
    "logs of nodes bytes": 16 * MIB,
    "spared executor private": 128 * MIB,  # it grows into its heap, which is full of garbage then
    "spared agent private": 96 * MIB,  # its threads keep what they have used once
    "spared daemon private": 16 * MIB,
    "spared executor shared": 48 * MIB,
    "spared agent shared": 64 * MIB,
    "spared daemon shared": 32 * MIB,
    "spared executor threads": 10,
    "spared agent threads": 8,
    "spared executor open files": 24,
    "spared agent open files": 16,
    "spared daemon open files": 16,
    "driver threads": 8,
    "driver jvm threads": 20,
    "executor threads": 10,
    "agent threads": 8,
    "driver open files": 16,
    "driver jvm open files": 32,
    "executor open files": 24,
    "agent open files": 16,
    "python worker open files": 24,
    "state files": 100,
    "state bytes": 48 * MIB,
    "shuffle files": 100,
    "shuffle bytes": 32 * MIB,
    "driver's local files": 40,
    "driver's state files": 20,
    "checkpoint, ours files": 80,
    "checkpoint, ours bytes": 48 * MIB,
    "checkpoint/spark files": 150,
    "checkpoint/events files": 40,  # one for each life of the driver, and never more than 40
    "checkpoint/commits files": 60,
    "query heap": 48 * MIB,
    "query batch_seconds": 1.5,
}
"""The series that must not grow, and what each may gain whatever its level. Those of processes are
of one process each: how many there are is up to the faults. *Spared* are those of a node to which
nothing is done for a third of the run."""

EACH_RUN = ("driver private", "driver jvm private", "driver threads", "driver open files",
            "driver jvm threads", "driver jvm open files", "query heap")  # fmt: skip
"""Series of the driver, which starts anew with it: judged in its longest life."""
_SPARED = tuple(f"spared {role} " for role in SPARED.values())


@dataclass(frozen=True)
class Growth:
    """What a series gained."""

    series: str
    level: float
    """Its median."""
    gained: float | None
    """By the median of all slopes, over the time looked at; None: too few samples to say."""
    allowed: float
    minutes: float
    """How long it was looked at."""

    @property
    def flat(self) -> bool | None:
        """Whether it does not grow; None if that cannot be said."""
        return None if self.gained is None else self.gained <= self.allowed

    def problem(self, minutes: float) -> str | None:
        """What is wrong with it in a run of so many minutes."""
        if self.gained is None:
            if minutes < MUST_JUDGE:
                return None
            return (
                f"{self.series} could not be judged in a run of {minutes:g} minutes: only "
                f"{self.minutes:.0f} minutes of it count"
            )
        if self.gained <= self.allowed:
            return None
        return (
            f"{self.series} gained {self.gained:,.1f} in {self.minutes:.0f} minutes at a level of "
            f"{self.level:,.1f}; {self.allowed:,.1f} are allowed"
        )


def judge(samples: Sequence[Sample], warm: float = WARM) -> list[Growth]:
    """The growth of every series in :data:`JUDGED`, while the query ran."""
    usable = [sample for sample in samples if "query version" in sample]
    found = []
    for name, floor in JUDGED.items():
        series = [each for sample in usable if (each := _point(name, sample)) is not None]
        chosen = [point for point in series if point.at >= warm]
        spared = name.startswith(_SPARED)
        if spared or name in EACH_RUN:
            chosen = _longest_life(chosen, _births(samples, _life(name)), warm)
        found.append(_growth(name, chosen, floor, _FEWEST_SPARED if spared else _FEWEST))
    return found


class _Point(NamedTuple):
    at: float
    life: float
    """Which process it is of, where only one life of it is judged."""
    value: float


def _life(name: str) -> str:
    """The sample that says which process a series is of."""
    spared = next((prefix for prefix in _SPARED if name.startswith(prefix)), None)
    return "run" if spared is None else f"{spared}born"


def _point(name: str, sample: Sample) -> _Point | None:
    if name not in sample:
        return None
    value = sample[name]
    role = next((role for role in ROLES.values() if name.startswith(f"{role} ")), None)
    if role is not None:
        processes = sample[f"{role} processes"]
        if not processes:
            return None
        value /= processes
    return _Point(sample["at"], sample[_life(name)], value)


def _births(samples: Sequence[Sample], life: str) -> dict[float, float]:
    """When each life was first seen."""
    began: dict[float, float] = {}
    for sample in samples:
        if life in sample:
            began.setdefault(sample[life], sample["at"])
    return began


def _longest_life(
    points: Sequence[_Point], began: Mapping[float, float], warm: float
) -> list[_Point]:
    """The samples of the process that lived longest, without its own first minutes."""
    lives: dict[float, list[_Point]] = {}
    for point in points:
        if point.at >= began[point.life] + warm / 2:
            lives.setdefault(point.life, []).append(point)
    return max(lives.values(), key=lambda life: life[-1].at - life[0].at, default=[])


def _growth(name: str, points: Sequence[_Point], floor: float, fewest: int) -> Growth:
    buckets: dict[int, list[float]] = {}
    for point in points:
        buckets.setdefault(int(point.at // _BUCKET), []).append(point.value)
    at = np.array(sorted(buckets), float)
    values = np.array([np.median(buckets[int(each)]) for each in at])
    level = float(np.median(values)) if len(values) else 0.0
    allowed = max(floor, TOLERANCE * level)
    if len(values) < fewest:
        return Growth(name, level, None, allowed, len(values))
    minutes = float(at[-1] - at[0] + 1)
    return Growth(name, level, slope(at, values) * minutes, allowed, minutes)


def slope(at: np.ndarray, values: np.ndarray) -> float:
    """The median of the slopes between all pairs (Theil and Sen): outliers do not matter.

    >>> slope(np.array([0.0, 1.0, 2.0, 3.0]), np.array([1.0, 3.0, 90.0, 7.0]))
    2.0
    """
    i, j = np.triu_indices(len(at), 1)
    return float(np.median((values[j] - values[i]) / (at[j] - at[i])))
