"""Histories of a query under faults: the real protocols drive a world that is a model in memory.

A seed decides everything: when orders are carried out and answered, which answers are lost or come
twice, and which faults happen when. Every order that takes something away is judged by what is in
the world then (:mod:`protocols.promises`). After every commit the state of every group is compared
with what it must be. In the end everything that was ordered must have ended, the stream must run,
and any one node may be lost.

``python -m protocols.simulator SEED`` (from the folder of the tests) tells the story of a history.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

from anabranch.backup import Fragments
from anabranch.checkpointing.policy import Checkpointing, Never, Periodic
from anabranch.placement.even import Even
from anabranch.protocols import orders as o
from anabranch.protocols.events import (
    Command,
    Event,
    GiveUp,
    NodeCame,
    NodeLost,
    ReadState,
    Rebalance,
    Scale,
    TakeCheckpoint,
    TimePassed,
)
from anabranch.protocols.model import Host, OperatorPlan, Routed, serving
from anabranch.protocols.orders import SECOND
from anabranch.protocols.query import Policies
from anabranch.state.groups import Routing
from anabranch.state.part import Part
from anabranch.units import NO_VERSION, Version
from protocols.drivers import Driver
from protocols.plans import SHAPES, Plan, Planned, Stage, Unequal
from protocols.promises import can_recover, can_restart, keeps
from protocols.world import Buffers, Durable, File, Machine, Truth, Violation, World

_QUIET = 8000 * SECOND
"""So long after the last fault everything must have ended. A replay of a hundred batches counts as
failed after 6,600 seconds, if its answer is lost."""
_OF_NO_HOST = (
    "damage",
    "driver",
    "second driver",
    "store down",
    "leave",
    "manifest",
    "power",
    "log",
)
"""Faults with which nothing is wrong with a host that was not wrong before."""
_KNOWN = 130 * SECOND
"""What has been well for this long is known to be: no wait of a protocol is longer."""


class Simulation:
    """One history."""

    def __init__(self, plan: Plan, story: list[str] | None = None) -> None:
        self.plan, self.story = plan, story
        self.chance = random.Random(plan.seed)
        self.operators = {
            name: OperatorPlan(name, plan.groups, before)
            for name, before in SHAPES[plan.shape].items()
        }
        names = [f"h{i}" for i in range(plan.hosts)]
        groups = {name: each.key_groups for name, each in self.operators.items()}
        self.world = World(Truth(plan.seed), groups, names)
        routing = {
            name: Routing.even(each.key_groups, self.chance.randint(1, 2))
            for name, each in self.operators.items()
        }
        for name in names[plan.hosts - plan.late :] if plan.hosts > plan.late else ():
            self.world.machines[name].up = False
        placed = Even().place({n: r.instances for n, r in routing.items()}, names)
        self.routed = {n: Routed(r, tuple(placed[n])) for n, r in routing.items()}
        often = Periodic(plan.interval, plan.incremental, at_most=8, retain=plan.retain)
        checkpointing: Checkpointing = Unequal(often, plan.rarely) if plan.rarely else often
        self.policies = Policies(
            checkpointing if plan.backs_up else Never(),
            plan.backup,
            Even(plan.pool),
            plan.parallelism,
            longest_chain=plan.longest_chain,
            tolerate=plan.tolerate,
            retained_offsets=plan.retained,
            replays=plan.replays,
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
        self.given_up: set[str] = set()
        """The names of the parts that some driver has ordered to be deleted."""
        self.quiet_since = NO_VERSION
        """The version that was committed when the last fault was over."""
        self.lost = False
        """Whether there is nothing any more that the query could go on from."""
        self.commits_since_quiet = 0
        self._unsafe_at = -1
        """After so many of these commits it was not safe."""
        self.orders = 0
        """How many orders that change something were given."""
        self.stages: list[tuple[int, Stage]] = []
        """The stages that these orders have reached."""
        self._at_orders: dict[tuple[int, Stage], list[Planned]] = {}
        self.driver = self.new_driver()

    # Time

    def at(self, when: int, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + int(seconds * SECOND), action)

    def delay(self, hosts: Collection[Host]) -> float:
        """How long a message to hosts, or from them, is on its way: mostly not long."""
        chance = self.chance.random()
        if self.faulty and chance < 0.02:
            self.ail(*hosts)
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
            else:
                self._at_orders.setdefault((planned.order, planned.stage), []).append(planned)
        for machine in self.world.machines.values():
            if not machine.up:
                self.after(
                    self.chance.random() * self.plan.seconds, partial(self.come_back, machine.name)
                )
        times = [p.at for p in (*self.plan.faults, *self.plan.commands) if p.at is not None]
        self._run_until(int((max(times, default=self.plan.seconds) + 3) * SECOND))
        self.mend()
        self._run_until(self.now + _QUIET, until=self.is_over)
        if not self.is_over():
            raise Violation(f"it does not come to an end: {self.why()}")
        if not self.lost:
            self.check_output()
        return self

    def _run_until(self, limit: int, until: Callable[[], bool] = lambda: False) -> None:
        while self._heap and self._heap[0][0] <= limit and not until():
            self.now, _, action = heapq.heappop(self._heap)
            action()
        if not until():
            self.now = max(self.now, limit)

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        self._run_until(self.now + int(seconds * SECOND))

    def run_until_safe(self) -> None:
        """Let time pass until every node may be lost."""
        limit = self.now + _QUIET
        self._run_until(limit, until=self.is_settled_and_safe)
        if self.now >= limit:
            raise Violation(f"it is never protected: {self.why()}")

    def is_settled_and_safe(self) -> bool:
        """Whether the stream runs on all nodes, and no loss of one of them would be noticed."""
        query = self.driver.query
        return (
            query.committed >= 3
            and self._is_settled()
            and query.ready == frozenset(self.world.machines)
            and self.is_safe()
        )

    def _is_settled(self) -> bool:
        query = self.driver.query
        return not (query.recovery or query.restart or query.suspects)

    def is_over(self) -> bool:
        query = self.driver.query
        return self.lost or (
            self.commits_since_quiet >= 5
            and self._is_settled()
            and not query.moves
            and not query.waiting
            and set(self.commands) <= set(self.ended)
            and self.has_checkpoint()
            and self.is_tidy()
            and self._is_safe_since_last_commit()
        )

    def _is_safe_since_last_commit(self) -> bool:
        # It takes long to see, and is looked at after every event.
        if self._unsafe_at != self.commits_since_quiet and not self.is_safe():
            self._unsafe_at = self.commits_since_quiet
        return self._unsafe_at != self.commits_since_quiet

    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint that was taken after the last fault."""
        newest = max(self.world.durable.manifests, default=NO_VERSION)
        return not self.plan.backs_up or newest >= self.quiet_since

    def is_safe(self) -> bool:
        """Whether nodes could be lost, with their disks, and all state be had without them.

        Any one node, or any so many at once as the backup promises to survive.
        """
        driver, world = self.driver, self.world
        up = {name for name, machine in world.machines.items() if machine.up}
        if not self.plan.backs_up or len(up) < 2:
            return True
        served = list(serving(driver.query.slices.values()))
        more = 0
        if isinstance(self.plan.backup, Fragments):
            parts = [part for of in driver.query.inventory.values() for part in of.parts]
            promised = min((p.parity for p in parts), default=self.plan.backup.parity)
            more = min(promised, len(up) - 2)
        owners = {each.node for each in served}
        for gone in combinations(sorted(up), 1 + more):
            if owners.isdisjoint(gone):
                continue
            left = up - set(gone)
            lost = [each for each in served if each.node not in left]
            # What is damaged is not known to be before somebody reads it.
            parts = [
                part
                for part in driver.parts.values()
                if len(world.copies(part, left)) >= part.needed
            ]
            sends = partial(self._sends, left)
            if not can_recover(
                self.operators, lost, parts, driver.buffers, world.durable.committed, sends
            ):
                return False
        return True

    def _sends(self, hosts: Collection[Host], host: Host, generation: int) -> bool:
        """Whether rows are still there that were sent by one of these hosts."""
        machine = self.world.machines[host]
        return host in hosts and machine.up and machine.generation == generation

    def check_output(self) -> None:
        """Every committed batch was delivered."""
        durable = self.world.durable
        missing = set(range(durable.committed + 1)) - durable.output.keys()
        if missing:
            raise Violation(f"batches {sorted(missing)} were never delivered")

    def is_tidy(self) -> bool:
        """Whether no instance has too many slices, and nothing is left that nobody needs."""
        query = self.driver.query
        slices = Counter((s.operator, s.instance) for s in serving(query.slices.values()))
        named = {part.name for of in query.inventory.values() for part in of.parts}
        for manifest in self.world.durable.manifests.values():
            named |= {part.name for of in manifest.parts.values() for part in of}
        machines = [machine for machine in self.world.machines.values() if not machine.gone]
        strays = any(machine.vault.keys() - named for machine in machines) and not query.unreadable
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

    def why(self) -> str:
        query = self.driver.query
        return (
            f"{self.commits_since_quiet} commits since the last fault, {query.changes}, "
            f"batch {query.batch}, tidy {self.is_tidy()}, safe {self.is_safe()}, "
            f"checkpoint {self.has_checkpoint()}, "
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
        event = driver.commands.get(command)
        if error is None and isinstance(event, Scale) and self.is_current(driver):
            self.check_noted(driver, event)
        self.ended[command] = error
        if isinstance(driver.commands.get(command), ReadState):
            # Whoever reads takes some time for it.
            driver.after(self.chance.random() * 200, lambda: driver.take(GiveUp(command)))

    def check_noted(self, driver: Driver, event: Scale) -> None:
        """A restart has as many instances as were asked for last, unless nobody waited for it."""
        later = [
            number
            for number, other in driver.commands.items()
            if isinstance(other, Scale)
            and other.operator == event.operator
            and number > event.command
        ]
        # A recovery may have divided them since.
        excused = event.command in driver.given_up or later or self.plan.parallelism > 1
        _, routed, _ = self.world.durable.noted or (0, self.routed, ())
        instances = routed[event.operator].routing.instances
        if instances != event.instances and not excused:
            raise Violation(f"{event} ended well, and {instances} instances are noted")

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
        well = self._well(self.world.machines)
        if "there has been no node" in reason:
            if well:
                raise Violation(f"it stopped, though {well} are well: {reason}")
            return
        if " times: " in reason:
            served = {each.node for each in serving(driver.query.slices.values())}
            if served <= well:
                raise Violation(f"it stopped, though {served} are well: {reason}")
            return
        if "the log of commits does not answer" in reason:
            return
        if "checkpoints in a row failed" in reason:
            if driver.failed_in_a_row <= self.plan.tolerate:
                raise Violation(f"it stopped, though not so many checkpoints failed: {reason}")
            return
        if "will not reach back" in reason and not self.plan.hold:
            if driver.failed_since_held < 3:
                raise Violation(f"it stopped, though checkpoints did not fail: {reason}")
            return
        version = self._can_begin_from(well, driver.unreadable)
        if version is not None:
            raise Violation(f"it stopped, though version {version} can be had: {reason}")
        if "is lost; the newest" not in reason:
            raise Violation(f"the query stopped: {reason}")
        # Otherwise the user starts it again, until the nodes are there.
        coming = {name for name, machine in self.world.machines.items() if not machine.gone}
        self.lost = self._can_begin_from(coming, driver.unreadable) is None

    def _can_begin_from(
        self, hosts: Collection[Host], unreadable: Collection[Version]
    ) -> Version | None:
        """A version that these hosts have, and after which Spark's log has all batches."""
        durable = self.world.durable
        for version, manifest in durable.manifests.items():
            parts = [part for of in manifest.parts.values() for part in of]
            enough = version + 1 >= durable.oldest_offsets or not durable.trusted
            whole = all(self.world.is_whole(part, hosts) for part in parts)
            if version not in unreadable and enough and whole:
                return version
        return None

    def check_order(self, driver: Driver, order: o.Order) -> None:
        """No order may take away what is promised."""
        if not self.is_current(driver):
            return
        if isinstance(order, o.Withdraw):
            self._check_withdraw(driver, order)
        elif isinstance(order, o.Trim):
            self._check_trim(driver, order)
        elif isinstance(order, o.Drop):
            for name in order.files:
                file = self.world.machines[order.host].files.get(name)
                if file is not None and self.is_needed(name, file):
                    raise Violation(f"{order}: {name} is still needed")
        elif isinstance(order, o.Publish):
            known = {p.name for of in driver.query.inventory.values() for p in of.parts}
            named = {p.name for of in order.published.parts.values() for p in of}
            if not named <= known:
                raise Violation(f"{order} names parts that are not known: {named - known}")
        elif isinstance(order, o.Tell) and order.kind == "going back":
            self._check_going_back(driver, order)
        elif isinstance(order, o.Tell) and order.kind == "stream held":
            driver.failed_since_held = 0
        elif isinstance(order, o.Tell) and order.kind == "checkpoint failed":
            driver.failed_since_held += 1
            driver.failed_in_a_row += 1
        elif isinstance(order, o.Tell) and order.kind == "checkpoint":
            driver.failed_in_a_row = 0
        elif isinstance(order, o.Tell) and order.kind == "restarted":
            parts = (part for of in driver.query.inventory.values() for part in of.parts)
            driver.parts = {part.name: part for part in parts}

    def _check_withdraw(self, driver: Driver, order: o.Withdraw) -> None:
        """After it the query can still recover and restart, if it could before."""
        world, committed = self.world, self.world.durable.committed
        gone = {part.name for part in order.parts}
        whole = partial(self._is_thought_whole, driver=driver)
        before = [part for part in driver.parts.values() if whole(part)]
        after = [part for part in before if part.name not in gone]
        if keeps(self.operators, before, driver.buffers, committed) and not keeps(
            self.operators, after, driver.buffers, committed
        ):
            raise Violation(f"{order} takes away parts that a recovery would need")
        could = can_restart(world, driver.withdrawing | driver.unreadable, self.given_up, whole)
        driver.parts = {part.name: part for part in after}
        self.given_up |= gone
        without = driver.withdrawing | driver.unreadable | set(order.versions)
        if could and not can_restart(world, without, self.given_up, whole):
            raise Violation(f"{order} takes away the versions that a restart would need")

    def _is_thought_whole(self, part: Part, driver: Driver) -> bool:
        """Whether a driver must think that there still are copies of a part, which are whole.

        It does not know of a loss before it is told, nor of a lost disk before the agent is back.
        """
        world, query = self.world, driver.query
        unknown = {
            host
            for host in part.holders
            if host in query.nodes
            and not (world.machines[host].up and host in query.ready)
            and (part.name, host) not in driver.lacking
        }
        if len(unknown) >= part.needed:
            return True
        known = tuple(host for host in part.holders if host not in unknown)
        rest = replace(part, holders=known, needed=part.needed - len(unknown))
        return bool(known or not unknown) and world.seems_whole(rest, driver.damaged)

    def _check_trim(self, driver: Driver, order: o.Trim) -> None:
        """After it a recovery still has all rows that it would have to replay."""
        parts, buffers = driver.parts.values(), driver.buffers
        committed = self.world.durable.committed
        if keeps(self.operators, parts, buffers, committed):
            trimmed = Buffers(self.world, buffers.before, dict(buffers.sent))
            trimmed.trim(order.operator, order.upto)
            if not keeps(self.operators, parts, trimmed, committed):
                raise Violation(f"{order} takes away rows that a recovery would need")

    def _check_going_back(self, driver: Driver, order: o.Tell) -> None:
        """A query goes back only if it cannot recover with what has been well for a while."""
        world, query = self.world, driver.query
        well = self._well(world.machines)
        lost = [query.slices[each] for each in query.suspects if each in query.slices]
        parts = [part for part in driver.parts.values() if world.is_whole(part, well)]
        if not self._is_well(world.durable.ill_at):
            parts = [part for part in parts if part.holders]
        committed, sends = world.durable.committed, partial(self._sends, world.machines)
        if well and can_recover(self.operators, lost, parts, driver.buffers, committed, sends):
            raise Violation(f"it goes back, though it could recover: {order.details}")

    def _well(self, hosts: Iterable[Host]) -> set[Host]:
        """The hosts with which nothing has been wrong for so long that all know of it."""
        cut = {host for pair in self.world.cuts for host in pair}
        machines = {host: self.world.machines[host] for host in hosts}
        return {
            host
            for host, machine in machines.items()
            if machine.answers
            and not machine.full
            and host not in cut
            and self._is_well(machine.ill_at)
        }

    def _is_well(self, ill_at: int) -> bool:
        return self.now - ill_at > _KNOWN

    def ail(self, *hosts: Host) -> None:
        """Note that something is wrong with hosts."""
        for host in hosts:
            self.world.machines[host].ill_at = self.now

    def check_manifests(self) -> None:
        """No manifest names a part that was deleted."""
        for version, manifest in self.world.durable.manifests.items():
            named = {part.name for of in manifest.parts.values() for part in of}
            if named & self.world.withdrawn:
                raise Violation(f"version {version} names {named & self.world.withdrawn}")

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

    def count_order(self) -> int:
        """The number of an order."""
        self.orders += 1
        return self.orders

    def reached(self, order: int | None, stage: Stage, hosts: Collection[Host]) -> None:
        """An order has reached a stage: now are the faults that are planned then."""
        if order is not None:
            self.stages.append((order, stage))
            for planned in self._at_orders.pop((order, stage), ()):
                self.happen(planned, hosts)

    def happen(self, planned: Planned, hosts: Collection[Host] = ()) -> None:
        chance = random.Random(f"{self.plan.seed}-{planned.number}")
        if planned.kind == "command":
            self.command(chance)
        elif self.faulty:
            aims = sorted(hosts) if planned.aimed else ()
            self.fault(planned.kind, chance, aims or list(self.world.machines))

    def command(self, chance: random.Random) -> None:
        number = o.CommandId(1000 + len(self.commands))
        name = chance.choice([*self.operators, ""][: len(self.operators) or 1])
        open_ = sorted(self.driver.commands.keys() - self.ended.keys())
        if open_ and chance.random() < 0.3 and not (self.driver.dead or self.driver.paused):
            command = chance.choice(open_)
            self.driver.given_up.add(command)
            self.driver.take(GiveUp(command))
            return
        of_all: list[Command] = [Rebalance(number), TakeCheckpoint(number)]
        event: Command = chance.choice(
            [
                *of_all,
                Scale(number, name, chance.randint(1, self.plan.groups)),
                Scale(number, name, chance.randint(1, 3)),
                ReadState(number, name),
            ]
            if name
            else of_all
        )
        if self.driver.dead or self.driver.paused or not self.driver.started:
            return
        self.commands[number] = str(event)
        self.driver.commands[number] = event
        self.driver.take(event)

    def fault(self, kind: str, chance: random.Random, hosts: Sequence[Host]) -> None:
        self.made += 1
        self.kinds[kind] += 1
        machine = self.world.machines[chance.choice(hosts)]
        if kind not in _OF_NO_HOST:
            self.ail(machine.name)
        self.say(0, "fault", f"{kind} {machine.name}")
        match kind:
            case "executor":
                self.lose(machine.name, memory=False)
            case "host":
                self.lose(machine.name, memory=True, disk=chance.random() < 0.3)
                others = [m for m in self.world.machines.values() if not (m.gone or m is machine)]
                machine.gone = machine.gone or (len(others) > 1 and chance.random() < 0.1)
            case "agent":
                machine.agent = False
            case "hang":
                machine.hung = True
                if chance.random() < 0.5:
                    self.after(chance.random() * 60, partial(self._end, machine, "hung"))
            case "stop":
                machine.stopped = True
                after = chance.choice([5, 60, 400]) * chance.random()
                self.after(after, partial(self._end, machine, "stopped"))
            case "driver":
                self.kill_driver()
            case "second driver":
                self.second_driver()
            case "disk full":
                machine.full = True
                self.after(chance.random() * 10, partial(self._end, machine, "full"))
            case "damage":
                self.damage(machine.name, chance)
            case "store down":
                self.world.durable.down = True
                self.world.durable.ill_at = self.now
                self.after(chance.random() * 5, partial(self._end, self.world.durable, "down"))
            case "log":
                self.world.durable.log_down = True
                self.after(chance.random() * 3, partial(self._end, self.world.durable, "log_down"))
            case "clock":
                # To the driver everything seems to be late, or silent, for so long.
                self.driver.ahead += chance.choice([1, 30, 700]) * SECOND
                self.ail(*self.world.machines)
                self.world.durable.ill_at = self.now
                self.driver.after(0, partial(self.driver.take, TimePassed()))
            case "lost table":
                if machine.tables:
                    machine.tables.pop(chance.choice(list(machine.tables)))
            case "cut":
                other = chance.choice(list(self.world.machines))
                pair = frozenset([machine.name, other])
                self.world.cuts.add(pair)
                self.after(chance.random() * 20, partial(self._join, pair))
            case "no agent":
                machine.agent, machine.barren = False, True
                after = chance.choice([2, 30, 300]) * chance.random()
                self.after(after, partial(self._end, machine, "barren"))
            case "leave":
                if not (self.driver.dead or self.driver.paused):
                    self.driver.leave()
                    self.driver.ask()
            case "lost file":
                machine.files.clear()
            case "manifest":
                if self.world.durable.manifests:
                    versions = sorted(self.world.durable.manifests)
                    self.world.durable.unreadable.add(chance.choice(versions))
            case "power":
                self.fail_power()

    def _end(self, of: Machine | Durable, trouble: str) -> None:
        """Some trouble of a machine or of the store is over."""
        if getattr(of, trouble):
            setattr(of, trouble, False)
            of.ill_at = self.now

    def _join(self, pair: frozenset[Host]) -> None:
        if pair in self.world.cuts:
            self.world.cuts.discard(pair)
            self.ail(*pair)

    def fail_power(self) -> None:
        """All hosts lose power: what was written last may not be there, so it does not count."""
        for machine in self.world.machines.values():
            self.lose(machine.name, memory=True)
        self.world.durable.trusted = False
        self.kill_driver()

    def lose(self, host: Host, *, memory: bool, disk: bool = False) -> None:
        machine = self.world.machines[host]
        if not machine.up:
            return
        self.ail(host)
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
        if not (machine.up or machine.gone):
            machine.up = True
            self.ail(host)
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
        self.quiet_since = self.world.durable.committed
        self._end(self.world.durable, "down")
        self._end(self.world.durable, "log_down")
        for pair in list(self.world.cuts):
            self._join(pair)
        for machine in self.world.machines.values():
            for trouble in ("full", "hung", "stopped", "barren"):
                self._end(machine, trouble)
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
