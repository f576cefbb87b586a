"""A flood of requests that an agent must refuse, beside which it serves as if there were none.

``FLOOD=1000000`` in the environment has so many sent; without it a few thousand are.

Whether it serves is judged by the clock: no answer takes a second. Beside the agent there is a
*control*, a server that only uses the processor for a moment, and is asked all the while from the
same process. In a long run every answer is judged. In a short one, which may share the machine with
other tests, those are not during which the control did not get the processor either.
"""

import asyncio
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest
from node_tools import Reached, Starter, wait_until
from raw import asked, declared

from anabranch.errors import StoreError
from anabranch.nodes import AgentAddress, Secret, Signer
from anabranch.nodes.wire import HEAD_BYTES, LARGEST_REQUEST
from anabranch.priority import process_gives_way
from anabranch.stores.peers import AT_PEERS

REQUESTS = int(os.environ.get("FLOOD", "6000"))
LONG = REQUESTS >= 100_000
OVER_TLS = 1200
IDLE = 1000
FLOODERS = 3
AT_ONCE = 20
OVERSIZED_EVERY = 100
SLOWEST = 1.0
"""Seconds in which everybody else has an answer."""
WORK = 0.04
"""Seconds of the processor that a request to the control takes: a flooded agent needs more."""
BUSY = 0.25
"""Seconds that the control takes only where the machine is busy with other things: it is not judged
in a short run what answers took then."""
SHARE = 0.1
"""An answer is judged all the same if the control took less than this share of its time."""
AROUND = 1.0
"""Seconds before and after an answer in which the control is looked at."""
MOST_MEMORY = 64 << 20
MOST_LOG = 10 << 20


def memory(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def logged(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("agent.log*"))


class Kinds:
    """Requests to refuse, of every kind."""

    def __init__(self, secret: Secret, address: str, seed: int, *, tls: bool) -> None:
        self._random = random.Random(seed)
        self._address = address
        self._signer = Signer(secret)
        self._stranger = Signer(Secret.new())
        self._old = Signer(secret, lambda: time.time() - 100)
        self._used: list[bytes] = []
        self.all: dict[str, Callable[[], bytes]] = {
            "malformed": lambda: self._random.randbytes(self._random.randint(1, 300)),
            "marked": lambda: b"anb2" + self._random.randbytes(HEAD_BYTES),
            "oversized": self._oversized,
            "cut off": lambda: self._ping()[: self._random.randint(1, HEAD_BYTES + 5)],
            "unsigned": lambda: self._changed(self._ping(), HEAD_BYTES - 32, HEAD_BYTES),
            "wrongly signed": lambda: self._stranger.sign(asked("stop", epoch=1), self._address),
            "changed": lambda: self._changed(self._ping(), 4, HEAD_BYTES - 32),
            "replayed": self._replayed,
            "stale": lambda: self._old.sign(asked("ping"), self._address),
            "for another node": lambda: self._signer.sign(asked("ping"), "10.0.0.1:1"),
            "wrong fields": self._wrong_fields,
            "silent upload": lambda: self._signer.sign(declared(b"x" * 100), self._address),
        }
        if tls:
            self.all |= {
                "not encrypted": self._ping,
                "noise": lambda: self._random.randbytes(self._random.randint(1, 300)),
                "half a handshake": lambda: _first_of_a_handshake()[: self._random.randint(1, 200)],
            }

    def one(self, number: int) -> tuple[str, bytes]:
        names = sorted(self.all)
        name = names[number % len(names)]
        return name, self.all[name]()

    def use(self, data: bytes) -> None:
        """Remember a request that was taken, to send it again."""
        self._used = [*self._used[-100:], data]

    def _ping(self) -> bytes:
        return self._signer.sign(asked("ping"), self._address)

    def _replayed(self) -> bytes:
        return self._random.choice(self._used) if self._used else b"x" * HEAD_BYTES

    def _oversized(self) -> bytes:
        if self._random.randrange(OVERSIZED_EVERY):
            return b"anb2" + struct.pack(">I", (1 << 32) - 1) + bytes(10_000)
        return self._stranger.sign({"x": "y" * (LARGEST_REQUEST - 10)}, self._address)

    def _changed(self, data: bytes, start: int, end: int) -> bytes:
        at = self._random.randrange(start, end)
        return data[:at] + bytes([data[at] ^ self._random.randint(1, 255)]) + data[at + 1 :]

    def _wrong_fields(self) -> bytes:
        wrong = [{}, asked("dance"), asked("get", name="../x", offset=0, length=None),
                 asked("size", name=1),
                 declared(b"", bytes=1 << 90), asked("drop", epoch=1, tables=["/etc"], captures=[]),
                 asked("drop", epoch=1, tables=["../x"], captures=[]),
                 asked("store", epoch=1, peers={}, file="/etc/passwd", under=""),
                 asked("list"), {"verb": "ping"}, asked("ping", more=1)]  # fmt: skip
        return self._signer.sign(self._random.choice(wrong), self._address)


def _first_of_a_handshake() -> bytes:
    sent = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="127.0.0.1")
    try:
        asking.do_handshake()
    except ssl.SSLWantReadError:
        return sent.read()
    raise AssertionError("a handshake without the other side")


