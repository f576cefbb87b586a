"""A ring of thousands of simulated nodes that hold the fragments of many states.

The peers, their messages and the choice of holders are those of real nodes. The network is in
memory, and the ring is made as the protocol leaves it, not joined by one node after the other.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log

from anabranch.errors import PlanError
from anabranch.fragments.spread import Holder, spread
from anabranch.ring import Contact, Found, Settings
from anabranch.ring.converged import converged, leaf_set
from anabranch.ring.network import Network, contact_of

_MOST_PERIODS = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """What is simulated."""

    nodes: int = 5000
    racks: int = 1
    applications: int = 1000
    """Each has one state, at another owner as far as there are enough nodes."""
    data: int = 10
    parity: int = 20
    searches: int = 5000
    killed: float = 0.05
    """This share of the nodes, all at once."""
    state: int = 128_000_000
    """Bytes of a state."""
    link: float = 12_500_000
    """Bytes that a node can send, and can receive, in a second."""
    latency: float = 0.0005
    """Seconds that a message takes."""
    settings: Settings = field(default_factory=Settings)
    seed: int = 0

    def __post_init__(self) -> None:
        self.settings.check(self.fragments)
        if min(self.nodes, self.racks, self.applications, self.data, self.parity) < 1:
            raise PlanError("nodes, racks, applications, data and parity must be positive")
        if self.nodes <= self.fragments:
            raise PlanError(
                f"{self.fragments} fragments need as many other nodes; there are {self.nodes} nodes"
            )
        if not 0 <= self.killed < 1:
            raise PlanError(f"killed={self.killed}: give a share of the nodes, such as 0.05")
        if min(self.searches, self.state, self.link, self.latency) <= 0:
            raise PlanError("searches, state, link and latency must be positive")

    @property
    def fragments(self) -> int:
        """Fragments of a state."""
        return self.data + self.parity


@dataclass(frozen=True, slots=True)
class Routing:
    """How many hops the searches for owners took."""

    mean: float
    most: int
    logarithm: float
    """Of the number of nodes to base 16: rows that the routing tables have, about."""
    within: Mapping[int, float]
    """The share of searches that took at most so many hops."""
    seconds: Mapping[int, float]
    """From question to answer, by hops."""
    mean_seconds: float
    retrieval_seconds: float
    """A search, a round trip to the holders, and a state over the link of the restoring node."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How many fragments the nodes hold."""

    mean: float
    most: int
    most_of_95_percent: int
    within: Mapping[int, float]
    """The share of nodes that hold at most so many."""


@dataclass(frozen=True, slots=True)
class Repair:
    """What it took until all was well again after nodes were killed."""

    killed: int
    periods: float
    """From the kill until all leaf sets were right; three of them are waiting for keep-alives."""
    messages_per_node: float
    """Beyond the keep-alives that are sent at all times."""
    usual_messages_per_node: float
    """In the same time, without failures."""
    contacts_per_node: float
    """Nodes that were named in all of these messages."""
    lost_fragments: int
    lost_states: int
    """Fewer than ``data`` fragments are left, and the owner is killed."""
    moved_bytes: int
    """To make lost fragments again and bring them to other holders."""
    most_fragments: int
    """At a node, after that."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a simulation."""

    nodes: int
    racks: int
    routing: Routing
    spread: Spread
    repair: Repair | None


def simulate(plan: Plan) -> Report:
    """Make a ring, search owners, spread fragments, and kill nodes.

    >>> report = simulate(Plan(nodes=40, applications=5, data=2, parity=1, searches=10))
    >>> report.spread.mean, report.repair.killed
    (0.375, 2)
    """
    chance = random.Random(plan.seed)
    nodes = [contact_of(f"node-{i}", rack=f"rack-{i % plan.racks}") for i in range(plan.nodes)]
    network = converged(nodes, plan.settings, plan.seed, plan.latency)
    owners = chance.sample(nodes, min(plan.applications, plan.nodes))
    owners += chance.choices(nodes, k=plan.applications - len(owners))
    states = _Fragments(plan, network)
    for owner in owners:
        states.save(owner)
    routing, spread = _route(plan, network, owners, chance), _spread(plan, states.load)
    repair = _repair(plan, network, states, chance) if plan.killed else None
    return Report(plan.nodes, plan.racks, routing, spread, repair)


