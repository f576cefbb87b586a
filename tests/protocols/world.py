"""A cluster, a durable store and Spark as a model in memory, for the simulator.

State is modelled by its history: the state of a key group is a number made of all batches that
were applied to it, in order. A batch that is applied twice, left out, or applied to the wrong state
gives another number than the one that it must be.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from anabranch.errors import AnabranchError, StateFull
from anabranch.protocols.model import Facts, Host, Published, Routed, Slice, SliceId, serving
from anabranch.protocols.orders import (
    Advance,
    Capture,
    Captured,
    CaptureWanted,
    Make,
    Mend,
    Merge,
    Replay,
    RunBatch,
    Store,
)
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.units import NO_VERSION, Version

NEVER = -(10**15)

Content = dict[int, int]
"""The state of key groups."""


class Trouble(Exception):
    """A request cannot be carried out."""

    def __init__(
        self,
        reason: str,
        damaged: str | None = None,
        unreachable: str | None = None,
        missing: SliceId | None = None,
        damaged_at: tuple[str, ...] = (),
        final: bool = False,
        kind: type[AnabranchError] | None = None,
    ) -> None:
        super().__init__(reason)
        self.damaged, self.unreachable, self.missing = damaged, unreachable, missing
        self.damaged_at, self.final, self.kind = damaged_at, final, kind


class Missing(Trouble):
    """A table is not there, or not at the version that is needed."""


class TableFenced(Trouble):
    """A newer attempt, or another driver, has taken over."""


class StaleDriver(Trouble):
    """Another driver has taken over."""


class Violation(AssertionError):
    """What must never happen."""


@dataclass(frozen=True)
class Truth:
    """What state must be: a batch changes the groups that it has rows of."""

    seed: int
    _known: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def has_rows(self, operator: str, group: int, version: int) -> bool:
        return (hash((self.seed, ord(operator[-1]), group, version)) >> 7) % 3 > 0

    def apply(self, operator: str, content: Content, groups: Collection[int], version: int) -> None:
        for group in groups:
            if self.has_rows(operator, group, version):
                content[group] = hash((content.get(group, 0), version, group))

    def at(self, operator: str, group: int, version: int) -> int:
        if version < 0:
            return 0
        key = (operator, group, version)
        if key not in self._known:
            content = {group: self.at(operator, group, version - 1)}
            self.apply(operator, content, [group], version)
            self._known[key] = content[group]
        return self._known[key]


@dataclass
class Table:
    """A state table: one version can be rolled back."""

    content: Content
    version: Version
    base: Version | None
    changed: set[int] = field(default_factory=set)
    fence: int = 0
    before: tuple[Content, Version, Version | None, set[int]] | None = None

    def rollback(self) -> None:
        assert self.before is not None
        self.content, self.version, self.base, self.changed = self.before
        self.before = None

    def reachable(self) -> frozenset[Version]:
        return frozenset([self.version, *([self.before[1]] if self.before else [])])

    def bring_to(self, version: Version) -> None:
        if self.version == version + 1 and self.before is not None:
            self.rollback()
        if self.version != version:
            raise Missing(f"the table is at version {self.version}, not {version}")

    def begin(self, version: Version, fence: int) -> None:
        if fence < self.fence:
            raise TableFenced("a newer attempt has taken over")
        self.bring_to(Version(version - 1))
        self.fence = fence
        self.before = (dict(self.content), self.version, self.base, set(self.changed))
        self.version = version


@dataclass(frozen=True)
class File:
    """What is in a captured file or in a part."""

    content: Content
    damaged: bool = False
    fence: int = 0
    """Under which it was captured."""
    slice: SliceId | None = None
    """Of which it was captured."""
    part: Part | None = None
    """As which it was stored."""


@dataclass
class Machine:
    """A host: its executor, its agent, its memory and its disk."""

    name: str
    up: bool = True
    generation: int = 0
    """How many executors it had."""
    agent: bool = False
    hung: bool = False
    stopped: bool = False
    """Whether none of its processes does anything, though all are there."""
    barren: bool = False
    """Whether no agent can be started on it."""
    gone: bool = False
    """Whether it never comes back."""
    epoch: int = 0
    """Drivers before this one are refused."""
    tables: dict[SliceId, Table] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    vault: dict[str, File] = field(default_factory=dict)
    full: bool = False
    ill_at: int = NEVER
    """When something was wrong with it for the last time."""

    @property
    def answers(self) -> bool:
        """Whether its agent answers requests."""
        return self.up and self.agent and not (self.hung or self.stopped)


@dataclass
class Durable:
    """What outlives every process: the checkpoint folder, Spark's logs, the sinks."""

    epoch: int = 0
    down: bool = False
    log_down: bool = False
    """Whether the log of commits does not answer."""
    ill_at: int = NEVER
    """When it was down for the last time."""
    manifests: dict[Version, Published] = field(default_factory=dict)
    parts: dict[str, File] = field(default_factory=dict)
    unreadable: set[Version] = field(default_factory=set)
    """Versions whose manifests are damaged."""
    trusted: bool = True
    """Whether there was no power failure since results were taken back the last time."""
    rewinding: bool = False
    """Whether a driver has begun to take Spark back, and has not finished."""
    noted: tuple[int, Mapping[str, Routed], tuple[Slice, ...]] | None = None
    arrangement: int = 0
    commits: set[Version] = field(default_factory=set)
    output: dict[Version, dict[tuple[str, int], int]] = field(default_factory=dict)
    rewind: Version = NO_VERSION
    """Batches up to this one are to be run again without being delivered."""
    oldest_offsets: int = 0
    """Spark's log of offsets reaches back to this batch."""

    @property
    def committed(self) -> Version:
        return max(self.commits, default=NO_VERSION)


