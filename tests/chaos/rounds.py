"""What rounds of chaos share: how the input comes, and what there was to see at the end."""

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import model, runs

BURST = 80_000
"""Rides in a file of a burst. All of them are forgotten at once, some files later: then heaps are
cleaned, and indexes made smaller."""
BURSTS_EVERY = 20
_QUIET = range(10, 13)
"""Files after a burst without a ride, when it is forgotten: a table is compacted before a batch
only if the batch before it has deleted nothing."""


def make_input(folder: Path, seed: int, files: int) -> Path:
    rows = {}
    for first in range(2, files, BURSTS_EVERY):
        rows |= {first + more: BURST for more in range(2)} | {first + more: 0 for more in _QUIET}
    rows = {file: count for file, count in rows.items() if file < files}
    return runs.make_input(folder, seed, files, rows=1500, others=rows)


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
    upkeep: Counter[str] = field(default_factory=Counter)
    """Batches before which tables were compacted, and those before which heaps were cleaned."""

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
        for line in (work / "upkeep").read_text().splitlines():
            done = json.loads(line)
            self.upkeep["compacted"] += done["compacted_rows"] > 0
            self.upkeep["cleaned"] += done["cleaned_bytes"] > 0

    def check(self) -> None:
        """That everything was under way while there were kills, after a run that was long."""
        assert self.scales, "no operator was scaled"
        assert self.events["merge"], f"no chain of checkpoints was merged: {self.events}"
        assert self.events["slices merged"], f"no small slices were merged: {self.events}"
        assert self.upkeep["compacted"], f"no table was compacted: {self.upkeep}"
        assert self.upkeep["cleaned"], f"no heap was cleaned: {self.upkeep}"
