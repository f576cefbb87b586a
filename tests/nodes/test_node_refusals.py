"""What an agent refuses; after each refusal it serves as before."""

import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from node_tools import EPOCH, Reached, Starter, wait_until
from raw import Asking, Raw, asked, declared

from anabranch.errors import Refused
from anabranch.nodes import AgentAddress, Secret, Signer
from anabranch.nodes.chunks import CHUNK
from anabranch.nodes.wire import HEAD_BYTES, LARGEST_REQUEST, Kind


@pytest.fixture(autouse=True)
def _serves_afterwards(
    node: Reached, agent: AgentAddress, home: Path, secret: Secret
) -> Iterator[None]:
    Asking.address = str(agent)
    node.put("kept", b"kept")
    before = node.ping()
    yield
    assert list(node.list()) == ["kept"]
    assert node.get("kept").to_pybytes() == b"kept"
    after = node.ping()
    assert after.pid == before.pid
    assert sum(after.failures.values()) > sum(before.failures.values()), "it is counted"
    log = (home / "agent.log").read_text()
    assert "Refused" in log or "DidNotHappen" in log
    assert secret.to_hex() not in log


def refusal(agent: AgentAddress, data: bytes, body: bytes = b"") -> tuple[str, str]:
    """The error that a request on a connection of its own is answered with."""
    with Raw(agent) as raw:
        answer = raw.ask(data, body)
    assert answer is not None
    assert answer[0] is Kind.FAILED
    assert "Traceback" not in answer[1]["message"]
    return answer[1]["error"], answer[1]["message"]


def entries(agent: AgentAddress, folder: str) -> int:
    """How many threads or descriptors an agent has."""
    return len(list(Path(f"/proc/{agent.pid}/{folder}").iterdir()))


UNSIGNED = [b"x", b"{}", b"\xff" * 99, b"x" * (2 << 20), b"anb2" + bytes(200),
            b"anb2\xff\xff\xff\xff" + bytes(200), b"GET / HTTP/1.1\r\n\r\n"]  # fmt: skip


@pytest.mark.parametrize("data", UNSIGNED)
def test_no_signature(agent: AgentAddress, data: bytes) -> None:
    with Raw(agent) as raw:
        raw.send(data)
        if len(data) < HEAD_BYTES:
            raw.socket.shutdown(socket.SHUT_WR)
        answer = raw.answer()
        assert answer is not None
        assert answer[0] is Kind.FAILED
        assert answer[1]["error"] == "Refused"
        assert answer[1]["closing"]
        assert raw.answer() is None, "the connection is closed"


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(min_size=HEAD_BYTES, max_size=400), marked=st.booleans())
def test_garbage(agent: AgentAddress, garbage: bytes, marked: bool) -> None:
    data = b"anb2" + garbage[4:] if marked else garbage
    assert refusal(agent, data)[0] == "Refused"


def test_a_client_of_another_version_can_read_why(agent: AgentAddress) -> None:
    """The head of the form before was shorter, and its body too: nothing more comes."""
    with Raw(agent) as raw:
        raw.send(b"anb1" + bytes(100) + b"{}")
        answer = raw.answer()
    assert answer is not None
    assert answer[1]["error"] == "Refused"
    assert "different versions of anabranch" in answer[1]["message"]


def test_a_request_as_a_query_is_refused(agent: AgentAddress, secret: Secret) -> None:
    address = str(agent)
    signed = Signer(secret.of_query("words"), by="words").sign(asked("ping"), address)
    kind, message = refusal(agent, signed)
    assert kind == "Refused"
    assert "not a standing node" in message


def test_every_cut_of_a_request(agent: AgentAddress, secret: Secret) -> None:
    for end in range(1, len(Asking(secret).sign(asked("ping")))):
        with Raw(agent) as raw:
            raw.send(Asking(secret).sign(asked("ping"))[:end])
            raw.socket.shutdown(socket.SHUT_WR)
            answer = raw.answer()
            assert answer is not None
            assert answer[1]["error"] == "Refused"


def test_a_request_byte_by_byte_is_taken(agent: AgentAddress, secret: Secret) -> None:
    with Raw(agent) as raw:
        for byte in Asking(secret).sign(asked("ping")):
            raw.socket.sendall(bytes([byte]))
        answer = raw.answer()
        assert answer is not None
        assert answer[0] is Kind.DONE
    assert refusal(agent, b"x" * 200)[0] == "Refused"


