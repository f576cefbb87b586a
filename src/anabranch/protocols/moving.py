"""A move: what it is, and how far it is.

Every step of a move makes a new one of these. They tell others what they need to know of moves:
whether the stream is held, which rows that were sent are still needed, and whether a checkpoint
would take what a move waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from anabranch.protocols.events import Rebalance, Scale
from anabranch.protocols.model import Change, Routed, Slice, SliceId
from anabranch.protocols.orders import SECOND, CommandId, Wake
from anabranch.protocols.query import Query
from anabranch.protocols.turn import Turn
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.units import NO_VERSION, Version

PATIENCE = 5 * SECOND
"""How long a capture waits for a batch."""
SHORT = SECOND // 5
"""The same where Spark asks for no batch."""


@dataclass(frozen=True, slots=True)
class MergeSlices:
    """Merge the smallest slices of an instance. Treated like a command of a user."""

    command: CommandId
    operator: str
    instance: int


class Phase(Enum):
    """The steps of a move."""

    PREPARE = "waiting for nodes"
    CAPTURE = "capturing the groups that move"
    MAKE = "making slices at their new nodes"
    FOLLOW = "catching up with the stream"
    LAST = "capturing the last changes"
    HOLD = "holding the stream for the last changes"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Groups that go from one slice to another."""

    source: SliceId
    target: SliceId
    groups: KeyGroups


@dataclass(frozen=True, slots=True)
class Move:
    """A move in progress."""

    event: Scale | Rebalance | MergeSlices
    operator: str
    since: int
    begun: Version
    """The version that was committed when this attempt began."""
    phase: Phase = Phase.PREPARE
    phase_since: int = 0
    before: Routed | None = None
    """How the operator was divided when the move was planned."""
    after: Routed | None = None
    """How it is divided once the move is done."""
    transfers: tuple[Transfer, ...] = ()
    targets: tuple[Slice, ...] = ()
    parts: tuple[Part, ...] = ()
    """The parts that the targets are made of."""
    made: bool = False
    """Whether the targets have tables."""
    read: int = 0
    """Bytes of parts that the targets were told to read."""
    rounds: int = 0
    attempts: int = 1
    not_before: int = 0
    held_since: int | None = None
    """When the batch that ran had ended, and no other one could begin."""
    wants_capture: bool = False
    """Whether the next batch is to capture for this move."""
    capturing: bool = False
    """Whether the batch that runs does."""

    @property
    def command(self) -> CommandId:
        """The command that the move executes."""
        return self.event.command

    @property
    def change(self) -> Change:
        """The present step, the reason, and the start."""
        match self.event:
            case Scale(instances=count):
                kind, why = "move", f"scale to {count} instances"
            case Rebalance():
                kind, why = "move", "rebalance"
            case MergeSlices(instance=instance):
                kind, why = "merge", f"instance {instance} has many slices"
        return Change(kind, self.operator, why, self.phase.value, self.since)

    @property
    def at(self) -> Version:
        """The version of the slices at their new nodes."""
        return min((each.version for each in self.targets), default=NO_VERSION)

    @property
    def moved(self) -> Mapping[SliceId, KeyGroups]:
        """The groups that leave each source."""
        moved: dict[SliceId, KeyGroups] = {}
        for each in self.transfers:
            moved[each.source] = moved.get(each.source, KeyGroups()) | each.groups
        return moved


def holds(query: Query) -> bool:
    """Whether the stream is held for a move."""
    return any(each.phase is Phase.HOLD for each in query.moves.values())


def postpones_checkpoints(query: Query) -> bool:
    """Whether a checkpoint now would take the changes that a move waits for."""
    near = (Phase.FOLLOW, Phase.LAST, Phase.HOLD)
    return any(each.wants_capture or each.phase in near for each in query.moves.values())


def needs(query: Query, operator: str) -> Iterator[Version]:
    """The versions after which rows sent to an operator are still needed."""
    for each in query.moves.values():
        if each.operator == operator:
            yield each.begun


def put(turn: Turn, moving: Move) -> None:
    """Record how far a move is."""
    turn.change(moves={**turn.query.moves, moving.command: moving})


def enter(turn: Turn, moving: Move, phase: Phase) -> Move:
    """Go to a step, and look again when a batch has been waited for."""
    moving = replace(moving, phase=phase, phase_since=turn.query.now)
    put(turn, moving)
    turn.send(Wake(turn.query.now + SHORT))
    turn.send(Wake(turn.query.now + PATIENCE))
    return moving
