"""Benchmark runs on a cluster with faults: scenarios and their results."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from anabranch.errors import QueryFailed

_SECONDS = 900.0


class Scheme(StrEnum):
    """How lost state comes back."""

    CHECKPOINT = "checkpoint + replay"
    BUFFERS = "upstream backup"
    SOURCE = "source replay"
    SPARK = "spark, rocksdb"


class Act(StrEnum):
    """What happens to the query."""

    KILL = "a node is killed"
    SCALE = "the operator grows"
    NOTHING = "nothing"


class Backup(StrEnum):
    """Where our side's checkpoints are."""

    FILES = "Files"
    UPSTREAM = "Upstream"
    FRAGMENTS = "Fragments"


@dataclass(frozen=True)
class Scenario:
    """A query over words at a steady rate; after a while something happens to it."""

    scheme: Scheme
    rate: int
    """Rows a second."""
    keys: int = 100_000
    fill: bool = False
    """Whether all keys are in the state before the rows start to come."""
    window: str | None = "30 seconds"
    interval: float = 5.0
    """Seconds between two checkpoints."""
    parallelism: int = 1
    instances: int = 2
    nodes: int = 3
    warm: float = 35.0
    """Seconds from the first row to what happens."""
    after: float = 10.0
    act: Act = Act.KILL
    grow_to: int = 4
    """Instances after the operator has grown."""
    backlog: int = 0
    """Files of one second's rows that are there from the start, each a batch, and no others."""
    checkpoints: bool = True
    backup: Backup = Backup.FILES
    fragments: tuple[int, int] = (2, 1)
    """Of data and of parity."""
    seed: int = 7

    def to_json(self) -> str:
        """For the process that runs it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        """Read :meth:`to_json`."""
        value = json.loads(text)
        named = {"scheme": Scheme, "act": Act, "backup": Backup, "fragments": tuple}
        return cls(**value | {name: kind(value[name]) for name, kind in named.items()})


@dataclass(frozen=True)
class Outcome:
    """When batches were committed, and when it happened, in seconds since the query ran."""

    happened: float
    over: float
    """When what was done had returned."""
    commits: list[tuple[float, int]]
    """The time and number of each batch."""
    state_rows: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    """Bytes that state and captures took up on all nodes, now and then."""

    @property
    def gap(self) -> float:
        """From what happened to the commit of the first batch that was begun after it."""
        before = [number for at, number in self.commits if at <= self.happened]
        # The next one was under way already, and may have been as good as done.
        first = max(before, default=-1) + 2
        for at, number in self.commits:
            if number >= first:
                return at - self.happened
        raise QueryFailed("no batch was committed after the fault")

    def between(self, start: float, stop: float) -> list[float]:
        """The seconds from commit to commit in a stretch of time."""
        pairs = itertools.pairwise(at for at, _ in self.commits)
        return [later - earlier for earlier, later in pairs if later > start and earlier < stop]

    def to_json(self) -> str:
        """For the process that asked."""
        return json.dumps(asdict(self))


def run(scenario: Scenario) -> Outcome:
    """Carry out a scenario in a process of its own, with a cluster of its own."""
    with tempfile.TemporaryFile("w+") as errors:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "anabranch_bench.faults_side"],
                input=scenario.to_json(),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise QueryFailed(f"{scenario} did not end within {_SECONDS:.0f} s") from error
        if done.returncode:
            errors.seek(0)
            lines = [line for line in errors.read().splitlines() if "Error" in line]
            raise QueryFailed(f"{scenario}: {(lines or ['it ended without a message'])[-1]}")
    value = json.loads(done.stdout.splitlines()[-1])
    pairs = {name: [tuple(pair) for pair in value[name]] for name in ("commits", "memory")}
    return Outcome(**value | pairs)
