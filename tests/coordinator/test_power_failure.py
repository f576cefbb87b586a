"""Queries on a machine that loses its power: nothing is lost, nothing is repeated."""

import os
import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from coordinator.mini import Killed, Mini, Outside, expected, lose_memory, results
from coordinator.power import PowerDisk

MODULES = ("boot", "coordinator.assembly", "coordinator.ledger")
ENDINGS = ["stop", "kill", "kill and lose the state", "power"]


# An example is many runs of a query: to shrink one takes longer than to read it.
@settings(
    max_examples=40,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    derandomize="CI" in os.environ,
)
@given(
    history=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(ENDINGS)), max_size=6),
    every=st.integers(1, 6),
    outside=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_whatever_ends_a_run_results_come_once(
    tmp_path_factory: pytest.TempPathFactory,
    history: list[tuple[int, str]],
    every: int,
    outside: bool,
    seed: int,
) -> None:
    chance = random.Random(seed)
    root = tmp_path_factory.mktemp("machine")
    disk, memory = root / "disk", root / "memory"
    disk.mkdir()
    sink = Outside() if outside else None
    boots = 0
    with PowerDisk(disk).watched() as power, pytest.MonkeyPatch.context() as patch:
        for steps, ending in [*history, (3, "stop")]:
            for module in ["coordinator.mini", *(f"anabranch.{name}" for name in MODULES)]:
                patch.setattr(f"{module}.boot_id", lambda now=boots: f"{now:032x}")
            last = ending == "stop"
            query = Mini(disk, memory, sink, every=every, chance=None if last else chance)
            try:
                query.start()
                for _ in range(steps):
                    query.step()
            except Killed:
                last = False
            query.end(killed=not last)
            if ending == "power":
                power.fail(chance)
                boots += 1
            if ending not in ("stop", "kill"):
                lose_memory(memory)
    found = results(disk)
    assert found == expected(len(found))
    if sink is not None:
        assert sorted(row for rows in sink.given.values() for row in rows) == found
