"""Real processes are killed at random moments; the result must be as if nothing had happened.

``KILLS`` sets how many kills there are in all (make chaos: 100), ``SEED`` repeats a run.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.backup import Files, Manifests, read_state

FILES, ROWS, KILLS_PER_ROUND = 16, 400, 10
DAEMON = "anabranch.spark.daemon"
PROGRAM = Path(__file__).with_name("program.py")
KILLS = int(os.environ.get("KILLS", "5"))
SEED = int(os.environ.get("SEED", str(random.SystemRandom().randrange(10**6))))


def make_input(folder: Path, seed: int) -> None:
    folder.mkdir()
    numbers = np.random.default_rng(seed)
    for file in range(FILES):
        start = 1_700_000_000_000_000 + file * 1_000_000
        at = pa.array(start + np.arange(ROWS), pa.timestamp("us", tz="UTC"))
        user = pa.array([f"user-{n}" for n in numbers.zipf(1.3, ROWS) % 300])
        city = pa.array(numbers.integers(0, 20, ROWS), pa.int32())
        fare = pa.array(numbers.gamma(2.0, 7.5, ROWS))
        table = pa.table({"at": at, "user": user, "city": city, "fare": fare})
        path = folder / f"{file:04d}.parquet"
        pq.write_table(table, path)
        # The file source takes files in the order of their times.
        os.utime(path, (1_700_000_000 + file, 1_700_000_000 + file))


def launch(source: Path, work: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(source), str(work), str(seconds)],
        stdout=subprocess.PIPE,
        stderr=(work / "stderr.log").open("a"),
        text=True,
    )


def finish(process: subprocess.Popen[str], work: Path) -> None:
    process.communicate(timeout=240)
    assert process.returncode == 0, (work / "stderr.log").read_text()[-5000:]


def results(work: Path) -> dict[str, pa.Table]:
    """Everything the query has made: all rows of every output, and the final state."""
    found = {}
    for name, key in (("users", "user"), ("cities", "city")):
        files = sorted((work / "out" / name).glob("part-*.parquet"))
        # Names are part-<query>-<version>-<partition>: rows are compared batch by batch.
        tables = [
            pq.read_table(file).append_column(
                "batch", pa.array([int(file.name.split("-")[2])] * pq.read_metadata(file).num_rows)
            )
            for file in files
        ]
        order = [("batch", "ascending"), (key, "ascending")]
        found[f"output of {name}"] = pa.concat_tables(tables).sort_by(order)
        store = Files(str(work / "checkpoint")).open()
        manifest = Manifests(store).latest()
        assert manifest is not None
        assert manifest.version == FILES - 1
        found[f"state of {name}"] = read_state(store, manifest, name).sort_by(key)
    return found


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, pa.Table]]:
    work = tmp_path_factory.mktemp("undisturbed")
    source = work / "input"
    make_input(source, SEED)
    finish(launch(source, work, 0.5), work)
    return source, results(work)


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


def disturbed_run(source: Path, work: Path, chance: random.Random, kills: int) -> int:
    """Run to the end, killing on the way; returns how many kills there were."""
    done = 0
    process = launch(source, work, chance.choice([0.2, 1.0, 30.0]))
    while process.poll() is None:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("committed") or done >= kills:
            continue
        # A moment inside the batch that has just begun; which one is left to chance.
        time.sleep(chance.uniform(0, 0.4))
        if chance.random() < 0.4:
            done += kill_driver(process)
            if chance.random() < 0.25:
                shutil.rmtree(work / "state", ignore_errors=True)  # the machine is gone as well
            process = launch(source, work, chance.choice([0.2, 1.0, 30.0]))
        else:
            done += kill_worker(process, chance)
    finish(process, work)
    return done


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_kills_change_nothing(expected: tuple[Path, dict[str, pa.Table]], tmp_path: Path) -> None:
    source, undisturbed = expected
    chance = random.Random(SEED)
    killed, rounds = 0, 0
    while killed < KILLS:
        work = tmp_path / f"round-{rounds}"
        work.mkdir()
        killed += disturbed_run(source, work, chance, min(KILLS_PER_ROUND, KILLS - killed))
        rounds += 1
        for what, table in results(work).items():
            assert table.equals(undisturbed[what]), f"SEED={SEED}, round {rounds}: {what}"
        print(f"seed {SEED}: {killed} kills in {rounds} rounds, nothing lost or repeated")
