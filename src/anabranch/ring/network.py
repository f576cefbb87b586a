"""A network in memory: many peers, messages that take time, and faults, all decided by a seed."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from anabranch.ring.ids import NodeId
from anabranch.ring.messages import (
    Address,
    Came,
    Contact,
    Found,
    Join,
    KeepAlive,
    Leaving,
    Message,
    NotFound,
    Output,
    Send,
    Settings,
    Welcome,
    Went,
)
from anabranch.ring.peer import Peer, Status


@dataclass(frozen=True, slots=True)
class Faults:
    """How unreliable the network is; each is a probability for a message."""

    lost: float = 0.0
    repeated: float = 0.0
    late: float = 0.0
    """It arrives up to ``delay`` seconds later, so after others that were sent after it."""
    delay: float = 0.0
    refused: float = 1.0
    """The sender learns that nothing listens where it sent a message. Otherwise it is lost."""


RELIABLE = Faults()


class Network:
    """Peers that send to each other, and a clock.

    ``latency`` seconds is how long a message takes, give or take a half.

    >>> network = Network(Settings(period=1.0), seed=1)
    >>> for host in ["a", "b", "c"]:
    ...     network.add(contact_of(host), seeds=["a:1"])
    >>> network.run(5)
    >>> [len(peer.neighbours.leaves) for peer in network.peers.values()]
    [2, 2, 2]
    """

    def __init__(
        self,
        settings: Settings,
        seed: int = 0,
        faults: Faults = RELIABLE,
        latency: float = 0.0005,
    ) -> None:
        self.settings, self.faults, self.latency = settings, faults, latency
        self.chance = random.Random(seed)
        self.now = 0.0
        self.peers: dict[Address, Peer] = {}
        self.sent: Counter[str] = Counter()
        """Messages by kind."""
        self.named: Counter[str] = Counter()
        """Nodes that are named in the messages, by kind: what their size depends on."""
        self.answers: dict[tuple[Address, int], tuple[float, Found | NotFound]] = {}
        """The answers to searches by who asked and the key, and when they came."""
        self.news: list[tuple[float, Address, Came | Went]] = []
        self.watched = False
        """Whether the news of all peers are kept."""
        self._part: dict[Address, int] = {}
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0

    def add(
        self, me: Contact, seeds: Collection[Address] = (), alive: Iterable[Contact] = ()
    ) -> None:
        """Start a peer; one that had its address is replaced."""
        peer = self.peers[me.address] = Peer(me, self.settings, list(seeds), alive)
        self._carry_out(me.address, peer.start())
        self._at(self.chance.random() * self.settings.period, self._tick, me.address, peer)

    def kill(self, address: Address) -> None:
        """A peer ends without a word."""
        del self.peers[address]

    def leave(self, address: Address) -> None:
        """A peer says that it ends."""
        self._carry_out(address, self.peers[address].leave())
        del self.peers[address]

    def cut(self, *parts: Collection[Address]) -> None:
        """Let only those reach each other that are in one part; who is in none is in another."""
        self._part = {each: i for i, part in enumerate(parts, 1) for each in part}

    def heal(self) -> None:
        """End the cut."""
        self._part = {}

    def find(self, address: Address, key: int) -> None:
        """Let a peer search a key."""
        self.answers.pop((address, key), None)
        self._carry_out(address, self.peers[address].find(key))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> None:
        """Let time pass, until a condition is true at most."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            if until is not None and until():
                return
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        self.now = end

    def _at(self, after: float, action: Callable[..., None], *arguments: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + after, self._count, action, arguments))

    def _tick(self, address: Address, peer: Peer) -> None:
        if self.peers.get(address) is peer:
            self._carry_out(address, peer.tick())
            jitter = 0.98 + 0.04 * self.chance.random()
            self._at(self.settings.period * jitter, self._tick, address, peer)
            if peer.status is Status.REPLACED:
                del self.peers[address]

    def _carry_out(self, address: Address, outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case Send():
                    self._send(address, output)
                case Found() | NotFound():
                    self.answers[address, output.key] = self.now, output
                case Came() | Went():
                    if self.watched:
                        self.news.append((self.now, address, output))

    def _send(self, sender: Address, send: Send) -> None:
        message = send.message
        kind = type(message).__name__
        self.sent[kind] += 1
        self.named[kind] += contacts_in(message)
        faults, chance = self.faults, self.chance.random
        if faults.lost and chance() < faults.lost:
            return
        delay = self.latency * (0.5 + chance())
        if faults.late and chance() < faults.late:
            delay += chance() * faults.delay
        self._at(delay, self._deliver, sender, send)
        if faults.repeated and chance() < faults.repeated:
            self._at(delay + chance() * faults.delay, self._deliver, sender, send)

    def _deliver(self, sender: Address, send: Send) -> None:
        peer = self.peers.get(send.to)
        if peer is not None and self._part.get(sender, 0) == self._part.get(send.to, 0):
            self._carry_out(send.to, peer.receive(send.message))
        elif sender in self.peers and self.chance.random() < self.faults.refused:
            self._carry_out(sender, self.peers[sender].undelivered(send))


def contacts_in(message: Message) -> int:
    """How many nodes a message names.

    >>> contacts_in(Join(contact_of("a")))
    1
    """
    match message:
        case KeepAlive(leaves=leaves, others=others) | Welcome(leaves=leaves, others=others):
            return 1 + len(leaves) + len(others)
        case Join(others=others):
            return 1 + len(others)
        case Found(leaves=leaves) | Leaving(leaves=leaves):
            return 1 + len(leaves)
        case _:
            return 0


def contact_of(host: str, zone: str = "", rack: str = "", incarnation: int = 0) -> Contact:
    """A node of a simulation.

    >>> print(contact_of("a", rack="r1"))
    a at a:1 (abca:6fb92e0432c03e53679a8dd183fa)
    """
    return Contact(NodeId.of(host, zone, rack), host, f"{host}:1", incarnation)
