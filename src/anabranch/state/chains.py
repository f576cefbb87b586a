"""Captures that build on one another, judged without their rows.

A *chain* is any number of captures of one operator, by whichever instances: for every key group it
has a full capture and the captures after it, each of what changed since the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from anabranch.errors import CheckpointError
from anabranch.state.groups import MAX_KEY_GROUPS, KeyGroups
from anabranch.units import Version

_UNSEEN, _FULL = -(1 << 62), -(1 << 61)


class Link(Protocol):
    """What is known of a capture without its rows."""

    @property
    def version(self) -> Version:
        """The version it was taken at."""

    @property
    def base(self) -> Version | None:
        """The version since which it has the changes, or None if it has everything."""

    @property
    def groups(self) -> KeyGroups:
        """The key groups it was taken of."""


L = TypeVar("L", bound=Link)


@dataclass(frozen=True)
class Chain:
    """What a chain of captures amounts to: the groups' state at a version, or changes of it."""

    version: Version
    base: Version | None
    groups: KeyGroups


def follow(links: Sequence[Link]) -> Chain:
    """Check that captures fit together, and say what they amount to.

    :class:`~anabranch.errors.CheckpointError` says which groups lack what.
    """
    at = np.full(MAX_KEY_GROUPS, _UNSEEN, np.int64)
    since = at.copy()
    for link in sorted(links, key=lambda link: link.version):
        mine = np.fromiter(link.groups, np.int64, len(link.groups))
        if link.base is None:
            wrong = at[mine] == link.version
            since[mine] = _FULL
        else:
            wrong = (at[mine] != link.base) & (at[mine] != _UNSEEN)
            since[mine] = np.where(at[mine] == _UNSEEN, link.base, since[mine])
        if wrong.any():
            raise CheckpointError(
                f"groups {KeyGroups.of(mine[wrong])}: a capture of version {link.version} "
                f"(base {link.base}) does not follow on version {at[mine[wrong]].max()}"
            )
        at[mine] = link.version
    groups = KeyGroups.of(np.flatnonzero(at != _UNSEEN))
    if not groups:
        raise CheckpointError("there are no captures, or none of any key group")
    versions, bases = (np.unique(given[list(groups)]).tolist() for given in (at, since))
    if len(versions) > 1 or len(bases) > 1:
        parts = [
            f"{way} {'the beginning' if v == _FULL else v} for groups "
            f"{KeyGroups.of(np.flatnonzero(given == v))}"
            for way, given, found in (("from", since, bases), ("to", at, versions))
            for v in found
        ]
        raise CheckpointError(f"the captures are not all of the same versions: {', '.join(parts)}")
    return Chain(Version(versions[0]), None if bases == [_FULL] else Version(bases[0]), groups)


def needed(links: Sequence[L]) -> list[tuple[L, KeyGroups]]:
    """The captures that count, oldest first, and for which groups.

    A full capture makes those before it needless as far as its groups go.
    """
    full = KeyGroups()
    kept = []
    for link in sorted(links, key=lambda link: link.version)[::-1]:
        if link.groups - full:
            kept.append((link, link.groups - full))
        if link.base is None:
            full |= link.groups
    return kept[::-1]
