"""The frozen state of a query, and the turn in which one event changes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from anabranch.backup.policy import Backup
from anabranch.checkpointing.policy import Checkpointing
from anabranch.errors import AnabranchError, QueryFailed
from anabranch.placement.policy import Placement
from anabranch.protocols.model import (
    Change,
    Host,
    Inventory,
    Node,
    OperatorPlan,
    Published,
    Readiness,
    Routed,
    Slice,
    SliceId,
    named,
    serving,
)
from anabranch.protocols.orders import (
    SECOND,
    Advance,
    Answered,
    Capture,
    Captured,
    CommandId,
    Drop,
    End,
    Inspect,
    Make,
    Mend,
    Merge,
    Order,
    OrderId,
    Prepare,
    Stop,
    Store,
    Tell,
    Wake,
    Withdraw,
    patience,
)
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.units import NO_VERSION, Version

if TYPE_CHECKING:
    from anabranch.fragments.cost import Standing
    from anabranch.protocols.adaptation import Observed
    from anabranch.protocols.checkpoint import Checkpoints
    from anabranch.protocols.events import Rebalance, Scale
    from anabranch.protocols.move import Move
    from anabranch.protocols.read import Read
    from anabranch.protocols.recover import Recovery
    from anabranch.protocols.restart import Restart

PROBE = 10 * SECOND
"""A node that has not answered an order for this long is probed."""

DESERTED = 120 * SECOND
"""A query that needs a node waits for any so long, and for those that hold the only backups."""

FENCES = 1 << 40
"""A fence is the driver's epoch times this, plus a number that grows."""


class Owner(Enum):
    """The protocol that handles an answer."""

    NODES = "nodes"
    NOTE = "note"
    CHECKPOINT = "checkpoint"
    MERGE = "merge"
    MEND = "mend"
    MOVE = "move"
    RECOVERY = "recovery"
    RESTART = "restart"
    READ = "read"


@dataclass(frozen=True, slots=True)
class Outstanding:
    """An order that has not been answered."""

    order: Answered
    owner: Owner
    command: CommandId | None
    """The command of the move that it is for."""
    since: int
    """When the order was given."""
    deadline: int


@dataclass(frozen=True, slots=True)
class Unnoted:
    """A command that was executed, and whose arrangement is not written yet."""

    command: CommandId
    arrangement: int
    since: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch that Spark has asked for, or that runs."""

    version: Version
    attempts: int = 0
    fence: int | None = None
    """Set while it runs."""
    begun: int = 0
    """When it began to run."""
    not_before: int = 0
    cancelled: bool = False


@dataclass(frozen=True)
class Policies:
    """One choice on each axis."""

    checkpointing: Checkpointing
    backup: Backup
    placement: Placement
    parallelism: int = 1
    """How many instances take over the key groups of a lost one."""
    longest_chain: int = 10
    """Chains of parts longer than this are merged."""
    tolerate: int = 10
    """How many checkpoints in a row may fail before the query stops."""
    retained_offsets: int = 200
    """How many batches back Spark's log of offsets reaches."""
    replays: bool = True
    """Whether what was sent to operators is kept, to be run again."""
    begins_empty: bool = False
    """Whether state that is lost begins empty before the oldest batch that still matters."""
    hold: bool = True
    """Whether the stream waits until a checkpoint succeeds when Spark's log of offsets would soon
    not reach back to the newest published version; if not, the query stops when one fails then."""
    most_slices: int = 8
    """An instance with more slices than this has its smallest ones merged."""


