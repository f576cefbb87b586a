"""The orders of the coordinator: a few verbs on slices and parts.

Every order with an answer is answered by :class:`~anabranch.protocols.events.Done` or
:class:`~anabranch.protocols.events.Failed` under its number. Answers may come late, twice or never.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

from anabranch.errors import AnabranchError, QueryFailed
from anabranch.protocols.model import Host, Published, Routed, Slice, SliceId
from anabranch.state.groups import KeyGroups
from anabranch.state.part import COPIES, Part, Shape
from anabranch.units import Version

OrderId = NewType("OrderId", int)
CommandId = NewType("CommandId", int)

SECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class CaptureWanted:
    """Rows to write to a file with a batch: all rows of some groups, or changes since a base."""

    slice: SliceId
    groups: KeyGroups
    base: Version | None
    clean: bool
    """Whether the table counts as unchanged afterwards: all of its groups are captured."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A file of captured rows on the node of its slice."""

    file: str
    slice: SliceId
    operator: str
    node: Host
    version: Version
    base: Version | None
    groups: KeyGroups
    clean: bool
    """See CaptureWanted."""


@dataclass(frozen=True, slots=True)
class RunBatch:
    """Run a batch with these slices, deliver its results and commit it."""

    version: Version
    fence: int
    arrangement: int
    """Noted with the commit: tables in place can be used if the noted slices are of the same."""
    routed: Mapping[str, Routed]
    slices: tuple[Slice, ...]
    captures: tuple[CaptureWanted, ...]
    deliver: bool
    """Whether results go to the sinks; not so if they are there since before a restart."""


@dataclass(frozen=True, slots=True)
class CancelBatch:
    """Cancel the jobs of a batch that cannot succeed. The end of the batch is the answer."""

    version: Version
    fence: int


@dataclass(frozen=True, slots=True)
class Make:
    """Make the table of a slice from parts, oldest first. Without parts the table is empty.

    A part applies only to those groups of the slice that are at a version which it follows on.
    """

    slice: Slice
    parts: tuple[Part, ...]
    version: Version


@dataclass(frozen=True, slots=True)
class Advance:
    """Advance the table of a slice from a version to a later one by the changes in parts."""

    slice: Slice
    parts: tuple[Part, ...]
    after: Version
    upto: Version
    fence: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Run earlier batches again on these slices alone, without outputs."""

    slices: tuple[Slice, ...]
    """Each from its own version on."""
    upto: Version
    fence: int


@dataclass(frozen=True, slots=True)
class Capture:
    """Write rows of a slice to a file between two batches; answered by Captured.

    The fence keeps a late order from rolling back what a later batch has done.
    """

    wanted: CaptureWanted
    slice: Slice
    version: Version
    fence: int
    bytes: int = 0
    """The size of its table, as far as it is known."""


@dataclass(frozen=True, slots=True)
class Store:
    """Store a captured file at its holders; answered by the part.

    The part gets a new name, so that a part whose order was given up can be deleted by its name.
    """

    captured: Captured
    holders: tuple[Host, ...]
    bytes: int = 0
    """The size of the table that it was captured of, as far as it is known."""
    shape: Shape = COPIES


@dataclass(frozen=True, slots=True)
class Mend:
    """Make lost fragments of a part again, at other holders; answered by the part."""

    part: Part
    host: Host
    """The node that makes them."""
    holders: tuple[Host, ...]
    """The ones that are to hold a fragment too."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge parts of a slice into one full part; answered by that part."""

    slice: Slice
    parts: tuple[Part, ...]
    groups: KeyGroups
    version: Version
    holders: tuple[Host, ...]
    shape: Shape = COPIES


@dataclass(frozen=True, slots=True)
class Publish:
    """Write the manifest of a version."""

    published: Published


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Delete the manifests of these versions, then parts that only they named. It has no answer.

    In this order no manifest ever names a deleted part.
    """

    versions: tuple[Version, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """Write the routing of operators and the nodes of their slices.

    Without it a restart restores all slices. Notes are written in the order of their orders.
    """

    arrangement: int
    routed: Mapping[str, Routed]
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Start an agent on a node if none answers; it refuses earlier drivers. Gets Inspected."""

    host: Host


@dataclass(frozen=True, slots=True)
class Inspect:
    """List the tables and parts on a node; answered by Inspected.

    Only the tables of these slices are opened, because that waits for a batch that uses them.
    """

    host: Host
    slices: tuple[Slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Rewind:
    """Rewind Spark to a version, so that the batches up to the target run again.

    It is refused after a batch or another rewind with a higher fence has begun.
    """

    start: Version
    target: Version
    fence: int


Answered = (
    Make | Advance | Replay | Capture | Store | Mend | Merge | Note | Publish | Prepare | Inspect
    | Rewind
)  # fmt: skip
"""Orders that are answered by Done or Failed."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete tables and captured files on a node. It has no answer."""

    host: Host
    slices: tuple[SliceId, ...] = ()
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trim:
    """Drop the kept rows that were sent to an operator up to a version. It has no answer."""

    operator: str
    upto: Version


@dataclass(frozen=True, slots=True)
class AskNodes:
    """Request this number of nodes in all from the cluster manager. It has no answer."""

    total: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Send TimePassed at this time."""

    at: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Record an event for the user."""

    kind: str
    details: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class End:
    """End a command, with its result or the reason of its failure."""

    command: CommandId
    error: str | None = None
    result: object = None


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the query, for this reason."""

    reason: str
    kind: type[AnabranchError] = QueryFailed
    """The error that whoever waits for the query gets."""


Order = (
    RunBatch | CancelBatch | Answered | Withdraw | Drop | Trim | AskNodes | Wake
    | Tell | End | Stop
)  # fmt: skip


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


_BASE: Mapping[type, int] = {
    Make: 600 * SECOND,
    Advance: 120 * SECOND,
    Replay: 600 * SECOND,
    Capture: 60 * SECOND,
    Store: 600 * SECOND,
    Mend: 600 * SECOND,
    Merge: 600 * SECOND,
    Note: 60 * SECOND,
    Publish: 60 * SECOND,
    Prepare: 60 * SECOND,
    Inspect: 15 * SECOND,
    Rewind: 600 * SECOND,
}
"""How long each order may take, however little there is to do."""
_BYTE = 1
"""And how much longer for each byte that is read or written: 1 MB/s is slower than any store that
is of use. A node that hangs is found earlier, as its agent does not answer either; a transfer that
stands still fails by itself."""
_BATCH = 60 * SECOND
"""And for each batch that is replayed."""


def patience(order: Answered) -> int:
    """How long an order may take before it counts as failed, in microseconds."""
    base = _BASE[type(order)]
    match order:
        case Make(_, parts) | Advance(_, parts) | Merge(_, parts):
            return base + _BYTE * sum(part.bytes for part in parts)
        case Mend(part):
            return base + _BYTE * part.bytes
        case Capture(bytes=size) | Store(bytes=size):
            return base + _BYTE * size
        case Replay(slices, upto):
            return base + _BATCH * (upto - min(each.version for each in slices))
        case _:
            return base
