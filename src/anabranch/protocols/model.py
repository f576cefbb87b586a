"""The state of a query as its coordinator knows it: frozen values, and questions about them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType

from anabranch.backup.policy import Backup
from anabranch.state.groups import KeyGroups, Routing
from anabranch.state.part import Part
from anabranch.units import NO_VERSION, Version

SliceId = NewType("SliceId", str)
"""``epoch-number``: no two slices of a query ever have the same, whichever driver made them."""

Host = str
"""The name of a node."""


NO_GROUPS = KeyGroups()


class Role(Enum):
    """The use of a slice. Each key group has exactly one serving slice."""

    SERVING = "serving"
    ARRIVING = "arriving"
    """Its table is being made."""
    STANDBY = "standby"
    """It has a table, which follows the stream until rows are routed to it."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Some key groups of one operator with a state table of their own on one node."""

    id: SliceId
    operator: str
    instance: int
    node: Host
    groups: KeyGroups
    role: Role
    version: Version = NO_VERSION
    """The version of its table, as far as it is not serving: a serving one follows the commits."""
    base: Version | None = None
    """Its table knows what changed since this version; None: the next capture is of all rows."""
    leaving: KeyGroups = NO_GROUPS
    """Groups that another slice serves now, whose rows its table has not shed yet."""


def named(hosts: Iterable[Host]) -> str:
    """Nodes for a reader; the only node of a query without a cluster has no name."""
    return ", ".join(host or "this machine" for host in sorted(hosts))


class Readiness(Enum):
    """Whether the agent of a node answers."""

    NEW = "new"
    PREPARING = "preparing"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Node:
    """A host with an executor."""

    host: Host
    readiness: Readiness = Readiness.NEW
    failures: int = 0
    """How often in a row its agent could not be started."""
    retry_at: int = 0
    """When to try again, in microseconds of the coordinator's clock."""
    probed_at: int = 0
    """When it was asked last whether its agent still answers."""
    since: int = 0
    """When it came, or its agent was found not to answer."""
    known: frozenset[str] = frozenset()
    """The parts that it was known to hold when it was prepared last: of later ones its answer does
    not tell."""
    prepared: int = 0
    """The number of the last order to prepare it. What was stored before may be lost since."""
    strays: frozenset[str] = frozenset()
    """The parts that it held when it was inspected last, and that nothing named."""
    inspected_at: int = 0
    """When it was inspected last."""

    @property
    def is_ready(self) -> bool:
        """Whether its agent answers."""
        return self.readiness is Readiness.READY

    @property
    def change(self) -> Change:
        """That its agent is being started, why, and since when."""
        why = "the agent did not start" if self.failures else "the node came, or its agent is gone"
        return Change("node", named([self.host]), why, "starting its agent", self.since)


@dataclass(frozen=True, slots=True)
class OperatorPlan:
    """The properties of a stateful operator that the protocols need."""

    name: str
    key_groups: int
    before: tuple[str, ...] = ()
    """The operators that send rows to it."""

    def check(self, instances: int) -> None:
        """Raise PlanError if the operator cannot have this number of instances."""
        Routing.even(self.key_groups, instances)


@dataclass(frozen=True, slots=True)
class Published:
    """A version that a restart can begin from: the parts of every operator."""

    version: Version
    parts: Mapping[str, tuple[Part, ...]]


@dataclass(frozen=True, slots=True)
class Change:
    """An operation in progress: its present step, its reason, and its start."""

    kind: str
    """``move``, ``merge``, ``mend``, ``note``, ``checkpoint``, ``read``, ``hold``, ``node``,
    ``recovery`` or ``restart``."""
    what: str
    """What is changed, such as the name of an operator, or waited for, such as a node."""
    why: str
    step: str
    """What is done now."""
    since: int
    """When it began, in microseconds of the coordinator's clock."""


class _Reached(NamedTuple):
    """The versions and groups that can be made of some parts."""

    versions: dict[Version, KeyGroups]
    ends: dict[str, KeyGroups]
    """For each part the groups of which a chain of parts ends with it."""