class World:
    """Everything there is outside of the drivers."""

    def __init__(self, truth: Truth, operators: Mapping[str, int], hosts: Collection[str]) -> None:
        self.truth = truth
        self.operators = operators
        self.machines = {name: Machine(name) for name in hosts}
        self.durable = Durable()
        self.numbers = 0
        self.cuts: set[frozenset[str]] = set()
        """Pairs of hosts that do not reach each other."""
        self.withdrawn: set[str] = set()
        """The parts that a driver had deleted."""

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def facts(self, routed: Mapping[str, Routed]) -> Facts:
        durable = self.durable
        readable = sorted(durable.manifests.keys() - durable.unreadable)
        published = tuple(durable.manifests[v] for v in readable)
        noted, routed, slices = durable.noted or (0, routed, ())
        return Facts(
            routed,
            {each.id: each for each in slices},
            noted,
            durable.arrangement,
            published,
            durable.committed,
            durable.rewind,
            durable.oldest_offsets,
            durable.trusted,
            tuple(sorted(durable.unreadable)),
            durable.rewinding,
        )

    # What nodes do

    def make(self, order: Make) -> None:
        machine = self.machines[order.slice.node]
        if machine.full:
            raise Trouble("the disk is full", kind=StateFull)
        content = self.put_together(order.parts, order.slice.groups, order.version, machine.name)
        if order.version == NO_VERSION and order.parts:
            raise Violation(f"{order}: parts for an empty table")
        if order.slice.id in machine.tables:
            raise Violation(f"there already is a table of {order.slice.id}")
        machine.tables[order.slice.id] = Table(content, order.version, order.version)

    def put_together(
        self, parts: Sequence[Part], groups: KeyGroups, version: Version, reader: str
    ) -> Content:
        """The state of groups at a version; a part counts for the groups that it follows on."""
        content: Content = {}
        at: dict[int, Version] = {}
        for part in parts:
            file = self.read(part, reader)
            for group in part.groups & groups:
                if part.base is None:
                    at[group], content[group] = part.version, file.content.get(group, 0)
                elif part.base <= at.get(group, part.version) < part.version:
                    at[group] = part.version
                    content[group] = file.content.get(group, content[group])
        short = [group for group in groups if at.get(group, NO_VERSION) != version]
        if short and version != NO_VERSION:
            raise Violation(f"{parts} do not bring groups {short} to version {version}")
        return content

    def read(self, part: Part, reader: str) -> File:
        reached = [h for h in part.holders if self._answers(h, reader)]
        found = [self.machines[h].vault.get(part.name) for h in reached]
        if not part.holders:
            if self.durable.down:
                raise Trouble("the store does not answer")
            found = [self.durable.parts.get(part.name)]
        there = [file for file in found if file is not None]
        whole = [file for file in there if not file.damaged]
        if len(whole) < part.needed:
            silent = [h for h in part.holders if not self._answers(h, reader)]
            one = replace(part, needed=1)
            bad = tuple(h for h in reached if not self.is_whole(one, [h]))
            if silent:
                raise Trouble(
                    f"{silent[0]} does not answer",
                    part.name if bad else None,
                    silent[0],
                    damaged_at=bad,
                )
            raise Trouble(f"{part.name} is {'damaged' if there else 'not there'}", part.name)
        return whole[0]

    def copies(self, part: Part, hosts: Collection[str]) -> list[File]:
        """The copies of a part in the store, or else at some of these hosts."""
        vaults = [self.machines[host].vault for host in part.holders if host in hosts]
        places = vaults if part.holders else [self.durable.parts]
        return [place[part.name] for place in places if part.name in place]

    def is_whole(self, part: Part, hosts: Collection[str]) -> bool:
        """Whether a part can be read from the store, or from some of these hosts."""
        whole = sum(not file.damaged for file in self.copies(part, hosts))
        return whole >= part.needed

    def seems_whole(self, part: Part, damaged: Collection[tuple[str, Host | None]]) -> bool:
        """Whether there is a copy of a part that is not known to be damaged."""
        copies = sum(
            bool(self.copies(part, [holder])) and (part.name, holder) not in damaged
            for holder in part.holders or [""]
        )
        return (part.name, None) not in damaged and copies >= part.needed

    def _answers(self, host: str, asker: str) -> bool:
        machine = self.machines[host]
        cut = host != asker and frozenset([host, asker]) in self.cuts
        return machine.answers and not cut

    def table(self, each: Slice) -> Table:
        table = self.machines[each.node].tables.get(each.id)
        if table is None:
            raise Missing(f"there is no table of {each.id} on {each.node}", missing=each.id)
        return table

    def advance(self, order: Advance) -> None:
        table = self.table(order.slice)
        if order.fence < table.fence:
            raise TableFenced("a newer attempt has taken over")
        if table.version == order.upto and table.fence == order.fence:
            return
        table.bring_to(order.after)
        files = [(part, self.read(part, order.slice.node)) for part in order.parts]
        at = dict.fromkeys(order.slice.groups, order.after)
        for part, file in files:
            for group in part.groups & order.slice.groups:
                if part.base is None or not part.base <= at[group] < part.version:
                    raise Violation(f"{part} does not follow on version {at[group]}")
                at[group] = part.version
                table.content[group] = file.content.get(group, table.content.get(group, 0))
        if any(version != order.upto for version in at.values()):
            raise Violation(f"{order} does not bring all groups to its version: {at}")
        table.version, table.base, table.changed = order.upto, order.upto, set()
        table.fence, table.before = order.fence, None

    def captured(
        self, each: Slice, wanted: CaptureWanted, version: Version, fence: int
    ) -> Captured:
        machine, table = self.machines[each.node], self.table(each)
        if machine.full:
            raise Trouble("the disk is full", kind=StateFull)
        if wanted.base is not None and wanted.base != table.base:
            raise Violation(f"{wanted}: the table knows changes since {table.base}")
        chosen = [g for g in wanted.groups if wanted.base is None or g in table.changed]
        name = f"file-{self.number()}"
        content = {g: table.content.get(g, 0) for g in chosen}
        machine.files[name] = File(content, fence=fence, slice=each.id)
        if wanted.clean:
            table.base, table.changed = version, set()
        return Captured(
            name, each.id, each.operator, each.node, version, wanted.base, wanted.groups,
            wanted.clean,
        )  # fmt: skip

    def capture(self, order: Capture) -> Captured:
        table = self.table(order.slice)
        if order.fence < table.fence:
            raise TableFenced("a newer attempt has taken over")
        table.bring_to(order.version)
        table.fence = order.fence
        return self.captured(order.slice, order.wanted, order.version, order.fence)

    def store(self, order: Store) -> Part:
        captured = order.captured
        file = self.machines[captured.node].files.get(captured.file)
        if file is None:
            raise Trouble(f"{captured.file} is not there")
        part = Part(
            f"part-{self.number()}", captured.operator, captured.version, captured.base,
            captured.groups, order.holders, order.shape.needed, parity=order.shape.parity,
        )  # fmt: skip
        part = self.put(part, file, captured.node)
        self.machines[captured.node].files.pop(captured.file)
        return part

    def put(self, part: Part, file: File, sender: str) -> Part:
        """Store a file at the holders of a part, or at one more than are needed."""
        file = File(file.content, part=part)
        if not part.holders:
            if self.durable.down:
                raise Trouble("the store does not answer")
            self.durable.parts[part.name] = file
        stored: list[str] = []
        refused: Trouble | None = None
        for host in part.holders:
            if not self._answers(host, sender) or self.machines[host].full:
                silent = None if self._answers(host, sender) else host
                refused = Trouble(f"{host} does not take {part.name}", unreachable=silent)
                if part.needed == 1:
                    break
            else:
                self.machines[host].vault[part.name] = File(file.content, part=part)
                stored.append(host)
        if refused is not None and len(stored) <= part.needed:
            raise refused
        return replace(part, holders=tuple(stored))

    def mend(self, order: Mend) -> Part:
        """Make lost fragments again at other holders."""
        file = self.read(order.part, order.host)
        there = [h for h in order.part.holders if self._answers(h, order.host)]
        whole = [h for h in there if self.is_whole(replace(order.part, needed=1), [h])]
        for host in order.holders:
            if not self._answers(host, order.host) or self.machines[host].full:
                raise Trouble(f"{host} does not take {order.part.name}", unreachable=host)
            self.machines[host].vault[order.part.name] = File(file.content, part=order.part)
        return replace(order.part, holders=(*whole, *order.holders))

    def merge(self, order: Merge) -> Part:
        name = f"part-{self.number()}"
        content = self.put_together(order.parts, order.groups, order.version, order.slice.node)
        part = Part(name, order.slice.operator, order.version, None, order.groups, order.holders,
                    order.shape.needed, parity=order.shape.parity)  # fmt: skip
        return self.put(part, File(content), order.slice.node)

    # Tasks

    def run_slice(
        self, each: Slice, version: Version, fence: int, wanted: CaptureWanted | None
    ) -> Captured | str | None:
        """A task runs a slice: what it captured, or why it could not."""
        table = self.table(each)
        table.begin(version, fence)
        before = dict(table.content)
        self.truth.apply(each.operator, table.content, list(each.groups), version)
        table.changed |= {g for g in each.groups if table.content.get(g) != before.get(g)}
        strange = table.content.keys() - set(each.groups) - set(each.leaving)
        if strange:
            raise Violation(f"{each} has rows of groups {strange}")
        if wanted is None:
            return None
        try:
            return self.captured(each, wanted, version, fence)
        except Trouble as trouble:
            return str(trouble)

    def shed(self, each: Slice) -> int:
        """Drop the rows of one group that has left a slice; how many groups are left to shed."""
        content = self.table(each).content
        left = [group for group in each.leaving if group in content]
        for group in left[:1]:
            del content[group]
        return len(left[1:])

    def results(self, slices: Collection[Slice]) -> dict[tuple[str, int], int]:
        return {
            (each.operator, group): self.table(each).content.get(group, 0)
            for each in slices
            for group in each.groups
        }

    def check_results(self, order: RunBatch) -> dict[tuple[str, int], int]:
        found = self.results(order.slices)
        for (operator, group), value in found.items():
            if value != self.truth.at(operator, group, order.version):
                raise Violation(f"batch {order.version}: wrong state of {operator} group {group}")
        groups = {(name, g) for name, count in self.operators.items() for g in range(count)}
        if found.keys() != groups:
            raise Violation(f"batch {order.version}: not all groups are in it")
        return found

    def check_served(self, slices: Collection[Slice], committed: Version) -> None:
        """After a commit every table that serves has the state of exactly the committed batches."""
        for each in serving(slices):
            machine = self.machines[each.node]
            table = machine.tables.get(each.id)
            if table is None or not machine.up:
                continue
            content = table.content if table.version == committed else None
            if content is None and table.before is not None and table.before[1] == committed:
                content = table.before[0]
            for group in each.groups if content is not None else ():
                if content.get(group, 0) != self.truth.at(each.operator, group, committed):
                    raise Violation(f"{each.id}: wrong state of group {group} at {committed}")


