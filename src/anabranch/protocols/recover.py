"""Recovery: lost slices are made on other nodes from parts, and replay the batches they missed.

The stream is held. Slices that may be lost are inspected first, if their node is there; undamaged
ones continue. New slices get new ids, so no undamaged table is ever overwritten, and a recovery
that fails starts again from the beginning. The routing changes only when all new slices are at the
last committed version.

If the parts of a lost slice are lost too, or the rows that were sent to it, the query is rolled
back to a published version: see :mod:`anabranch.protocols.restart`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from anabranch.protocols import checkpoint, move, restart
from anabranch.protocols.events import Done, Failed, Inspected
from anabranch.protocols.model import (
    Change,
    Host,
    Role,
    Routed,
    Slice,
    SliceId,
    instances_of,
    serving,
)
from anabranch.protocols.orders import SECOND, Inspect, Make, Replay, Wake
from anabranch.protocols.query import Outstanding, Owner, Query, Turn
from anabranch.state.groups import KeyGroups
from anabranch.units import NO_VERSION, Version

_HOLDERS = 30 * SECOND
"""So long nodes are waited for that hold newer parts than others do."""
_NODES = 120 * SECOND
"""So long any node is waited for."""
_REPLAYS = 3
"""Replays that may fail, with no node lost, before the query goes back to a published version."""
_PAUSE = SECOND // 2


class Phase(Enum):
    """The steps of a recovery."""

    INSPECT = "inspecting tables"
    PREPARE = "waiting for nodes"
    MAKE = "making slices from parts"
    REPLAY = "replaying batches"


@dataclass(frozen=True, slots=True)
class Recovery:
    """A recovery in progress."""

    since: int
    phase: Phase = Phase.INSPECT
    lost: frozenset[SliceId] = frozenset()
    """The new slices."""
    made: tuple[Slice, ...] = ()
    """The new slices in their place."""
    routed: Mapping[str, Routed] = field(default_factory=dict)
    """How operators are divided once these serve."""
    replays: int = 0
    """How many replays have failed."""
    not_before: int = 0

    @property
    def change(self) -> Change:
        """The present step, the reason, and the start."""
        what = ", ".join(sorted({each.operator for each in self.made})) or "slices"
        why = f"{len(self.lost)} slices are lost" if self.lost else "slices may be lost"
        return Change("recovery", what, why, self.phase.value, self.since)


def run(turn: Turn) -> None:
    """Begin a recovery if slices may be lost, or take the next step of the present one."""
    query = turn.query
    if query.restart or query.stopped or query.running:
        return
    if query.recovery is None:
        if not query.suspects:
            return
        turn.change(recovery=Recovery(query.now))
        checkpoint.interrupt(turn)
        move.interrupt(turn)
        _inspect(turn)
    recovery = turn.query.recovery
    assert recovery is not None
    if any(w.owner is Owner.RECOVERY for w in turn.query.outstanding.values()):
        return
    if recovery.phase in (Phase.INSPECT, Phase.PREPARE):
        _plan(turn)


def answer(turn: Turn, waiting: Outstanding, event: Done | Failed) -> None:
    """The answer to an order of a recovery."""
    match waiting.order, event:
        case Inspect(), Done(answer=Inspected(tables)):
            whole = {i for i, versions in tables.items() if turn.query.committed in versions}
            turn.change(suspects=turn.query.suspects - whole)
        case Inspect(), Failed():
            pass  # what was not seen to be whole counts as lost
        case Make(), Done():
            _made(turn)
        case Replay(), Done():
            _switch(turn)
        case Make(), Failed(reason=reason):
            _again(turn, reason)
        case Replay(), Failed(reason=reason):
            _again(turn, reason, replays=1)


def node_lost(turn: Turn, host: Host) -> None:
    """A node was lost: start the recovery again if it needs the node."""
    recovery = turn.query.recovery
    if recovery is None:
        return
    if any(each.node == host for each in recovery.made) or recovery.phase is Phase.REPLAY:
        _again(turn, f"node {host} was lost")


def _inspect(turn: Turn) -> None:
    query = turn.query
    suspected = [query.slices[i] for i in sorted(query.suspects)]
    for host in sorted({each.node for each in suspected} & query.ready):
        here = tuple(each for each in suspected if each.node == host)
        turn.order(Inspect(host, here), Owner.RECOVERY)


def _again(turn: Turn, reason: str, replays: int = 0) -> None:
    """Start the recovery again."""
    recovery = turn.query.recovery
    assert recovery is not None
    turn.tell("recovery failed", reason=reason, step=recovery.phase.value)
    turn.forget(Owner.RECOVERY)
    turn.remove(frozenset(each.id for each in recovery.made))
    later = turn.query.now + _PAUSE
    turn.change(
        recovery=Recovery(
            recovery.since, Phase.PREPARE, replays=recovery.replays + replays, not_before=later
        )
    )
    turn.send(Wake(later))


def _plan(turn: Turn) -> None:
    """Decide on which nodes lost slices are made, and from which version."""
    query, recovery = turn.query, turn.query.recovery
    assert recovery is not None
    lost = [query.slices[i] for i in sorted(query.suspects)]
    if not lost:
        turn.change(recovery=None)
        return
    if query.now < recovery.not_before:
        return
    turn.change(recovery=replace(recovery, phase=Phase.PREPARE))
    if not query.ready:
        if query.now >= recovery.since + _NODES:
            turn.stop(
                "there has been no node for two minutes; start executors, then start the query "
                "again"
            )
        turn.send(Wake(recovery.since + _NODES))
        return
    now = _versions(query, lost, query.ready)
    best = _versions(query, lost, frozenset(query.nodes))
    waited = query.now >= recovery.since + _HOLDERS
    if best is not None and (now is None or sum(best.values()) > sum(now.values())) and not waited:
        turn.send(Wake(recovery.since + _HOLDERS))
        return
    if now is None or recovery.replays >= _REPLAYS:
        if now is None and not waited and _versions(query, lost, _holders(query)) is not None:
            turn.send(Wake(recovery.since + _HOLDERS))  # a holder that is gone may come back
            return
        _go_back(turn)
        return
    _make(turn, lost, now)


def _holders(query: Query) -> frozenset[Host]:
    """All nodes that hold parts, lost ones included."""
    parts = (part for of in query.inventory.values() for part in of.parts)
    return frozenset(query.nodes).union(*(part.holders for part in parts))


def _versions(query: Query, lost: list[Slice], nodes: frozenset[Host]) -> dict[str, Version] | None:
    """The version at which the lost slices of each operator can be made, if all can.

    If an operator and one that receives its rows are both lost, the first makes these rows again.
    So it must not be made at a later version than the second. Rows sent up to the version must
    not be needed.
    """
    versions: dict[str, Version] = {}
    for name in reversed(list(query.operators)):
        mine = [each for each in lost if each.operator == name]
        if not mine:
            continue
        upto = query.committed
        for behind, at in versions.items():
            if name in query.operators[behind].before:
                upto = min(upto, at)
        usable = query.usable(name, nodes)
        found = [query.inventory[name].newest(each.groups, usable, upto) for each in mine]
        empty = NO_VERSION
        if query.policies.begins_empty:
            empty = query.trimmed.get(name, NO_VERSION)
        at = min((empty if v is None else v for v in found), default=empty)
        if at < query.committed and not query.policies.replays:
            return None
        if any(not _reaches(query, name, each, at, usable) for each in mine):
            return None
        versions[name] = at
    return versions


def _reaches(
    query: Query, name: str, each: Slice, version: Version, usable: frozenset[str]
) -> bool:
    if version < query.trimmed.get(name, NO_VERSION):
        return False
    if version == NO_VERSION or query.policies.begins_empty:
        return True
    reached = query.inventory[name].reach(usable).get(version)
    return reached is not None and each.groups <= reached


def _make(turn: Turn, lost: list[Slice], versions: dict[str, Version]) -> None:
    query = turn.query
    routed = dict(query.routed)
    made: list[Slice] = []
    for name in versions:
        mine = [each for each in lost if each.operator == name]
        instances = sorted({each.instance for each in mine})
        routing = query.routed[name].routing
        whole = [i for i in instances if all(s in mine for s in _of(query, name, i))]
        after = routing.divided(whole, query.policies.parallelism) if whole else routing
        routed[name] = Routed(after, query.routed[name].hosts)
    hosts = _place(query, routed, lost)
    for name in versions:
        routed[name] = Routed(routed[name].routing, hosts[name])
        mine = [each for each in lost if each.operator == name]
        gone, at = KeyGroups(), versions[name]
        for each in mine:
            gone = gone | each.groups
        for instance, owned in enumerate(routed[name].routing.owners):
            if owned & gone:
                node, groups = hosts[name][instance], owned & gone
                fresh = Slice(
                    turn.slice_id(), name, instance, node, groups, Role.ARRIVING, at, base=at
                )
                made.append(fresh)
    turn.put(*made)
    recovery = turn.query.recovery
    assert recovery is not None
    turn.change(
        recovery=replace(
            recovery,
            phase=Phase.MAKE,
            lost=frozenset(each.id for each in lost),
            made=tuple(made),
            routed=routed,
        )
    )
    for each in made:
        usable = query.usable(each.operator, query.ready)
        inventory = query.inventory[each.operator]
        made_of = inventory.reach(usable).get(each.version, KeyGroups())
        can_be_made = each.groups <= made_of
        parts = inventory.recipe(each.groups, each.version, usable) if can_be_made else ()
        turn.order(Make(each, parts, each.version), Owner.RECOVERY)


def _of(query: Query, operator: str, instance: int) -> list[Slice]:
    return [s for s in serving(query.slices.values(), operator) if s.instance == instance]


def _place(
    query: Query, routed: dict[str, Routed], lost: list[Slice]
) -> dict[str, tuple[Host, ...]]:
    """The hosts of instances. An instance with an undamaged slice stays on its node."""
    placement = query.policies.placement
    instances = {name: of.routing.instances for name, of in routed.items()}
    gone = {s.node for s in lost if s.node not in query.nodes}
    alive = query.ready | {s.node for s in serving(query.slices.values()) if s.node not in gone}
    before = {name: of.hosts for name, of in query.routed.items()}
    placed = placement.place(instances, alive & query.nodes.keys(), before)
    # A placement may want everything elsewhere; what is whole is not moved by a recovery.
    whole = {(s.operator, s.instance) for s in serving(query.slices.values()) if s not in lost}
    return {
        name: tuple(before[name][i] if (name, i) in whole else host for i, host in enumerate(hosts))
        for name, hosts in placed.items()
    }


def _made(turn: Turn) -> None:
    query = turn.query
    if any(w.owner is Owner.RECOVERY for w in query.outstanding.values()):
        return
    recovery = query.recovery
    assert recovery is not None
    if all(each.version == query.committed for each in recovery.made):
        _switch(turn)
        return
    turn.change(recovery=replace(recovery, phase=Phase.REPLAY))
    turn.order(Replay(recovery.made, query.committed, turn.fence()), Owner.RECOVERY)


def _switch(turn: Turn) -> None:
    """The new slices serve from now on."""
    query, recovery = turn.query, turn.query.recovery
    assert recovery is not None
    serve = [
        replace(each, role=Role.SERVING, version=query.committed, base=each.version)
        for each in recovery.made
    ]
    turn.put(*serve)
    turn.remove(recovery.lost)
    turn.change(recovery=None)
    turn.arrange(recovery.routed)
    restored = min((each.version for each in recovery.made), default=query.committed)
    turn.tell(
        "recovery",
        seconds=(query.now - recovery.since) / SECOND,
        lost=instances_of(query.slices[i] for i in recovery.lost if i in query.slices),
        slices=[each.id for each in serve],
        restored=restored,
        replayed=query.committed - restored,
    )
    checkpoint.review(turn)


def _go_back(turn: Turn) -> None:
    turn.forget(Owner.RECOVERY)
    turn.change(recovery=None)
    restart.begin(
        turn, "lost slices cannot be recovered: their backups or the rows to replay are lost too"
    )
