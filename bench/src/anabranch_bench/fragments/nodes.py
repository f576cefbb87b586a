"""States of nodes whose agents keep fragments for each other, and a shared store beside them.

A node is an agent with a link, and what this program does in the network of the agent: it codes the
states of the node, sends fragments, and reads them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa

from anabranch.backup.fragments import Fragments
from anabranch.cluster import LocalAgents
from anabranch.errors import QueryFailed
from anabranch.fragments import Fragment
from anabranch.nodes import Deadline, NodeStore, RemoteNode, Signer
from anabranch.nodes.requests import Epoch
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part, peer_name
from anabranch.stores.peers import PeerStore
from anabranch.stores.scattered import gathered, scatter
from anabranch.units import NO_VERSION

A = TypeVar("A")

NODES = 31
LINK = "100 Mbit"
MB = 1_000_000
_PATIENCE = 1800.0
_SILENCE = 60.0

_DRIVER = ""
Job = Callable[[], object]


@dataclass(frozen=True)
class Usage:
    """What an agent has used since it was started."""

    cpu: float
    private: int
    """Bytes of memory that it has alone, now."""
    sent: int
    received: int


class Nodes:
    """The nodes, and one more agent that is the shared store."""

    def __init__(self, agents: LocalAgents, silence: float = _SILENCE) -> None:
        self.agents = agents
        self.hosts = agents.hosts[:-1]
        self.shared = agents.hosts[-1]
        self.linked = agents.linked
        self._silence = silence
        self._stores: dict[str, Mapping[str, NodeStore]] = {}
        self._lock = threading.Lock()

    def holders(self, owner: str, data: int, parity: int) -> tuple[str, ...]:
        """Where the fragments of a node's state are."""
        return Fragments(data, parity).holders(owner, "", self.hosts, ())

    def save(self, owner: str, name: str, state: pa.Buffer, data: int, parity: int) -> Part:
        """Save a state of a node in fragments at others."""
        part = Part(
            name=name,
            operator="bench",
            version=NO_VERSION,
            base=None,
            groups=KeyGroups.all(1),
            holders=self.holders(owner, data, parity),
            needed=data,
            bytes=state.size,
        )
        return self._at(owner, lambda store: scatter(store, part, state))

    def recover(self, host: str, part: Part, start: int = 0, end: int | None = None) -> pa.Buffer:
        """The bytes of a state, or a range of them, at a node."""
        length = (part.bytes if end is None else end) - start

        def read(store: PeerStore) -> pa.Buffer:
            with gathered(store, part) as source:
                return source.read(start, length)

        return self._at(host, read)

    def retrieve(self, host: str, part: Part, holders: Sequence[str]) -> list[Fragment]:
        """The fragments of some holders, whole, from all at once."""

        def get(store: PeerStore) -> list[Fragment]:
            def one(holder: str) -> Fragment:
                data = store.get(peer_name(holder, part.name))
                return Fragment.parse(data, name=part.name)

            with ThreadPoolExecutor(len(holders)) as pool:
                return list(pool.map(one, holders))

        return self._at(host, get)

    def drop(self, parts: Sequence[Part]) -> None:
        """Delete fragments."""
        for part in parts:
            for copy in part.copies:
                self._store(_DRIVER).delete(copy)

    def put_shared(self, host: str, name: str, state: pa.Buffer) -> None:
        """Save a state of a node in the shared store."""
        self._at(host, lambda store: store.put(peer_name(self.shared, name), state))

    def get_shared(self, host: str, name: str) -> pa.Buffer:
        """A state from the shared store."""
        return self._at(host, lambda store: store.get(peer_name(self.shared, name)))

    def drop_shared(self, names: Sequence[str]) -> None:
        """Delete states from the shared store."""
        for name in names:
            self._store(_DRIVER).delete(peer_name(self.shared, name))

    def at_once(self, jobs: Sequence[Job]) -> float:
        """The seconds from the begin of all jobs, of any nodes, to the end of the last."""
        begin = threading.Barrier(len(jobs))

        def carry_out(job: Job) -> tuple[float, float]:
            begin.wait()
            began = time.monotonic()
            job()
            return began, time.monotonic()

        with ThreadPoolExecutor(len(jobs)) as pool:
            times = list(pool.map(carry_out, jobs))
        return max(ended for _, ended in times) - min(began for began, _ in times)

    def others(self, part: Part, owner: str) -> list[str]:
        """The nodes that neither own a state nor hold fragments of it."""
        return [host for host in self.hosts if host != owner and host not in part.holders]

    @contextmanager
    def stopped(self, hosts: Sequence[str]) -> Iterator[None]:
        """Nodes whose agents do not answer meanwhile."""
        try:
            for host in hosts:
                self.agents.send(host, signal.SIGSTOP)
            yield
        finally:
            for host in hosts:
                self.agents.send(host, signal.SIGCONT)

    def usage(self, host: str) -> Usage:
        """What the agent of a node has used."""
        proc = Path("/proc") / str(self.agents.addresses[host].pid)
        fields = (proc / "stat").read_text().rpartition(")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        rollup = (proc / "smaps_rollup").read_text().splitlines()
        private = sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
        counted = [
            line.partition(":")[2].split()
            for line in (proc / "net" / "dev").read_text().splitlines()
            if line.strip().startswith("eth0:")
        ]
        received, sent = (int(counted[0][0]), int(counted[0][8])) if self.linked else (0, 0)
        return Usage(cpu, private << 10, sent, received)

    def of(self, count: int) -> Nodes:
        """The first of the nodes alone."""
        some = Nodes(self.agents, self._silence)
        some.hosts = self.hosts[:count]
        return some

    def patient(self, seconds: float) -> Nodes:
        """The same nodes, whose silence of so many seconds is a failure."""
        return Nodes(self.agents, seconds)

    def _at(self, host: str, work: Callable[[PeerStore], A]) -> A:
        """Work that a node does with the backups of all, through its own link."""
        return self.agents.inside(host, lambda: work(self._store(host)))

    def _store(self, host: str) -> PeerStore:
        # A connection belongs to the network that it was opened in: each node has its own.
        with self._lock:
            if host not in self._stores:
                signer = Signer(self.agents.secret)
                self._stores[host] = {
                    each: NodeStore(
                        RemoteNode(str(address), signer, host=each, silence=self._silence),
                        Epoch(1),
                        lambda: Deadline(_PATIENCE),
                    )
                    for each, address in self.agents.addresses.items()
                }
            stores = self._stores[host]
        return PeerStore(lambda: stores)


def jobs(work: Callable[[int, str], object], hosts: Sequence[str]) -> list[Job]:
    """The same work at several nodes, each with its number among them."""
    return [partial(work, number, host) for number, host in enumerate(hosts)]


@contextmanager
def nodes(count: int = NODES) -> Iterator[Nodes]:
    """Start nodes and the store, each with a link; without links where they are not permitted."""
    with LocalAgents(count + 1, LINK) as agents:
        yield Nodes(agents)


def state_of(size: int, seed: int) -> pa.Buffer:
    """A state of random bytes."""
    return pa.py_buffer(np.random.default_rng(seed).integers(0, 256, size, np.uint8))


def check(found: pa.Buffer, expected: pa.Buffer, what: str) -> None:
    """A side that is quick and wrong must not win."""
    if not found.equals(expected):
        raise QueryFailed(f"{what}: the bytes that were read are not those that were saved")
