"""Chains of captures, checked without reading their rows.

A *chain* is any number of captures of one operator, by any instances. For every key group it has a
full capture and incremental captures after it. An incremental capture advances state of any version
from its base on to its own version, so it can follow every capture between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    for link in _oldest_first(links):
        mine = np.fromiter(link.groups, np.int64, len(link.groups))
        if link.base is None:
            wrong = at[mine] == link.version
            since[mine] = _FULL
        else:
            follows = (link.base <= at[mine]) & (at[mine] < link.version)
            wrong = ~follows & (at[mine] != _UNSEEN)
            since[mine] = np.where(at[mine] == _UNSEEN, link.base, since[mine])
        if wrong.any():
            raise CheckpointError(
                f"groups {KeyGroups.of(mine[wrong])}: a capture of version {link.version} "
                f"(base {link.base}) does not follow on version {at[mine[wrong]].max()}"
            )
        at[mine] = link.version
    groups = KeyGroups.of(np.flatnonzero(at != _UNSEEN))
    if not groups:
        raise CheckpointError("there is no capture of any key group")
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
    return _without_needless([(link, link.groups) for link in _oldest_first(links)])


def leading_to(
    links: Sequence[L], groups: KeyGroups, version: Version, *, since: Version | None = None
) -> list[tuple[L, KeyGroups]]:
    """The captures that bring groups to a version, oldest first, and which of the groups each.

    They start with full captures, or, with ``since``, bring on groups that are at that version. The
    groups may take different ways. Captures that do not follow on those before, or are later than
    the version, are left out for the groups of which that is so.
    :class:`~anabranch.errors.CheckpointError` says which groups do not come to the version.
    """
    at = {} if since is None else {since: groups}
    taken = []
    for link in _oldest_first(links):
        if link.version > version:
            break
        able = link.groups & groups
        if link.base is not None:
            able &= _union(of for v, of in at.items() if link.base <= v < link.version)
        elif since is not None:
            continue  # it does not say which rows are gone
        if able:
            taken.append((link, able))
            at = {v: of - able for v, of in at.items()}
            at[link.version] = at.get(link.version, KeyGroups()) | able
    if at.get(version, KeyGroups()) != groups:
        ends = {f"version {v}": of for v, of in sorted(at.items()) if of}
        ends["no version"] = groups - _union(at.values())
        raise CheckpointError(
            "the captures bring "
            + ", ".join(f"groups {of} to {v}" for v, of in ends.items() if of)
            + f"; all of groups {groups} are wanted at version {version}"
        )
    return _without_needless(taken)


def _oldest_first(links: Sequence[L]) -> list[L]:
    """Of the same version the full ones last: they make the others needless."""
    return sorted(links, key=lambda link: (link.version, link.base is None))


def _without_needless(steps: Sequence[tuple[L, KeyGroups]]) -> list[tuple[L, KeyGroups]]:
    full = KeyGroups()
    kept = []
    for link, groups in reversed(steps):
        if groups - full:
            kept.append((link, groups - full))
        if link.base is None:
            full |= groups
    return kept[::-1]


def _union(sets: Iterable[KeyGroups]) -> KeyGroups:
    return KeyGroups(tuple(bounds for each in sets for bounds in each.ranges))