class _Fragments:
    """Who holds what."""

    def __init__(self, plan: Plan, network: Network) -> None:
        self.plan, self.network = plan, network
        self.load: Counter[str] = Counter()
        self.held: list[tuple[Contact, list[Contact]]] = []
        """Owners, and the holders of their fragments."""

    def save(self, owner: Contact) -> None:
        self.held.append((owner, self._choose(owner, self.plan.fragments, [])))

    def make_again(self, dead: set[str]) -> tuple[int, int, int]:
        """Make what was lost again. Return lost fragments and states, and the bytes moved."""
        lost = states = pieces = 0
        for i, (owner, holders) in enumerate(self.held):
            live = [each for each in holders if each.host not in dead]
            missing = len(holders) - len(live)
            lost += missing
            if owner.host in dead and len(live) < self.plan.data:
                states += 1
            elif missing:
                maker = live[0] if owner.host in dead else owner
                # The owner has its state on its own disk. A holder has one fragment of it.
                pieces += missing + (self.plan.data - 1 if owner.host in dead else 0)
                self.held[i] = owner, live + self._choose(maker, missing, live)
        for host in dead:
            self.load.pop(host, None)
        return lost, states, pieces * -(-self.plan.state // self.plan.data)

    def _choose(self, maker: Contact, count: int, holding: Sequence[Contact]) -> list[Contact]:
        near = {c.host: c for c in self.network.peers[maker.address].neighbours.contacts()}
        chosen = spread(
            self._holders(near.values()), count, self.plan.parity, self._holders(holding)
        )
        self.load.update(each.host for each in chosen)
        return [near[each.host] for each in chosen]

    def _holders(self, nodes: Iterable[Contact]) -> list[Holder]:
        return [Holder(each.host, each.id.label, self.load[each.host]) for each in nodes]


def _route(
    plan: Plan, network: Network, owners: Sequence[Contact], chance: random.Random
) -> Routing:
    begin = network.now
    searches: set[tuple[str, int]] = set()
    while len(searches) < min(plan.searches, len(owners) * plan.nodes):
        searches.add((chance.choice(list(network.peers)), chance.choice(owners).id))
    for address, key in sorted(searches):
        network.find(address, key)
    network.run(plan.settings.period * 2, until=lambda: len(network.answers) == len(searches))
    times: dict[int, list[float]] = {}
    for at, answer in network.answers.values():
        assert isinstance(answer, Found)
        assert answer.root.id == answer.key, "the owner lives"
        times.setdefault(answer.hops, []).append(at - begin)
    hops = Counter({each: len(found) for each, found in times.items()})
    mean = sum(map(sum, times.values())) / hops.total()
    return Routing(
        sum(each * count for each, count in hops.items()) / hops.total(),
        max(hops),
        log(plan.nodes, 16),
        _within(hops),
        {each: sum(times[each]) / len(times[each]) for each in sorted(times)},
        mean,
        mean + 2 * plan.latency + plan.state / plan.link,
    )


def _spread(plan: Plan, load: Mapping[str, int]) -> Spread:
    counts = Counter(load.values())
    counts[0] += plan.nodes - counts.total()
    within = _within(counts)
    return Spread(
        sum(load.values()) / plan.nodes,
        max(counts),
        min(each for each, share in within.items() if share >= 0.95),
        within,
    )


def _within(counts: Mapping[int, int]) -> dict[int, float]:
    total, so_far, shares = sum(counts.values()), 0, {}
    for each in sorted(counts):
        so_far += counts[each]
        shares[each] = so_far / total
    return shares


def _repair(plan: Plan, network: Network, states: _Fragments, chance: random.Random) -> Repair:
    period = plan.settings.period
    network.sent.clear()
    network.run(period)
    usual = network.sent.total() / len(network.peers)
    dead = chance.sample(list(network.peers.values()), round(plan.killed * plan.nodes))
    for peer in dead:
        network.kill(peer.me.address)
    network.sent.clear()
    network.named.clear()
    begin = network.now
    while network.now < begin + _MOST_PERIODS * period and not _is_whole(network):
        network.run(period / 4)
    periods = (network.now - begin) / period
    lost, gone, moved = states.make_again({peer.me.host for peer in dead})
    live = len(network.peers)
    return Repair(
        len(dead),
        periods,
        network.sent.total() / live - usual * periods,
        usual * periods,
        network.named.total() / live,
        lost,
        gone,
        moved,
        max(states.load.values()),
    )


def _is_whole(network: Network) -> bool:
    """Whether every leaf set is the right one."""
    ids = sorted(peer.me.id for peer in network.peers.values())
    return all(
        set(peer.neighbours.leaves) == set(leaf_set(peer.me.id, ids, network.settings.leaves))
        for peer in network.peers.values()
    )
