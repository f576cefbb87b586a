"""A query in a test of its protocols: orders are carried out at once, unless a test holds them.

``play = Play.started()``; then events happen (``play.batch()``, ``play.lose("a")``), and what was
ordered is looked at (``play.given(o.Make)``). ``play.hold(o.Store)`` keeps orders of a kind until
the test answers them by ``play.finish(...)`` or ``play.fail(...)``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from anabranch.backup import Backup
from anabranch.checkpointing.policy import Checkpointing, Periodic
from anabranch.fragments.cost import Cost
from anabranch.placement.even import Even
from anabranch.protocols import orders as o
from anabranch.protocols.events import (
    BatchAsked,
    BatchCommitted,
    BatchFailed,
    Cause,
    Command,
    Done,
    Event,
    Failed,
    Inspected,
    NodeCame,
    NodeLost,
    SliceReport,
    Started,
    TakeCheckpoint,
    TimePassed,
)
from anabranch.protocols.machine import step
from anabranch.protocols.model import (
    Facts,
    OperatorPlan,
    Published,
    Routed,
    Slice,
    SliceId,
    serving,
)
from anabranch.protocols.orders import SECOND, CommandId, OrderId
from anabranch.protocols.query import Policies, Query
from anabranch.state.groups import KeyGroups, Routing
from anabranch.state.part import COPIES, Part, Shape
from anabranch.units import NO_VERSION, Version
from protocols.plans import InStore

O = TypeVar("O")  # noqa: E741

GROUPS = 8
OP = OperatorPlan("op", GROUPS)
EVERYTHING = KeyGroups.all(GROUPS)


@dataclass(frozen=True)
class AtPeers:
    """Every part is at one other node, the first there is."""

    def holders(self, owner: str, key: str, nodes: Any, senders: Any) -> tuple[str, ...]:
        return (min(set(nodes) - {owner}, default=owner),)

    @property
    def coding(self) -> None:
        return None

    def shape(self, holders: int) -> Shape:
        return COPIES

    def survives(self, part: Part, owner: str, nodes: Any) -> bool:
        return part.available(set(nodes) - {owner})

    def substitutes(self, part: Part, owners: Any, nodes: Any) -> tuple[str, ...]:
        return ()


@dataclass
class Play:
    """A query, its orders, and what it told."""

    query: Query
    now: int = 0
    sent: list[o.Order] = field(default_factory=list)
    """All orders so far."""
    held: dict[OrderId, o.Order] = field(default_factory=dict)
    """Orders that were not answered yet."""
    kinds: set[type] = field(default_factory=set)
    """Orders of these kinds are kept for the test to answer."""
    tables: dict[str, Mapping[SliceId, frozenset[Version]]] = field(default_factory=dict)
    parts_at: dict[str, frozenset[str]] = field(default_factory=dict)
    """What inspected nodes say."""
    ended: dict[CommandId, o.End] = field(default_factory=dict)
    numbers: int = 0
    cost: Cost | None = None
    """What every order takes at its node."""
    bytes: int = 0
    """The size of every table."""

    @classmethod
    def of(
        cls,
        *operators: OperatorPlan,
        checkpointing: Checkpointing | None = None,
        backup: Backup | None = None,
        pool: int = 0,
        **policies: Any,
    ) -> Play:
        chosen = Policies(
            checkpointing or Periodic("1 hour", at_most=3, retain=2),
            backup or InStore(),
            Even(pool),
            **policies,
        )
        return cls(Query({each.name: each for each in operators or (OP,)}, chosen, epoch=1))

    @classmethod
    def started(
        cls, *operators: OperatorPlan, hosts: str = "ab", instances: int = 2, **policies: Any
    ) -> Play:
        """A new query on these hosts that is ready for its first batch."""
        play = cls.of(*operators, **policies)
        for host in hosts:
            play.happen(NodeCame(host))
        play.take_over(instances)
        assert play.query.settled
        return play

    def take_over(self, instances: int = 2, **facts: Any) -> None:
        routed = {
            each.name: Routed(Routing.even(each.key_groups, instances), ())
            for each in self.query.operators.values()
        }
        self.happen(Started(Facts(**{"routed": routed, **facts})))

    # What happens

    def happen(self, event: Event) -> None:
        """An event, and then the answers to what was ordered, as long as none is held."""
        events = [event]
        while events:
            self.query, orders = step(self.query, events.pop(0), self.now)
            if self.query.taken_over is not None:
                self.query.validate()
            for number, order in orders:
                self.sent.append(order)
                if isinstance(order, o.End):
                    assert order.command not in self.ended, f"{order} was ended before"
                    self.ended[order.command] = order
                if number is None:
                    continue
                self.held[number] = order
                if type(order) not in self.kinds:
                    events.append(self._done(number))

    def batch(self, **changes: SliceReport) -> o.RunBatch:
        """A batch that is committed; the order to run it."""
        order = self.ask()
        assert order is not None, f"the stream is held: {self.query.changes}"
        self.commit(order, **changes)
        return order

    def batches(self, count: int) -> list[o.RunBatch]:
        return [self.batch() for _ in range(count)]

    def ask(self) -> o.RunBatch | None:
        """Spark asks for the next batch: the order to run it, if it may run."""
        before = len(self.sent)
        self.happen(BatchAsked(Version(self.query.committed + 1)))
        return next((each for each in self.sent[before:] if isinstance(each, o.RunBatch)), None)

    def commit(self, order: o.RunBatch, **changes: SliceReport) -> None:
        """A batch that runs is committed, with the captures that it was ordered."""
        slices = {each.id: each for each in order.slices}
        reports = {i: SliceReport(rows=10, changed=1, bytes=self.bytes) for i in slices}
        for wanted in order.captures:
            each = slices[wanted.slice]
            captured = self.captured(wanted, each, order.version)
            reports[each.id] = SliceReport(captured, rows=10, bytes=self.bytes)
        for name, report in changes.items():
            reports[SliceId(name.replace("_", "-").removeprefix("s"))] = report
        self.happen(BatchCommitted(order.version, order.fence, reports))

    def break_off(self, order: o.RunBatch, cause: Cause, reason: str = "it failed") -> None:
        self.happen(BatchFailed(order.version, order.fence, cause, reason))

    def lose(self, host: str) -> None:
        self.happen(NodeLost(host))

    def come(self, host: str) -> None:
        self.happen(NodeCame(host))

    def wait(self, seconds: float) -> None:
        """Time goes by, and whoever wanted to be woken is."""
        until = self.now + int(seconds * SECOND)
        while (wake := self._next_wake(until)) is not None:
            self.now = wake
            self.happen(TimePassed())
        self.now = until
        self.happen(TimePassed())

    def command(self, make: Any, *args: Any) -> CommandId:
        self.numbers += 1
        event: Command = make(CommandId(self.numbers), *args)
        self.happen(event)
        return event.command

    def checkpoint(self) -> CommandId:
        return self.command(TakeCheckpoint)

    # Answers

    def hold(self, *kinds: type) -> None:
        self.kinds |= set(kinds)

    def let_go(self, *kinds: type) -> None:
        """Answer what is held of these kinds, and hold no more of them."""
        self.kinds -= set(kinds)
        for number, order in list(self.held.items()):
            if type(order) in kinds and number in self.held:
                self.happen(self._done(number))

    def finish(self, order: Any, answer: object = None) -> None:
        """A held order is carried out."""
        number = self._number(order)
        self.happen(Done(number, self._answer(order) if answer is None else answer))

    def fail(self, order: Any, reason: str = "no room", **what: Any) -> None:
        """A held order fails."""
        self.happen(Failed(self._number(order), reason, **what))

    def waiting(self, kind: type[O]) -> list[O]:
        """The orders of a kind that are held, and whose answers somebody waits for."""
        known = self.query.outstanding
        return [each for n, each in self.held.items() if isinstance(each, kind) and n in known]

    # What is seen

    def given(self, kind: type[O]) -> list[O]:
        """All orders of a kind so far."""
        return [each for each in self.sent if isinstance(each, kind)]

    def last(self, kind: type[O]) -> O:
        return self.given(kind)[-1]

    def told(self, kind: str) -> list[Mapping[str, Any]]:
        """The details of all events of a kind that the user was told."""
        return [each.details for each in self.given(o.Tell) if each.kind == kind]

    @property
    def slices(self) -> list[Slice]:
        """The serving slices, by their groups."""
        return sorted(serving(self.query.slices.values()), key=lambda s: s.groups.ranges)

    def at(self, host: str) -> list[Slice]:
        """The serving slices of a node."""
        return [each for each in self.slices if each.node == host]

    @property
    def published(self) -> list[Version]:
        return [each.version for each in self.query.published]

    # What those who carry orders out answer

    def captured(self, wanted: o.CaptureWanted, each: Slice, version: Version) -> o.Captured:
        self.numbers += 1
        name = f"file-{self.numbers}"
        base, groups = wanted.base, wanted.groups
        return o.Captured(
            name, each.id, each.operator, each.node, version, base, groups, wanted.clean
        )

    def part(
        self,
        version: int,
        base: int | None = None,
        groups: KeyGroups = EVERYTHING,
        holders: tuple[str, ...] = (),
        operator: str = "op",
        shape: Shape = COPIES,
    ) -> Part:
        self.numbers += 1
        since = None if base is None else Version(base)
        name = f"part-{self.numbers}"
        return Part(
            name, operator, Version(version), since, groups, holders,
            shape.needed if holders else 1, bytes=100, parity=shape.parity if holders else 0,
        )  # fmt: skip

    def _done(self, number: OrderId) -> Done:
        return Done(number, self._answer(self.held.pop(number)), self.cost)

    def _answer(self, order: o.Order) -> object:
        match order:
            case o.Prepare(host) | o.Inspect(host):
                tables = self.tables.get(host, self._tables(host))
                return Inspected(tables, self.parts_at.get(host, frozenset()))
            case o.Capture(wanted, each, version):
                return self.captured(wanted, each, version)
            case o.Store(captured, holders, _, shape):
                version, base, groups = captured.version, captured.base, captured.groups
                return self.part(version, base, groups, holders, captured.operator, shape)
            case o.Merge(each, _, groups, version, holders, shape):
                return self.part(version, None, groups, holders, each.operator, shape)
            case o.Mend(part, _, holders):
                return replace(part, holders=(*part.holders, *holders))
        return None

    def _tables(self, host: str) -> Mapping[SliceId, frozenset[Version]]:
        at = frozenset([self.query.committed])
        return {s.id: at for s in serving(self.query.slices.values()) if s.node == host}

    def _number(self, order: Any) -> OrderId:
        number = next(n for n, each in self.held.items() if each is order)
        del self.held[number]
        return number

    def _next_wake(self, until: int) -> int | None:
        times = [each.at for each in self.given(o.Wake) if self.now < each.at <= until]
        return min(times, default=None)


def whole(version: int, *parts: Part, operators: Collection[str] = ("op",)) -> Published:
    """A published version of these parts."""
    of = {name: tuple(p for p in parts if p.operator == name) for name in operators}
    return Published(Version(version), of)


def groups_of(slices: Collection[Slice]) -> KeyGroups:
    found = KeyGroups()
    for each in slices:
        found = found | each.groups
    return found


__all__ = ["EVERYTHING", "GROUPS", "NO_VERSION", "OP", "AtPeers", "InStore", "Play", "whole"]
