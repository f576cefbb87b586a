"""Random faults and random scaling of three operators on a cluster; the result must not change.

``FAULTS`` sets how many faults there are in all (make chaos: 200), ``SEED`` repeats a run. Every
round has a seed of its own, ``SEED`` and the ones after it.
"""

import json
import os
import random
from pathlib import Path

import pytest

from cluster import runs

FAULTS = int(os.environ.get("FAULTS", "2"))
FILES = 60 if FAULTS > 2 else 10
SEED = int(os.environ.get("SEED", str(random.SystemRandom().randrange(10**6))))
_MOST = 25
"""Faults in one round."""
OPERATORS = ("users", "cities", "sizes")
KINDS = (
    "kill", "kill", "kill two", "kill all", "executor", "agent", "both", "worker",
    "kill while scaling", "kill in a checkpoint", "everything",
)  # fmt: skip

FAULT_ACTS = ("kill", "executor", "agent", "both", "worker", "everything")


def plan_of(chance: random.Random, faults: int, backup: str) -> dict[str, list[str]]:
    """What is done after which batch."""
    acts: dict[str, list[str]] = {}
    kinds = list(KINDS)
    if backup == "upstream":  # the nodes have the backups of each other, and only they
        kinds = [kind for kind in kinds if kind not in ("kill two", "kill all", "everything")]
    for moment in sorted(chance.sample(range(2, FILES - 3), faults)):
        when = chance.choice(["", "~"])
        which = chance.randrange(3)
        kind = chance.choice(kinds)
        scale = f"~scale {chance.choice(OPERATORS)} {chance.randrange(1, 5)}"
        acts[str(moment)] = {
            "kill": [f"{when}kill {which}", "~start"],
            "kill two": [f"{when}kill {which} {which + 1}", "~start", "~start"],
            "kill all": [f"{when}kill all", "~start", "~start", "~start"],
            "kill while scaling": [scale, f"{when}kill {which}", "~start"],
            "kill in a checkpoint": ["~checkpoint", f"~kill {which}", "~start"],
            "everything": [f"{when}everything"],
        }.get(kind, [f"{when}{kind} {which}"])
        if kind == "everything":
            kinds.remove(kind)
        elif chance.random() < 0.2:
            acts[str(moment)].append(scale)
    return acts


def faults_in(work: Path) -> int:
    """How often something was killed in a run; not when it was gone already."""
    acts = [
        line.split()[1]
        for line in (work / "log").read_text().splitlines()
        if line.startswith("did ")
    ]
    return len([act for act in acts if act in FAULT_ACTS])


@pytest.mark.chaos
@pytest.mark.timeout(14400)
def test_faults_and_scaling_change_nothing(tmp_path: Path) -> None:
    print(f"SEED={SEED}")
    source = runs.make_input(tmp_path / "input", SEED, FILES)
    runs.run(source, tmp_path / "undisturbed", 2400, nodes=0)
    done = rounds = 0
    while done < FAULTS:
        chance = random.Random(SEED + rounds)
        faults = min(_MOST, FAULTS - done)
        backup = chance.choice(["files", "upstream"])
        seconds = chance.choice([0.3, 1.0, 30.0])
        acts = plan_of(chance, faults, backup)
        work = tmp_path / f"round-{rounds}"
        print(f"seed {SEED + rounds}: backup={backup}, checkpoints every {seconds} s, {acts}")
        plan = {"nodes": 3, "backup": backup, "seconds": seconds, "acts": acts}
        runs.run_anyhow(source, work, 2400, **plan)
        runs.same(work, tmp_path / "undisturbed")
        done, rounds = done + faults_in(work), rounds + 1
        failures = json.loads((work / "failures.json").read_text())
        print(f"{done} faults in {rounds} rounds, nothing lost or repeated; refused: {failures}")
