"""A flood of requests that an agent must refuse, beside which it serves as if there were none.

``FLOOD=1000000`` in the environment has so many sent; without it a few thousand are.
"""

import multiprocessing
import os
import random
import re
import resource
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_tools import Reached, Starter
from raw import asked, declared

from anabranch.errors import StoreError
from anabranch.nodes import AgentAddress, Secret, Signer
from anabranch.nodes.wire import HEAD_BYTES, LARGEST_REQUEST
from anabranch.stores.peers import AT_PEERS

REQUESTS = int(os.environ.get("FLOOD", "6000"))
IDLE = 1000
FLOODERS = 3
AT_ONCE = 20
OVERSIZED_EVERY = 100
SLOWEST = 1.0
MOST_MEMORY = 64 << 20
MOST_LOG = 10 << 20


def memory(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def waited(pid: int) -> float:
    """For how many seconds the threads of a process were ready, and had no processor."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    try:
        return sum(int((task / "schedstat").read_text().split()[1]) for task in tasks) / 1e9
    except OSError:  # a thread has ended
        return 0.0


def logged(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("agent.log*"))


class Kinds:
    """Requests to refuse, of every kind."""

    def __init__(self, secret: Secret, address: str, seed: int) -> None:
        self._random = random.Random(seed)
        self._address = address
        self._signer = Signer(secret)
        self._stranger = Signer(Secret.new())
        self._old = Signer(secret, lambda: time.time() - 100)
        self._used: list[bytes] = []
        self.all: dict[str, Callable[[], bytes]] = {
            "malformed": lambda: self._random.randbytes(self._random.randint(1, 300)),
            "marked": lambda: b"anb1" + self._random.randbytes(HEAD_BYTES),
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
            return b"anb1" + struct.pack(">I", (1 << 32) - 1) + bytes(10_000)
        return self._stranger.sign({"x": "y" * (LARGEST_REQUEST - 10)}, self._address)

    def _changed(self, data: bytes, start: int, end: int) -> bytes:
        at = self._random.randrange(start, end)
        return data[:at] + bytes([data[at] ^ self._random.randint(1, 255)]) + data[at + 1 :]

    def _wrong_fields(self) -> bytes:
        wrong = [{}, asked("dance"), asked("get", name="../x"), asked("size", name=1),
                 declared(b"", bytes=1 << 90), asked("drop", epoch=1, tables=["/etc"], captures=[]),
                 asked("drop", epoch=1, tables=["../x"], captures=[]),
                 asked("store", epoch=1, peers={}, file="/etc/passwd", under=""),
                 asked("list"), {"verb": "ping"}, asked("ping", more=1)]  # fmt: skip
        return self._signer.sign(self._random.choice(wrong), self._address)


class Flooder:
    """Sends its share, one after the other, and looks that nothing is taken."""

    def __init__(self, agent: AgentAddress, secret: Secret, count: int, seed: int) -> None:
        self.sent: Counter[str] = Counter()
        self.taken: list[str] = []
        self.unanswered = 0
        self._agent = agent
        self._count = count
        self._kinds = Kinds(secret, str(agent), seed)
        self._seed = seed

    def run(self) -> "Flooder":
        for start in range(0, self._count, AT_ONCE):
            if start % (50 * AT_ONCE) == 0:
                used = self._kinds._ping()
                self._exchange([used])
                self._kinds.use(used)
            numbers = range(start, min(start + AT_ONCE, self._count))
            requests = [self._kinds.one(number) for number in numbers]
            answers = self._exchange([data for _, data in requests])
            for (name, _), answer in zip(requests, answers, strict=True):
                self.sent[name] += 1
                if not answer:
                    self.unanswered += 1
                # An upload that was announced is waited for; no byte of it ever comes.
                elif b"Refused" not in answer and name != "silent upload":
                    self.taken.append(f"{name}: {answer!r}")
        return self

    def _exchange(self, requests: list[bytes]) -> list[bytes]:
        """Send each on a connection of its own, all at once; the answers."""
        socks = [self._asked(data) for data in requests]
        return [b"" if sock is None else _answered(sock) for sock in socks]

    def _asked(self, data: bytes) -> socket.socket | None:
        # Those who ask are at many addresses: the system keeps ports that were used for a minute.
        source = f"127.{self._seed + 1}.{random.randint(0, 255)}.{random.randint(1, 254)}"
        sock = socket.socket()
        try:
            sock.settimeout(20)
            sock.bind((source, 0))
            sock.connect((self._agent.host, self._agent.port))
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
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
    agent: AgentAddress, key: str, count: int, seed: int
) -> tuple[Counter[str], list[str], int]:
    """Runs in a process of its own: what was sent, what was taken, and what got no answer."""
    os.nice(5)  # as the agent does: strangers would be on other machines
    flooder = Flooder(agent, Secret.from_hex(key), count, seed).run()
    return flooder.sent, flooder.taken, flooder.unanswered


class Friend(threading.Thread):
    """Pings, stores and reads all the while, and notes how long the longest took."""

    def __init__(self, agent: AgentAddress, secret: Secret) -> None:
        super().__init__()
        self.slowest: Counter[str] = Counter()
        self.slowest_of_agent: Counter[str] = Counter()
        """Without the time for which other programs had the processors."""
        self.wrong: list[object] = []
        self.rounds = 0
        self.memory = 0
        self.threads = 0
        self.done = threading.Event()
        self._agent = agent
        self._secret = secret

    def run(self) -> None:
        data = os.urandom(1 << 20)
        kept = Reached(str(self._agent), Signer(self._secret))
        while not self.done.wait(0.02):
            # One that is new each time has to come in among the strangers.
            with Reached(str(self._agent), Signer(self._secret)) as new:
                for name, ask in (
                    ("ping", lambda node=new: node.ping()),
                    ("kept ping", lambda: kept.ping()),
                    ("put", lambda node=new: node.put("friend", data)),
                    ("get", lambda node=new: node.get("friend")),
                ):
                    pids = (self._agent.pid, os.getpid())
                    since, before = time.monotonic(), sum(map(waited, pids))
                    try:
                        answer = ask()
                        if name == "get" and answer.to_pybytes() != data:
                            self.wrong.append("other bytes")
                    except StoreError as error:
                        self.wrong.append(error)
                    took = time.monotonic() - since
                    busy = min(took, max(0.0, sum(map(waited, pids)) - before))
                    self.slowest[name] = max(self.slowest[name], took)
                    of_agent = max(self.slowest_of_agent[name], took - busy)
                    self.slowest_of_agent[name] = of_agent
            self.rounds += 1
            self.memory = max(self.memory, memory(self._agent.pid))
            self.threads = max(self.threads, threads(self._agent.pid))


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


@pytest.mark.timeout(max(300, REQUESTS // 100))
@pytest.mark.usefixtures("_many_descriptors")
def test_a_flood_harms_nobody(start: Starter, secret: Secret, folder: Path) -> None:
    context = {"root": str(folder / "root"), "secret": secret.to_hex(), "host": "127.0.0.1",
               "store": AT_PEERS.to_json()}  # fmt: skip
    agent = start(
        folder=folder, limit=64 << 20, log=folder / "agent.log", transfer_timeout=5,
        node="anabranch.nodes.serving:make", context=context,
    )  # fmt: skip
    with Reached(str(agent), Signer(secret)) as node:
        for _ in range(20):  # what is loaded with the first calls is no growth
            node.put("friend", bytes(1 << 20))
            node.get("friend")
        _wait_until_idle(agent.pid)
        before = memory(agent.pid)
        since = time.monotonic()
        friend = Friend(agent, secret)
        shares = [
            (agent, secret.to_hex(), -(-REQUESTS // FLOODERS), seed) for seed in range(FLOODERS)
        ]
        with Idlers(agent) as idlers, multiprocessing.get_context("spawn").Pool(FLOODERS) as pool:
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
    print(
        f"\n{sent.total():,} requests in {took:.0f} s beside {IDLE} idle connections "
        f"({idlers.made:,} made): {dict(sent)}\n{unanswered:,} closed without an answer; "
        f"the agent's failures {failures}\n"
        f"friend: {friend.rounds} rounds, slowest in s {_rounded(friend.slowest)}, of which the "
        f"agent's {_rounded(friend.slowest_of_agent)}\n"
        f"memory {before >> 20} MiB and {grown / (1 << 20):.1f} more, {friend.threads} threads, "
        f"log {logged(folder):,} bytes"
    )
    assert sent.total() >= REQUESTS
    assert [each for _, taken, _ in floods for each in taken] == []
    assert friend.wrong == []
    assert friend.rounds > 1
    assert max(friend.slowest_of_agent.values()) < SLOWEST
    assert grown < MOST_MEMORY
    assert logged(folder) < MOST_LOG
    assert friend.threads < 80
    assert stored == ["friend"]
    assert unanswered < 0.05 * sent.total()
    assert sum(failures.values()) >= 0.9 * (sent.total() - unanswered)