RAW = {"not encrypted", "noise", "half a handshake"}
"""What is sent to an agent with TLS as it is. There is no answer to it."""
GONE = RAW | {"cut off"}
"""With TLS these leave without waiting for an answer: there is no half of a connection to close."""


class Flooder:
    """Sends its share, one after the other, and looks that nothing is taken."""

    def __init__(
        self, agent: AgentAddress, secret: Secret, count: int, seed: int, root: Path | None = None
    ) -> None:
        self.sent: Counter[str] = Counter()
        self.taken: list[str] = []
        self.unanswered = 0
        self._agent = agent
        self._count = count
        self._kinds = Kinds(secret, str(agent), seed, tls=root is not None)
        self._seed = seed
        self._tls = None if root is None else ssl.create_default_context(cafile=root)

    def run(self) -> "Flooder":
        for start in range(0, self._count, AT_ONCE):
            if start % (50 * AT_ONCE) == 0:
                used = self._kinds._ping()
                self._exchange([("used", used)])
                self._kinds.use(used)
            numbers = range(start, min(start + AT_ONCE, self._count))
            requests = [self._kinds.one(number) for number in numbers]
            for (name, _), answer in zip(requests, self._exchange(requests), strict=True):
                self.sent[name] += 1
                if self._tls is not None and name in GONE:
                    continue
                if not answer:
                    self.unanswered += 1
                # An upload that was announced is waited for; no byte of it ever comes.
                elif b"Refused" not in answer and name != "silent upload":
                    self.taken.append(f"{name}: {answer!r}")
        return self

    def _exchange(self, requests: list[tuple[str, bytes]]) -> list[bytes]:
        """Send each on a connection of its own, all at once; the answers."""
        socks = [self._asked(name, data) for name, data in requests]
        return [b"" if sock is None else _answered(sock) for sock in socks]

    def _asked(self, name: str, data: bytes) -> socket.socket | None:
        # Those who ask are at many addresses: the system keeps ports that were used for a minute.
        source = f"127.{self._seed + 1}.{random.randint(0, 255)}.{random.randint(1, 254)}"
        sock = socket.socket()
        try:
            sock.settimeout(20)
            sock.bind((source, 0))
            sock.connect((self._agent.host, self._agent.port))
            if self._tls is None:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                return sock
            if name not in RAW:
                sock = self._tls.wrap_socket(sock, server_hostname=self._agent.host)
                # Without an end that can be seen, something that is too short would be waited for.
                data = data if name in GONE else data.ljust(HEAD_BYTES, b"x")
            sock.sendall(data)
            if name in GONE:
                sock.close()
                return None
        except OSError:  # the agent has refused it, and closed the connection
            sock.close()
            return None
        return sock


def _answered(sock: socket.socket) -> bytes:
    with sock:
        try:
            return sock.recv(2000)
        except OSError:
            return b""


def flood(
    agent: AgentAddress, key: str, count: int, seed: int, root: Path | None
) -> tuple[Counter[str], list[str], int]:
    """Runs in a process of its own: what was sent, what was taken, and what got no answer."""
    os.nice(5)  # as the agent does: strangers would be on other machines
    flooder = Flooder(agent, Secret.from_hex(key), count, seed, root).run()
    return flooder.sent, flooder.taken, flooder.unanswered


class Asked(NamedTuple):
    """A request: what for, and when it was asked and answered."""

    what: str
    since: float
    until: float

    @property
    def took(self) -> float:
        """Seconds by the clock."""
        return self.until - self.since


@dataclass
class Answers:
    """How long answers took."""

    slowest: Counter[str] = field(default_factory=Counter)
    slow: list[Asked] = field(default_factory=list)
    """Those that took longer than ``least``."""
    least: float = SLOWEST

    def note(self, asked: Asked) -> None:
        """Take note of one."""
        self.slowest[asked.what] = max(self.slowest[asked.what], asked.took)
        if asked.took >= self.least:
            self.slow.append(asked)


def late(agent: Answers, control: Answers, *, strict: bool) -> list[Asked]:
    """The answers that took too long; if not ``strict``, without those of a busy machine."""

    def busy(asked: Asked) -> bool:
        around = (
            each.took
            for each in control.slow
            if each.since < asked.until + AROUND and each.until > asked.since - AROUND
        )
        return max(around, default=0.0) >= SHARE * asked.took

    return [asked for asked in agent.slow if strict or not busy(asked)]


