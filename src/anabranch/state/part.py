"""A part: the description of a stored capture, enough to decide what to read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import quote

from anabranch.state.groups import KeyGroups
from anabranch.units import Version

OWN = "own/"
"""What the names of files begin with that a node keeps for itself."""


def peer_name(host: str, name: str) -> str:
    """The name of a peer's backup in the store of all peers."""
    return f"{quote(host, safe='')}/{name}"


def own_name(name: str) -> str:
    """The name of a part's file where the owner keeps it, beside what it keeps for others."""
    return f"{OWN}{name}"


@dataclass(frozen=True, slots=True)
class Shape:
    """How a part is divided over its holders; without holders, how the store itself is to divide
    it, if it can."""

    needed: int = 1
    """See :class:`Part`."""
    parity: int = 0
    """See :class:`Part`."""
    row: int | None = None
    """How many bytes of each fragment are coded at a time; None: as many as suit most states."""


COPIES = Shape()
"""Each holder has a copy."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of some key groups of an operator at a version: all rows, or the changed ones.

    A part with a ``base`` advances state of any version from its base on to its own version.
    """

    name: str
    """The name of its file in a backup store; at each of its holders, if it has any."""
    operator: str
    version: Version
    base: Version | None
    groups: KeyGroups
    holders: tuple[str, ...] = ()
    """The nodes that have it; none: it is in a store that outlives all nodes."""
    needed: int = 1
    """So many of its holders can give it. If they are more than one, each has a fragment of it."""
    bytes: int = 0
    rows: int = 0
    checksum: str = ""
    instance: int = 0
    parity: int = 0
    """So many holders more than are needed it should have, as was promised when it was stored."""
    owner: str = ""
    """The node of its slice, if that keeps the file for itself. It counts as no holder, as the part
    is to survive its loss."""

    @property
    def copies(self) -> tuple[str, ...]:
        """The names under which a store has it."""
        return tuple(peer_name(host, self.name) for host in self.holders) or (self.name,)

    @property
    def own_name(self) -> str:
        """The name under which its owner keeps the file."""
        return own_name(self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which a store may have it, the owner's among them."""
        return (*self.copies, peer_name(self.owner, self.own_name)) if self.owner else self.copies

    def available(self, nodes: Collection[str]) -> bool:
        """Whether it can be read while only these nodes are alive."""
        if not self.holders:
            return True
        return sum(host in nodes for host in self.holders) >= self.needed

    def at(self, *holders: str) -> Part | None:
        """The same part at these holders only. None if they cannot give it."""
        return replace(self, holders=holders) if len(holders) >= self.needed else None

    def to_json(self) -> dict[str, Any]:
        """A value for :mod:`json`."""
        return asdict(self) | {"groups": str(self.groups), "holders": list(self.holders)}

    @classmethod
    def from_json(cls, value: dict[str, Any], operator: str = "") -> Part:
        """The part that :meth:`to_json` wrote. ``operator`` is the default of older forms."""
        found = {"operator": operator} | value
        groups, holders = KeyGroups.parse(found["groups"]), tuple(found.get("holders", ()))
        return cls(**found | {"groups": groups, "holders": holders})
