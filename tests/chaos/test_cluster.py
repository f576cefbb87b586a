"""Random faults and random scaling of three operators on a cluster; the result must not change.

``FAULTS`` sets how many faults there are in all (make chaos: 200), ``SEED`` repeats a run.
"""

import os
import random
from pathlib import Path

import pytest

from cluster import runs

FAULTS = int(os.environ.get("FAULTS", "2"))
FILES = 24 if FAULTS > 2 else 10
SEED = int(os.environ.get("SEED", str(random.SystemRandom().randrange(10**6))))
_MOST = 8
"""Faults in one round."""
OPERATORS = ("users", "cities", "sizes")


def plan_of(chance: random.Random, faults: int) -> tuple[dict[str, list[str]], int]:
    """What is done after which batch, and how many of it are faults."""
    acts: dict[str, list[str]] = {}
    moments = sorted(chance.sample(range(2, FILES - 3), faults))
    for moment in moments:
        when = chance.choice(["", "~"])
        which = chance.randrange(3)
        kind = chance.choice(["kill", "kill", "executor", "agent", "kill while scaling"])
        scale = f"~scale {chance.choice(OPERATORS)} {chance.randrange(1, 5)}"
        if kind == "kill while scaling":
            acts[str(moment)] = [scale, f"{when}kill {which}", "~add"]
        elif kind == "kill":
            acts[str(moment)] = [f"{when}kill {which}", "~add"]
        else:
            acts[str(moment)] = [f"{when}{kind} {which}"]
        if chance.random() < 0.3:
            acts[str(moment)].append(scale)
    return acts, len(moments)


@pytest.mark.chaos
@pytest.mark.timeout(14400)
def test_faults_and_scaling_change_nothing(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    print(f"SEED={SEED}")
    source = runs.make_input(tmp_path / "input", SEED, FILES)
    runs.run(source, tmp_path / "undisturbed", nodes=0)
    done = rounds = 0
    while done < FAULTS:
        acts, faults = plan_of(chance, min(_MOST, FAULTS - done))
        work = tmp_path / f"round-{rounds}"
        backup = chance.choice(["files", "upstream"])
        seconds = chance.choice([0.3, 1.0, 30.0])
        print(f"round {rounds}: backup={backup}, checkpoints every {seconds} s, {acts}", flush=True)
        runs.run(source, work, 900, nodes=3, backup=backup, seconds=seconds, acts=acts)
        runs.same(work, tmp_path / "undisturbed")
        done, rounds = done + faults, rounds + 1
        print(
            f"seed {SEED}: {done} faults in {rounds} rounds, nothing lost or repeated", flush=True
        )
