"""The process of an agent: how it starts, how many there are, and when it ends."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from acting import Print, Temporary
from node_tools import EPOCH, Reached, Starter, is_gone, wait_until

from anabranch.errors import Deposed, DidNotHappen, PlanError, Refused
from anabranch.nodes import AgentAddress, Secret, Signer
from anabranch.nodes.log import LARGEST
from anabranch.nodes.requests import Drop, TableName
from anabranch.state.lock import holder_of


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.chaos
def test_it_ends_with_the_process_that_it_watches(
    start: Starter, tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    address = start(folder=tmp_path, watch_pid=sleeper.pid)
    sleeper.kill()
    since = time.monotonic()
    assert is_gone(address.pid)
    assert time.monotonic() - since < 5
    assert not (tmp_path / "agent.json").exists()


def test_it_ends_on_sigterm_and_when_told(start: Starter, secret: Secret, tmp_path: Path) -> None:
    first = start(folder=tmp_path)
    os.kill(first.pid, signal.SIGTERM)
    assert is_gone(first.pid)
    second = start(folder=tmp_path)
    with Reached(str(second), Signer(secret)) as node:
        node.stop()
    assert is_gone(second.pid)
    assert not (tmp_path / "agent.json").exists()


def test_what_is_written_down_is_not_the_secret(
    agent: AgentAddress, secret: Secret, home: Path
) -> None:
    path = home / "folder" / "agent.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_bytes()) == {
        "host": agent.host, "port": agent.port, "pid": agent.pid
    }  # fmt: skip
    shown = [Path(f"/proc/{agent.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
    shown += [file.read_bytes() for file in home.rglob("*") if file.is_file()]
    assert len(shown) >= 4
    assert not any(secret.to_hex().encode() in each or secret.key in each for each in shown)


def test_its_output_goes_to_the_log(agent: AgentAddress, home: Path) -> None:
    assert "this goes to the log, not into the answer" in (home / "agent.log").read_text()
    links = [Path(f"/proc/{agent.pid}/fd/{number}").readlink() for number in range(3)]
    assert links == [Path("/dev/null"), home / "agent.log", home / "agent.log"]
    assert os.getsid(agent.pid) == agent.pid


def test_one_agent_for_a_folder(start: Starter, agent: AgentAddress, secret: Secret) -> None:
    assert start() == agent
    with pytest.raises(DidNotHappen, match=r"another agent uses .*not signed with the secret"):
        start(secret=Secret.new())
    with Reached(str(agent), Signer(secret)) as node:
        assert node.ping().pid == agent.pid


def test_an_agent_that_hangs_is_replaced(start: Starter, secret: Secret, tmp_path: Path) -> None:
    first = start(folder=tmp_path)
    with Reached(str(first), Signer(secret)) as node:
        node.put("a", b"kept")
    os.kill(first.pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(first.pid).status() == psutil.STATUS_STOPPED)
    since = time.monotonic()
    second = start(folder=tmp_path)
    assert time.monotonic() - since < 30
    assert is_gone(first.pid)
    with Reached(str(second), Signer(secret)) as node:
        assert node.get("a").to_pybytes() == b"kept"


def test_a_later_driver_takes_the_folder_over(start: Starter, tmp_path: Path) -> None:
    """Whoever is the later one: each driver has a secret of its own."""
    first, mine, other = start(folder=tmp_path, epoch=1), Secret.new(), Secret.new()
    with pytest.raises(DidNotHappen, match=r"another agent uses .*not signed with the secret"):
        start(folder=tmp_path, epoch=1, secret=other)
    second = start(folder=tmp_path, epoch=2, secret=mine)
    assert is_gone(first.pid)
    with pytest.raises(Deposed, match="driver 2"):
        start(folder=tmp_path, epoch=1)
    assert start(folder=tmp_path, epoch=2, secret=mine) == second


def test_a_stranger_is_not_ended(start: Starter, tmp_path: Path) -> None:
    """The number of the process that had the folder is that of another one by now."""
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (tmp_path / "lock").write_text(str(stranger.pid))
        assert holder_of(tmp_path) is None
        address = start(folder=tmp_path)
        assert holder_of(tmp_path) == address.pid
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.communicate()


def test_many_starts_at_once_make_one_agent(start: Starter, tmp_path: Path) -> None:
    found: list[AgentAddress] = []
    threads = [
        threading.Thread(target=lambda: found.append(start(folder=tmp_path))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1


def test_an_address_left_behind_is_not_believed(
    start: Starter, agent: AgentAddress, tmp_path: Path
) -> None:
    """The port of a dead agent is now that of another one, with the same secret."""
    left = {"host": agent.host, "port": agent.port, "pid": 1}
    (tmp_path / "agent.json").write_text(json.dumps(left))
    assert start(folder=tmp_path).pid not in (agent.pid, 1)


def test_it_outlives_the_process_that_started_it(secret: Secret, tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from anabranch.nodes import Secret, start_agent
address = start_agent(secret=Secret.from_hex(sys.stdin.read()), host="127.0.0.1",
    folder=Path({str(tmp_path)!r}), limit=1000, watch_pid={os.getpid()},
    log=Path({str(tmp_path / "log")!r}))
print(address.port, address.pid)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=secret.to_hex(), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    port, pid = map(int, done.stdout.split())
    with Reached(f"127.0.0.1:{port}", Signer(secret)) as node:
        assert node.ping().pid == pid
        node.stop()
    assert is_gone(pid)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"node": "acting:broken"}, "this node cannot be made"),
        ({"node": "acting"}, "module:attribute"),
        ({"node": "no_such_module:make"}, "no_such_module"),
        ({"host": "192.0.2.1"}, r"cannot listen at 192\.0\.2\.1"),
        ({"limit": -1}, "-1 bytes"),
        ({"watch_pid": 2**22 + 1}, "no process"),
    ],
)
def test_a_start_that_fails_says_why(
    start: Starter, tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    (tmp_path / "log").write_text("of an earlier agent\n")
    with pytest.raises(DidNotHappen, match=f"(?s)ended with code 1; .*{why}") as raised:
        start(folder=tmp_path / "folder", log=tmp_path / "log", **changes)
    assert "earlier" not in str(raised.value)


def test_a_start_that_cannot_be_is_refused_at_once(start: Starter, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="as JSON"):
        start(folder=tmp_path / "folder", context={"x": object()})
    with pytest.raises(PlanError, match="tls_root"):
        start(folder=tmp_path / "folder", tls_cert=tmp_path, tls_key=tmp_path)
    with pytest.raises(DidNotHappen, match="no answer in time"):
        start(folder=tmp_path / "folder", timeout=0.01)
    assert not (tmp_path / "folder" / "agent.json").exists()


def test_all_that_it_writes_is_for_its_user_alone(
    start: Starter, secret: Secret, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    (folder / "agent.log").write_text("of an earlier agent\n")
    (folder / "agent.log").chmod(0o644)
    before = os.umask(0)
    try:
        address = start(folder=folder, log=folder / "agent.log")
    finally:
        os.umask(before)
    with Reached(str(address), Signer(secret)) as node:
        node.put("a/b", b"x")
        assert node.ask(Temporary()).startswith(str(folder))
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_of_somebody_else_is_refused(start: Starter, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "folder").symlink_to(tmp_path / "theirs")
    with pytest.raises(DidNotHappen, match="does not belong to this user"):
        start(folder=tmp_path / "folder", log=tmp_path / "log")


def test_what_is_printed_does_not_make_its_log_large(
    start: Starter, secret: Secret, tmp_path: Path
) -> None:
    address = start(folder=tmp_path, log=tmp_path / "agent.log")
    with Reached(str(address), Signer(secret)) as node:
        node.ask(Print(times=200_000))
    wait_until(lambda: (tmp_path / "agent.log").stat().st_size <= LARGEST)
    assert (tmp_path / "agent.log.1").stat().st_size <= LARGEST


def test_connections_are_used_again(start: Starter, secret: Secret, tmp_path: Path) -> None:
    address = start(folder=tmp_path)

    def sockets() -> int:
        found = Path(f"/proc/{address.pid}/fd").iterdir()
        return sum("socket" in str(each.readlink()) for each in found)

    with Reached(str(address), Signer(secret)) as node:
        node.ping()
        before = sockets()
        unwanted = Drop(epoch=EPOCH, tables=(TableName("a/0-0"),))
        for number in range(50):
            node.put(f"{number}", b"x")
            node.get(f"{number}")
            with pytest.raises(Refused):
                node.ask(unwanted)
        assert sockets() == before


def test_tls(start: Starter, secret: Secret, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("a certificate is made with openssl, which is not here")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "1", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", tmp_path / "key", "-out", tmp_path / "cert"],
        capture_output=True, check=True,
    )  # fmt: skip
    files = {f"tls_{name}": tmp_path / name for name in ("cert", "key")}
    files["tls_root"] = tmp_path / "cert"
    address = start(folder=tmp_path / "folder", **files)
    assert start(folder=tmp_path / "folder", **files) == address
    root = (tmp_path / "cert").read_bytes()
    with Reached(str(address), Signer(secret), tls_root=root) as node:
        node.put("a", b"x" * (3 << 20))
        assert node.get("a").size == 3 << 20
    with Reached(str(address), Signer(secret), timeout=5) as plain, pytest.raises(DidNotHappen):
        plain.list()
    # The certificate names 127.0.0.1, and no other host.
    elsewhere = start(folder=tmp_path / "other", host="127.0.0.2", **files)
    with (
        Reached(str(elsewhere), Signer(secret), tls_root=root) as node,
        pytest.raises(DidNotHappen, match="certificate"),
    ):
        node.list()
    wrong = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "1", "-subj", "/CN=x", "-keyout", tmp_path / "k", "-out", "-"],
        capture_output=True, check=True,
    ).stdout  # fmt: skip
    with (
        Reached(str(address), Signer(secret), tls_root=wrong) as node,
        pytest.raises(DidNotHappen, match="certificate"),
    ):
        node.list()
    with pytest.raises(PlanError, match="PEM"):
        Reached(str(address), Signer(secret), tls_root=b"x")
