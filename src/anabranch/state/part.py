"""A part: the description of a stored capture, enough to decide what to read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote

from anabranch.state.groups import KeyGroups
from anabranch.units import Version


def peer_name(host: str, name: str) -> str:
    """The name of a peer's backup in the store of all peers."""
    return f"{quote(host, safe='')}/{name}"


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
    bytes: int = 0
    rows: int = 0
    checksum: str = ""
    instance: int = 0

    @property
    def copies(self) -> tuple[str, ...]:
        """The names under which a store has it."""
        return tuple(peer_name(host, self.name) for host in self.holders) or (self.name,)

    def to_json(self) -> dict[str, Any]:
        """A value for :mod:`json`."""
        return asdict(self) | {"groups": str(self.groups), "holders": list(self.holders)}

    @classmethod
    def from_json(cls, value: dict[str, Any], operator: str = "") -> Part:
        """The part that :meth:`to_json` wrote. ``operator`` is the default of older forms."""
        found = {"operator": operator} | value
        groups, holders = KeyGroups.parse(found["groups"]), tuple(found.get("holders", ()))
        return cls(**found | {"groups": groups, "holders": holders})