class Friend(threading.Thread):
    """Pings, stores and reads all the while, and notes how long that took."""

    def __init__(self, agent: AgentAddress, secret: Secret, root: bytes | None = None) -> None:
        super().__init__()
        self.answers = Answers()
        self.wrong: list[object] = []
        self.rounds = 0
        self.memory = 0
        self.threads = 0
        self.done = threading.Event()
        self._agent = agent
        self._secret = secret
        self._root = root

    def _reach(self) -> Reached:
        return Reached(str(self._agent), Signer(self._secret), tls_root=self._root)

    def run(self) -> None:
        data = os.urandom(1 << 20)
        kept = self._reach()
        while not self.done.wait(0.02):
            # One that is new each time has to come in among the strangers.
            with self._reach() as new:
                for name, ask in (
                    ("ping", lambda node=new: node.ping()),
                    ("kept ping", lambda: kept.ping()),
                    ("put", lambda node=new: node.put("friend", data)),
                    ("get", lambda node=new: node.get("friend")),
                ):
                    since = time.monotonic()
                    try:
                        answer = ask()
                        if name == "get" and answer.to_pybytes() != data:
                            self.wrong.append("other bytes")
                    except StoreError as error:
                        self.wrong.append(error)
                    self.answers.note(Asked(name, since, time.monotonic()))
            self.rounds += 1
            self.memory = max(self.memory, memory(self._agent.pid))
            self.threads = max(self.threads, threads(self._agent.pid))


def serve_control(told: Connection) -> None:
    """Runs in a process of its own, with a session and a priority like those of an agent."""
    os.setsid()
    process_gives_way()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read(100)
        begun = time.thread_time()
        while time.thread_time() - begun < WORK:
            pass
        writer.write(data)
        await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


