"""The requests to a node: one frozen type for each verb, and the type of its answer.

:class:`~anabranch.nodes.local.LocalNode` executes them on the tables of a machine. An agent gets
them as JSON (:mod:`anabranch.nodes.codec`). To callers both are a
:class:`~anabranch.nodes.node.Node`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NewType, TypeVar

import pyarrow as pa

from anabranch.fragments.code import LARGEST
from anabranch.fragments.cost import Cost
from anabranch.fragments.layout import ALIGNED, LARGEST_ROW
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.state.table import TableLayout
from anabranch.units import Version

A = TypeVar("A")

Epoch = NewType("Epoch", int)
"""The number of a driver's run of the query; the next driver has a greater one."""
TableName = NewType("TableName", str)
"""``operator/slice``, or ``operator@epoch/instance`` where the epoch is that of the routing."""
Host = NewType("Host", str)
"""The name of a node."""
OperatorName = NewType("OperatorName", str)
Instance = NewType("Instance", int)
CaptureFile = NewType("CaptureFile", str)
"""The path of a capture file on its node."""
BackupName = NewType("BackupName", str)
"""The name of bytes in a backup store."""
Prefix = NewType("Prefix", str)
"""What stands before the names of backups: nothing, or folders with a ``/`` at the end."""
Checksum = NewType("Checksum", str)
Address = NewType("Address", str)
"""``host:port`` of an agent."""

VERBS: dict[str, type[Request[Any]]] = {}
"""All types of requests, by verb."""

_TABLE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*)/[0-9]{1,18}-[0-9]{1,18}")


class Request(Generic[A]):
    """A request to a node. ``A`` is the type of its answer.

    The verb is the name of the class.
    """

    verb: ClassVar[str]

    def __init_subclass__(cls, *, abstract: bool = False) -> None:
        super().__init_subclass__()
        if not abstract:
            cls.verb = cls.__name__.lower()
            if cls.verb in VERBS:
                raise TypeError(f"there already is a request with the verb {cls.verb!r}")
            VERBS[cls.verb] = cls

    def __str__(self) -> str:
        of = [getattr(self, name) for name in ("table", "file", "name") if hasattr(self, name)]
        return " ".join([self.verb, *of])


@dataclass(frozen=True, kw_only=True)
class Change(Request[A], abstract=True):
    """A request that changes something. Fenced if the node has seen a driver of a later epoch."""

    epoch: Epoch


@dataclass(frozen=True, kw_only=True)
class Backed(Change[A], abstract=True):
    """A change that needs the backup store of the query."""

    peers: Mapping[str, Address] = field(default_factory=dict)
    """The agents of the nodes that keep backups for each other, by host."""


@dataclass(frozen=True)
class Stored:
    """A part that was stored, and what that took."""

    part: Part
    cost: Cost


# Tables


@dataclass(frozen=True, kw_only=True)
class Make(Backed[Cost]):
    """Make a table at a version. It replaces a table of the same name.

    It has the state of some groups from parts; without parts it is empty. Different groups may
    need different parts, and parts that no group needs are not read. CheckpointError, and nothing
    is changed, if the parts do not bring all groups to the version.
    """

    table: TableName
    layout: TableLayout
    version: Version
    groups: KeyGroups
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        _check_groups(self.groups, self.layout.key.key_groups)
        _check_parts(self.parts, self.layout.key.key_groups)


@dataclass(frozen=True, kw_only=True)
class Advance(Backed[None]):
    """Advance a table from a version to a later one, by the changes of its groups in between.

    Different groups may need different parts. CheckpointError, and nothing is changed, if the parts
    do not bring all groups to the version. StateMissing if the table is not at version ``since``
    and cannot be rolled back to it. Fenced if a batch of a later fence has begun. ``fence`` is that
    of the batches of the changes. Nothing happens if the table is at the version under this fence
    already, as for a repeated request.
    """

    table: TableName
    layout: TableLayout
    since: Version
    upto: Version
    groups: KeyGroups
    parts: tuple[Part, ...]
    fence: int

    def __post_init__(self) -> None:
        if self.upto < self.since:
            raise ValueError(f"'upto' is {self.upto}, before version {self.since}")
        _check_groups(self.groups, self.layout.key.key_groups)
        _check_parts(self.parts, self.layout.key.key_groups)


