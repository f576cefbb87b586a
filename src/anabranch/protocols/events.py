"""The events that the coordinator gets. All of its decisions follow from these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from anabranch.errors import AnabranchError
from anabranch.fragments.cost import Cost
from anabranch.protocols.model import Facts, Host, SliceId
from anabranch.protocols.orders import Captured, CommandId, OrderId
from anabranch.units import Version


@dataclass(frozen=True, slots=True)
class Started:
    """A driver took the query over, and read its durable state."""

    facts: Facts


@dataclass(frozen=True, slots=True)
class NodeCame:
    """A host has an executor."""

    host: Host


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A host has no executor any more."""

    host: Host


@dataclass(frozen=True, slots=True)
class BatchAsked:
    """Spark wants to run a batch."""

    version: Version


@dataclass(frozen=True, slots=True)
class SliceReport:
    """The report of a task on a slice after a batch."""

    captured: Captured | None = None
    not_captured: str | None = None
    rows: int = 0
    """The rows of its table."""
    changed: int = 0
    """How many of them have changed since the base of its next capture."""
    left_to_shed: int = 0
    """The rows of groups that have left it, which it has not dropped yet."""
    bytes: int = 0
    """The size of its table."""


@dataclass(frozen=True, slots=True)
class BatchCommitted:
    """A batch was committed: state, results and commit file are complete."""

    version: Version
    fence: int
    reports: Mapping[SliceId, SliceReport] = field(default_factory=dict)
    obsolete: Mapping[str, Version] = field(default_factory=dict)
    """For operators whose old rows do not matter: the last version of which none does."""
    loads: Mapping[str, float] = field(default_factory=dict)
    """For each operator: the share of the time since the commit before for which its busiest
    instance used a core."""


@dataclass(frozen=True, slots=True)
class BatchLeft:
    """Spark has withdrawn the batch that it asked for, which did not run."""

    version: Version


class Cause(Enum):
    """Why a batch failed."""

    PROCESS_LOST = "a process was lost"
    STATE_MISSING = "a state table is missing"
    FENCED = "another driver has taken over"
    ERROR = "an error that would occur again"


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """A batch was not committed."""

    version: Version
    fence: int
    cause: Cause
    reason: str = ""
    missing: tuple[SliceId, ...] = ()
    """The slices whose tables are missing, if that is known."""


@dataclass(frozen=True, slots=True)
class Done:
    """An order was executed."""

    order: OrderId
    answer: object = None
    cost: Cost | None = None
    """What it took at the node."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An order failed, or its outcome is unknown."""

    order: OrderId
    reason: str = ""
    unreachable: Host | None = None
    """The node that did not answer."""
    damaged: str | None = None
    """The part that none of its holders can give."""
    damaged_at: tuple[Host, ...] = ()
    """If others of its holders were silent: those that cannot give it."""
    missing: SliceId | None = None
    """The slice whose table is not there, or not at the version it should be at."""
    final: bool = False
    """Whether it would fail again, however often it is tried."""
    fenced: bool = False
    """Whether another driver has taken over, and this one is refused."""
    kind: type[AnabranchError] | None = None
    """The error of whoever carried it out; None if nobody did, as a node was lost or is silent."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """The answer to Prepare and Inspect: the tables and parts on a node."""

    tables: Mapping[SliceId, frozenset[Version]]
    """Its tables, and the versions that each can be brought to."""
    parts: frozenset[str] = frozenset()
    """The names of the parts that it holds."""
    files: Mapping[str, int] = field(default_factory=dict)
    """Its captured files, and the fence under which each was written."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The user wants an operator to have this number of instances."""

    command: CommandId
    operator: str
    instances: int


@dataclass(frozen=True, slots=True)
class Rebalance:
    """The user wants instances spread evenly over the nodes."""

    command: CommandId


@dataclass(frozen=True, slots=True)
class TakeCheckpoint:
    """The user wants a checkpoint now."""

    command: CommandId


@dataclass(frozen=True, slots=True)
class ReadState:
    """The user wants to read the state of an operator between two batches."""

    command: CommandId
    operator: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The user has cancelled a command."""

    command: CommandId


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The time of a Wake has come, or no other event came for a while."""


Command = Scale | Rebalance | TakeCheckpoint | ReadState
Event = (
    Started | NodeCame | NodeLost | BatchAsked | BatchLeft | BatchCommitted | BatchFailed | Done
    | Failed
    | Command | GiveUp | TimePassed
)  # fmt: skip