@dataclass
class Sent:
    """What was sent to an operator in a batch: who sent it, and the groups that each ran."""

    senders: dict[str, tuple[int, KeyGroups]] = field(default_factory=dict)


@dataclass
class Buffers:
    """What a driver's batches have sent, as far as it is kept."""

    world: World
    before: Mapping[str, tuple[str, ...]]
    sent: dict[tuple[str, Version], dict[str, Sent]] = field(default_factory=dict)

    def keep(self, order: RunBatch) -> None:
        for name, upstream in self.before.items():
            kept: dict[str, Sent] = {}
            for up in upstream:
                senders: dict[str, tuple[int, KeyGroups]] = {}
                for each in order.slices:
                    if each.operator == up:
                        _, groups = senders.get(each.node, (0, KeyGroups()))
                        generation = self.world.machines[each.node].generation
                        senders[each.node] = (generation, groups | each.groups)
                kept[up] = Sent(senders)
            self.sent[(name, order.version)] = kept

    def kept_after(self, operator: str, committed: int) -> Version:
        """All that was sent to an operator after this version is kept."""
        version = committed
        while version >= 0 and (operator, Version(version)) in self.sent:
            version -= 1
        return Version(version)

    def trim(self, operator: str, upto: Version) -> None:
        for name, version in list(self.sent):
            if name == operator and version <= upto:
                del self.sent[(name, version)]

    def replay(self, order: Replay) -> None:
        """Run old batches on slices; Trouble if what was sent is not there."""
        for name in self.before:
            for each in order.slices:
                if each.operator == name:
                    self._replay(each, order)

    def _replay(self, each: Slice, order: Replay) -> None:
        machine = self.world.machines[each.node]
        if not machine.up:
            raise Trouble(f"{each.node} is gone")
        table = self.world.table(each)
        if table.fence == order.fence and table.version == order.upto:
            return
        for number in range(each.version + 1, order.upto + 1):
            version = Version(number)
            kept = self.sent.get((each.operator, version))
            if kept is None:
                raise Trouble(f"what was sent to {each.operator} in batch {version} is not kept")
            for up, sent in kept.items():
                lost = KeyGroups()
                for host, (generation, groups) in sent.senders.items():
                    now = self.world.machines[host]
                    if not now.up or now.generation != generation:
                        lost = lost | groups
                again = KeyGroups()
                for other in order.slices:
                    if other.operator == up and other.version < version:
                        again = again | other.groups
                if not lost <= again:
                    raise Trouble(f"what {up} sent in batch {version} is lost")
            self.world.run_slice(each, version, order.fence, None)
