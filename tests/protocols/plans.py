"""Plans of simulated histories: a query, the faults that hit it, and the commands of its user.

A plan is drawn from a seed (:meth:`Plan.of`), with several faults at random moments. Or it is one
of many with one fault each: every kind of fault at every stage of every order of a history without
faults (:func:`one_fault_each`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from anabranch.backup import Backup, Fragments
from anabranch.checkpointing.policy import Kind, Periodic, Situation
from anabranch.fragments import Adapt, Prefer
from anabranch.protocols.model import Host
from anabranch.protocols.orders import SECOND
from anabranch.state.part import COPIES, Part, Shape


@dataclass(frozen=True)
class InStore:
    """All parts are in a store that outlives the nodes."""

    def holders(self, owner: Host, key: str, nodes: Any, senders: Any) -> tuple[Host, ...]:
        return ()

    @property
    def coding(self) -> None:
        return None

    def shape(self, holders: int) -> Shape:
        return COPIES

    def survives(self, part: Part, owner: Host, nodes: Any) -> bool:
        return True

    def substitutes(self, part: Part, owners: Any, nodes: Any) -> tuple[Host, ...]:
        return ()


@dataclass(frozen=True)
class AtPeers:
    """Every part is at some other nodes."""

    copies: int = 1

    def holders(self, owner: Host, key: str, nodes: Any, senders: Any) -> tuple[Host, ...]:
        others = sorted(set(nodes) - {owner}) or [owner]
        first = int(key.rpartition("-")[2]) % len(others)
        return tuple(dict.fromkeys(others[(first + i) % len(others)] for i in range(self.copies)))

    @property
    def coding(self) -> None:
        return None

    def shape(self, holders: int) -> Shape:
        return COPIES

    def survives(self, part: Part, owner: Host, nodes: Any) -> bool:
        return part.available(set(nodes) - {owner})

    def substitutes(self, part: Part, owners: Any, nodes: Any) -> tuple[Host, ...]:
        return ()


@dataclass(frozen=True)
class Unequal:
    """One operator is checkpointed a tenth as often as the others."""

    often: Periodic
    rarely: str
    backs_up: bool = True

    def decide(self, situation: Situation) -> Kind | None:
        if situation.operator != self.rarely:
            return self.often.decide(situation)
        return replace(self.often, interval=10 * self.often.micros / SECOND).decide(situation)

    @property
    def tracks_changes(self) -> bool:
        return self.often.tracks_changes

    @property
    def retain(self) -> int:
        return self.often.retain

    @property
    def tolerate(self) -> int:
        return self.often.tolerate

    @property
    def hold(self) -> bool:
        return self.often.hold


FAULTS = {
    "executor": 4,
    "host": 3,
    "agent": 3,
    "hang": 2,
    "stop": 2,
    "driver": 2,
    "second driver": 1,
    "disk full": 1,
    "damage": 2,
    "store down": 1,
    "clock": 1,
    "lost table": 1,
    "cut": 2,
    "no agent": 1,
    "leave": 2,
    "lost file": 1,
    "manifest": 1,
    "power": 1,
    "log": 1,
}
"""What can go wrong, and how often compared with the others."""

SHAPES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "pair": {"a": (), "b": ("a",)},
    "one": {"a": ()},
    "chain": {"a": (), "b": ("a",), "c": ("b",)},
    "fork": {"a": (), "b": ("a",), "c": ("a",)},
    "join": {"a": (), "b": (), "c": ("a", "b")},
    "apart": {"a": (), "b": ()},
    "nothing": {},
}
"""The operators of a query, and which others send rows to each."""


class Stage(Enum):
    """How far an order is."""

    GIVEN = "given"
    """Its request has not been sent, nor have those after it."""
    DONE = "executed"
    """Its answer has not been sent."""
    ANSWERED = "answered"
    """The driver has taken its answer."""


@dataclass(frozen=True)
class Planned:
    """A fault or a command, at some time or at a stage of some order.

    What it hits is drawn from its own number, or is a node of the order.
    """

    number: int
    kind: str
    at: float | None = None
    order: int = 0
    stage: Stage = Stage.GIVEN
    aimed: bool = False


@dataclass(frozen=True)
class Plan:
    """What a history is about: drawn from its seed."""

    seed: int
    hosts: int = 4
    groups: int = 6
    backup: Backup = field(default_factory=InStore)
    interval: float = 2.0
    incremental: bool = True
    parallelism: int = 1
    retained: int = 200
    hold: bool = True
    backs_up: bool = True
    rarely: str = ""
    """The operator that is checkpointed less often than others."""
    most_slices: int = 8
    shape: str = "pair"
    """Its operators, see SHAPES."""
    tolerate: int = 10**6
    retain: int = 3
    longest_chain: int = 3
    pool: int = 0
    replays: bool = True
    """Whether what was sent is kept; not so where the driver runs everything itself."""
    late: int = 0
    """So many hosts come some time after the beginning."""
    seconds: float = 0.0
    """How long faults can happen, if there is no later one."""
    faults: tuple[Planned, ...] = ()
    commands: tuple[Planned, ...] = ()

    @classmethod
    def of(cls, seed: int, faults: int = 10, span: float | None = None) -> Plan:
        """The plan of a seed."""
        chance = random.Random(f"plan-{seed}")
        kinds = list(FAULTS)
        drawn = chance.choices(kinds, list(FAULTS.values()), k=faults)
        span = 2 + 1.5 * faults if span is None else span
        wish = Adapt(chance.choice(list(Prefer)), 0.0, chance.choice([0.5, 1.0, 9.0]))
        adaptive = Fragments(2, 1, adapt=wish)
        local = chance.random() < 0.05
        return cls(
            seed,
            hosts=1 if local else chance.randint(2, 5),
            replays=not local,
            groups=chance.choice([3, 4, 6]),
            backup=chance.choice([InStore(), AtPeers(1), AtPeers(2), Fragments(2, 1), adaptive]),
            interval=chance.choice([0.5, 1.0, 3.0]),
            incremental=chance.random() < 0.8,
            parallelism=chance.choice([1, 1, 2]),
            retained=chance.choice([12, 200]),
            hold=chance.random() < 0.7,
            backs_up=chance.random() < 0.95,
            rarely=chance.choice(["", "", "a", "b"]),
            most_slices=chance.choice([1, 2, 3]),
            shape=chance.choice(["pair"] * 6 + [*SHAPES]),
            tolerate=chance.choice([2, 10**6, 10**6]),
            retain=chance.choice([1, 3, 3]),
            longest_chain=chance.choice([1, 3, 3]),
            pool=chance.choice([0, 0, 1]),
            late=chance.choice([0, 0, 1]),
            seconds=span,
            faults=tuple(_fault(chance, i, kind, span) for i, kind in enumerate(drawn)),
            commands=tuple(
                Planned(100 + i, "command", chance.random() * span)
                for i in range(chance.randint(0, 5))
            ),
        )


def _fault(chance: random.Random, number: int, kind: str, span: float) -> Planned:
    """Half of the faults come at any time, and half at a stage of an order."""
    if chance.random() < 0.5:
        return Planned(number, kind, at=0.5 + chance.random() * span)
    order = chance.randint(1, int(12 * span))
    stage = chance.choice(list(Stage))
    return Planned(number, kind, None, order, stage, aimed=chance.random() < 0.7)


_CALM = 6.0
"""Seconds of a history with one fault; in these all commands are given."""


def without_faults(seed: int) -> Plan:
    """A short history without faults."""
    return Plan.of(seed, faults=0, span=_CALM)


def one_fault_each(calm: Plan, stages: Iterable[tuple[int, Stage]]) -> Iterator[Plan]:
    """A history that reaches these stages of orders, each time with another fault at one of them.

    The faults come in any order, so that some of them are a sample of all.
    """
    chance = random.Random(f"faults-{calm.seed}")
    all_of_them = [(order, stage, kind) for order, stage in stages for kind in FAULTS]
    chance.shuffle(all_of_them)
    for number, (order, stage, kind) in enumerate(all_of_them):
        fault = Planned(1000 + number, kind, None, order, stage, aimed=chance.random() < 0.7)
        yield replace(calm, faults=(fault,))
