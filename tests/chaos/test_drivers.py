"""A driver is paused while another one takes its query over, and wakes up; then that one is paused.

They run on one cluster, each with executors of its own. The results are those of a model in plain
Python. A tenth of ``FAULTS`` is how many pauses there are (make chaos: 20), ``SEED`` repeats a run.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from anabranch.cluster import LocalCluster
from anabranch.cluster.waiting import until
from chaos import rounds
from cluster import model, runs

PAUSES = max(1, int(os.environ.get("FAULTS", "2")) // 10)
SEED = int(os.environ.get("SEED", str(random.SystemRandom().randrange(10**6))))
FILES = 16 if PAUSES == 1 else 60
_NODES = 2
_SECONDS = 300.0


class Driver:
    """One driver of the query, in a process group of its own."""

    def __init__(self, source: Path, work: Path, plan: dict[str, Any], number: int) -> None:
        # So a driver begins on another machine: the lock of the first is not seen there.
        (work / "checkpoint" / "driver.lock").unlink(missing_ok=True)
        self.number = number
        self._log = work / f"driver-{number}.log"
        self._commits = threading.Semaphore(0)
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
        self.process = runs.launch(source, work, plan, text=True, **how)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self._log.open("w") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                if line.startswith("committed"):
                    self._commits.release()
        self._commits.release(1000)

    def await_commits(self, count: int) -> None:
        for _ in range(count):
            assert self._commits.acquire(timeout=_SECONDS), f"no batch in {_SECONDS} s: {self.text}"

    @property
    def text(self) -> str:
        return self._log.read_text()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> int:
        """Wait until it ends by itself."""
        try:
            return self.process.wait(_SECONDS)
        finally:
            self._signal(signal.SIGKILL)
            self._reader.join()

    def _signal(self, what: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, what)


def has_more(folder: Path, before: set[Path]) -> bool:
    """Whether there is a new file in a folder, or one comes in time."""
    return bool(until(lambda: set(folder.iterdir()) - before, _SECONDS))


def take_turns(source: Path, work: Path, plan: dict[str, Any], chance: random.Random) -> int:
    """Run the query to its end; returns how many drivers were paused and taken over from."""
    driver = Driver(source, work, plan, 0)
    for number in range(PAUSES):
        driver.await_commits(chance.randint(2, 5))
        threading.Event().wait(chance.uniform(0, 0.5))  # a moment inside a batch, left to chance
        driver.pause()
        if driver.process.poll() is not None:
            break
        epochs = work / "checkpoint" / "epochs"
        before = set(epochs.iterdir())
        second = Driver(source, work, plan, number + 1)
        when = chance.choice(["at once", "when the other one has run a batch", "much later"])
        print(f"driver {number} paused; wakes up {when}")
        # Not before: it could be through with the input by the time the other one has started.
        assert has_more(epochs, before), second.text[-5000:]
        second.await_commits({"at once": 0, "much later": 4}.get(when, 1))
        driver.wake()
        assert driver.end() != 0, "a driver that was taken over from ended as if it were done"
        assert "has taken the query over" in driver.text, driver.text[-5000:]
        driver = second
    else:
        number += 1
    assert driver.end() == 0, driver.text[-5000:]
    return number


@pytest.mark.chaos
@pytest.mark.cluster
@pytest.mark.timeout(7200)
def test_a_driver_that_was_paused_changes_nothing(tmp_path: Path) -> None:
    print(f"SEED={SEED}")
    chance = random.Random(SEED)
    source, work = rounds.make_input(tmp_path / "input", SEED, FILES), tmp_path / "work"
    work.mkdir()
    # Room for the executors of two drivers on each node.
    with LocalCluster(_NODES, cores=2, memory="1200m") as cluster:
        plan = {"nodes": _NODES, "master": cluster.master, "cores": _NODES, "seconds": 0.5}
        paused = take_turns(source, work, plan, chance)
    assert paused
    model.check(work, source, ordered=False)
    print(f"{paused} drivers were paused; nothing lost or repeated")
