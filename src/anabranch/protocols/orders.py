"""What the coordinator has others do: a few verbs on slices and parts.

Every order with an answer is answered by :class:`~anabranch.protocols.events.Done` or
:class:`~anabranch.protocols.events.Failed` under its number. Answers may come late, twice or never.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

from anabranch.protocols.model import Host, Published, Routed, Slice, SliceId
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.units import Version

OrderId = NewType("OrderId", int)
CommandId = NewType("CommandId", int)

SECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class CaptureWanted:
    """Rows to write to a file with a batch: all of some groups, or those changed since a base."""

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
    """End the jobs of a batch that cannot succeed; it is answered by the end of the batch."""

    version: Version
    fence: int


@dataclass(frozen=True, slots=True)
class Make:
    """Make the table of a slice from parts, oldest first; without parts it is empty.

    A part counts only for those groups of the slice that are at a version which it follows on.
    """

    slice: Slice
    parts: tuple[Part, ...]
    version: Version


@dataclass(frozen=True, slots=True)
class Advance:
    """Bring the table of a slice from a version to a later one by the changes in parts."""

    slice: Slice
    parts: tuple[Part, ...]
    after: Version
    upto: Version
    fence: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Run batches again that were sent before, on these slices alone, with outputs dropped."""

    slices: tuple[Slice, ...]
    """Each from its own version on."""
    upto: Version
    fence: int


@dataclass(frozen=True, slots=True)
class Capture:
    """Write rows of a slice to a file between two batches; answered by Captured.

    The fence keeps one that comes late from taking back what a later batch has done.
    """

    wanted: CaptureWanted
    slice: Slice
    version: Version
    fence: int


@dataclass(frozen=True, slots=True)
class Store:
    """Bring a captured file to its holders; answered by the part that it then is.

    Its name is one that no part had before: what nobody waits for any more is dropped by name.
    """

    captured: Captured
    holders: tuple[Host, ...]


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge parts of a slice into one full part; answered by that part."""

    slice: Slice
    parts: tuple[Part, ...]
    groups: KeyGroups
    version: Version
    holders: tuple[Host, ...]


@dataclass(frozen=True, slots=True)
class Publish:
    """Write the manifest that makes a version exist."""

    published: Published


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Delete the manifests of these versions, then parts that only they named.

    Nobody waits for it. In this order: no manifest ever names a part that is gone.
    """

    versions: tuple[Version, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """Write down how operators are divided and where their slices are. Nobody waits for it.

    Without it a restart makes all slices anew. Notes are written in the order they are given.
    """

    arrangement: int
    routed: Mapping[str, Routed]
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Have an agent on a node that refuses drivers before this one; answered by Inspected."""

    host: Host


@dataclass(frozen=True, slots=True)
class Inspect:
    """See what a node has; answered by Inspected.

    Versions are told of these slices alone: to look into a table takes as long as a batch has it.
    """

    host: Host
    slices: tuple[Slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Rewind:
    """Take Spark back to a version, so that the batches up to the target are run again.

    One that comes after a batch, or another one, with a higher fence has begun is refused.
    """

    start: Version
    target: Version
    fence: int


Answered = (
    Make | Advance | Replay | Capture | Store | Merge | Publish | Prepare | Inspect | Rewind
)  # fmt: skip
"""Orders that are answered by Done or Failed."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget tables and captured files of a node. Nobody waits for it."""

    host: Host
    slices: tuple[SliceId, ...] = ()
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trim:
    """Let go of what was sent to an operator up to a version. Nobody waits for it."""

    operator: str
    upto: Version


@dataclass(frozen=True, slots=True)
class AskNodes:
    """Ask the cluster manager for so many nodes in all. Nobody waits for it."""

    total: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Say that time has passed at this moment."""

    at: int


@dataclass(frozen=True, slots=True)
class Tell:
    """An event for the user: what happened to which thing, with figures."""

    kind: str
    details: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class End:
    """A command is carried out, or has failed for this reason."""

    command: CommandId
    error: str | None = None
    result: object = None


@dataclass(frozen=True, slots=True)
class Stop:
    """The query cannot go on, for this reason."""

    reason: str
    state_lost: bool = False
    """Whether that is because state is lost that cannot be computed again."""


Order = (
    RunBatch | CancelBatch | Answered | Note | Withdraw | Drop | Trim | AskNodes | Wake
    | Tell | End | Stop
)  # fmt: skip

PATIENCE: Mapping[type, int] = {
    Make: 600 * SECOND,
    Advance: 120 * SECOND,
    Replay: 600 * SECOND,
    Capture: 60 * SECOND,
    Store: 600 * SECOND,
    Merge: 1800 * SECOND,
    Publish: 60 * SECOND,
    Prepare: 60 * SECOND,
    Inspect: 15 * SECOND,
    Rewind: 600 * SECOND,
}
"""How long each order may take before it counts as failed."""
