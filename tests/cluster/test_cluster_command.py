"""``anabranch cluster`` from two terminals."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.cluster.processes import of_folder
from anabranch.cluster.waiting import until

pytestmark = [pytest.mark.spark, pytest.mark.chaos]

PROGRAM = "from anabranch.cli.cluster import cluster; cluster()"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return dict(os.environ) | {"XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.fixture
def up(environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, "up", "--nodes", "1", "--memory", "512m"]
        started.append(
            subprocess.Popen(
                [*command, *options], env=environment, stdout=subprocess.PIPE, text=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=30)


def say(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if re.search(pattern, text):
            return text
    raise AssertionError(f"it ended without saying {pattern!r}:\n{text}")


def test_a_cluster_is_led_from_another_terminal(
    up: Callable[..., subprocess.Popen[str]], environment: dict[str, str]
) -> None:
    foreground = up()
    said = read_until(foreground, "Ctrl-C")
    master = re.search(r'spark = anabranch\.session\("(spark://127\.0\.0\.1:\d+)"\)', said)
    folder = re.search(r"logs +(\S+)", said)
    assert master
    assert folder
    status = say(environment, "status").stdout
    assert master[1] in status
    assert f"{folder[1]}/127.0.0.2" in status
    assert say(environment, "kill", "127.0.0.2").stdout == "killed 127.0.0.2\n"
    refused = say(environment, "kill", "127.0.0.2")
    assert refused.returncode != 0
    assert "no node '127.0.0.2' is up" in refused.stderr
    assert "running already" in say(environment, "up").stderr
    assert say(environment, "add").stdout == "added 127.0.0.3\n"
    assert say(environment, "down").stdout == "stopped\n"
    assert foreground.wait(20) == 0
    assert not Path(folder[1]).exists()
    assert of_folder(Path(folder[1])) == set()
    assert "no cluster is running" in say(environment, "status").stderr


def test_termination_while_it_starts_leaves_nothing(
    up: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "cluster"
    foreground = up("--folder", str(folder))
    assert until((folder / "master" / "master.log").exists, 30)
    foreground.terminate()
    assert foreground.wait(30) == 0
    assert of_folder(folder) == set()
    assert not [*folder.glob("*/state")]
    assert not (tmp_path / "anabranch" / "cluster.sock").exists()
