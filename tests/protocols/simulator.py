"""Histories of a query under faults: the real protocols drive a world that is a model in memory.

A seed decides everything: when orders are carried out and answered, which answers are lost or come
twice, and which faults happen when. After every commit the state of every group is compared with
what it must be; in the end everything that was ordered must have ended, and the stream must run.

``python -m protocols.simulator SEED`` (from the folder of the tests) tells the story of a history.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from anabranch.checkpointing.policy import Checkpointing, Kind, Never, Periodic, Situation
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
    GiveUp,
    Inspected,
    NodeCame,
    NodeLost,
    ReadState,
    Rebalance,
    Scale,
    SliceReport,
    Started,
    TakeCheckpoint,
    TimePassed,
)
from anabranch.protocols.machine import step
from anabranch.protocols.model import (
    Backup,
    Host,
    OperatorPlan,
    Routed,
    Slice,
    serving,
)
from anabranch.protocols.query import Policies, Query
from anabranch.state.groups import Routing
from anabranch.state.part import Part
from anabranch.units import Version
from protocols.world import (
    Buffers,
    File,
    Missing,
    StaleDriver,
    TableFenced,
    Trouble,
    Truth,
    Violation,
    World,
)

SECOND = o.SECOND
_MOST_STEPS = 10_000
_QUIET = 4000 * SECOND
"""So long after the last fault everything must have ended."""


@dataclass(frozen=True)
class InStore:
    """All parts are in a store that outlives the nodes."""

    def holders(self, owner: Host, key: str, nodes: Any, senders: Any) -> tuple[Host, ...]:
        return ()

    def available(self, part: Part, nodes: Any) -> bool:
        return True


@dataclass(frozen=True)
class AtPeers:
    """Every part is at some other nodes."""

    copies: int = 1

    def holders(self, owner: Host, key: str, nodes: Any, senders: Any) -> tuple[Host, ...]:
        others = sorted(set(nodes) - {owner}) or [owner]
        first = int(key.rpartition("-")[2]) % len(others)
        return tuple(dict.fromkeys(others[(first + i) % len(others)] for i in range(self.copies)))

    def available(self, part: Part, nodes: Any) -> bool:
        return any(host in nodes for host in part.holders)


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
}
"""What can go wrong, and how often compared with the others."""


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


@dataclass(frozen=True)
class Planned:
    """A fault or a command at some moment. What it hits is drawn from its own number."""

    number: int
    kind: str
    at: float | None
    after_order: int | None = None


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
    faults: tuple[Planned, ...] = ()
    commands: tuple[Planned, ...] = ()

    @classmethod
    def of(cls, seed: int, faults: int = 10) -> Plan:
        chance = random.Random(f"plan-{seed}")
        kinds = list(FAULTS)
        drawn = chance.choices(kinds, list(FAULTS.values()), k=faults)
        span = 2 + 1.5 * faults
        return cls(
            seed,
            hosts=chance.randint(2, 5),
            groups=chance.choice([3, 4, 6]),
            backup=chance.choice([InStore(), AtPeers(1), AtPeers(2)]),
            interval=chance.choice([0.5, 1.0, 3.0]),
            incremental=chance.random() < 0.8,
            parallelism=chance.choice([1, 1, 2]),
            retained=chance.choice([12, 200]),
            hold=chance.random() < 0.7,
            backs_up=chance.random() < 0.95,
            rarely=chance.choice(["", "", "a", "b"]),
            most_slices=chance.choice([1, 2, 3]),
            faults=tuple(Planned(i, kind, *_moment(chance, span)) for i, kind in enumerate(drawn)),
            commands=tuple(
                Planned(100 + i, "command", chance.random() * span)
                for i in range(chance.randint(0, 5))
            ),
        )


def _moment(chance: random.Random, span: float) -> tuple[float | None, int | None]:
    """Some time, or right after some order."""
    if chance.random() < 0.5:
        return 0.5 + chance.random() * span, None
    return None, chance.randint(1, int(4 * span))


class Driver:
    """A driver: the state of the query, and the threads that carry orders out, as a model."""

    def __init__(self, simulation: Simulation, epoch: int) -> None:
        self.simulation, self.epoch = simulation, epoch
        plan, world = simulation.plan, simulation.world
        self.query = Query(simulation.operators, simulation.policies, epoch)
        self.buffers = Buffers(world, {n: p.before for n, p in simulation.operators.items()})
        self.paused = self.dead = self.started = False
        self.backlog: list[Event] = []
        self.spark = world.durable.committed
        """Spark has run the batches up to this one."""
        self.commands: dict[o.CommandId, Event] = {}
        self.plan = plan
        self.attempt: Attempt | None = None
        self.fence = 0
        """The fence of the batch that began last, or of what took Spark back since."""

    def start(self) -> None:
        simulation, world = self.simulation, self.simulation.world
        self.started = True
        self.take(Started(world.facts(simulation.routed)))
        for machine in world.machines.values():
            if machine.up:
                self.take(NodeCame(machine.name))
        self.ask()

    def ask(self) -> None:
        """Spark wants the next batch, some time later."""

        def later() -> None:
            if self.query.restart is not None:
                self.after(0.2, later)
            elif self.query.batch is None:
                self.take(BatchAsked(Version(self.query.committed + 1)))

        # Once it is known that the stream runs again there is no hurry.
        slow = self.simulation.commits_since_quiet >= 5
        self.after(20 if slow else self.simulation.chance.choice([0.01, 0.05, 0.3]), later)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        def run() -> None:
            if not self.dead:
                action()

        self.simulation.after(seconds, run)

    def take(self, event: Event) -> None:
        """Feed the machine, and carry its orders out."""
        if self.dead:
            return
        if self.paused:
            self.backlog.append(event)
            return
        simulation = self.simulation
        simulation.steps += 1
        if simulation.steps > _MOST_STEPS:
            raise Violation(f"it does not come to rest: {simulation._why()}")
        simulation.say(self.epoch, "event", event)
        before = self.query
        self.query, given = step(before, event, simulation.now)
        if simulation.is_current(self) and not _divided_alike(before, self.query):
            self.query.validate()
        for number, order in given:
            simulation.say(self.epoch, f"order {number}", order)
            self.carry_out(number, order)

    def resume(self) -> None:
        self.paused = False
        backlog, self.backlog = self.backlog, []
        for event in backlog:
            self.take(event)

    def carry_out(self, number: o.OrderId | None, order: o.Order) -> None:
        simulation = self.simulation
        simulation.check_order(self, order)
        match order:
            case o.RunBatch():
                self.attempt = Attempt(self, order)
                self.fence = order.fence
                self.attempt.run()
            case o.CancelBatch(_, fence):
                if self.attempt is not None and self.attempt.order.fence == fence:
                    self.after(0.05, self.attempt.cancel)
            case o.Wake(at):
                simulation.at(at, lambda: self.take(TimePassed()))
            case o.Trim(operator, upto):
                self.buffers.trim(operator, upto)
            case o.Note(number, routed, slices):
                noted = (number, routed, slices)
                self.soon(lambda: self.durably(lambda d: setattr(d, "noted", noted)))
            case o.Withdraw(versions, parts):
                self.soon(lambda: self.withdraw(versions, parts))
            case o.Drop():
                self.soon(lambda: self.drop(order))
            case o.End(command, error, result):
                simulation.end(self, command, error, result)
            case o.Stop(reason):
                simulation.stopped(self, reason)
            case o.Tell(kind):
                simulation.told[kind] += 1
            case o.AskNodes():
                pass
            case _:
                assert number is not None
                self.ask_somebody(number, order)

    def soon(self, action: Callable[[], None]) -> None:
        # In order: what is written to the store is written by one thread.
        self.simulation.after(0.001, action)

    def durably(self, change: Callable[[Any], None]) -> None:
        durable = self.simulation.world.durable
        if durable.epoch == self.epoch and not durable.down:
            change(durable)

    def withdraw(self, versions: tuple[Version, ...], parts: tuple[Part, ...]) -> None:
        world = self.simulation.world
        if world.durable.epoch != self.epoch or world.durable.down:
            return
        for version in versions:
            world.durable.manifests.pop(version, None)
        for part in parts:
            world.durable.parts.pop(part.name, None)
            world.withdrawn.add(part.name)
            for host in part.holders:
                machine = world.machines[host]
                if machine.epoch <= self.epoch and not machine.stopped:
                    machine.vault.pop(part.name, None)

    def drop(self, order: o.Drop) -> None:
        machine = self.simulation.world.machines[order.host]
        answers = machine.up and machine.agent and not (machine.hung or machine.stopped)
        if answers and machine.epoch <= self.epoch:
            for each in order.slices:
                machine.tables.pop(each, None)
            for file in order.files:
                machine.files.pop(file, None)

    def ask_somebody(self, number: o.OrderId, order: o.Order) -> None:
        """Send an order over the network, have it carried out, and send the answer back."""
        simulation = self.simulation
        simulation.ordered()
        chance = simulation.chance
        wait = simulation.delay()

        def arrive() -> None:
            machines = self.simulation.world.machines.values()
            stopped = {each.name for each in machines if each.up and each.stopped}
            if stopped.intersection(_hosts(order)):
                simulation.after(1, arrive)
                return
            answer = self.answer(number, order)
            if answer is None:
                return  # nobody is there to answer
            simulation.say(self.epoch, "answer", answer)
            back = simulation.delay()
            if simulation.faulty and chance.random() < 0.01:
                return  # it is lost; the order counts as failed when its time is over
            self.after(back, lambda: self.take(answer))
            if simulation.faulty and chance.random() < 0.02:
                self.after(back + chance.random() * 3, lambda: self.take(answer))

        # A request that is on its way arrives though its sender may be dead by then.
        simulation.after(wait, arrive)

    def answer(self, number: o.OrderId, order: Any) -> Done | Failed | None:
        world = self.simulation.world
        host = _host(order)
        if host is not None:
            machine = world.machines[host]
            if isinstance(order, o.Prepare):
                return self.prepare(number, host)
            if not machine.up or not machine.agent:
                return Failed(number, f"{host} refuses connections", unreachable=host)
            if machine.hung:
                return None
            if machine.epoch > self.epoch:
                return Failed(number, fenced=True)
        try:
            return Done(number, self.effect(order))
        except TableFenced:
            return Failed(number, "a newer attempt has taken over")
        except StaleDriver:
            return Failed(number, fenced=True)
        except Trouble as trouble:
            if trouble.damaged in world.withdrawn and self.waits_for(number):
                raise Violation(f"{order} needs a part that was withdrawn") from trouble
            return Failed(
                number,
                str(trouble),
                trouble.unreachable,
                trouble.damaged,
                trouble.damaged_at,
                trouble.missing,
            )

    def waits_for(self, number: o.OrderId) -> bool:
        alive = not self.dead and not self.paused and self.simulation.is_current(self)
        return alive and number in self.query.outstanding

    def prepare(self, number: o.OrderId, host: Host) -> Done | Failed:
        machine = self.simulation.world.machines[host]
        if not machine.up:
            return Failed(number, f"no executor on {host}")
        if machine.epoch > self.epoch:
            return Failed(number, fenced=True)
        machine.epoch, machine.agent, machine.hung = self.epoch, True, False
        return Done(number, self.inspect(host))

    def inspect(self, host: Host) -> Inspected:
        machine = self.simulation.world.machines[host]
        tables = {i: table.reachable() for i, table in machine.tables.items()}
        files = {name: file.fence for name, file in machine.files.items()}
        return Inspected(tables, frozenset(machine.vault), files)

    def effect(self, order: Any) -> object:
        world = self.simulation.world
        match order:
            case o.Make():
                world.make(order)
            case o.Advance():
                world.advance(order)
            case o.Capture():
                return world.capture(order)
            case o.Store():
                return world.store(order)
            case o.Merge():
                return world.merge(order)
            case o.Replay():
                self.buffers.replay(order)
            case o.Inspect(host, slices):
                wanted = {each.id for each in slices}
                found = self.inspect(host)
                tables = {i: v if i in wanted else frozenset() for i, v in found.tables.items()}
                return Inspected(tables, found.parts, found.files)
            case o.Publish(published):
                self.check_epoch()
                world.durable.manifests[published.version] = published
            case o.Rewind(start, target, fence):
                self.check_epoch()
                if fence < self.fence:
                    raise Trouble("a later batch has begun")
                self.fence = fence
                if start + 1 < world.durable.oldest_offsets:
                    raise Violation(f"Spark's log has no offsets of batch {start + 1} any more")
                earlier = {v for v in world.durable.commits if v <= start}
                world.durable.commits = earlier | ({start} if start >= 0 else set())
                world.durable.rewind = max(target, world.durable.rewind)
                self.buffers.sent.clear()
                self.after(0.2, self.ask)
        return None

    def check_epoch(self) -> None:
        durable = self.simulation.world.durable
        if durable.down:
            raise Trouble("the store does not answer")
        if durable.epoch != self.epoch:
            raise StaleDriver("a newer driver has taken over")


class Attempt:
    """One attempt to run a batch: its tasks, one after the other, then the commit."""

    def __init__(self, driver: Driver, order: o.RunBatch) -> None:
        self.driver, self.order = driver, order
        self.tasks = list(order.slices)
        driver.simulation.chance.shuffle(self.tasks)
        self.wanted = {each.slice: each for each in order.captures}
        if len(self.wanted) < len(order.captures):
            raise Violation(f"two captures of one slice in a batch: {order.captures}")
        self.reports: dict[Any, SliceReport] = {}
        self.ended = False
        self.generations = {m.name: m.generation for m in driver.simulation.world.machines.values()}

    def run(self) -> None:
        self.driver.simulation.after(self.driver.simulation.delay(), self.next)

    def next(self) -> None:
        simulation, world = self.driver.simulation, self.driver.simulation.world
        if self.ended:
            return
        if self.driver.dead or (self.driver.paused and not self.tasks):
            for each in self.tasks:
                simulation.after(simulation.chance.random() * 3, partial(self.run_late, each))
            if not self.driver.dead:
                self.driver.after(0.5, self.next)
            return
        if not self.tasks:
            self.deliver()
            return
        machine = world.machines[self.tasks[-1].node]
        if machine.up and machine.stopped:
            simulation.after(1, self.next)
            return
        each = self.tasks.pop()
        try:
            if not machine.up or machine.generation != self.generations[each.node]:
                raise Trouble(f"the executor of {each.node} is gone")
            told = world.run_slice(
                each, self.order.version, self.order.fence, self.wanted.get(each.id)
            )
            left = world.shed(each)
        except TableFenced as trouble:
            self.fail(Cause.FENCED, trouble)
        except Missing as trouble:
            self.fail(Cause.STATE_MISSING, trouble)
        except Trouble as trouble:
            self.fail(Cause.PROCESS_LOST, trouble)
        else:
            captured = None if isinstance(told, str) else told
            why = told if isinstance(told, str) else None
            self.reports[each.id] = SliceReport(captured, why, left_to_shed=left)
            simulation.after(simulation.chance.random() * 0.02, self.next)

    def cancel(self) -> None:
        if not self.ended and self.tasks:
            self.fail(Cause.PROCESS_LOST, Trouble("it was cancelled"))

    def fail(self, cause: Cause, trouble: Trouble) -> None:
        self.ended = True
        for each in self.tasks:  # they do not know, and run on as long as nobody stops them
            simulation = self.driver.simulation
            simulation.after(simulation.chance.random() * 3, partial(self.run_late, each))
        event = BatchFailed(self.order.version, self.order.fence, cause, str(trouble))
        self.driver.take(event)

    def run_late(self, each: Slice) -> None:
        world = self.driver.simulation.world
        machine = world.machines[each.node]
        if machine.up and machine.stopped:
            self.driver.simulation.after(1, partial(self.run_late, each))
        elif machine.up and machine.generation == self.generations[each.node]:
            with suppress(Trouble):
                world.run_slice(each, self.order.version, self.order.fence, None)

    def deliver(self) -> None:
        world = self.driver.simulation.world
        if world.durable.epoch != self.driver.epoch:
            self.fail(Cause.FENCED, Trouble("a newer driver has taken over"))
            return
        for each in self.order.slices:
            if not world.machines[each.node].up or each.id not in world.machines[each.node].tables:
                self.fail(Cause.PROCESS_LOST, Trouble("what it made is lost"))
                return
        found = world.check_results(self.order)
        if self.order.deliver:
            before = world.durable.output.get(self.order.version)
            if before is not None and before != found:
                raise Violation(f"batch {self.order.version} was delivered with other results")
            if self.order.version <= world.durable.rewind:
                raise Violation(f"batch {self.order.version} is delivered once more")
            world.durable.output[self.order.version] = found
        self.driver.after(0.002, self.commit)

    def commit(self) -> None:
        driver, world = self.driver, self.driver.simulation.world
        if self.driver.paused:
            self.driver.after(0.5, self.commit)
            return
        if world.durable.epoch != driver.epoch:
            self.fail(Cause.FENCED, Trouble("a newer driver has taken over"))
            return
        world.durable.commits.add(self.order.version)
        oldest = self.order.version - driver.plan.retained + 1
        world.durable.oldest_offsets = max(world.durable.oldest_offsets, oldest)
        world.durable.arrangement = self.order.arrangement
        driver.buffers.keep(self.order)
        driver.simulation.committed(driver, self.order.version)
        driver.take(BatchCommitted(self.order.version, self.order.fence, self.reports))
        driver.ask()


def _divided_alike(before: Query, after: Query) -> bool:
    """Whether nothing has changed that a query validates."""
    return (
        before.slices is after.slices
        and before.routed is after.routed
        and (before.restart is None) is (after.restart is None)
    )


def _host(order: Any) -> Host | None:
    match order:
        case o.Make(slice) | o.Advance(slice) | o.Capture(_, slice) | o.Merge(slice):
            return slice.node
        case o.Store(captured):
            return captured.node
        case o.Prepare(host) | o.Inspect(host):
            return host
        case _:
            return None


def _hosts(order: Any) -> set[Host]:
    """Where an order is carried out."""
    if isinstance(order, o.Replay):
        return {each.node for each in order.slices}
    host = _host(order)
    return set() if host is None else {host}


class Simulation:
    """One history."""

    def __init__(self, plan: Plan, story: list[str] | None = None) -> None:
        self.plan, self.story = plan, story
        self.chance = random.Random(plan.seed)
        self.operators = {
            "a": OperatorPlan("a", plan.groups),
            "b": OperatorPlan("b", plan.groups, ("a",)),
        }
        names = [f"h{i}" for i in range(plan.hosts)]
        groups = {name: each.key_groups for name, each in self.operators.items()}
        self.world = World(Truth(plan.seed), groups, names)
        routing = {
            name: Routing.even(each.key_groups, self.chance.randint(1, 2))
            for name, each in self.operators.items()
        }
        placed = Even().place({n: r.instances for n, r in routing.items()}, names)
        self.routed = {n: Routed(r, tuple(placed[n])) for n, r in routing.items()}
        often = Periodic(plan.interval, plan.incremental, at_most=8)
        checkpointing: Checkpointing = Unequal(often, plan.rarely) if plan.rarely else often
        self.policies = Policies(
            checkpointing if plan.backs_up else Never(),
            plan.backup,
            Even(),
            plan.parallelism,
            longest_chain=3,
            tolerate=10**6,
            retained_offsets=plan.retained,
            hold=plan.hold,
            most_slices=plan.most_slices,
        )
        self.now = 0
        self.steps = 0
        self.made = 0
        self.told: Counter[str] = Counter()
        self.faulty = True
        self.kinds: Counter[str] = Counter()
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self.commands: dict[o.CommandId, str] = {}
        self.ended: dict[o.CommandId, str | None] = {}
        self.last_commit = 0
        self.lost = False
        """Whether there is nothing any more that the query could go on from."""
        self.commits_since_quiet = 0
        self._orders = 0
        self._after_order: dict[int, list[Planned]] = {}
        self.driver = self.new_driver()

    # Time

    def at(self, when: int, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + int(seconds * SECOND), action)

    def delay(self) -> float:
        """How long a message is on its way: mostly not long."""
        chance = self.chance.random()
        if self.faulty and chance < 0.02:
            return self.chance.random() * (20 if chance < 0.015 else 200)
        return 0.001 + chance * 0.05

    def say(self, epoch: int, what: str, value: object) -> None:
        if self.story is not None:
            self.story.append(f"{self.now / SECOND:9.3f} driver {epoch} {what}: {value}")

    # The run

    def run(self) -> Simulation:
        """Let faults happen, then let everything come to an end."""
        for planned in (*self.plan.faults, *self.plan.commands):
            if planned.at is not None:
                self.after(planned.at, partial(self.happen, planned))
            elif planned.after_order is not None:
                self._after_order.setdefault(planned.after_order, []).append(planned)
        times = [p.at for p in (*self.plan.faults, *self.plan.commands) if p.at is not None]
        self._run_until(int((max(times, default=0.0) + 3) * SECOND))
        self.mend()
        self._run_until(self.now + _QUIET, until=self.is_over)
        if not self.is_over():
            raise Violation(f"it does not come to an end: {self._why()}")
        return self

    def _run_until(self, limit: int, until: Callable[[], bool] = lambda: False) -> None:
        while self._heap and self._heap[0][0] <= limit and not until():
            self.now, _, action = heapq.heappop(self._heap)
            action()
        if not until():
            self.now = max(self.now, limit)

    def run_until_protected(self) -> None:
        """Let time pass until every node may be lost."""
        limit = self.now + _QUIET
        self._run_until(limit, until=self.is_protected)
        if self.now >= limit:
            raise Violation(f"it is never protected: {self._why()}")

    def is_protected(self) -> bool:
        query = self.driver.query
        return (
            query.committed >= 3
            and not (query.restart or query.recovery or query.suspects)
            and all(machine.up for machine in self.world.machines.values())
            and query.ready == frozenset(self.world.machines)
            and query.checkpoints is not None
            and not (query.checkpoints.wanted or query.checkpoints.current)
            and all(
                (query.protected(each) or -1) >= query.trimmed.get(each.operator, -1)
                and query.protected(each) is not None
                for each in serving(query.slices.values())
            )
        )

    def is_over(self) -> bool:
        query = self.driver.query
        return self.lost or (
            self.commits_since_quiet >= 5
            and not query.recovery
            and not query.restart
            and not query.suspects
            and not query.moves
            and not query.waiting
            and set(self.commands) <= set(self.ended)
            and self.is_tidy()
        )

    def is_tidy(self) -> bool:
        """Whether no instance has too many slices, and nothing is left that nobody needs."""
        query = self.driver.query
        slices = Counter((s.operator, s.instance) for s in serving(query.slices.values()))
        named = {part.name for of in query.inventory.values() for part in of.parts}
        for manifest in self.world.durable.manifests.values():
            named |= {part.name for of in manifest.parts.values() for part in of}
        machines = self.world.machines.values()
        strays = any(machine.vault.keys() - named for machine in machines)
        return (
            max(slices.values(), default=0) <= self.plan.most_slices
            and all(machine.tables.keys() <= query.slices.keys() for machine in machines)
            and all(self.is_needed(*file) for machine in machines for file in machine.files.items())
            and (not strays or self._is_storing())
        )

    def is_needed(self, name: str, file: File) -> bool:
        """Whether a captured file is to be stored or read, or is of a batch that runs."""
        query = self.driver.query
        if any(r.handed_out and any(c.file == name for c in r.captured) for r in query.reads):
            return True
        if query.batch is not None and query.batch.fence == file.fence:
            return True
        orders = [waiting.order for waiting in query.outstanding.values()]
        return any(
            order.captured.file == name
            if isinstance(order, o.Store)
            else (order.fence, order.slice.id) == (file.fence, file.slice)
            for order in orders
            if isinstance(order, o.Store | o.Capture)
        )

    def _is_storing(self) -> bool:
        waiting = self.driver.query.outstanding.values()
        return any(isinstance(each.order, o.Store | o.Merge) for each in waiting)

    def _why(self) -> str:
        query = self.driver.query
        return (
            f"{self.commits_since_quiet} commits since the last fault, {query.changes}, "
            f"batch {query.batch}, tidy {self.is_tidy()}, "
            f"recovery {query.recovery}, restart {query.restart}, moves {query.moves}, "
            f"waiting {query.waiting}, checkpoints {query.checkpoints}, "
            f"outstanding {query.outstanding}, open {set(self.commands) - set(self.ended)}"
        )

    def is_current(self, driver: Driver) -> bool:
        return driver.epoch == self.world.durable.epoch

    def committed(self, driver: Driver, version: Version) -> None:
        self.last_commit = self.now
        if not self.faulty:
            self.commits_since_quiet += 1
        before = self.world.durable.commits - {version}
        if before and max(before) != version - 1:
            raise Violation(f"batch {version} is committed after {max(before)}")
        served = list(serving(driver.query.slices.values()))
        self.world.check_served(served, version)

    def end(self, driver: Driver, command: o.CommandId, error: str | None, result: Any) -> None:
        if command in self.ended and self.is_current(driver):
            raise Violation(f"command {command} ended twice")
        if error is None and isinstance(result, int) and self.is_current(driver):
            newest = max(self.world.durable.manifests, default=-1)
            if newest < result:
                raise Violation(f"checkpoint {result} ended well, the newest one is {newest}")
        self.ended[command] = error
        if isinstance(driver.commands.get(command), ReadState):
            # Whoever reads takes some time for it.
            driver.after(self.chance.random() * 200, lambda: driver.take(GiveUp(command)))

    def stopped(self, driver: Driver, reason: str) -> None:
        driver.dead = True
        self.told["stopped"] += 1
        left = driver.commands.keys() - self.ended.keys()
        if left:
            raise Violation(f"the query stopped, and commands {left} have not ended")
        if self.is_current(driver):
            self.check_excuse(driver, reason)
            if not self.lost:
                self.after(1.0, self.replace_driver)

    def check_excuse(self, driver: Driver, reason: str) -> None:
        """A query may stop only if there is nothing that it could go on from, or not just now."""
        if "there has been no node" in reason or " times: " in reason:
            return
        if "will not reach back" in reason and not self.plan.hold:
            return
        ready = driver.query.ready
        for version, manifest in self.world.durable.manifests.items():
            parts = [part for of in manifest.parts.values() for part in of]
            enough = version + 1 >= self.world.durable.oldest_offsets
            if enough and all(self.world.is_whole(part, ready) for part in parts):
                raise Violation(f"it stopped, though version {version} can be had: {reason}")
        if "is lost; the newest" not in reason:
            raise Violation(f"the query stopped: {reason}")
        self.lost = True

    def check_order(self, driver: Driver, order: o.Order) -> None:
        """No order may take away what is promised."""
        if isinstance(order, o.Withdraw):
            gone = {part.name for part in order.parts}
            for manifest in driver.query.published:
                named = {part.name for of in manifest.parts.values() for part in of}
                if named & gone:
                    raise Violation(f"{order}: version {manifest.version} needs {named & gone}")
        elif isinstance(order, o.Drop) and self.is_current(driver):
            for name in order.files:
                file = self.world.machines[order.host].files.get(name)
                if file is not None and self.is_needed(name, file):
                    raise Violation(f"{order}: {name} is still needed")
        elif isinstance(order, o.Publish):
            known = {p.name for of in driver.query.inventory.values() for p in of.parts}
            named = {p.name for of in order.published.parts.values() for p in of}
            if not named <= known:
                raise Violation(f"{order} names parts that are not known: {named - known}")

    def _void_commands(self, driver: Driver) -> None:
        """Who gave commands to a driver that is gone knows that nobody carries them out."""
        for command in driver.commands:
            self.ended.setdefault(command, "the driver is gone")

    def new_driver(self) -> Driver:
        self.world.durable.epoch += 1
        driver = Driver(self, self.world.durable.epoch)
        self.after(0.01, driver.start)
        return driver

    def replace_driver(self) -> None:
        if self.driver.dead:
            self.driver = self.new_driver()

    # Commands and faults

    def ordered(self) -> None:
        """An order was given: faults may follow on it."""
        self._orders += 1
        for planned in self._after_order.pop(self._orders, ()) if self.faulty else ():
            self.after(self.chance.random() * 0.1, partial(self.happen, planned))

    def happen(self, planned: Planned) -> None:
        chance = random.Random(f"{self.plan.seed}-{planned.number}")
        if planned.kind == "command":
            self.command(chance)
        elif self.faulty:
            self.fault(planned.kind, chance)

    def command(self, chance: random.Random) -> None:
        number = o.CommandId(1000 + len(self.commands))
        name = chance.choice(list(self.operators))
        open_ = sorted(self.driver.commands.keys() - self.ended.keys())
        if open_ and chance.random() < 0.3 and not (self.driver.dead or self.driver.paused):
            self.driver.take(GiveUp(chance.choice(open_)))
            return
        event: Command = chance.choice(
            [
                Scale(number, name, chance.randint(1, self.plan.groups)),
                Scale(number, name, chance.randint(1, 3)),
                Rebalance(number),
                TakeCheckpoint(number),
                ReadState(number, name),
            ]
        )
        if self.driver.dead or self.driver.paused or not self.driver.started:
            return
        self.commands[number] = str(event)
        self.driver.commands[number] = event
        self.driver.take(event)

    def fault(self, kind: str, chance: random.Random) -> None:
        self.made += 1
        self.kinds[kind] += 1
        machine = chance.choice(list(self.world.machines.values()))
        self.say(0, "fault", f"{kind} {machine.name}")
        match kind:
            case "executor":
                self.lose(machine.name, memory=False)
            case "host":
                self.lose(machine.name, memory=True, disk=chance.random() < 0.3)
            case "agent":
                machine.agent = False
            case "hang":
                machine.hung = True
                if chance.random() < 0.5:
                    self.after(chance.random() * 60, lambda: setattr(machine, "hung", False))
            case "stop":
                machine.stopped = True
                after = chance.choice([5, 60, 400]) * chance.random()
                self.after(after, lambda: setattr(machine, "stopped", False))
            case "driver":
                self.kill_driver()
            case "second driver":
                self.second_driver()
            case "disk full":
                machine.full = True
                self.after(chance.random() * 10, lambda: setattr(machine, "full", False))
            case "damage":
                self.damage(machine.name, chance)
            case "store down":
                self.world.durable.down = True
                self.after(chance.random() * 5, lambda: setattr(self.world.durable, "down", False))
            case "clock":
                self.now += chance.choice([1, 30, 700]) * SECOND
            case "lost table":
                if machine.tables:
                    machine.tables.pop(chance.choice(list(machine.tables)))
            case "cut":
                other = chance.choice(list(self.world.machines))
                pair = frozenset([machine.name, other])
                self.world.cuts.add(pair)
                self.after(chance.random() * 20, lambda: self.world.cuts.discard(pair))

    def lose(self, host: Host, *, memory: bool, disk: bool = False) -> None:
        machine = self.world.machines[host]
        if not machine.up:
            return
        machine.up = machine.agent = machine.hung = machine.stopped = False
        machine.generation += 1
        if memory:
            machine.tables, machine.files = {}, {}
        if disk:
            machine.vault = {}
        self.tell_drivers(NodeLost(host))
        self.after(self.chance.choice([0.5, 3.0, 40.0]), lambda: self.come_back(host))

    def come_back(self, host: Host) -> None:
        machine = self.world.machines[host]
        if not machine.up:
            machine.up = True
            self.tell_drivers(NodeCame(host))

    def tell_drivers(self, event: Event) -> None:
        driver = self.driver
        driver.after(self.chance.random() * 0.5, lambda: self._tell_if_so(driver, event))

    def _tell_if_so(self, driver: Driver, event: Any) -> None:
        if not driver.started:
            return
        # News of a host come in order; the newest is what counts.
        up = self.world.machines[event.host].up
        known = event.host in driver.query.nodes or event.host in driver.query.banned
        if isinstance(event, NodeLost):
            driver.take(event)
            if up:
                driver.take(NodeCame(event.host))
        elif up and not known:
            driver.take(event)

    def kill_driver(self) -> None:
        self.driver.dead = True
        self._void_commands(self.driver)
        self.after(self.chance.choice([0.2, 5.0]), self.replace_driver)

    def second_driver(self) -> None:
        """Another driver takes over, while the first one goes on or is paused and wakes up."""
        first = self.driver
        if first.dead or first.paused:
            return
        first.paused = self.chance.random() < 0.7
        self._void_commands(first)
        self.driver = self.new_driver()
        if first.paused:
            self.after(self.chance.random() * 10, first.resume)

    def damage(self, host: Host, chance: random.Random) -> None:
        parts = self.world.durable.parts
        where: dict[str, File] = parts if parts else self.world.machines[host].vault
        if where:
            name = chance.choice(list(where))
            where[name] = File(where[name].content, damaged=True)

    def mend(self) -> None:
        """No more faults: everything that can come back does."""
        self.faulty = False
        self.commits_since_quiet = 0
        self.world.durable.down = False
        self.world.cuts.clear()
        for machine in self.world.machines.values():
            machine.full = False
            machine.hung = machine.stopped = False
            if not machine.up:
                self.come_back(machine.name)
        if self.driver.dead:
            self.replace_driver()


def simulate(seed: int, faults: int = 10) -> Simulation:
    """Run the history of a seed; Violation if something happens that must not."""
    return Simulation(Plan.of(seed, faults)).run()


def fails(plan: Plan) -> BaseException | None:
    """What is wrong with a history, if anything is."""
    try:
        Simulation(plan).run()
    except Exception as error:
        return error
    return None


def shrink(plan: Plan) -> Plan:
    """The same history with as few faults and commands as still make it fail."""
    for which in ("faults", "commands"):
        for planned in getattr(plan, which):
            left = tuple(each for each in getattr(plan, which) if each != planned)
            fewer = replace(plan, **{which: left})
            if fails(fewer) is not None:
                plan = fewer
    return plan


def main() -> None:
    """Tell the story of a seed, without what has nothing to do with its failure."""
    plan = Plan.of(int(sys.argv[1]))
    if fails(plan) is not None:
        plan = shrink(plan)
    print(plan)
    story: list[str] = []
    try:
        Simulation(plan, story=story).run()
    finally:
        print("\n".join(story))


if __name__ == "__main__":
    main()
