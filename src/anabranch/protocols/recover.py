"""Recovery: lost slices are made on other nodes from parts, and replay the batches they missed.

The stream is held. Slices that may be lost are inspected first, if their node is there; undamaged
ones continue. New slices get new ids, so no undamaged table is ever overwritten, and a recovery
that fails starts again from the beginning. The routing changes only when all new slices are at the
last committed version.

If the parts of a lost slice are lost too, or the rows that were sent to it, the query is rolled
back to a published version: see :mod:`anabranch.protocols.restart`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from anabranch.protocols import checkpoint, ends, protect, restart
from anabranch.protocols.attempts import NONE_YET, Attempts
from anabranch.protocols.events import Done, Failed, Inspected
from anabranch.protocols.model import (
    Change,
    Host,
    Role,
    Routed,
    Slice,
    SliceId,
    instances_of,
    named,
    serving,
)
from anabranch.protocols.orders import SECOND, Inspect, Make, Replay, Wake
from anabranch.protocols.query import Outstanding, Owner, Query
from anabranch.protocols.turn import DESERTED, Turn
from anabranch.state.groups import KeyGroups
from anabranch.units import NO_VERSION, Version

_Lots = dict[str, dict[Version, KeyGroups]]
"""For each operator the versions from which lost groups are recovered."""
_HOLDERS = 30 * SECOND
"""So long nodes are waited for that hold newer parts than others do."""
_REPLAYS = 3
"""Replays from the same versions that may fail before the query goes back to a published one."""


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
    """The slices that are replaced."""
    made: tuple[Slice, ...] = ()
    """The new slices in their place."""
    routed: Mapping[str, Routed] = field(default_factory=dict)
    """How operators are divided once these serve."""
    tried: _Lots | None = None
    """The versions from which groups were recovered last."""
    replays: int = 0
    """How many replays from these have failed."""
    attempts: Attempts = NONE_YET
    not_before: int = 0
    waits_for: str | None = None
    """The nodes that are waited for, though others are ready."""

    @property
    def change(self) -> Change:
        """The present step, the reason, and the start."""
        what = ", ".join(sorted({each.operator for each in self.made})) or "slices"
        why = f"{len(self.lost)} slices are lost" if self.lost else "slices may be lost"
        return Change("recovery", what, why, self.waits_for or self.phase.value, self.since)


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
        ends.interrupt(turn)
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
            _again(turn, reason, event)
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


def _again(turn: Turn, reason: str, failed: Failed | None = None, replays: int = 0) -> None:
    """Start the recovery again; or stop, if an error comes back again and again."""
    recovery = turn.query.recovery
    assert recovery is not None
    turn.forget(Owner.RECOVERY)
    turn.remove(frozenset(each.id for each in recovery.made))
    attempts = recovery.attempts.after(failed)
    pause = None if attempts.over else attempts.pause / SECOND
    turn.tell("recovery failed", reason=reason, step=recovery.phase.value, pause=pause)
    later = turn.query.now + attempts.pause
    turn.change(
        recovery=Recovery(
            recovery.since,
            Phase.PREPARE,
            tried=recovery.tried,
            replays=recovery.replays + replays,
            attempts=attempts,
            not_before=later,
        )
    )
    turn.send(Wake(later))
    attempts.stop_if_over(turn, "the recovery")


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
    recovery = replace(recovery, phase=Phase.PREPARE, waits_for=None)
    turn.change(recovery=recovery)
    if not query.ready:
        turn.wait_for_any_node()
        return
    now = _lots(query, lost, query.ready)
    here = _lots(query, lost, frozenset(query.nodes))
    waited = query.now >= recovery.since + _HOLDERS
    is_newer = here is not None and (now is None or _age(here) > _age(now))
    if is_newer and (now is None or not waited):
        starting = named(query.nodes.keys() - query.ready)
        _wait(turn, f"waiting for the agents of {starting}", recovery.since + _HOLDERS)
        return
    # Of newer parts, or of more lost slices, a replay may succeed: senders that are lost too make
    # the rows again that it did not find.
    replays = recovery.replays if now == recovery.tried else 0
    if now is not None and replays < _REPLAYS:
        turn.change(recovery=replace(recovery, tried=now, replays=replays))
        _make(turn, lost, now)
        return
    known = _holders(query)
    some_may_come = now is None and _lots(query, lost, known) is not None
    absent = sorted(known - query.nodes.keys()) if some_may_come else []
    if absent and query.now < recovery.since + DESERTED:
        what = f"waiting for nodes {named(absent)}, which may hold backups"
        _wait(turn, what, recovery.since + DESERTED)
        return
    reason = "what was sent to lost slices could not be replayed"
    if now is None:
        reason = "state and its backups were lost"
    if absent:
        reason += f"; nodes {named(absent)}, which may hold some, did not come back"
    _go_back(turn, reason)


def _go_back(turn: Turn, reason: str) -> None:
    recovery = turn.query.recovery
    assert recovery is not None
    turn.forget(Owner.RECOVERY)
    turn.change(recovery=None)
    restart.begin(turn, reason, recovery.since)


def _wait(turn: Turn, what: str, until: int) -> None:
    """Let it be seen what is waited for, and look again then at the latest."""
    recovery = turn.query.recovery
    assert recovery is not None
    turn.change(recovery=replace(recovery, waits_for=what))
    if until > turn.query.now:
        turn.send(Wake(until))


def _holders(query: Query) -> frozenset[Host]:
    """All nodes that hold parts, lost ones included."""
    parts = (part for of in query.inventory.values() for part in of.parts)
    return frozenset(query.nodes).union(*(part.holders for part in parts))


def _lots(query: Query, lost: list[Slice], nodes: frozenset[Host]) -> _Lots | None:
    """The versions at which lost groups can be made, if all can, and be replayed from there.

    If an operator and one that receives its rows are both lost, the first makes these rows again.
    So it must not be made at a later version than the second. Rows sent up to the version must
    not be needed. Slices of an operator that begin at the same version are replayed in one job.
    """
    lots: _Lots = {}
    for name in reversed(list(query.operators)):
        groups = _groups(each for each in lost if each.operator == name)
        if not groups:
            continue
        behind = [min(lots[other]) for other in lots if name in query.operators[other].before]
        upto = min([query.committed, *behind])
        found = query.inventory[name].lots(groups, query.usable(name, nodes), upto)
        trimmed = query.trimmed.get(name, NO_VERSION)
        if query.policies.begins_empty and NO_VERSION in found:
            empty = found.pop(NO_VERSION)
            found[trimmed] = found.get(trimmed, KeyGroups()) | empty
        oldest = min(found)
        if oldest < trimmed or (oldest < query.committed and not query.policies.replays):
            return None
        lots[name] = found
    return lots


def _age(lots: _Lots) -> int:
    """The versions of all groups in sum: of two lots of the same groups the newer has more."""
    return sum(at * len(groups) for of in lots.values() for at, groups in of.items())


def _make(turn: Turn, lost: list[Slice], lots: _Lots) -> None:
    query = turn.query
    routed = dict(query.routed)
    made: list[Slice] = []
    operators = list(dict.fromkeys(each.operator for each in lost))
    for name in operators:
        mine = [each for each in lost if each.operator == name]
        instances = sorted({each.instance for each in mine})
        routing = query.routed[name].routing
        whole = [i for i in instances if all(s in mine for s in _of(query, name, i))]
        after = routing.divided(whole, query.policies.parallelism) if whole else routing
        routed[name] = Routed(after, query.routed[name].hosts)
    hosts = _place(query, routed, lost)
    for name in operators:
        routed[name] = Routed(routed[name].routing, hosts[name])
        for instance, owned in enumerate(routed[name].routing.owners):
            for at, gone in lots[name].items():
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


def _groups(slices: Iterable[Slice]) -> KeyGroups:
    groups = KeyGroups()
    for each in slices:
        groups = groups | each.groups
    return groups


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
    protect.review(turn)