@dataclass(frozen=True)
class Query:
    """The state of a running query. One loop owns it, and replaces it with every event."""

    operators: Mapping[str, OperatorPlan]
    """In the order of the stream."""
    policies: Policies
    epoch: int
    taken_over: int | None = None
    """When this driver has taken the query over."""
    now: int = 0
    nodes: Mapping[Host, Node] = field(default_factory=dict)
    banned: Mapping[Host, int] = field(default_factory=dict)
    """Hosts with an executor whose agent could not be started, and when to try them again."""
    routed: Mapping[str, Routed] = field(default_factory=dict)
    slices: Mapping[SliceId, Slice] = field(default_factory=dict)
    arrangement: int = 0
    """Changes whenever other slices serve, or slices serve other groups."""
    noted: int = 0
    """The arrangement that is written in the checkpoint folder."""
    note_after: int = 0
    """After a note that failed there is a pause."""
    note_failures: int = 0
    """The notes that failed in a row."""
    unnoted: tuple[Unnoted, ...] = ()
    """Commands that were executed, and end once the arrangement that they made is noted."""
    sizes: Mapping[SliceId, int] = field(default_factory=dict)
    """The bytes of tables, as the last batch reported them."""
    suspects: frozenset[SliceId] = frozenset()
    """Serving slices whose tables may be lost."""
    inventory: Mapping[str, Inventory] = field(default_factory=dict)
    published: tuple[Published, ...] = ()
    doubtful: tuple[Published, ...] = ()
    """Versions that may exist: they are being published, or that failed."""
    unreadable: tuple[Version, ...] = ()
    """Versions whose manifests are damaged, and still there."""
    committed: Version = NO_VERSION
    delivered: Version = NO_VERSION
    """The last version whose results were delivered before a restart."""
    oldest_offsets: int = 0
    trimmed: Mapping[str, Version] = field(default_factory=dict)
    batch: Batch | None = None
    idle_since: int = 0
    """When the last batch ended. Spark asks for the next one a moment later, if it has one."""
    outstanding: Mapping[OrderId, Outstanding] = field(default_factory=dict)
    checkpoints: Checkpoints | None = None
    observed: Observed | None = None
    """What was measured, where fragments adapt to it."""
    standing: Standing | None = None
    """The standing nodes that the last save found, if fragments are at such."""
    lowered: tuple[tuple[int, int], ...] = ()
    """The m and k with which states were coded because these are too few, as far as it was told."""
    moves: Mapping[CommandId, Move] = field(default_factory=dict)
    waiting: tuple[Scale | Rebalance, ...] = ()
    merge_after: int = 0
    """Slices are not merged before this time, after a merge has failed."""
    mend_after: int = 0
    """Parts are not mended before this time, after that has failed."""
    recovery: Recovery | None = None
    restart: Restart | None = None
    reads: tuple[Read, ...] = ()
    asked_nodes: int = 0
    ask_again_at: int = 0
    """When missing nodes are requested again."""
    deserted_since: int | None = None
    """Since when no node is ready."""
    probe_at: int = 0
    """When nodes are probed next."""
    numbers: int = 0
    """How many numbers were given to slices, orders and fences."""
    stopped: str | None = None

    @property
    def running(self) -> bool:
        """Whether a batch is running."""
        return self.batch is not None and self.batch.fence is not None

    @property
    def settled(self) -> bool:
        """Whether the driver has taken the query over and no restart is in progress."""
        return self.taken_over is not None and self.restart is None

    @property
    def ready(self) -> frozenset[Host]:
        """The nodes whose agents answer."""
        return frozenset(h for h, n in self.nodes.items() if n.readiness is Readiness.READY)

    @property
    def oldest(self) -> int:
        """The oldest batch whose offsets are certainly still in Spark's log."""
        return max(self.oldest_offsets, self.committed + 1 - self.policies.retained_offsets)

    @property
    def changes(self) -> tuple[Change, ...]:
        """The operations in progress, of all protocols."""
        found = [moving.change for moving in self.moves.values()]
        found += [each.change for each in self.reads if not each.handed_out]
        found += [node.change for node in self.nodes.values() if not node.is_ready]
        if self.unnoted:
            why, step = "a command has changed it", "writing it to the checkpoint folder"
            found.append(Change("note", "arrangement", why, step, self.unnoted[0].since))
        if self.recovery is not None:
            found.append(self.recovery.change)
        if self.restart is not None:
            found.append(self.restart.change)
        if self.checkpoints is not None and self.checkpoints.current is not None:
            found.append(self.checkpoints.current.change)
        if self.checkpoints is not None and self.checkpoints.held_since is not None:
            newest = self.published[-1].version if self.published else NO_VERSION
            why = f"Spark's log of offsets would soon not reach back to checkpoint {newest}"
            step = "waiting until a checkpoint is published"
            found.append(Change("hold", "stream", why, step, self.checkpoints.held_since))
        for waiting in self.outstanding.values():
            if isinstance(waiting.order, Merge):
                merge = waiting.order
                why = f"a chain of {len(merge.parts)} parts has become long"
                step = f"merging parts of slice {merge.slice.id}"
                found.append(Change("merge", merge.slice.operator, why, step, waiting.since))
            elif isinstance(waiting.order, Mend):
                why = f"{waiting.order.part.name} has lost fragments"
                step = f"making new ones at {named(waiting.order.holders)}"
                what = waiting.order.part.operator
                found.append(Change("mend", what, why, step, waiting.since))
        return tuple(found)

    @property
    def lost(self) -> tuple[Slice, ...]:
        """Serving slices whose node was lost."""
        return tuple(s for s in serving(self.slices.values()) if s.node not in self.nodes)

    def usable(self, operator: str, nodes: frozenset[Host] | None = None) -> frozenset[str]:
        """The names of an operator's parts that can be read from nodes; None: from all alive nodes.

        An alive node counts even while its agent is starting.
        """
        hosts = frozenset(self.nodes) if nodes is None else nodes
        return self.inventory[operator].usable(hosts)

    @property
    def manifests(self) -> tuple[Published, ...]:
        """The versions that are published, and those that may be, oldest first."""
        found = (*self.published, *self.doubtful)
        return tuple(sorted(found, key=lambda each: each.version)) if self.doubtful else found

    @property
    def named_files(self) -> frozenset[str]:
        """The captured files that are being stored, or read."""
        orders = [waiting.order for waiting in self.outstanding.values()]
        stored = [order.captured.file for order in orders if isinstance(order, Store)]
        return frozenset([*stored, *(c.file for each in self.reads for c in each.captured)])

    def knows(self, part: Part) -> bool:
        """Whether a part is in the inventory, or named by a manifest."""
        of = [manifest.parts.get(part.operator, ()) for manifest in self.manifests]
        known = (self.inventory[part.operator].parts, *of)
        return any(part.name == each.name for parts in known for each in parts)

    def anchors(self, usable: Mapping[str, frozenset[str]]) -> dict[str, dict[Version, KeyGroups]]:
        """The versions from which parts with these names would recover all groups of operators.

        Rows that an operator sends may be lost with it. So it is not recovered from a later version
        than the operators that receive them.
        """
        anchors: dict[str, dict[Version, KeyGroups]] = {}
        for name, plan in reversed(list(self.operators.items())):
            behind = [min(anchors[n]) for n in anchors if name in self.operators[n].before]
            upto = min([self.committed, *behind])
            everything = KeyGroups.all(plan.key_groups)
            anchors[name] = self.inventory[name].lots(everything, usable[name], upto)
        return anchors

    def size(self, each: Slice) -> int:
        """The bytes of a slice, as far as they are known: of its table, or of its parts."""
        known = self.sizes.get(each.id)
        if known is not None:
            return known
        return sum(p.bytes for p in self.inventory[each.operator].parts if p.groups & each.groups)

    def surviving(self, each: Slice) -> frozenset[str]:
        """The names of the parts that a slice can be recovered from when its node is lost."""
        inventory, nodes = self.inventory[each.operator], frozenset(self.nodes)
        return inventory.surviving(self.policies.backup, each.node, nodes)

    def protected(self, each: Slice) -> Version | None:
        """The oldest version from which a slice is recovered if its own node is lost, if it can."""
        safe = self.surviving(each)
        oldest = min(self.inventory[each.operator].lots(each.groups, safe, self.committed))
        return None if oldest == NO_VERSION else oldest

    def holders(self, each: Slice) -> tuple[Host, ...]:
        """The nodes that store the parts of a slice."""
        nodes = self.ready or frozenset(self.nodes)
        before = self.operators[each.operator].before
        senders = {s.node for s in serving(self.slices.values()) if s.operator in before} & nodes
        key = f"{each.operator}/{each.id}"
        return self.policies.backup.holders(each.node, key, nodes, senders)

    def store(self, captured: Captured, each: Slice) -> Store:
        """The order to store what was captured for a slice."""
        holders = self.holders(each)
        size = self.size(self.slices[captured.slice])
        return Store(captured, holders, size, self.policies.backup.shape(len(holders)))

    def validate(self) -> None:
        """Raise AssertionError if an invariant of the state is violated."""
        if self.restart is not None:
            return
        for name, plan in self.operators.items():
            found = sorted(g for s in serving(self.slices.values(), name) for g in s.groups)
            if found != list(range(plan.key_groups)):
                raise AssertionError(f"{name}: groups {found} are served, of {plan.key_groups}")
            routed = self.routed[name]
            for each in serving(self.slices.values(), name):
                if not each.groups <= routed.routing.owners[each.instance]:
                    raise AssertionError(f"{each} has groups that are not of its instance")
                if routed.hosts[each.instance] != each.node:
                    raise AssertionError(f"{each} is not on the node of its instance")