@dataclass(frozen=True, kw_only=True)
class Capture(Change[CaptureFile]):
    """Write the rows of a table at a committed version to a file of the node.

    All rows, or those that changed since ``base``, the version of its last checkpoint.
    StateMissing if the table is not at that version and cannot be rolled back to it. Fenced if a
    batch of a later fence has begun, as a late request must not roll it back.
    """

    table: TableName
    layout: TableLayout
    operator: OperatorName
    instance: Instance
    groups: KeyGroups
    version: Version
    base: Version | None
    fence: int

    def __post_init__(self) -> None:
        _check_groups(self.groups, self.layout.key.key_groups)


@dataclass(frozen=True, kw_only=True)
class Inspect(Request[Mapping[TableName, tuple[Version, ...]]]):
    """List the tables, and the versions at which each can be used.

    These are the version that a table is at, and the one that it can be rolled back to. Only the
    tables in ``layouts`` are looked into; one that cannot be used, because it is damaged, of other
    columns, or held by somebody until the deadline, has no version.
    """

    layouts: Mapping[TableName, TableLayout] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Drop(Change[None]):
    """Remove tables and capture files; nothing happens for those that are not there."""

    tables: tuple[TableName, ...] = ()
    captures: tuple[CaptureFile, ...] = ()


# Captures and parts


@dataclass(frozen=True, kw_only=True)
class Captures(Request[tuple[CaptureFile, ...]]):
    """The capture files that there are, those that are just being written among them."""


@dataclass(frozen=True, kw_only=True)
class Fetch(Request[pa.Buffer]):
    """The bytes of a capture file."""

    file: CaptureFile


@dataclass(frozen=True, kw_only=True)
class Store(Backed[Stored]):
    """Copy a capture file to the backup store, under a prefix, and delete it.

    With ``holders`` the store is that of the peers, and each of these hosts gets a copy, or a
    fragment if more than one of them are ``needed``. If a copy, or too many fragments, fail, the
    file stays, and the request can be repeated: DidNotHappen if no host has a copy, MayHaveHappened
    if some may have one.
    """

    file: CaptureFile
    under: Prefix
    holders: tuple[Host, ...] = ()
    needed: int = 1
    row: int | None = None
    """How many bytes of each fragment are coded at a time."""
    parity: int = 0
    """Without holders: the store is to code it into ``needed`` and so many more fragments."""

    def __post_init__(self) -> None:
        _check_needed(self.needed, self.holders, self.parity)
        _check_row(self.row)


@dataclass(frozen=True, kw_only=True)
class Mend(Backed[Stored]):
    """Make lost fragments of a part again, or copies, at these hosts.

    The answer has all hosts that hold one now.
    """

    part: Part
    holders: tuple[Host, ...]

    def __post_init__(self) -> None:
        if not self.part.holders:
            raise ValueError(f"'part' is {self.part.name}, which is at no node")


@dataclass(frozen=True, kw_only=True)
class Merge(Backed[Stored]):
    """Merge parts into a full one of some groups at a version, and store it as Store does.

    CheckpointError if the parts do not bring all groups to the version.
    """

    schema: CheckpointSchema
    parts: tuple[Part, ...]
    groups: KeyGroups
    version: Version
    under: Prefix
    holders: tuple[Host, ...] = ()
    needed: int = 1
    row: int | None = None
    parity: int = 0

    def __post_init__(self) -> None:
        _check_row(self.row)
        _check_groups(self.groups, self.schema.key_groups)
        _check_parts(self.parts, self.schema.key_groups)
        _check_needed(self.needed, self.holders, self.parity)


