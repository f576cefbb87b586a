"""Random faults and random scaling of all operators on a cluster, with backlogs.

The results are those of a model in plain Python. ``FAULTS`` sets how many faults there are in all
(make chaos: 200), ``SEED`` repeats a run. Every round has a seed of its own, ``SEED`` and the ones
after it.
"""

import itertools
import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chaos import rounds
from cluster import faults, runs
from cluster.program import OPERATORS

FAULTS = int(os.environ.get("FAULTS", "2"))
LONG = FAULTS > 2
FILES = 70 if LONG else 16
SEED = int(os.environ.get("SEED", str(random.SystemRandom().randrange(10**6))))
_MOST = 25
"""Faults in one round."""
_CHAIN = 16 if LONG else 0
"""Files at the beginning in which no operator is scaled, so that chains of changes grow long."""
_CALM = 4 if LONG else 1
"""Scales in a round that no fault disturbs: these have to happen."""
KINDS = (
    "kill", "kill", "kill two", "kill all", "executor", "agent", "both", "worker",
    "kill while scaling", "kill in a checkpoint", "everything",
    "hang", "hang long", "hang-agent", "hang-agent long", "cut", "cut", "fill", "fill", "damage",
)  # fmt: skip

FAULT_ACTS = (
    "kill", "executor", "agent", "both", "worker", "everything", "hang", "hang-agent", "cut",
    "fill", "damage",
)  # fmt: skip
_DISK = 600
"""Megabytes of the disk that is filled."""
_LONG_SILENCE = (42.0, 60.0)
"""Seconds after which a process that hangs counts as lost."""


def plan_of(number: int, most: int) -> dict[str, Any]:
    """How the query runs in a round, and what is done after which file."""
    chance = random.Random(SEED + number)
    backup = ("files", "upstream", "fragments")[(SEED + number) % 3]
    kinds = list(KINDS)
    if backup != "files":  # the nodes have the backups of each other, and only they
        without = ("kill two", "kill all", "everything", "fill", "damage")
        kinds = [kind for kind in kinds if kind not in without]
    with_disk = backup == "files" and faults.can_mount()
    kinds = [kind for kind in kinds if possible(kind, with_disk)]
    # After a group, so that the query can get over one fault before the next.
    ends: list[int] = []
    while len(ends) < min(FAULTS, 8) + _CALM:
        groups = [1] * _CHAIN + rounds.groups(chance, FILES - _CHAIN)
        ends = [end - 1 for end in itertools.accumulate(groups) if _CHAIN < end <= FILES - 3]
    moments = sorted(chance.sample(ends, min(len(ends), most + _CALM)))
    calm = chance.sample(moments, _CALM)
    acts: dict[str, list[str]] = {}
    if LONG:
        # Chains are merged about now: of files by the driver, and nodes have their part in it.
        faults_of_nodes = ["~worker 0", "~agent 1", "~executor 2"]
        acts = {str(_CHAIN - 4 + n): [act] for n, act in enumerate(faults_of_nodes)}
        acts[str(_CHAIN - 1)] = ["~kill 0", "~start"]
    instances = dict.fromkeys(OPERATORS, 2)
    for moment in moments:
        operator = chance.choice(OPERATORS)
        if moment in calm:
            # Never as many as there are; with one instance less, another one has slices to merge.
            instances[operator] = wanted = instances[operator] - 1 or 4
            acts[str(moment)] = [f"scale {operator} {wanted}"]
            continue
        kind = chance.choice(kinds)
        scale = f"~scale {operator} {chance.randint(1, 4)}"
        acts[str(moment)] = _fault(chance, kind, scale)
        if kind == "everything":
            kinds.remove(kind)
        elif chance.random() < 0.2:
            acts[str(moment)].append(scale)
    return {
        "nodes": 3,
        "ordered": False,
        "backup": backup,
        # Often enough for long chains in every second round.
        "seconds": 0.2 if number % 2 == 0 else chance.choice([0.3, 1.0, 30.0]),
        "chain": 2,
        "slices": 1,
        "groups": groups,
        "acts": acts,
    } | (_disk(chance) if with_disk else {})


def _disk(chance: random.Random) -> dict[str, Any]:
    """A small disk, for the checkpoint folder alone or for the results as well."""
    return {"disk": _DISK, "on_disk": chance.choice([["checkpoint"], ["checkpoint", "out"]])}


def possible(kind: str, with_disk: bool) -> bool:
    """Whether this machine and the plan can have a fault of this kind."""
    return {"fill": with_disk, "cut": faults.can_cut()}.get(kind, True)


def _fault(chance: random.Random, kind: str, scale: str) -> list[str]:
    when = chance.choice(["", "~"])
    which = chance.randrange(3)
    short = f"{chance.uniform(0.5, 12):.1f}"
    long = f"{chance.uniform(*_LONG_SILENCE):.1f}"
    return {
        "kill": [f"{when}kill {which}", "~start"],
        "kill two": [f"{when}kill {which} {which + 1}", "~start", "~start"],
        "kill all": [f"{when}kill all", "~start", "~start", "~start"],
        "kill while scaling": [scale, f"{when}kill {which}", "~start"],
        "kill in a checkpoint": ["~checkpoint", f"~kill {which}", "~start"],
        "everything": [f"{when}everything"],
        "hang": [f"{when}hang {which} {short}"],
        "hang long": [f"{when}hang {which} {long}", "~start"],
        "hang-agent": [f"{when}hang-agent {which} {short}"],
        "hang-agent long": [f"{when}hang-agent {which} {long}"],
        "cut": [f"~cut {which} {which + 1} {chance.choice([short, long])}"],
        "fill": [f"{when}fill {short}"],
        "damage": [f"{when}damage {which}", "~start"],
    }.get(kind, [f"{when}{kind} {which}"])


def faults_in(work: Path) -> Counter[str]:
    """How often something was disturbed in a run; not when it was gone already."""
    lines = (work / "log").read_text().splitlines()
    acts = [line.split()[1] for line in lines if line.startswith("did ")]
    return Counter(act for act in acts if act in FAULT_ACTS)


@pytest.mark.chaos
@pytest.mark.timeout(14400)
def test_faults_and_scaling_change_nothing(tmp_path: Path) -> None:
    print(f"SEED={SEED}")
    source = rounds.make_input(tmp_path / "input", SEED, FILES)
    seen = rounds.Seen()
    number = ordered = 0
    done: Counter[str] = Counter()
    while done.total() < FAULTS:
        plan = plan_of(number, min(_MOST, FAULTS - done.total()))
        work = tmp_path / f"round-{number}"
        print(f"seed {SEED + number}: {plan}")
        runs.run_anyhow(source, work, 2400, **plan)
        seen.add(work, source, plan)
        done, number = done + faults_in(work), number + 1
        if not (work / "killed").exists():  # what a driver was at when it was killed is not noted
            ordered += sum("scale" in act for acts in plan["acts"].values() for act in acts)
            assert seen.scales + seen.unchanged + seen.refused >= ordered, "a scale came to nothing"
        failures = json.loads((work / "failures.json").read_text())
        print(
            f"{done.total()} faults in {number} rounds, {seen.scales} scales, {seen.refused} not; "
            f"nothing lost or repeated; {dict(done)}; {dict(seen.upkeep)}; {dict(seen.events)}; "
            f"refused: {failures}"
        )
        shutil.rmtree(work)
    assert seen.scales >= number, f"only {seen.scales} scales happened"
    if LONG:
        assert seen.scales >= seen.refused, f"{seen.refused} scales were refused"
        seen.check()
