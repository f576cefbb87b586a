"""On eight nodes, the node of a slice is killed at once with two that have fragments of its state.

Fragments are 4 + 2, so every slice can be made again of what is left. The results are those of a
model in plain Python, and of each operator's state in it. ``KILLS`` is twice the number of such
losses (make chaos: 50), ``SEED`` repeats a run.
"""

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cluster import runs
from cluster.program import OPERATORS

LOSSES = max(1, int(os.environ.get("KILLS", "2")) // 2)
SEED = int(os.environ.get("SEED", str(random.SystemRandom().randrange(10**6))))
_NODES = 8
_IN_A_ROUND = 10
WHEN = ("now", "batch", "checkpoint", "scale", "recovery")


def plan_of(chance: random.Random, losses: int) -> dict[str, Any]:
    """What is done after which file: nodes are lost, new ones come, and all is protected again."""
    new = ["add", "add", "add", "protected"]
    acts = {"1": ["protected"]}
    instances = dict.fromkeys(OPERATORS, 2)
    for number in range(losses):
        operator, when = chance.choice(OPERATORS), WHEN[number % len(WHEN)]
        during = []
        if when == "checkpoint":
            during = ["~checkpoint"]
        elif when == "scale":
            moving = chance.choice(OPERATORS)
            wanted = chance.choice(sorted({1, 2, 3, 4} - {instances[moving]}))
            during, instances[moving] = [f"~scale {moving} {wanted}"], wanted
        kill = f"kill-holders {operator} {chance.randrange(10**6)} {when}"
        if when == "batch":
            kill = f"~{kill}"  # the next batch comes once this file is done
        acts[str(2 + 2 * number)] = [*during, kill]
        acts[str(3 + 2 * number)] = new
    return {"nodes": _NODES, "backup": "4 + 2", "seconds": 0.5, "ordered": False, "acts": acts}


@pytest.mark.chaos
@pytest.mark.cluster
@pytest.mark.timeout(7200)
def test_an_owner_and_two_holders_are_lost_at_once(tmp_path: Path) -> None:
    print(f"SEED={SEED}")
    chance, done, number = random.Random(SEED), 0, 0
    seen: Counter[str] = Counter()
    while done < LOSSES:
        losses = min(_IN_A_ROUND, LOSSES - done)
        plan = plan_of(chance, losses)
        print(f"round {number}: {plan}")
        source = runs.make_input(tmp_path / f"input-{number}", SEED + number, 4 + 2 * losses)
        work = tmp_path / f"round-{number}"
        events = runs.run(source, work, 2400, **plan)
        seen.update(event["kind"] for event in events)
        lost = sum(event["kind"] == "failure" for event in events)
        assert lost >= 2 * losses, f"only {lost} nodes were lost"
        starts = [event["start"] for event in events if event["kind"] == "restarted"][1:]
        assert all(start >= 0 for start in starts), f"state was computed from the sources: {starts}"
        shutil.rmtree(work)
        done, number = done + losses, number + 1
        print(f"{done} losses of 3 nodes in {number} rounds; nothing lost or repeated; {seen}")
    assert seen["recovery"]
    assert seen["part mended"]
