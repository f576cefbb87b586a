"""What rounds of chaos share: how the input comes, and what there was to see at the end."""

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import model, runs

BURST = 80_000
"""Rides in a file of a burst. All of them are forgotten at once, some files later: then tables are
compacted, heaps cleaned and indexes made smaller."""
BURSTS_EVERY = 20


def make_input(folder: Path, seed: int, files: int) -> Path:
    bursts = {
        first + more: BURST
        for first in range(2, files, BURSTS_EVERY)
        for more in range(2)
        if first + more < files
    }
    return runs.make_input(folder, seed, files, rows=1500, bursts=bursts)


def groups(chance: random.Random, files: int) -> list[int]:
    """How many files are given to the stream at a time: often one, now and then a backlog."""
    found: list[int] = []
    while (left := files - sum(found)) > 0:
        found.append(min(left, chance.choice([1, 1, 2, 4, 7])))
    return found


@dataclass
class Seen:
    """What has happened in all rounds."""

    scales: int = 0
    unchanged: int = 0
    """Scales to as many instances as there were."""
    refused: int = 0
    events: Counter[str] = field(default_factory=Counter)

    def add(self, work: Path, source: Path, plan: dict[str, Any]) -> None:
        """Compare a round with the model, and take note of what it did."""
        model.check(work, source, ordered=plan["ordered"])
        scales, unchanged = runs.check_scales(work)
        self.scales, self.unchanged = self.scales + scales, self.unchanged + unchanged
        failures = json.loads((work / "failures.json").read_text())
        self.refused += sum(failure.startswith("scale") for failure in failures)
        # All runs of the query are in the folder; the program knows only the last one's.
        for log in (work / "checkpoint" / "events").iterdir():
            events = [json.loads(line) for line in log.read_text().splitlines()]
            self.events.update(event["kind"] for event in events)
