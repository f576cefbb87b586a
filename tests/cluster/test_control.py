"""The socket between terminals and a running cluster."""

import json
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cluster import ClusterFailed
from anabranch.cluster.control import LONGEST, ask, runtime_folder, serve
from anabranch.errors import PlanError


def echo(request: Mapping[str, Any]) -> Mapping[str, Any]:
    return dict(request)


def refuse(request: Mapping[str, Any]) -> Mapping[str, Any]:
    raise PlanError("no node '127.0.0.9' is up")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    socket_path = tmp_path_factory.mktemp("run") / "c.sock"
    with serve(socket_path, {"echo": echo, "refuse": refuse}):
        yield socket_path
    assert not socket_path.exists()


def raw(path: Path, data: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(path))
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answers:
            return json.loads(answers.readline())


def test_a_request_is_answered(path: Path) -> None:
    assert ask(path, "echo", host="127.0.0.2") == {"op": "echo", "host": "127.0.0.2"}


def test_an_error_is_raised_where_it_was_asked(path: Path) -> None:
    with pytest.raises(ClusterFailed, match=r"127\.0\.0\.9"):
        ask(path, "refuse")


def test_an_unknown_operation_is_refused_and_the_known_are_named(path: Path) -> None:
    with pytest.raises(ClusterFailed, match=r"'launch'.*echo, refuse"):
        ask(path, "launch")


def test_the_socket_is_for_its_user_only(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_the_server_carries_on(path: Path, data: bytes) -> None:
    assert "error" in raw(path, data + b"\n")
    assert ask(path, "echo") == {"op": "echo"}


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]\n", b"[" * 60_000 + b"\n"])
def test_what_is_not_a_request_is_refused(path: Path, data: bytes) -> None:
    assert "error" in raw(path, data)


def test_an_endless_line_is_refused(path: Path) -> None:
    assert "at most" in raw(path, b'"' + b"x" * (LONGEST - 1))["error"]


def test_a_client_that_goes_away_does_no_harm(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(b'{"op": "echo"}\n')
    assert ask(path, "echo") == {"op": "echo"}


def test_a_second_cluster_is_refused(path: Path) -> None:
    with pytest.raises(ClusterFailed, match="running already"), serve(path, {}):
        pass
    assert ask(path, "echo") == {"op": "echo"}


def test_without_a_cluster_the_error_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(ClusterFailed, match="anabranch cluster up"):
        ask(tmp_path / "none.sock", "status")


@pytest.mark.chaos
def test_the_socket_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    program = (
        "import pathlib, sys, time\n"
        "from anabranch.cluster.control import serve\n"
        "with serve(pathlib.Path(sys.argv[1]), {}):\n"
        "    print('serving', flush=True); time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "serving\n"
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    assert path.exists()
    with pytest.raises(ClusterFailed, match="no cluster"):
        ask(path, "echo")
    with serve(path, {"echo": echo}):
        assert ask(path, "echo") == {"op": "echo"}


def test_the_server_ends_after_an_answer_under_way(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    asked, gone, answered = threading.Event(), threading.Event(), threading.Event()

    def down(request: Mapping[str, Any]) -> Mapping[str, Any]:
        asked.set()
        gone.wait(20)
        answered.set()
        return {"said": "stopped"}

    answers: list[dict[str, Any]] = []
    client = threading.Thread(target=lambda: answers.append(ask(path, "down")))
    with serve(path, {"down": down}):
        client.start()
        assert asked.wait(20)
        threading.Timer(0.5, gone.set).start()  # the server is told to end before that
    assert answered.is_set()
    client.join(20)
    assert answers == [{"said": "stopped"}]


def test_the_folder_of_sockets_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = runtime_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    with pytest.raises(ClusterFailed, match="only you"):
        runtime_folder()
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(ClusterFailed, match="only you"):
        runtime_folder()
