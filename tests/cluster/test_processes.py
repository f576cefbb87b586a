"""Every process of a node is found and ended, whatever it did to hide, and no other one."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cluster.processes import (
    MARK,
    Process,
    descendants,
    end,
    executors,
    last_lines,
    of_folder,
    running,
    start,
)
from anabranch.cluster.waiting import until

# A tree as Spark makes it: the parent, a child in its own process group, a child of that in its
# own session whose parent is gone, and one that has lost its environment.
FAMILY = """
import os, subprocess, sys, time
sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
group = subprocess.Popen(sleeper, preexec_fn=os.setpgrp).pid
bare = subprocess.Popen(sleeper, env={}).pid
orphan = subprocess.run(
    [sys.executable, "-S", "-c", '''
import subprocess, sys
print(subprocess.Popen(
    [sys.executable, "-S", "-c", "import time; time.sleep(600)"],
    start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
).pid)'''],
    capture_output=True, text=True, check=True,
).stdout.strip()
print("family", os.getpid(), group, bare, orphan, flush=True)
time.sleep(600)
"""

Start = Callable[[Path], list[int]]


def is_live(pid: int) -> bool:
    return pid in running()


@pytest.fixture
def start_family(tmp_path: Path) -> Iterator[Start]:
    begun: list[subprocess.Popen[bytes]] = []

    def begin(node: Path) -> list[int]:
        node.mkdir(parents=True)
        environment = dict(os.environ) | {MARK: str(node / "state")}
        log = node / "log"
        command = [sys.executable, "-S", "-c", FAMILY]
        begun.append(start(command, environment=environment, log=log))
        assert until(lambda: "family" in log.read_text(), 20)
        return [int(pid) for pid in log.read_text().split()[1:]]

    yield begin
    end(lambda: of_folder(tmp_path))
    for process in begun:
        process.wait(10)


@pytest.mark.chaos
def test_all_of_a_node_is_found_and_ended_and_nothing_of_its_neighbour(
    start_family: Start, tmp_path: Path
) -> None:
    # The second name begins with the first one.
    lost, spared = start_family(tmp_path / "127.0.0.2"), start_family(tmp_path / "127.0.0.20")
    assert of_folder(tmp_path / "127.0.0.2") == set(lost)
    assert of_folder(tmp_path) == {*lost, *spared}
    end(lambda: of_folder(tmp_path / "127.0.0.2"))
    assert not [pid for pid in lost if is_live(pid)]
    assert all(is_live(pid) for pid in spared)


def test_a_process_never_finds_itself_or_those_above_it(tmp_path: Path) -> None:
    look = (
        "import os, pathlib, subprocess, sys\n"
        "from anabranch.cluster.processes import of_folder\n"
        "print(of_folder(pathlib.Path(sys.argv[1])))"
    )
    said = subprocess.run(
        ["/bin/sh", "-c", '"$@"; true', "sh", sys.executable, "-c", look, str(tmp_path)],
        env=os.environ | {MARK: str(tmp_path / "state")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == "set()"


def test_a_process_that_is_only_to_be_reaped_is_not_live(tmp_path: Path) -> None:
    child = subprocess.Popen(["/bin/true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_live(child.pid)
    child.wait()


def test_ending_nothing_is_quick() -> None:
    began = time.monotonic()
    end(set)
    assert time.monotonic() - began < 1


@pytest.mark.chaos
def test_executors_go_with_their_python_workers_but_without_background_services(
    tmp_path: Path,
) -> None:
    program = (
        "import os, subprocess, sys, time\n"
        "sleep = [sys.executable, '-S', '-c', 'import time; time.sleep(600)']\n"
        "if sys.argv[1] == 'worker':\n"
        "    executor = subprocess.Popen(\n"
        "        [sys.executable, '-S', '-c', sys.argv[2], 'CoarseGrainedExecutorBackend',\n"
        "         sys.argv[2]])\n"
        "else:\n"
        "    daemon = subprocess.Popen(sleep, preexec_fn=os.setpgrp).pid\n"
        "    service = subprocess.Popen(sleep, start_new_session=True).pid\n"
        "    print('tree', os.getpid(), daemon, service, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = dict(os.environ) | {MARK: str(tmp_path / "state")}
    log = tmp_path / "log"
    command = [sys.executable, "-S", "-c", program, "worker", program]
    worker = start(command, environment=environment, log=log)
    try:
        assert until(lambda: "tree" in log.read_text(), 20)
        backend, daemon, service = (int(pid) for pid in log.read_text().split()[1:])
        # The command line of the worker has the word in it too: it is not an executor.
        assert executors(worker.pid) == {backend, daemon}
        assert is_live(service)
    finally:
        end(lambda: of_folder(tmp_path))
        worker.wait(10)
    assert executors(worker.pid) == set()
    assert not is_live(service)


@given(st.lists(st.integers(0, 30), max_size=31))
def test_descendants_are_the_transitive_closure(parents: list[int]) -> None:
    among = {pid: Process(pid, parent, 0) for pid, parent in enumerate(parents)}

    def is_below(pid: int, root: int) -> bool:
        seen: set[int] = set()
        while pid in among and pid not in seen:
            seen.add(pid)
            pid = among[pid].parent
            if pid == root:
                return True
        return False

    for root in range(4):
        assert descendants([root], among) == {pid for pid in among if is_below(pid, root)}


def test_the_end_of_a_log_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "no log" in last_lines(log)
    log.write_text("\n".join(f"line {n}" for n in range(100)))
    assert last_lines(log, 2) == "line 98\nline 99"
