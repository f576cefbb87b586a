"""A driver as a model: the real state of the query, and threads that carry its orders out.

The driver feeds events to the real protocols. Its orders travel over a network that delays, loses
and repeats answers. One thread writes to the checkpoint folder, in the order of the orders. A
driver can be killed or paused between any two of its orders.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from anabranch.backup import Fragments
from anabranch.fragments.cost import Coded, Cost, Transferred
from anabranch.protocols import orders as o
from anabranch.protocols.events import (
    BatchAsked,
    BatchCommitted,
    BatchFailed,
    BatchLeft,
    Cause,
    Done,
    Event,
    Failed,
    Inspected,
    NodeCame,
    SliceReport,
    Started,
    TimePassed,
)
from anabranch.protocols.machine import step
from anabranch.protocols.model import Host, Slice, SliceId
from anabranch.protocols.orders import SECOND
from anabranch.protocols.query import Query
from anabranch.state.part import Part
from anabranch.units import Version
from protocols.plans import Stage
from protocols.world import Buffers, Missing, StaleDriver, TableFenced, Trouble, Violation

if TYPE_CHECKING:
    from protocols.simulator import Simulation

_MOST_STEPS = 10_000
_UNCOUNTED = (o.Wake, o.Tell, o.End, o.Stop, o.AskNodes)
"""Orders that change nothing outside of the driver."""


class Driver:
    """A driver: the state of the query, and the threads that carry orders out, as a model."""

    def __init__(self, simulation: Simulation, epoch: int) -> None:
        self.simulation, self.epoch = simulation, epoch
        plan, world = simulation.plan, simulation.world
        self.query = Query(simulation.operators, simulation.policies, epoch)
        self.buffers = Buffers(world, {n: p.before for n, p in simulation.operators.items()})
        self.paused = self.dead = self.started = False
        self.backlog: list[Callable[[], None]] = []
        """What it goes on with when it is resumed."""
        self.spark = world.durable.committed
        """Spark has run the batches up to this one."""
        self.commands: dict[o.CommandId, Event] = {}
        self.given_up: set[o.CommandId] = set()
        """The commands that nobody waits for any more."""
        self.plan = plan
        self.attempt: Attempt | None = None
        self.fence = 0
        """The fence of the batch that began last, or of what took Spark back since."""
        self.ahead = simulation.chance.randint(0, 10**6) * SECOND
        """How far its clock is ahead: no two machines have the same."""
        self.writing_until = 0
        self.failed_since_held = 0
        """How many checkpoints have failed since the stream was held."""
        self.withdrawing: set[Version] = set()
        """Versions whose manifests are still to be deleted."""
        self.parts: dict[str, Part] = {}
        """The parts that it knew of since it began or went back, but for those it had deleted."""
        self.unreadable: set[Version] = set()
        """The versions whose manifests it could not read when it began."""
        self.failed_in_a_row = 0
        """How many checkpoints it was told to have failed since one did not."""
        self.damaged: set[tuple[str, Host | None]] = set()
        """The copies that it was told are damaged: parts, and holders or None for all of them."""
        self.lacking: set[tuple[str, Host]] = set()
        """The parts that a holder has told it that it does not have."""

    def start(self) -> None:
        simulation, world = self.simulation, self.simulation.world
        self.started = True
        facts = world.facts(simulation.routed)
        self.unreadable = set(facts.unreadable)
        self.take(Started(facts))
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
            self.backlog.append(partial(self.take, event))
            return
        simulation = self.simulation
        simulation.steps += 1
        if simulation.steps > _MOST_STEPS:
            raise Violation(f"it does not come to rest: {simulation.why()}")
        simulation.say(self.epoch, "event", event)
        before = self.query
        if isinstance(event, Failed) and event.damaged and event.order in before.outstanding:
            self.damaged |= {(event.damaged, host) for host in event.damaged_at or [None]}
        if isinstance(event, Done) and isinstance(event.answer, Inspected):
            waiting = before.outstanding.get(event.order)
            if waiting is not None and isinstance(waiting.order, o.Prepare):
                host, there = waiting.order.host, event.answer.parts
                named = {part.name for part in self.parts.values() if host in part.holders}
                self.lacking |= {(name, host) for name in named - there}
        self.query, given = step(before, event, simulation.now + self.ahead)
        if simulation.is_current(self) and not _divided_alike(before, self.query):
            self.query.validate()
        if before.inventory is not self.query.inventory:
            known = (part for of in self.query.inventory.values() for part in of.parts)
            for part in known:
                self.lacking -= {(part.name, host) for host in part.holders}
                held = self.parts.get(part.name, part).holders
                # Who had a fragment that was made again elsewhere has one too many, if it returns.
                before_it = () if part.name == self._mended(before, event) else held
                everywhere = tuple(dict.fromkeys((*before_it, *part.holders)))
                self.parts[part.name] = replace(part, holders=everywhere)
        for number, order in given:
            self.give(number, order)

    def _mended(self, before: Query, event: Event) -> str | None:
        """The part whose lost fragments were made again, if that is what has happened."""
        if not isinstance(event, Done) or event.order not in before.outstanding:
            return None
        order = before.outstanding[event.order].order
        return order.part.name if isinstance(order, o.Mend) else None

    def give(self, number: o.OrderId | None, order: o.Order) -> None:
        """Carry out an order, unless a fault comes before it."""
        if isinstance(order, _UNCOUNTED):
            count = None
        else:
            count = self.simulation.count_order()
            self.simulation.reached(count, Stage.GIVEN, _hosts(order))
        if self.dead:
            return
        if self.paused:
            self.backlog.append(lambda: self.give_now(number, order, count))
        else:
            self.give_now(number, order, count)

    def resume(self) -> None:
        self.paused = False
        backlog, self.backlog = self.backlog, []
        for go_on in backlog:
            go_on()

    def give_now(self, number: o.OrderId | None, order: o.Order, count: int | None) -> None:
        simulation = self.simulation
        simulation.say(self.epoch, f"order {number}", order)
        simulation.check_order(self, order)
        match order:
            case o.RunBatch() if self.query.batch is None:
                pass  # Spark has left meanwhile
            case o.RunBatch():
                self.attempt = Attempt(self, order, count)
                self.fence = order.fence
                self.attempt.run()
            case o.CancelBatch(_, fence):
                if self.attempt is not None and self.attempt.order.fence == fence:
                    self.after(0.05, self.attempt.cancel)
            case o.Wake(at):
                simulation.at(at - self.ahead, lambda: self.take(TimePassed()))
            case o.Trim(operator, upto):
                self.buffers.trim(operator, upto)
            case o.Note() | o.Publish():
                assert number is not None
                self.write(lambda: self.answer_written(number, order, count))
            case o.Withdraw(versions, parts):
                self.write(lambda: self.withdraw(versions, parts))
            case o.Drop():
                self.send_drop(order)
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
                self.ask_somebody(number, order, count)

    # The checkpoint folder

    def write(self, action: Callable[[], None]) -> None:
        """Have the one thread that writes to the checkpoint folder do something, in its turn."""
        simulation = self.simulation
        slow = simulation.faulty and simulation.chance.random() < 0.01
        seconds = simulation.chance.random() * (100 if slow else 0.02)
        self.writing_until = max(self.writing_until, simulation.now) + int(seconds * SECOND)

        def run() -> None:
            if self.paused:
                self.backlog.append(run)
            elif not self.dead:
                action()

        simulation.at(self.writing_until, run)

    def answer_written(
        self, number: o.OrderId, order: o.Note | o.Publish, count: int | None
    ) -> None:
        simulation, durable = self.simulation, self.simulation.world.durable
        answer: Done | Failed = Done(number)
        try:
            self.check_epoch()
        except StaleDriver:
            answer = Failed(number, fenced=True)
        except Trouble as trouble:
            answer = Failed(number, str(trouble))
        else:
            match order:
                case o.Note(arrangement, routed, slices):
                    durable.noted = (arrangement, routed, slices)
                case o.Publish(published):
                    durable.manifests[published.version] = published
                    durable.unreadable.discard(published.version)
                    self.unreadable.discard(published.version)
                    self.withdrawing.discard(published.version)
                    simulation.check_manifests()
            if simulation.faulty and simulation.chance.random() < 0.02:
                answer = Failed(number, "the store took too long")  # and did it all the same
        simulation.say(self.epoch, "answer", answer)
        simulation.reached(count, Stage.DONE, set())
        self.take(answer)
        simulation.reached(count, Stage.ANSWERED, set())

    def withdraw(self, versions: tuple[Version, ...], parts: tuple[Part, ...]) -> None:
        world = self.simulation.world
        self.withdrawing |= set(versions)
        if world.durable.epoch != self.epoch or world.durable.down:
            return
        for version in self.withdrawing:
            world.durable.manifests.pop(version, None)
            world.durable.unreadable.discard(version)
        self.withdrawing.clear()
        for part in parts:
            world.durable.parts.pop(part.name, None)
            world.withdrawn.add(part.name)
            for host in part.holders:
                machine = world.machines[host]
                if machine.epoch <= self.epoch and not machine.stopped:
                    machine.vault.pop(part.name, None)
        self.simulation.check_manifests()

    def check_epoch(self) -> None:
        durable = self.simulation.world.durable
        if durable.down:
            raise Trouble("the store does not answer")
        if durable.epoch != self.epoch:
            raise StaleDriver("a newer driver has taken over")

    # Nodes

    def send_drop(self, order: o.Drop) -> None:
        """It has no answer: now and then it is late, or lost."""
        simulation = self.simulation
        chance = simulation.chance.random() if simulation.faulty else 1.0
        if chance > 0.01:
            seconds = simulation.chance.random() * 20 if chance < 0.03 else 0.001
            simulation.after(seconds, lambda: self.drop(order))

    def drop(self, order: o.Drop) -> None:
        machine = self.simulation.world.machines[order.host]
        if machine.answers and machine.epoch <= self.epoch:
            for each in order.slices:
                machine.tables.pop(each, None)
            for file in order.files:
                machine.files.pop(file, None)

    def ask_somebody(self, number: o.OrderId, order: Any, count: int | None) -> None:
        """Send an order over the network, have it carried out, and send the answer back."""
        simulation = self.simulation
        chance = simulation.chance
        hosts = _hosts(order)
        wait = simulation.delay(hosts)

        def arrive() -> None:
            machines = self.simulation.world.machines.values()
            stopped = {each.name for each in machines if each.up and each.stopped}
            if stopped.intersection(hosts):
                simulation.after(1, arrive)
                return
            if isinstance(order, o.Rewind) and self.dead:
                return  # no other process does it
            if isinstance(order, o.Rewind) and self.writing_until > simulation.now:
                # A version that was to be published before exists by then, or does not.
                simulation.at(self.writing_until, arrive)
                return
            answer = self.answer(number, order)
            simulation.reached(count, Stage.DONE, hosts)
            if answer is None:
                return  # nobody is there to answer
            simulation.say(self.epoch, "answer", answer)
            back = simulation.delay(hosts)
            if simulation.faulty and chance.random() < 0.01:
                simulation.ail(*hosts)
                return  # it is lost; the order counts as failed when its time is over
            self.after(back, lambda: self.take_answer(answer, count, hosts))
            if simulation.faulty and chance.random() < 0.02:
                self.after(back + chance.random() * 3, lambda: self.take(answer))

        # A request that is on its way arrives though its sender may be dead by then.
        simulation.after(wait, arrive)

    def take_answer(self, answer: Done | Failed, count: int | None, hosts: set[Host]) -> None:
        self.take(answer)
        self.simulation.reached(count, Stage.ANSWERED, hosts)

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
            return Done(number, self.effect(order), self.cost(order))
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
                trouble.final,
                kind=trouble.kind,
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
        if machine.barren and not (machine.agent and not machine.hung):
            return Failed(number, f"no agent can be started on {host}")
        if not machine.agent or machine.hung:
            self.simulation.ail(host)
        machine.epoch, machine.agent, machine.hung = self.epoch, True, False
        return Done(number, self.inspect(host))

    def inspect(self, host: Host) -> Inspected:
        machine = self.simulation.world.machines[host]
        tables = {i: table.reachable() for i, table in machine.tables.items()}
        files = {name: file.fence for name, file in machine.files.items()}
        return Inspected(tables, frozenset(machine.vault), files)

    def cost(self, order: Any) -> Cost | None:
        """What an order took at a node: links and processors are faster at some times."""
        simulation = self.simulation
        backup = simulation.plan.backup
        if not isinstance(backup, Fragments) or backup.adapt is None:
            return None
        chance = random.Random(hash((simulation.plan.seed, simulation.now // (3 * SECOND))))
        up, down, coding = (10 ** chance.uniform(4, 9) for _ in range(3))
        coded = (Coded(2, 1, 1_000_000, 1_000_000 / coding),)
        match order:
            case o.Store() | o.Merge():
                return Cost(sent=Transferred(1_000_000, 1_000_000 / up), encoded=coded)
            case o.Make() | o.Mend():
                return Cost(received=Transferred(1_000_000, 1_000_000 / down), recomputed=coded)
            case _:
                return None

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
            case o.Mend():
                return world.mend(order)
            case o.Replay():
                self.buffers.replay(order)
            case o.Inspect(host, slices):
                wanted = {each.id for each in slices}
                found = self.inspect(host)
                tables = {i: v if i in wanted else frozenset() for i, v in found.tables.items()}
                return Inspected(tables, found.parts, found.files)
            case o.Rewind():
                self.rewind(order)
        return None

    def rewind(self, order: o.Rewind) -> None:
        durable = self.simulation.world.durable
        self.check_epoch()
        if order.fence < self.fence:
            raise Trouble("a later batch has begun")
        self.fence = order.fence
        if not durable.trusted:
            if order.start < 0 < durable.oldest_offsets:
                raise Trouble("the state is lost; the newest checkpoint was not had", final=True)
            # Later batches are planned anew: nothing counts that was delivered of them.
            durable.output = {v: out for v, out in durable.output.items() if v <= order.start}
            durable.rewind = order.start
            durable.oldest_offsets = min(durable.oldest_offsets, order.start + 1)
        if order.start + 1 < durable.oldest_offsets:
            raise Violation(f"Spark's log has no offsets of batch {order.start + 1} any more")
        durable.rewind = max(order.target, durable.rewind)
        durable.rewinding = True
        if self.simulation.faulty and self.simulation.chance.random() < 0.1:
            raise Trouble("the store took too long")
        earlier = {v for v in durable.commits if v <= order.start}
        durable.commits = earlier | ({order.start} if order.start >= 0 else set())
        durable.rewinding, durable.trusted = False, True
        self.buffers.sent.clear()
        self.leave()
        self.after(0.2, self.ask)

    def leave(self) -> None:
        """Spark does not want the batch any more that it has asked for: its query was stopped."""
        if self.attempt is not None:
            self.attempt.abandon()
        batch = self.query.batch
        if batch is not None:
            self.take(BatchLeft(batch.version))


_SILENT = "the log of commits does not answer"
_TABLE = 1_000_000
"""The bytes of a table."""


class Attempt:
    """One attempt to run a batch: its tasks, one after the other, then the commit."""

    def __init__(self, driver: Driver, order: o.RunBatch, count: int | None) -> None:
        self.driver, self.order, self.count = driver, order, count
        self.tasks = list(order.slices)
        driver.simulation.chance.shuffle(self.tasks)
        self.wanted = {each.slice: each for each in order.captures}
        if len(self.wanted) < len(order.captures):
            raise Violation(f"two captures of one slice in a batch: {order.captures}")
        self.reports: dict[Any, SliceReport] = {}
        self.ended = False
        self.generations = {m.name: m.generation for m in driver.simulation.world.machines.values()}

    def run(self) -> None:
        simulation = self.driver.simulation
        simulation.after(simulation.delay(_hosts(self.order)), self.next)

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
            self.fail(Cause.STATE_MISSING, trouble, missing=(each.id,))
        except Trouble as trouble:
            self.fail(Cause.PROCESS_LOST, trouble)
        else:
            captured = None if isinstance(told, str) else told
            why = told if isinstance(told, str) else None
            self.reports[each.id] = SliceReport(captured, why, left_to_shed=left, bytes=_TABLE)
            simulation.after(simulation.chance.random() * 0.02, self.next)

    def cancel(self) -> None:
        if not self.ended and self.tasks:
            self.fail(Cause.PROCESS_LOST, Trouble("it was cancelled"))

    def fail(self, cause: Cause, trouble: Trouble, missing: tuple[SliceId, ...] = ()) -> None:
        self.abandon()
        if self.driver.simulation.chance.random() < 0.5:
            missing = ()  # it is not always known
        order = self.order
        self.driver.take(BatchFailed(order.version, order.fence, cause, str(trouble), missing))

    def abandon(self) -> None:
        """Nobody waits for its tasks; they do not know, and run on as long as nobody stops them."""
        if not self.ended:
            self.ended = True
            for each in self.tasks:
                simulation = self.driver.simulation
                simulation.after(simulation.chance.random() * 3, partial(self.run_late, each))

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
        if self.ended:
            return
        if self.driver.paused:
            self.driver.after(0.5, self.commit)
            return
        silent = world.durable.log_down and driver.simulation.chance.random() < 0.7
        if silent and driver.simulation.chance.random() < 0.5:
            self.fail(Cause.ERROR, Trouble(_SILENT))
            return
        if world.durable.epoch != driver.epoch:
            self.fail(Cause.FENCED, Trouble("a newer driver has taken over"))
            return
        world.durable.commits.add(self.order.version)
        oldest = self.order.version - driver.plan.retained + 1
        world.durable.oldest_offsets = max(world.durable.oldest_offsets, oldest)
        world.durable.arrangement = self.order.arrangement
        if driver.plan.replays:
            driver.buffers.keep(self.order)
        driver.simulation.committed(driver, self.order.version)
        hosts = _hosts(self.order)
        driver.simulation.reached(self.count, Stage.DONE, hosts)
        if driver.dead:
            return
        if silent:  # and has it all the same
            self.fail(Cause.ERROR, Trouble(_SILENT))
            return
        self.ended = True
        driver.take(BatchCommitted(self.order.version, self.order.fence, self.reports))
        driver.simulation.reached(self.count, Stage.ANSWERED, hosts)
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
        case o.Mend(_, host):
            return host
        case o.Prepare(host) | o.Inspect(host):
            return host
        case _:
            return None


def _hosts(order: Any) -> set[Host]:
    """Where an order is carried out."""
    if isinstance(order, o.Replay | o.RunBatch):
        return {each.node for each in order.slices}
    if isinstance(order, o.Drop):
        return {order.host}
    host = _host(order)
    return set() if host is None else {host}
