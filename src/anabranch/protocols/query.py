"""The frozen state of a query: all that its protocols know, and simple questions about it.

The loop of the coordinator owns it. A :class:`~anabranch.protocols.turn.Turn` replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from anabranch.backup.policy import Backup
from anabranch.checkpointing.policy import Checkpointing
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
    Answered,
    CommandId,
    Mend,
    Merge,
    OrderId,
    Store,
)
from anabranch.state.part import Part
from anabranch.units import NO_VERSION, Version

if TYPE_CHECKING:
    from anabranch.fragments.cost import Standing
    from anabranch.protocols.adaptation import Observed
    from anabranch.protocols.events import Rebalance, Scale
    from anabranch.protocols.moving import Move
    from anabranch.protocols.pending import Checkpoints
    from anabranch.protocols.read import Read
    from anabranch.protocols.recover import Recovery
    from anabranch.protocols.restart import Restart


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

    @property
    def change(self) -> Change | None:
        """What is done, if it belongs to no operation that tells it."""
        match self.order:
            case Merge(slice, parts):
                why = f"a chain of {len(parts)} parts has become long"
                step = f"merging parts of slice {slice.id}"
                return Change("merge", slice.operator, why, step, self.since)
            case Mend(part, _, holders):
                why = f"{part.name} has lost fragments"
                step = f"making new ones at {named(holders)}"
                return Change("mend", part.operator, why, step, self.since)
            case _:
                return None


@dataclass(frozen=True, slots=True)
class Unnoted:
    """A command that was executed, and whose arrangement is not written yet."""

    command: CommandId
    arrangement: int
    since: int

    @property
    def change(self) -> Change:
        """What is done, why, and since when."""
        why, step = "a command has changed it", "writing it to the checkpoint folder"
        return Change("note", "arrangement", why, step, self.since)


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
        """The operations in progress, as their protocols tell them."""
        newest = self.published[-1].version if self.published else NO_VERSION
        checkpoints = self.checkpoints
        found = [moving.change for moving in self.moves.values()]
        found += [each.change for each in self.reads if not each.handed_out]
        found += [node.change for node in self.nodes.values() if not node.is_ready]
        found += [each.change for each in self.unnoted[:1]]
        found += [each.change for each in (self.recovery, self.restart) if each is not None]
        if checkpoints is not None and checkpoints.current is not None:
            found.append(checkpoints.current.change)
        held = None if checkpoints is None else checkpoints.holding(newest)
        told = [held, *(waiting.change for waiting in self.outstanding.values())]
        return (*found, *(change for change in told if change is not None))

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

    def size(self, each: Slice) -> int:
        """The bytes of a slice, as far as they are known: of its table, or of its parts."""
        known = self.sizes.get(each.id)
        if known is not None:
            return known
        return sum(p.bytes for p in self.inventory[each.operator].parts if p.groups & each.groups)

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