def test_another_secret(agent: AgentAddress) -> None:
    with Reached(str(agent), Signer(Secret.new())) as stranger:
        for ask in (lambda: stranger.get("kept"), lambda: stranger.put("a", b"x"), stranger.list,
                    lambda: stranger.delete("kept"), lambda: stranger.size("kept"),
                    stranger.stop, stranger.ping,
                    lambda: stranger.list("x" * (LARGEST_REQUEST - 100))):  # fmt: skip
            with pytest.raises(Refused, match="not signed with the secret"):
                ask()


def test_a_request_to_another_node(agent: AgentAddress, secret: Secret) -> None:
    for address in ("", "127.0.0.1:1"):
        kind, message = refusal(agent, Signer(secret).sign(asked("ping"), address))
        assert kind == "Refused"
        assert "meant for another node" in message


def test_a_request_sent_twice(agent: AgentAddress, secret: Secret) -> None:
    read = Asking(secret).sign(asked("get", name="kept", offset=0, length=None))
    pinged = Asking(secret).sign(asked("ping"))
    stored = Asking(secret).sign(declared(b"kept", name="kept"))
    for data in (read, pinged, stored):
        with Raw(agent) as raw:
            answer = raw.ask(data, b"kept")
            assert answer is not None
            assert answer[0] is Kind.DONE
            raw.send(data)  # and again on the same connection
        kind, message = refusal(agent, data, b"kept")
        assert kind == "Refused"
        assert "received before" in message


@pytest.mark.parametrize(("age", "why"), [(120, "old"), (-120, "future")])
def test_a_request_of_another_time(
    agent: AgentAddress, secret: Secret, age: float, why: str
) -> None:
    signed = Asking(secret, lambda: time.time() - age).sign(
        asked("get", name="kept", offset=0, length=None)
    )
    kind, message = refusal(agent, signed)
    assert kind == "Refused"
    assert why in message


def test_a_signed_head_with_another_body(agent: AgentAddress, secret: Secret) -> None:
    signed = Asking(secret).sign(asked("ping"))
    kind, message = refusal(agent, signed[:HEAD_BYTES] + b'{"verb":"stop","within":20}')
    assert kind == "Refused"
    assert "not the one that was signed" in message


def test_more_than_a_request_may_have(agent: AgentAddress, secret: Secret) -> None:
    signed = Asking(secret).sign(asked("ping"))
    larger = signed[:4] + struct.pack(">I", LARGEST_REQUEST + 1) + signed[8:]
    assert refusal(agent, larger)[0] == "Refused"


@pytest.mark.parametrize("size", [-1, 1.5, "1", None, True, 10**30])
def test_an_impossible_declaration(agent: AgentAddress, secret: Secret, size: object) -> None:
    kind, message = refusal(agent, Asking(secret).sign(declared(b"x", bytes=size)), b"x")
    assert kind == "Refused"
    assert "'blocks' as a list of a Block" in message
    assert "no whole number" in message


@pytest.mark.parametrize("checksum", ["", "x", "0" * 17, "G" * 16, 1, None])
def test_an_impossible_checksum(agent: AgentAddress, secret: Secret, checksum: object) -> None:
    request = declared(b"x", checksum=checksum)
    assert refusal(agent, Asking(secret).sign(request), b"x")[0] == "Refused"


@pytest.mark.parametrize("size", [0, 1, 100, CHUNK])
def test_more_bytes_than_declared(
    agent: AgentAddress, node: Reached, secret: Secret, size: int
) -> None:
    """What comes behind an upload is taken for the next request, which it is not."""
    with Raw(agent) as raw:
        answer = raw.ask(Asking(secret).sign(declared(b"x" * size)), b"x" * (size + HEAD_BYTES))
        assert answer == (Kind.DONE, {"answer": None})
        answer = raw.answer()
        assert answer is not None
        assert answer[1]["error"] == "Refused"
    assert node.get("a").to_pybytes() == b"x" * size
    node.delete("a")


def test_fewer_bytes_than_declared(agent: AgentAddress, secret: Secret) -> None:
    with Raw(agent) as raw:
        raw.send(Asking(secret).sign(declared(b"xyz")))
        assert raw.answer() == (Kind.READY, {})
        raw.send(b"xy")
        raw.socket.shutdown(socket.SHUT_WR)
        answer = raw.answer()
    assert answer is not None
    assert answer[1]["error"] == "DidNotHappen"
    assert "ended after 2 of 3 bytes" in answer[1]["message"]


def test_a_wrong_checksum(agent: AgentAddress, secret: Secret) -> None:
    kind, message = refusal(agent, Asking(secret).sign(declared(b"xyz")), b"xyZ")
    assert kind == "DidNotHappen"
    assert "checksum" in message


