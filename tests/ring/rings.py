"""Histories of a ring under faults: peers that join, leave, are killed, return and are cut apart.

A seed decides everything. Then the faults end, and after some quiet every leaf set must be the
right one by brute force, and every search must end at the closest node that lives.

``python -m ring.rings SEED`` (from the folder of the tests) runs one history.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

from anabranch.ring import Contact, Found, NodeId, Settings, Status, closest
from anabranch.ring.ids import BITS, clockwise
from anabranch.ring.network import Faults, Network

SETTINGS = Settings(leaves=8, period=1.0, probes=3, patience=6, remembered=40)
SEEDS = (0, 1)
"""These hosts have the same address for ever, and run in the end: nodes that know no live address
cannot find a ring."""
QUIET = 90
"""Periods in which a ring must be whole again."""


class Violation(AssertionError):
    """What must not happen did."""


@dataclass(frozen=True)
class History:
    """What happens to a ring."""

    seed: int
    hosts: int
    racks: int
    seconds: int
    faults: Faults
    events: int

    @classmethod
    def of(cls, seed: int) -> History:
        chance = random.Random(seed)
        harsh = chance.random() < 0.7
        faults = Faults(
            lost=chance.choice([0, 0.02, 0.1]) if harsh else 0,
            repeated=chance.choice([0, 0.1]) if harsh else 0,
            late=chance.choice([0, 0.1]) if harsh else 0,
            delay=chance.choice([0.5, 5.0]),
            refused=chance.choice([0.0, 0.5, 1.0]),
        )
        return cls(
            seed,
            hosts=chance.choice([2, 5, 9, 10, 20, 40]),
            racks=chance.choice([1, 3, 40]),
            seconds=chance.choice([10, 40]),
            faults=faults,
            events=chance.choice([3, 10, 30]),
        )


class Ring:
    """The hosts of a history, and which of them run."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.chance = random.Random(history.seed)
        self.network = Network(SETTINGS, history.seed, history.faults, latency=0.01)
        self.running: dict[int, Contact] = {}
        self.moves: dict[int, int] = {}
        self.incarnations: dict[int, int] = {}
        for host in range(history.hosts):
            self.start(host)

    def start(self, host: int) -> None:
        """Start a host, or start it again: with a clock that is wrong, or at another address."""
        known = self.incarnations.get(host, 100)
        self.incarnations[host] = self.chance.choice([known + 1, known + 1, known, known - 5])
        if self.chance.random() < 0.3:
            self.move(host)
        address = self.address(host)
        id = NodeId.of(f"h{host}", rack=f"r{host % self.history.racks}")
        me = Contact(id, f"h{host}", address, self.incarnations[host])
        self.network.add(me, [self.address(seed) for seed in SEEDS])
        self.running[host] = me

    def move(self, host: int) -> None:
        """Have the host at another address from its next start on."""
        if host not in SEEDS:
            self.moves[host] = self.moves.get(host, 0) + 1

    def address(self, host: int) -> str:
        return f"h{host}:{self.moves.get(host, 0)}"

    def kill(self, host: int) -> None:
        address = self.running.pop(host).address
        if address in self.network.peers:  # and was not replaced by a former process
            self.network.kill(address)

    def happen(self) -> None:
        """Something goes wrong."""
        away = [host for host in range(self.history.hosts) if host not in self.running]
        here = list(self.running)
        match self.chance.choice(
            ["kill", "kill", "leave", "start", "again", "cut", "heal", "many"]
        ):
            case "kill" if len(here) > 1:
                self.kill(self.chance.choice(here))
            case "leave" if len(here) > 1:
                host = self.chance.choice(here)
                if (address := self.running.pop(host).address) in self.network.peers:
                    self.network.leave(address)
            case "start" if away:
                self.start(self.chance.choice(away))
            case "again":
                host = self.chance.choice(here)
                if self.chance.random() < 0.3 and host not in SEEDS:
                    # The former process hangs, and is not gone.
                    self.move(host)
                elif self.running[host].address in self.network.peers:
                    self.network.kill(self.running[host].address)
                self.start(host)
            case "cut":
                parts: list[list[str]] = [[], []]
                for address in self.network.peers:
                    self.chance.choice(parts).append(address)
                self.network.cut(*parts)
            case "heal":
                self.network.heal()
            case "many" if len(here) > 5:
                # Neighbours on the ring, so that whole sides of leaf sets are lost.
                here.sort(key=lambda host: self.running[host].id)
                at = self.chance.randrange(len(here))
                for host in (here * 2)[at : at + len(here) // 3]:
                    self.kill(host)
            case _:
                pass

    def run(self) -> Ring:
        history = self.history
        for _ in range(history.events):
            self.network.run(self.chance.random() * 2 * history.seconds / history.events)
            self.happen()
        self.network.heal()
        self.network.faults = Faults(refused=history.faults.refused)
        for host in SEEDS:
            if self.address(host) not in self.network.peers:
                self.start(host)
        self.network.run(QUIET * SETTINGS.period)
        self.check()
        return self

    def check(self) -> None:
        """Everything is as it must be."""
        peers = self.network.peers
        ids = {peer.me.id: peer.me for peer in peers.values()}
        if len(ids) < len(peers):
            raise Violation(f"two processes with one id: {sorted(peers)}")
        hosts = {me.host for me in ids.values()}
        if ended := {me.host for me in self.running.values()} - hosts:
            raise Violation(f"nothing runs on {ended}")
        for peer in peers.values():
            if peer.status is not Status.JOINED:
                raise Violation(f"{peer.me} is {peer.status}")
            near = peer.neighbours
            wrong = set(near.leaves) ^ neighbours(peer.me.id, set(ids), SETTINGS.leaves)
            if wrong:
                raise Violation(f"{peer.me} has the wrong leaves: {wrong}")
            for contact in near.contacts():
                if contact != ids[contact.id]:
                    raise Violation(f"{peer.me} knows {contact}, not {ids[contact.id]}")
            dead = set(near.table) - set(ids)
            if dead:
                raise Violation(f"{peer.me} has dead nodes in its routing table: {dead}")
        self.check_routes(set(ids))

    def check_routes(self, ids: set[NodeId]) -> None:
        keys = [NodeId(self.chance.getrandbits(BITS)) for _ in range(3)]
        keys += self.chance.sample(sorted(ids), min(3, len(ids)))
        keys += [NodeId((key + 1) % (1 << BITS)) for key in keys[-2:]]
        asked = [(address, key) for address in self.network.peers for key in keys]
        for address, key in asked:
            self.network.find(address, key)
        self.network.run(1.5 * SETTINGS.period)
        for address, key in asked:
            _, answer = self.network.answers.get((address, key), (0, None))
            if not isinstance(answer, Found):
                raise Violation(f"{address} has not found {key}: {answer}")
            if answer.root.id != closest(key, ids):
                raise Violation(f"{address} found {answer.root} for {key}")


def neighbours(me: NodeId, ids: set[NodeId], size: int) -> set[NodeId]:
    """The leaf set of a node, by brute force."""
    others = ids - {me}
    after = sorted(others, key=lambda id: clockwise(me, id))[: size // 2]
    before = sorted(others, key=lambda id: clockwise(id, me))[: size // 2]
    return {*after, *before}


if __name__ == "__main__":
    print(Ring(History.of(int(sys.argv[1]))).run().network.sent)