class Turn:
    """The change of a query by one event: the changed query, and the orders that go out."""

    def __init__(self, query: Query) -> None:
        self.query = query
        self.orders: list[tuple[OrderId | None, Order]] = []

    def change(self, **fields: Any) -> None:
        """Change fields of the query."""
        # dataclasses.replace asks for every field; a step makes this change a few times.
        if not fields.keys() <= self.query.__dict__.keys():
            raise TypeError(f"a query has no {sorted(fields.keys() - self.query.__dict__.keys())}")
        changed = object.__new__(Query)
        changed.__dict__.update(self.query.__dict__, **fields)
        self.query = changed

    def number(self) -> int:
        """A number that was not used before."""
        self.change(numbers=self.query.numbers + 1)
        return self.query.numbers

    def fence(self) -> int:
        """A fence greater than all before it, those of earlier drivers included."""
        return self.query.epoch * FENCES + self.number()

    def slice_id(self) -> SliceId:
        """A new id of a slice."""
        return SliceId(f"{self.query.epoch}-{self.number()}")

    def order(self, order: Answered, owner: Owner, command: CommandId | None = None) -> OrderId:
        """Give an order whose answer a protocol waits for."""
        number = OrderId(self.number())
        deadline = self.query.now + patience(order)
        waiting = Outstanding(order, owner, command, self.query.now, deadline)
        self.change(outstanding={**self.query.outstanding, number: waiting})
        self.orders.append((number, order))
        self.send(Wake(deadline))
        if node_of(order) is not None:
            self.probe_soon()
        return number

    def probe_soon(self) -> None:
        """Make sure that slow nodes are probed soon."""
        probe = self.query.now + PROBE
        if not self.query.now < self.query.probe_at <= probe:
            self.change(probe_at=probe)
            self.send(Wake(probe))

    def send(self, order: Order) -> None:
        """Give an order that has no answer."""
        self.orders.append((None, order))

    def tell(self, kind: str, **details: object) -> None:
        """Record an event for the user."""
        self.send(Tell(kind, details))

    def stop(self, reason: str, kind: type[AnabranchError] = QueryFailed) -> None:
        """End the query, and every command in progress."""
        query = self.query
        if query.stopped is not None:
            return
        self.change(stopped=reason)
        reads = [each for each in query.reads if not each.handed_out]
        commands = [each.command for each in (*query.waiting, *query.moves.values(), *reads)]
        commands += [each.command for each in query.unnoted]
        if query.checkpoints is not None:
            commands += query.checkpoints.open
        for command in commands:
            self.end(command, f"the query stopped: {reason}")
        self.send(Stop(reason, kind))

    def wait_for_any_node(self) -> None:
        """Wait until a node is ready, or stop."""
        since = self.query.now
        if self.query.deserted_since is not None:
            since = self.query.deserted_since
        if self.query.now >= since + DESERTED:
            self.stop(
                "there has been no node for two minutes; start executors, then start the query "
                "again"
            )
        self.send(Wake(since + DESERTED))

    def end(self, command: CommandId, error: str | None = None, result: object = None) -> None:
        """End a command with a result or an error."""
        if command >= 0:  # the others are the query's own
            self.send(End(command, error, result))

    def forget(self, *owners: Owner, command: CommandId | None = None) -> list[Outstanding]:
        """Give up the outstanding orders of protocols, and return them."""
        mine = {
            number: waiting
            for number, waiting in self.query.outstanding.items()
            if waiting.owner in owners and (command is None or waiting.command == command)
        }
        if mine:
            rest = {n: w for n, w in self.query.outstanding.items() if n not in mine}
            self.change(outstanding=rest)
        return list(mine.values())

    def put(self, *slices: Slice) -> None:
        """Add slices, or replace those with the same ids."""
        self.change(slices={**self.query.slices, **{each.id: each for each in slices}})

    def remove(self, ids: frozenset[SliceId]) -> None:
        """Remove slices, and drop their tables on their nodes."""
        kept = {i: s for i, s in self.query.slices.items() if i not in ids}
        for host in sorted({s.node for i, s in self.query.slices.items() if i in ids}):
            if host in self.query.nodes:
                gone = [s.id for s in self.query.slices.values() if s.id in ids and s.node == host]
                self.send(Drop(host, tuple(gone)))
        self.change(slices=kept, suspects=self.query.suspects - ids)

    def arrange(self, routed: Mapping[str, Routed]) -> None:
        """Record that other slices serve from now on; it is noted with the next step."""
        self.change(routed=routed, arrangement=self.fence())

    def forget_parts(self, host: Host, has: frozenset[str]) -> None:
        """Record that of the parts which a node was known to hold it has only these.

        Versions that need one of the others do not exist any more.
        """
        missing = self.query.nodes[host].known - has
        self._forget_copies(host, lambda part: part.name in missing)

    def _forget_copies(self, host: Host, lacks: Callable[[Part], bool]) -> None:
        def keep(part: Part) -> Part | None:
            if host not in part.holders or not lacks(part):
                return part
            return part.at(*(holder for holder in part.holders if holder != host))

        inventory = dict(self.query.inventory)
        published, doubtful = list[Published](), list[Published]()
        gone: list[Version] = []
        for name, of in inventory.items():
            kept = [keep(part) for part in of.parts]
            if any(now is not before for now, before in zip(kept, of.parts, strict=True)):
                inventory[name] = Inventory(part for part in kept if part is not None)
        for each in self.query.manifests:
            parts = {name: [keep(part) for part in of] for name, of in each.parts.items()}
            if all(part is not None for of in parts.values() for part in of):
                whole = {name: tuple(p for p in of if p) for name, of in parts.items()}
                exists = each in self.query.published
                (published if exists else doubtful).append(Published(each.version, whole))
            else:
                gone.append(each.version)
        self.change(inventory=inventory, published=tuple(published), doubtful=tuple(doubtful))
        if gone:  # before anything deletes its other parts
            self.send(Withdraw(tuple(gone), ()))

    def forget_part(self, name: str, at: Collection[Host] = ()) -> None:
        """Record that a part cannot be read, or not at these of its holders."""
        if at:
            for host in at:
                self._forget_copies(host, lambda part: part.name == name)
        else:
            inventory = {
                operator: of.without({name}) if any(p.name == name for p in of.parts) else of
                for operator, of in self.query.inventory.items()
            }
            self.change(inventory=inventory)
        self.tell("part damaged", part=name)

    def find_fragments(self, host: Host, has: Collection[str]) -> None:
        """Record that a node has fragments of parts which it was not known to hold.

        The manifest that a driver begins with tells where they were stored at first.
        """

        def found(part: Part) -> Part:
            new = part.needed > 1 and part.name in has and host not in part.holders
            return replace(part, holders=(*part.holders, host)) if new else part

        self._replace_parts(found)

    def replace_part(self, part: Part) -> None:
        """Record that a part has other holders."""
        self._replace_parts(lambda each: part if each.name == part.name else each)

    def _replace_parts(self, by: Callable[[Part], Part]) -> None:
        for name, of in self.query.inventory.items():
            parts = [by(part) for part in of.parts]
            if any(new is not old for new, old in zip(parts, of.parts, strict=True)):
                self.change(inventory={**self.query.inventory, name: Inventory(parts)})

        def renewed(published: Published) -> Published:
            parts = {name: tuple(map(by, of)) for name, of in published.parts.items()}
            return Published(published.version, parts)

        published, doubtful = self.query.published, self.query.doubtful
        self.change(
            published=tuple(map(renewed, published)), doubtful=tuple(map(renewed, doubtful))
        )

    def add_part(self, part: Part) -> None:
        """Record that a part is at its holders."""
        inventory = self.query.inventory
        self.change(
            inventory={**inventory, part.operator: inventory[part.operator].with_part(part)}
        )


def node_of(order: Answered) -> Host | None:
    """The node that executes an order, if a node does."""
    match order:
        case Make(slice) | Advance(slice) | Capture(_, slice) | Merge(slice):
            return slice.node
        case Store(captured):
            return captured.node
        case Mend(_, host):
            return host
        case Prepare(host) | Inspect(host):
            return host
        case _:
            return None