class Inventory:
    """The parts of one operator, oldest first, and which versions can be made of them."""

    __slots__ = ("_known", "_surviving", "_usable", "parts")

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self.parts = tuple(sorted(parts, key=lambda part: (part.version, part.base is None)))
        self._known: tuple[frozenset[str], _Reached] | None = None
        self._usable: dict[frozenset[Host], frozenset[str]] = {}
        self._surviving: dict[tuple[Host, frozenset[Host]], frozenset[str]] = {}

    def __repr__(self) -> str:
        return f"Inventory({[part.name for part in self.parts]})"

    def with_part(self, part: Part) -> Inventory:
        """The inventory after a part was stored."""
        return Inventory([*(each for each in self.parts if each.name != part.name), part])

    def without(self, names: Collection[str]) -> Inventory:
        """The inventory after parts were dropped."""
        return Inventory(part for part in self.parts if part.name not in names)

    def usable(self, hosts: frozenset[Host]) -> frozenset[str]:
        """The names of the parts that can be read while only these nodes are alive."""
        found = self._usable.get(hosts)
        if found is None:
            found = frozenset(p.name for p in self.parts if p.available(hosts))
            self._usable[hosts] = found
        return found

    def surviving(self, backup: Backup, owner: Host, hosts: frozenset[Host]) -> frozenset[str]:
        """The names of the parts that outlive what is promised to survive; see the policy."""
        found = self._surviving.get((owner, hosts))
        if found is None:
            found = frozenset(p.name for p in self.parts if backup.survives(p, owner, hosts))
            self._surviving[owner, hosts] = found
        return found

    def reach(self, usable: frozenset[str]) -> Mapping[Version, KeyGroups]:
        """For each version the groups that can be made at it of the parts with these names.

        >>> full = Part("f", "op", Version(3), None, KeyGroups.parse("0-7"))
        >>> more = Part("m", "op", Version(5), Version(2), KeyGroups.parse("0-3"))
        >>> Inventory([full, more]).reach(frozenset("fm"))
        {3: KeyGroups('0-7'), 5: KeyGroups('0-3')}
        """
        return self._reached(usable).versions

    def _reached(self, usable: frozenset[str]) -> _Reached:
        if self._known is not None and self._known[0] == usable:
            return self._known[1]
        reach: dict[Version, KeyGroups] = {}
        ends: dict[str, KeyGroups] = {}
        for part in self.parts:
            if part.name not in usable:
                continue
            groups = part.groups
            if part.base is not None:
                under = KeyGroups()
                for version, reached in reach.items():
                    if part.base <= version < part.version:
                        under = under | reached
                groups = groups & under
            if groups:
                ends[part.name] = groups
                reach[part.version] = reach.get(part.version, KeyGroups()) | groups
        found = _Reached(reach, ends)
        self._known = (usable, found)
        return found

    def newest(
        self, groups: KeyGroups, usable: frozenset[str], upto: Version | None = None
    ) -> Version | None:
        """The newest version at which all of these groups can be made, if any."""
        for version, reached in sorted(self.reach(usable).items(), reverse=True):
            if (upto is None or version <= upto) and groups <= reached:
                return version
        return None

    def lots(
        self, groups: KeyGroups, usable: frozenset[str], upto: Version
    ) -> dict[Version, KeyGroups]:
        """The newest versions up to another one at which groups can be made, oldest first.

        It is one version if all can be made at the oldest. What cannot be made begins empty.
        """
        found: dict[Version, KeyGroups] = {}
        left, reach = groups, self.reach(usable)
        for version, reached in sorted(reach.items(), reverse=True):
            if version <= upto and left & reached:
                found[version] = left & reached
                left = left - reached
        if left:
            found[NO_VERSION] = left
        oldest = min(found, default=NO_VERSION)
        if groups <= reach.get(oldest, NO_GROUPS):
            return {oldest: groups}
        return dict(sorted(found.items()))

    def recipe(
        self, groups: KeyGroups, version: Version, usable: frozenset[str]
    ) -> tuple[Part, ...]:
        """The parts that make these groups at a version, oldest first, as few as possible."""
        ends = self._reached(usable).ends
        wanted: dict[tuple[Version, Version], KeyGroups] = {(version, version): groups}
        chosen: list[Part] = []
        for part in reversed(self.parts):
            able = ends.get(part.name)
            if able is None:
                continue
            taken = KeyGroups()
            for least, most in list(wanted):
                if least <= part.version <= most:
                    given = wanted[(least, most)] & able
                    if given:
                        taken = taken | given
                        _leave(wanted, (least, most), given)
            if taken:
                chosen.append(part)
                if part.base is not None:
                    under = (part.base, Version(part.version - 1))
                    wanted[under] = wanted.get(under, KeyGroups()) | taken
        if any(wanted.values()):
            raise LookupError(f"no parts make groups {groups} at version {version}: {self}")
        return tuple(reversed(chosen))

    def after(self, groups: KeyGroups, version: Version) -> tuple[Part, ...]:
        """The parts that advance these groups from a version as far as possible, oldest first."""
        found, at = [], version
        for part in self.parts:
            if part.base is not None and part.base <= at < part.version and groups <= part.groups:
                found.append(part)
                at = part.version
        return tuple(found)


def _leave(
    wanted: dict[tuple[Version, Version], KeyGroups],
    span: tuple[Version, Version],
    given: KeyGroups,
) -> None:
    rest = wanted[span] - given
    if rest:
        wanted[span] = rest
    else:
        del wanted[span]


@dataclass(frozen=True, slots=True)
class Routed:
    """Which instance has which groups of an operator, and where each instance runs."""

    routing: Routing
    hosts: tuple[Host, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """The durable state of a query: all that a driver needs to continue it."""

    routed: Mapping[str, Routed]
    slices: Mapping[SliceId, Slice] = field(default_factory=dict)
    """The serving slices, as they were noted last."""
    noted: int = 0
    """The arrangement of these slices."""
    arrangement: int = 0
    """The arrangement that the last committed batch ran with."""
    published: tuple[Published, ...] = ()
    committed: Version = NO_VERSION
    """The last batch that counts as done."""
    delivered: Version = NO_VERSION
    """Results up to here are in the sinks; later than committed if a query is on its way back."""
    oldest_offsets: int = 0
    """Spark's log of offsets reaches back to this batch."""
    trusted: bool = True
    """Whether everything that was written is there. Not so after a power failure: then nothing
    after the newest whole version counts, and its results are taken back."""
    unreadable: tuple[Version, ...] = ()
    """Versions whose manifests are there and damaged."""
    rewinding: bool = False
    """Whether a driver began to take Spark back and did not finish: batches up to ``delivered``
    are to be run again as they were, and only a Rewind sees to it."""


def instances_of(slices: Iterable[Slice]) -> dict[str, list[int]]:
    """The instances that slices belong to, by operator."""
    found: dict[str, set[int]] = {}
    for each in slices:
        found.setdefault(each.operator, set()).add(each.instance)
    return {name: sorted(instances) for name, instances in found.items()}


def serving(slices: Iterable[Slice], operator: str | None = None) -> Iterator[Slice]:
    """The serving slices of all operators or of one."""
    for each in slices:
        if each.role is Role.SERVING and operator in (None, each.operator):
            yield each