# Backups that the node keeps for others


MOST_BLOCKS = 64
"""How many blocks one request may put."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of bytes with a name."""

    name: BackupName
    bytes: int
    checksum: Checksum


@dataclass(frozen=True, kw_only=True)
class Put(Change[None]):
    """Keep blocks of bytes, which are sent one after the other when the node is ready for them.

    None of them is kept if one cannot be.
    """

    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        names = {block.name for block in self.blocks}
        if not 0 < len(self.blocks) <= MOST_BLOCKS or len(names) < len(self.blocks):
            raise ValueError(
                f"'blocks' has {len(self.blocks)}, with {len(names)} names; there must be 1 to "
                f"{MOST_BLOCKS}, each with a name of its own"
            )

    def __str__(self) -> str:
        return _listing(self.verb, [block.name for block in self.blocks])


@dataclass(frozen=True, kw_only=True)
class Get(Request[pa.Buffer]):
    """The bytes under a name, or a range of them; fewer if they end before."""

    name: BackupName
    offset: int = 0
    length: int | None = None


@dataclass(frozen=True, kw_only=True)
class List(Request[tuple[str, ...]]):
    """The names that start with a prefix, sorted."""

    prefix: str


@dataclass(frozen=True, kw_only=True)
class Size(Request[int]):
    """The number of bytes under a name."""

    name: BackupName


@dataclass(frozen=True, kw_only=True)
class Delete(Change[None]):
    """Delete names. Nothing happens for those that do not exist."""

    names: tuple[BackupName, ...]

    def __str__(self) -> str:
        return _listing(self.verb, self.names)


# The agent itself


@dataclass(frozen=True)
class Pong:
    """The state of an agent."""

    pid: int
    used: int
    """The bytes of all backups that it keeps."""
    limit: int
    """The most bytes that these can have now."""
    failures: Mapping[str, int]
    """How many requests have failed, by the name of the error."""


@dataclass(frozen=True)
class Ping(Request[Pong]):
    """Whether the agent answers."""


@dataclass(frozen=True, kw_only=True)
class Stop(Change[None]):
    """End the agent."""


def check_table(value: object) -> TableName:
    """The name of a table. ValueError if it is invalid."""
    if not isinstance(value, str) or not _TABLE.fullmatch(value):
        raise ValueError(f"{value!r:.100} is no name of a table, which is operator/epoch-number")
    return TableName(value)


def slice_table(operator: str, slice_id: str) -> TableName:
    """The name of the table of a slice.

    >>> slice_table("counter", "3-17")
    'counter/3-17'
    """
    return check_table(f"{operator}/{slice_id}")


def _listing(verb: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{verb} {names[0]}{more}" if names else verb


def _check_groups(groups: KeyGroups, among: int) -> None:
    if not groups <= KeyGroups.all(among):
        raise ValueError(f"'groups' has {groups}, but the operator has {among} key groups")


def _check_needed(needed: int, holders: tuple[Host, ...], parity: int) -> None:
    among = len(holders) or needed + parity
    if not 0 <= parity < LARGEST or among > LARGEST:
        raise ValueError(f"'parity' is {parity}; there are at most {LARGEST} fragments")
    if needed < 1 or (needed > 1 and needed >= among):
        raise ValueError(f"'needed' is {needed}, of {among} holders")


def _check_row(row: int | None) -> None:
    if row is not None and (row % ALIGNED or not ALIGNED <= row <= LARGEST_ROW):
        raise ValueError(f"'row' is {row}, not a multiple of {ALIGNED} up to {LARGEST_ROW}")


def _check_parts(parts: tuple[Part, ...], among: int) -> None:
    for part in parts:
        if not part.groups <= KeyGroups.all(among):
            raise ValueError(
                f"'parts' has {part.groups} in {part.name}, but the operator has {among} key groups"
            )
