"""Queries on a machine that loses its power: nothing is lost, nothing is repeated.

``POWER`` sets how many histories are tried (make power: 2,000).
"""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from anabranch.errors import QueryFailed, SinkFailed, StoreError
from coordinator.mini import Killed, Mini, Outside, expected, lose_memory, results
from coordinator.power import PowerDisk

POWER = int(os.environ.get("POWER", "40"))
MODULES = ("boot", "coordinator.assembly", "coordinator.ledger")
ENDINGS = ["stop", "kill", "kill and lose the state", "power"]
ACTIONS = ["batch", "batch", "batch", "batch without rows", "scale"]


@dataclass(frozen=True)
class Run:
    """One run of the query, from its start to its end."""

    actions: tuple[str, ...]
    ending: str
    frail: bool = False
    """Whether it is likely to die while it starts."""
    failing: bool = False
    """Whether files and folders cannot be flushed now and then."""


LAST = Run(("batch", "batch", "batch"), "stop")
RUNS = st.builds(
    Run,
    st.lists(st.sampled_from(ACTIONS), max_size=9).map(tuple),
    st.sampled_from(ENDINGS),
    st.booleans(),
    st.booleans(),
)


# An example is many runs of a query: to shrink one takes longer than to read it.
@settings(
    max_examples=POWER,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    derandomize="CI" in os.environ,
)
@given(
    history=st.lists(RUNS, max_size=6),
    every=st.integers(1, 6),
    outside=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_whatever_ends_a_run_results_come_once(
    history: list[Run], every: int, outside: bool, seed: int
) -> None:
    chance = random.Random(seed)
    sink = Outside() if outside else None
    boots = 0
    with machine() as (power, memory), pytest.MonkeyPatch.context() as patch:
        for run in [*history, LAST]:
            for module in ["coordinator.mini", *(f"anabranch.{name}" for name in MODULES)]:
                patch.setattr(f"{module}.boot_id", lambda now=boots: f"{now:032x}")
            play(run, power, memory, sink, every, None if run is LAST else chance)
            if run.ending == "power":
                power.fail(chance)
                boots += 1
            if run.ending not in ("stop", "kill"):
                lose_memory(memory)
        found = results(power.root)
    assert found == expected(len(found))
    if sink is not None:
        assert sorted(row for rows in sink.given.values() for row in rows) == found


@contextmanager
def machine() -> Iterator[tuple[PowerDisk, Path]]:
    """A disk, and a folder in memory."""
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    (root / "disk").mkdir()
    try:
        with PowerDisk(root / "disk").watched() as power:
            yield power, root / "memory"
    finally:
        shutil.rmtree(root)


def play(
    run: Run,
    power: PowerDisk,
    memory: Path,
    outside: Outside | None,
    every: int,
    chance: random.Random | None,
) -> None:
    """Start the query, let it run, and end it, if it lives as long."""
    query: Mini | None = None
    failures = 0

    def before_flush() -> None:
        nonlocal failures
        if chance is not None and query is not None and chance.random() < query.risk / 3:
            raise query.killed("flushing")
        # A few only: the pauses between attempts grow, and a disk that never works ends a query.
        may_fail = run.failing and failures < 6
        if chance is not None and may_fail and chance.random() < 0.05:
            failures += 1
            raise OSError(5, "Input/output error")

    power.before_flush = before_flush
    stopped = False
    try:
        query = Mini(power.root, memory, outside, every=every, chance=chance)
        query.tolerant = run.failing
        query.risk = 0.2 if run.frail else 0.03
        query.start()
        query.risk = 0.03
        for number, action in enumerate(run.actions):
            if action == "scale":
                scale(query, 1 + (number + len(run.actions)) % 4, may_fail=run.failing)
            else:
                query.step(sparse=action == "batch without rows")
        stopped = run.ending == "stop"
        if stopped:
            query.end(killed=False)
    except Killed:
        stopped = False
    except (StoreError, SinkFailed, QueryFailed):
        stopped = False
        if not failures:
            raise
    finally:
        power.before_flush = None
        if query is not None and not stopped:
            query.end(killed=True)


def scale(query: Mini, instances: int, *, may_fail: bool) -> None:
    try:
        query.scale(instances)
    except QueryFailed:
        if not may_fail or query.failure is not None:
            raise
