"""Whether a series of samples grows, whatever saw-tooth it has."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anabranch.bench.soak.samples import Sample

MIB = 2.0**20
TOLERANCE = 0.10
"""How much of its level a series may gain in an hour."""
WARM = 600.0
"""Seconds at the beginning that are not looked at."""
_BUCKET = 60.0
_FEWEST = 8
"""Minutes below which nothing can be said."""

JUDGED: dict[str, float] = {
    "driver private": 48 * MIB,
    "driver jvm private": 64 * MIB,
    "executor private": 96 * MIB,
    "agent private": 48 * MIB,
    "python worker private": 96 * MIB,
    "soak private": 64 * MIB,
    "driver threads": 8,
    "driver jvm threads": 20,
    "executor threads": 30,
    "agent threads": 20,
    "driver open files": 16,
    "driver jvm open files": 32,
    "executor open files": 60,
    "agent open files": 40,
    "python worker open files": 100,
    "state files": 200,
    "state bytes": 48 * MIB,
    "shuffle files": 100,
    "shuffle bytes": 32 * MIB,
    "driver's local files": 40,
    "driver's state files": 20,
    "checkpoint files": 80,
    "checkpoint bytes": 48 * MIB,
    "checkpoint/events files": 8,
    "checkpoint/commits files": 60,
    "query heap": 48 * MIB,
    "query batch_seconds": 1.5,
}
"""The series that must not grow, and what each may gain in an hour whatever its level."""

EACH_RUN = ("driver private", "driver jvm private", "driver threads", "driver open files",
            "driver jvm threads", "driver jvm open files", "query heap")  # fmt: skip
"""Series of the driver, which starts anew with it: judged in its longest life."""


@dataclass(frozen=True)
class Growth:
    """What a series gained."""

    series: str
    level: float
    """Its median."""
    per_hour: float | None
    """What it gains in an hour, by the median of all slopes; None: too few samples to say."""
    allowed: float
    minutes: float
    """How long it was looked at."""

    @property
    def flat(self) -> bool:
        """Whether it does not grow, as far as can be said."""
        return self.per_hour is None or self.per_hour <= self.allowed


def judge(samples: Sequence[Sample], warm: float = WARM) -> list[Growth]:
    """The growth of all series that are judged and were sampled."""
    found = []
    for pattern, floor in JUDGED.items():
        names = {name for sample in samples for name in sample if fnmatch.fnmatch(name, pattern)}
        for name in sorted(names):
            chosen = [sample for sample in samples if name in sample and sample["at"] >= warm]
            if name in EACH_RUN:
                chosen = _longest_life(chosen, samples, warm)
            found.append(_growth(name, chosen, floor))
    return found


def _longest_life(chosen: Sequence[Sample], samples: Sequence[Sample], warm: float) -> list[Sample]:
    """The samples of the driver that lived longest, without its own first minutes."""
    began: dict[float, float] = {}
    for sample in samples:
        began.setdefault(sample["run"], sample["at"])
    lives: dict[float, list[Sample]] = {}
    for sample in chosen:
        if sample["at"] >= began[sample["run"]] + warm / 2:
            lives.setdefault(sample["run"], []).append(sample)
    return max(lives.values(), key=lambda life: life[-1]["at"] - life[0]["at"], default=[])


def _growth(name: str, samples: Sequence[Sample], floor: float) -> Growth:
    buckets: dict[int, list[float]] = {}
    for sample in samples:
        buckets.setdefault(int(sample["at"] // _BUCKET), []).append(sample[name])
    at = np.array(sorted(buckets), float)
    values = np.array([np.median(buckets[int(each)]) for each in at])
    level = float(np.median(values)) if len(values) else 0.0
    allowed = max(floor, TOLERANCE * level)
    if len(values) < _FEWEST:
        return Growth(name, level, None, allowed, len(values))
    return Growth(name, level, slope(at, values) * 3600 / _BUCKET, allowed, len(values))


def slope(at: np.ndarray, values: np.ndarray) -> float:
    """The median of the slopes between all pairs (Theil and Sen): outliers do not matter.

    >>> slope(np.array([0.0, 1.0, 2.0, 3.0]), np.array([1.0, 3.0, 90.0, 7.0]))
    2.0
    """
    i, j = np.triu_indices(len(at), 1)
    return float(np.median((values[j] - values[i]) / (at[j] - at[i])))