@pytest.mark.parametrize("name", ["", "../x", "/etc/passwd", ".partial/x", None, 1, "a\0", ["a"]])
def test_bad_names(agent: AgentAddress, secret: Secret, name: object) -> None:
    for request in (
        asked("get", name=name, offset=0, length=None), declared(b"x", name=name),
        asked("delete", epoch=EPOCH, names=["a", name]), asked("size", name=name),
    ):  # fmt: skip
        kind, message = refusal(agent, Asking(secret).sign(request), b"x")
        assert kind == "Refused"
        assert "name" in message


def test_unknown_calls(agent: AgentAddress, node: Reached, secret: Secret) -> None:
    kind, message = refusal(agent, Asking(secret).sign(asked("dance")))
    assert kind == "Refused"
    assert "cannot do 'dance'; it can ['advance', 'capture'" in message
    for request in ({}, asked(1), asked(["ping"]), asked(None), asked("list", prefix=1),
                    asked("ping", more=1), {"verb": "ping"}, {"verb": "ping", "within": -1},
                    {"verb": "ping", "within": 1e300}, {"verb": "ping", "within": "1"},
                    asked("backed", epoch=1, peers={}), asked("request")):  # fmt: skip
        assert refusal(agent, Asking(secret).sign(request))[0] == "Refused"


def test_a_refused_friend_can_ask_again_on_the_same_connection(
    agent: AgentAddress, secret: Secret
) -> None:
    with Raw(agent) as raw:
        for _ in range(3):
            refused = raw.ask(Asking(secret).sign(asked("dance")))
            assert refused is not None
            assert not refused[1]["closing"]
            answer = raw.ask(Asking(secret).sign(asked("ping")))
            assert answer is not None
            assert answer[0] is Kind.DONE


def test_a_client_that_goes_away_half_way(
    agent: AgentAddress, node: Reached, secret: Secret
) -> None:
    program = """
import os, signal, socket, sys
host, port = sys.argv[1].split(":")
sock = socket.create_connection((host, int(port)))
sock.sendall(sys.stdin.buffer.read())
sock.recv(100)
sock.sendall(bytes(5 << 20))
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = Asking(secret).sign(declared(bytes(8 << 20)))
    before = node.ping().failures.get("DidNotHappen", 0)
    killed = subprocess.run(
        [sys.executable, "-c", program, str(agent)], input=command, timeout=60, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    wait_until(lambda: node.ping().failures.get("DidNotHappen", 0) > before)


def test_silent_connections_are_closed_and_cost_no_thread(
    agent: AgentAddress, node: Reached
) -> None:
    """More connections than strangers may have: the oldest are closed for the newest."""
    threads = entries(agent, "task")
    silent = [Raw(agent) for _ in range(600)]
    try:
        assert node.ping().pid == agent.pid
        wait_until(lambda: entries(agent, "fd") < 560)
        assert silent[0].socket.recv(1) == b"", "the first was closed"
        assert entries(agent, "task") <= threads + 2
        silent[-1].socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].socket.recv(1)
    finally:
        for raw in silent:
            raw.socket.close()


def test_transfers_may_be_slow_but_must_go_on(
    start: Starter, secret: Secret, tmp_path: Path, agent: AgentAddress
) -> None:
    """With half a second of patience: three seconds in all are fine, one of silence is not."""
    slow = start(folder=tmp_path, transfer_timeout=0.5)
    Asking.address = str(slow)
    data = bytes(10)
    with Raw(slow) as raw:
        raw.send(Asking(secret).sign(declared(data)))
        assert raw.answer() == (Kind.READY, {})
        for _ in data:
            time.sleep(0.3)
            raw.send(b"\0")
        assert raw.answer() == (Kind.DONE, {"answer": None})
        raw.send(Asking(secret).sign(declared(data)))
        assert raw.answer() == (Kind.READY, {})
        raw.send(b"\0")
        since = time.monotonic()
        answer = raw.answer()
        assert answer is not None
        assert "failed after 1 of 10 bytes: timed out" in answer[1]["message"]
        assert 0.3 < time.monotonic() - since < 5
    with Reached(str(slow), Signer(secret)) as node:
        node.put("large", bytes(64 << 20))
        before = node.ping().failures.get("DidNotHappen", 0)
        with Raw(slow) as raw:  # a reader that does not read
            raw.send(Asking(secret).sign(asked("get", name="large", offset=0, length=None)))
            wait_until(lambda: node.ping().failures.get("DidNotHappen", 0) > before)
    Asking.address = str(agent)
    assert refusal(agent, b"x" * 200)[0] == "Refused"
