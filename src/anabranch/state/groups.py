"""Key groups: the unit in which state is routed, checkpointed and moved.

A key belongs to group ``pmod(hash, key_groups)`` for as long as the operator lives. Which instance
owns which groups is a :class:`Routing`, and any set of groups is a :class:`KeyGroups`; nothing
else in the package does arithmetic on groups.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.errors import PlanError

MAX_KEY_GROUPS = 1 << 16
"""Groups are kept as uint16."""

_END = (MAX_KEY_GROUPS, MAX_KEY_GROUPS + 1)
"""A range behind all others."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def group_of(hashes: npt.NDArray[Any], key_groups: int) -> npt.NDArray[np.uint16]:
    """The key group of each 64-bit key hash, as Spark's ``pmod`` of the signed hash gives it."""
    signed = np.ascontiguousarray(hashes).view(np.int64)
    if key_groups & (key_groups - 1) == 0:  # a mask is what pmod is, and ten times quicker
        return (signed & (key_groups - 1)).astype(np.uint16)
    return np.mod(signed, key_groups).astype(np.uint16)


@dataclass(frozen=True)
class KeyGroups:
    """A set of key groups, kept as sorted half-open ranges that do not touch.

    Ranges may be given in any order and may overlap. ``|``, ``&``, ``-``, ``<=``, ``in``, ``len``
    and iteration work as they do on sets. The text form names the last group of each range:

    >>> KeyGroups(((0, 43), (64, 128)))
    KeyGroups('0-42,64-127')
    >>> str(KeyGroups.parse("0-42,64-127") - KeyGroups.parse("10-99"))
    '0-9,100-127'
    """

    ranges: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(self.ranges):
            if not 0 <= start <= stop <= MAX_KEY_GROUPS:
                raise ValueError(f"[{start}, {stop}) is no range of key groups")
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            elif start < stop:
                merged.append((start, stop))
        object.__setattr__(self, "ranges", tuple(merged))

    @classmethod
    def all(cls, key_groups: int) -> KeyGroups:
        """Every group of an operator that has this many."""
        return cls(((0, key_groups),))

    @classmethod
    def of(cls, groups: Iterable[int]) -> KeyGroups:
        """The set of these groups (an array of them will do)."""
        given = groups if isinstance(groups, np.ndarray) else np.array(list(groups), np.int64)
        return cls(tuple((int(g), int(g) + 1) for g in np.unique(given)))

    @classmethod
    def parse(cls, text: str) -> KeyGroups:
        """The set that prints as this text, such as ``"0-42,64-127"``; no text, no groups."""
        ranges = []
        for part in text.split(",") if text else []:
            match = _RANGE.fullmatch(part)
            if not match:
                raise ValueError(f"{text!r} names no key groups; write them like '0-42,64-127'")
            ranges.append((int(match[1]), int(match[2] or match[1]) + 1))
        return cls(tuple(ranges))

    def __str__(self) -> str:
        return ",".join(f"{a}-{b - 1}" if b - a > 1 else f"{a}" for a, b in self.ranges)

    def __repr__(self) -> str:
        return f"KeyGroups({str(self)!r})"

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.ranges:
            yield from range(start, stop)

    def __contains__(self, group: object) -> bool:
        return any(start <= group < stop for start, stop in self.ranges)  # type: ignore[operator]

    def __or__(self, other: KeyGroups) -> KeyGroups:
        if not self.ranges or self.ranges == other.ranges:
            return other
        return KeyGroups(self.ranges + other.ranges) if other.ranges else self

    def __and__(self, other: KeyGroups) -> KeyGroups:
        if self.ranges == other.ranges:
            return self
        shared, mine, theirs = [], 0, 0
        while mine < len(self.ranges) and theirs < len(other.ranges):
            (a, b), (c, d) = self.ranges[mine], other.ranges[theirs]
            if max(a, c) < min(b, d):
                shared.append((max(a, c), min(b, d)))
            if b <= d:
                mine += 1
            else:
                theirs += 1
        return KeyGroups._sorted(shared)

    def __sub__(self, other: KeyGroups) -> KeyGroups:
        left, theirs = [], iter(other.ranges)
        start, stop = next(theirs, _END)
        for at, end in self.ranges:
            while stop <= at:
                start, stop = next(theirs, _END)
            while start < end:
                if at < start:
                    left.append((at, start))
                at = stop
                if stop > end:
                    break
                start, stop = next(theirs, _END)
            if at < end:
                left.append((at, end))
        return KeyGroups._sorted(left)

    def __le__(self, other: KeyGroups) -> bool:
        if self.ranges == other.ranges:
            return True
        theirs = iter(other.ranges)
        start, stop = next(theirs, _END)
        for at, end in self.ranges:
            while stop <= at:
                start, stop = next(theirs, _END)
            if at < start or end > stop:
                return False
        return True

    @classmethod
    def _sorted(cls, ranges: list[tuple[int, int]]) -> KeyGroups:
        """A set of ranges that are sorted, not empty, and do not touch."""
        made = object.__new__(cls)
        object.__setattr__(made, "ranges", tuple(ranges))
        return made

    def mask(self, groups: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which elements of an array of groups are in the set."""
        member = np.zeros(MAX_KEY_GROUPS, np.bool_)
        for start, stop in self.ranges:
            member[start:stop] = True
        found: npt.NDArray[np.bool_] = member[groups]
        return found


def assign(key_groups: int, instances: int) -> tuple[KeyGroups, ...]:
    """The groups of each instance in an even assignment of contiguous ranges."""
    _check(key_groups, instances)
    cuts = [i * key_groups // instances for i in range(instances + 1)]
    return tuple(KeyGroups((cut,)) for cut in pairwise(cuts))


def _check(key_groups: int, instances: int) -> None:
    if not 1 <= key_groups <= MAX_KEY_GROUPS:
        raise PlanError(f"{key_groups} key groups: there must be 1 to {MAX_KEY_GROUPS}")
    if not 1 <= instances <= key_groups:
        raise PlanError(
            f"{instances} instances of an operator with {key_groups} key groups: "
            "there must be at least one, and no more than there are key groups"
        )


@dataclass(frozen=True)
class Routing:
    """Which instance owns each key group of an operator.

    ``owners[i]`` are the groups of instance ``i``. Every group has exactly one owner. ``epoch``
    grows with every change and tells which one of two routings is newer.
    """

    owners: tuple[KeyGroups, ...]
    epoch: int = 0

    def __post_init__(self) -> None:
        union = KeyGroups(tuple(r for owned in self.owners for r in owned.ranges))
        if union != KeyGroups.all(len(union)) or len(union) != sum(map(len, self.owners)):
            text = {i: str(owned) for i, owned in enumerate(self.owners)}
            raise ValueError(f"not a routing: groups without an owner, or with two: {text}")
        _check(len(union), len(self.owners))

    @classmethod
    def even(cls, key_groups: int, instances: int) -> Routing:
        """The routing that a new operator starts with."""
        return cls(assign(key_groups, instances))

    @property
    def instances(self) -> int:
        """How many instances there are; they are numbered from 0."""
        return len(self.owners)

    @property
    def key_groups(self) -> int:
        """How many key groups there are."""
        return sum(map(len, self.owners))

    def table(self) -> npt.NDArray[np.int32]:
        """The instance of every group, by group: ``routing.table()[group]``."""
        table = np.empty(self.key_groups, np.int32)
        for instance, owned in enumerate(self.owners):
            for start, stop in owned.ranges:
                table[start:stop] = instance
        return table

    def scaled(self, instances: int) -> Routing:
        """The balanced routing over this many instances that moves as few groups as possible.

        Instances keep their numbers; the highest numbers come and go. Without anything to move
        the routing is returned as it is.
        """
        _check(self.key_groups, instances)
        least, larger = divmod(self.key_groups, instances)
        kept = [*self.owners[:instances], *[KeyGroups()] * (instances - len(self.owners))]
        # Those that own most may keep one more than the others: each group kept is one not moved.
        quota = dict.fromkeys(range(instances), least)
        for instance in sorted(quota, key=lambda i: (-len(kept[i]), i))[:larger]:
            quota[instance] += 1
        kept = [_first(owned, quota[i]) for i, owned in enumerate(kept)]
        loose = KeyGroups.all(self.key_groups)
        for owned in kept:
            loose -= owned
        for i, owned in enumerate(kept):
            given = _first(loose, quota[i] - len(owned))
            kept[i], loose = owned | given, loose - given
        if tuple(kept) == self.owners:
            return self
        return Routing(tuple(kept), self.epoch + 1)

    def divided(self, instances: Iterable[int], parts: int) -> Routing:
        """The routing with each of these instances divided into several, as far as it has groups.

        An instance keeps its number for the first part; the others are numbered from the end on.
        """
        owners = list(self.owners)
        for instance in sorted(instances):
            owned = owners[instance]
            count = min(parts, len(owned))
            cuts = [i * len(owned) // count for i in range(count + 1)]
            pieces = [_first(owned, stop) - _first(owned, start) for start, stop in pairwise(cuts)]
            owners[instance] = pieces[0]
            owners += pieces[1:]
        return self if tuple(owners) == self.owners else Routing(tuple(owners), self.epoch + 1)

    def to_json(self) -> dict[str, Any]:
        """A value for :mod:`json`, read back by :meth:`from_json`."""
        return {"epoch": self.epoch, "owners": [str(owned) for owned in self.owners]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Routing:
        """The routing that :meth:`to_json` wrote; ValueError if it is none."""
        try:
            owners = tuple(KeyGroups.parse(text) for text in value["owners"])
            return cls(owners, int(value["epoch"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a routing: {json.dumps(value, default=repr)}") from error


def _first(groups: KeyGroups, count: int) -> KeyGroups:
    """The ``count`` lowest groups of a set, or all of it."""
    taken = []
    for start, stop in groups.ranges:
        stop = min(stop, start + count)
        taken.append((start, stop))
        count -= stop - start
    return KeyGroups(tuple(taken))
