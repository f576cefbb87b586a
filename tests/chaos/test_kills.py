"""Real processes are killed at random moments; the results are those of a model in plain Python.

``KILLS`` sets how many kills there are in all (make chaos: 100), ``SEED`` repeats a run.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.backup import Files
from anabranch.stores import Manifests, read_state
from chaos import rounds
from cluster import runs

KILLS_PER_ROUND = 10
DAEMON = "anabranch.worker.daemon"
KILLS = int(os.environ.get("KILLS", "5"))
SEED = int(os.environ.get("SEED", str(random.SystemRandom().randrange(10**6))))
LONG = KILLS > 5
FILES = 50 if LONG else 16
CHANCE = 0.35 if LONG else 0.8
"""Of a kill after a commit. A chain of changes needs some batches in peace to grow."""
_SILENT = 180.0


def launch(source: Path, work: Path, plan: dict[str, Any]) -> subprocess.Popen[str]:
    errors = (work / "stderr.log").open("a")
    return runs.launch(source, work, plan, stdout=subprocess.PIPE, stderr=errors, text=True)


def finish(process: subprocess.Popen[str], work: Path) -> None:
    process.communicate(timeout=_SILENT)
    assert process.returncode == 0, (work / "stderr.log").read_text()[-5000:]


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_driver(process: subprocess.Popen[str]) -> bool:
    """Driver and JVM at once, as when a machine's memory runs out."""
    victims = [process, *children(process)]
    for victim in victims:
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    return True


def kill_worker(process: subprocess.Popen[str], chance: random.Random) -> bool:
    """One of the Python workers, which are forked by the daemon below the JVM."""
    workers = []
    for child in children(process):
        try:
            parent = child.parent()
            # Not those of the JVM: the name of the daemon is among its settings as well.
            if parent is not None and parent.cmdline()[1:3] == ["-m", DAEMON]:
                workers.append(child)
        except psutil.NoSuchProcess:
            continue
    if not workers:
        return False
    try:
        chance.choice(workers).kill()
    except psutil.NoSuchProcess:
        return False
    return True


def plan_of(chance: random.Random, number: int) -> dict[str, Any]:
    """One file a batch, with results that depend on the order of rows; or files as they come."""
    ordered = (SEED + number) % 2 == 0
    plan: dict[str, Any] = {"nodes": 0, "ordered": ordered, "chain": 2, "slices": 1}
    plan["instances"] = chance.choice([1, 2])
    if LONG:
        # A merge takes longer than the batches: without waiting none would ever be finished.
        plan["acts"] = {str(moment): ["merge"] for moment in (14, 26, 38)}
    if not ordered:
        plan["groups"] = rounds.groups(chance, FILES)
        operators = ("users", "once", "windows")
        acts = plan.setdefault("acts", {})
        for moment in chance.sample(range(2, FILES - 3), 3):
            scale = f"~scale {chance.choice(operators)} {chance.randint(1, 4)}"
            acts.setdefault(str(moment), []).append(scale)
    return plan


def disturbed_run(
    source: Path, work: Path, plan: dict[str, Any], chance: random.Random, kills: int
) -> int:
    """Run to the end, killing on the way; returns how many kills there were."""

    def start() -> subprocess.Popen[str]:
        return launch(source, work, plan | {"seconds": chance.choice([0.2, 0.2, 1.0, 30.0])})

    done = 0
    process = start()
    while process.poll() is None:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("committed") or done >= kills or chance.random() > CHANCE:
            continue
        # A moment inside the batches that have just begun; which one is left to chance.
        time.sleep(chance.uniform(0, 0.4) * (3 if "groups" in plan else 1))
        if chance.random() < 0.4:
            done += kill_driver(process)
            if chance.random() < 0.25:
                shutil.rmtree(work / "memory", ignore_errors=True)  # the machine is gone as well
            process = start()
        else:
            done += kill_worker(process, chance)
    finish(process, work)
    return done


def stored_state(work: Path) -> dict[str, pa.Table]:
    """The state of all operators in the newest checkpoint."""
    store = Files(str(work / "checkpoint")).open()
    manifest = Manifests(store).latest()
    assert manifest is not None
    return {name: read_state(store, manifest, name) for name in manifest.operators}


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_kills_change_nothing(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    source = rounds.make_input(tmp_path / "input", SEED, FILES)
    seen = rounds.Seen()
    killed, number = 0, 0
    while killed < KILLS:
        work = tmp_path / f"round-{number}"
        work.mkdir()
        plan = plan_of(chance, number)
        print(f"SEED={SEED}, round {number}: {plan}")
        killed += disturbed_run(source, work, plan, chance, min(KILLS_PER_ROUND, KILLS - killed))
        seen.add(work, source, plan)
        for name, stored in stored_state(work).items():
            keys = [(key, "ascending") for key in runs.STATES[name]]
            live = pq.read_table(work / "state" / f"{name}.parquet")
            assert stored.sort_by(keys).equals(live.sort_by(keys)), f"stored state of {name}"
        shutil.rmtree(work)
        number += 1
        print(
            f"{killed} kills in {number} rounds, {seen.scales} scales, {dict(seen.upkeep)}, "
            f"{dict(seen.events)}; nothing lost or repeated"
        )
    if LONG:
        seen.check()