class Control(threading.Thread):
    """Asks the control all the while, from the process of the friend."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = Answers(least=BUSY)
        self._done = threading.Event()
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        self._server = spawn.Process(target=serve_control, args=(there,), daemon=True)
        self._server.start()
        assert here.poll(60), "the control did not start"
        self._port: int = here.recv()

    def run(self) -> None:
        while not self._done.wait(10 * WORK):
            since = time.monotonic()
            with socket.create_connection(("127.0.0.1", self._port), timeout=60) as sock:
                sock.sendall(b"x" * 100)
                assert sock.recv(100)
            self.answers.note(Asked("control", since, time.monotonic()))

    def __enter__(self) -> "Control":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()
        self._server.kill()
        self._server.join()


class Idlers:
    """Connections that say nothing; those that the agent closes are made anew."""

    def __init__(self, agent: AgentAddress) -> None:
        self._agent = agent
        self._socks: list[socket.socket] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.made = 0

    def __enter__(self) -> "Idlers":
        self._refill()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        for sock in self._socks:
            sock.close()

    def _run(self) -> None:
        while not self._done.wait(1):
            for sock in [each for each in self._socks if _ended(each)]:
                self._socks.remove(sock)
                sock.close()
            self._refill()

    def _refill(self) -> None:
        while len(self._socks) < IDLE:
            self._socks.append(
                socket.create_connection((self._agent.host, self._agent.port), timeout=20)
            )
            self.made += 1


def _ended(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        sock.recv(2000)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _rounded(seconds: Counter[str]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}


def _wait_until_idle(pid: int) -> None:
    """An agent loads what it will need for tables when it has started."""

    def used() -> tuple[str, ...]:
        return tuple(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])

    deadline, before, since = time.monotonic() + 120, used(), time.monotonic()
    while time.monotonic() - since < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        if used() != before:
            before, since = used(), time.monotonic()


@pytest.fixture
def _many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory: how long a busy disk takes to write is of no matter here."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("a certificate is made with openssl, which is not here")
    folder = tmp_path_factory.mktemp("certificate")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "1", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key", "-out", folder / "cert"],
        capture_output=True, check=True,
    )  # fmt: skip
    return folder


def start_in(folder: Path, start: Starter, secret: Secret, **more: Path) -> AgentAddress:
    context = {"root": str(folder / "root"), "secret": secret.to_hex(), "host": "127.0.0.1",
               "store": AT_PEERS.to_json()}  # fmt: skip
    return start(
        folder=folder, limit=64 << 20, log=folder / "agent.log", transfer_timeout=5,
        node="anabranch.nodes.serving:make", context=context, **more,
    )  # fmt: skip


@pytest.mark.timeout(max(300, REQUESTS // 100))
@pytest.mark.usefixtures("_many_descriptors")
def test_a_flood_harms_nobody(start: Starter, secret: Secret, folder: Path) -> None:
    flooded(start_in(folder, start, secret), secret, folder, REQUESTS, None)


@pytest.mark.usefixtures("_many_descriptors")
def test_a_flood_over_tls_harms_nobody(
    start: Starter, secret: Secret, folder: Path, certificate: Path
) -> None:
    root = certificate / "cert"
    agent = start_in(
        folder, start, secret, tls_cert=root, tls_key=certificate / "key", tls_root=root
    )
    sent = flooded(agent, secret, folder, OVER_TLS, root)
    assert sent.keys() > RAW


def flooded(
    agent: AgentAddress, secret: Secret, folder: Path, requests: int, root: Path | None
) -> Counter[str]:
    """Flood an agent and judge how it did; what was sent to it."""
    trusted = None if root is None else root.read_bytes()
    with Reached(str(agent), Signer(secret), tls_root=trusted) as node:
        for _ in range(20):  # what is loaded with the first calls is no growth
            node.put("friend", bytes(1 << 20))
            node.get("friend")
        _wait_until_idle(agent.pid)
        before = memory(agent.pid)
        since = time.monotonic()
        friend = Friend(agent, secret, trusted)
        shares = [
            (agent, secret.to_hex(), -(-requests // FLOODERS), seed, root)
            for seed in range(FLOODERS)
        ]
        with (
            Idlers(agent) as idlers,
            multiprocessing.get_context("spawn").Pool(FLOODERS) as pool,
            Control() as control,
        ):
            friend.start()
            try:
                floods = pool.starmap(flood, shares, chunksize=1)
            finally:
                took = time.monotonic() - since
                friend.done.set()
                friend.join()
        failures = node.ping().failures
        stored = list(node.list())
    sent = sum((sent for sent, _, _ in floods), Counter[str]())
    unanswered = sum(count for _, _, count in floods)
    grown = max(friend.memory, memory(agent.pid)) - before
    too_late = late(friend.answers, control.answers, strict=LONG)
    print(
        f"\n{sent.total():,} requests in {took:.0f} s beside {IDLE} idle connections "
        f"({idlers.made:,} made): {dict(sent)}\n{unanswered:,} closed without an answer; "
        f"the agent's failures {failures}\n"
        f"friend: {friend.rounds} rounds, slowest in s {_rounded(friend.answers.slowest)}; "
        f"control {_rounded(control.answers.slowest)}; {len(friend.answers.slow)} took longer than "
        f"{SLOWEST:g} s, of which {len(too_late)} count\n"
        f"memory {before >> 20} MiB and {grown / (1 << 20):.1f} more, {friend.threads} threads, "
        f"log {logged(folder):,} bytes"
    )
    assert sent.total() >= requests
    assert [each for _, taken, _ in floods for each in taken] == []
    assert friend.wrong == []
    assert friend.rounds > 1
    assert not too_late, f"{too_late[:5]}; the control's slowest is {control.answers.slowest}"
    assert grown < MOST_MEMORY
    assert logged(folder) < MOST_LOG
    assert friend.threads < 80
    assert stored == ["friend"]
    assert unanswered < 0.05 * sent.total()
    assert sum(failures.values()) >= 0.9 * (sent.total() - unanswered)
    return sent


def answers(*asked: tuple[float, float], least: float = SLOWEST) -> Answers:
    noted = Answers(least=least)
    for since, until in asked:
        noted.note(Asked("ping", since, until))
    return noted


def test_a_late_answer_counts_unless_the_machine_was_busy() -> None:
    agent = answers((10.0, 11.5), (20.0, 20.9), (30.0, 31.2))
    quiet = answers((10.0, 10.2), least=BUSY)
    assert [each.since for each in late(agent, quiet, strict=False)] == [10.0, 30.0]
    busy = answers((9.9, 10.3), (33.0, 34.0), least=BUSY)
    assert [each.since for each in late(agent, busy, strict=False)] == [30.0]
    assert [each.since for each in late(agent, busy, strict=True)] == [10.0, 30.0]
    # A control that waits a little does not excuse an agent that waits for very long.
    assert late(answers((10.0, 20.0)), busy, strict=False)


def test_an_agent_that_stands_still_is_late_by_the_clock(
    start: Starter, secret: Secret, folder: Path
) -> None:
    agent = start_in(folder, start, secret)
    friend = Friend(agent, secret)
    with Control() as control:
        friend.start()
        wait_until(lambda: friend.rounds > 3)
        os.kill(agent.pid, signal.SIGSTOP)
        time.sleep(1.5 * SLOWEST)
        os.kill(agent.pid, signal.SIGCONT)
        rounds = friend.rounds
        wait_until(lambda: friend.rounds > rounds)
        friend.done.set()
        friend.join()
    assert late(friend.answers, control.answers, strict=True)
    assert friend.wrong == []
