"""Restart: a driver takes a query over, or rolls it back to a published version.

A new driver uses the tables in place, if all of them are at the last committed version. Otherwise
all slices are restored from the newest complete published version. Spark then runs the later
batches again; results that were delivered before are not delivered again. A damaged version is
skipped. A restart waits up to 30 seconds for nodes that have newer parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from anabranch.protocols import checkpoint, move
from anabranch.protocols.events import Done, Failed, Inspected
from anabranch.protocols.model import (
    Change,
    Facts,
    Host,
    Inventory,
    Published,
    Readiness,
    Role,
    Routed,
    Slice,
    SliceId,
)
from anabranch.protocols.orders import SECOND, Inspect, Make, Rewind, Wake, Withdraw
from anabranch.protocols.query import Outstanding, Owner, Query, Turn
from anabranch.state.part import Part
from anabranch.units import NO_VERSION, Version

_TABLES = 5 * SECOND
"""So long the nodes are waited for that had the tables."""
_COMING = 30 * SECOND
"""So long nodes are waited for whose agents are being started, once another one is ready."""
_HOLDERS = 30 * SECOND
"""So long nodes are waited for that hold parts of newer versions."""
_NODES = 120 * SECOND
"""How long a restart waits for the first node."""
_PAUSE = SECOND // 2


class Phase(Enum):
    """The steps of a restart."""

    NODES = "waiting for nodes"
    INSPECT = "inspecting tables"
    CHOOSE = "choosing a published version"
    MAKE = "making slices from parts"
    REWIND = "rewinding Spark's logs"


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart in progress."""

    since: int
    target: Version
    """The last version that was committed."""
    phase: Phase
    why: str = "a driver took the query over"
    found: Mapping[SliceId, frozenset[Version]] = field(default_factory=dict)
    """The tables in place, and the versions that they can be rolled back to."""
    damaged: frozenset[Version] = frozenset()
    """Published versions that cannot be read."""
    start: Version = NO_VERSION
    made: tuple[Slice, ...] = ()
    routed: Mapping[str, Routed] = field(default_factory=dict)
    not_before: int = 0
    trusted: bool = True
    """Whether what was committed after the newest published version counts."""

    @property
    def change(self) -> Change:
        """The present step, the reason, and the start."""
        what = f"version {self.start}" if self.made else f"up to version {self.target}"
        return Change("restart", what, self.why, self.phase.value, self.since)


def take_over(turn: Turn, facts: Facts) -> None:
    """Begin the restart of a driver, from the durable state of the query."""
    query = turn.query
    inventory = _inventory(query, facts.published)
    target = Version(max(facts.committed, facts.delivered))
    if not facts.trusted:
        target = max((each.version for each in facts.published), default=NO_VERSION)
    turn.change(
        taken_over=query.now,
        routed=facts.routed,
        slices=facts.slices if facts.noted == facts.arrangement else {},
        arrangement=facts.arrangement,
        inventory=inventory,
        published=facts.published,
        committed=facts.committed,
        delivered=facts.delivered,
        oldest_offsets=facts.oldest_offsets,
        restart=Restart(query.now, target, Phase.NODES, trusted=facts.trusted),
    )
    for wait in (_TABLES, _HOLDERS, _NODES):
        turn.send(Wake(query.now + wait))


def begin(turn: Turn, reason: str) -> None:
    """Roll a running query back to a published version."""
    query = turn.query
    turn.tell("going back", reason=reason, committed=query.committed)
    target = Version(max(query.committed, query.delivered))
    turn.forget(Owner.RECOVERY, Owner.CHECKPOINT, Owner.MERGE, Owner.MOVE)
    why = f"the query was rolled back to an earlier version: {reason}"
    move.abandon(turn, why)
    checkpoint.abandon(turn, why)
    turn.change(restart=Restart(query.now, target, Phase.CHOOSE, reason), recovery=None)
    turn.send(Wake(query.now + _HOLDERS))
    run(turn)  # nothing else may happen for long


def run(turn: Turn) -> None:
    """Take the next step."""
    query, restart = turn.query, turn.query.restart
    if restart is None or query.stopped or query.now < restart.not_before:
        return
    if any(waiting.owner is Owner.RESTART for waiting in query.outstanding.values()):
        return
    if not query.ready:
        if query.now >= restart.since + _NODES:
            turn.stop(
                "there has been no node for two minutes; start executors, then start the query "
                "again"
            )
        turn.send(Wake(restart.since + _NODES))
        return
    coming = any(node.readiness is not Readiness.READY for node in query.nodes.values())
    patience = min(query.nodes[host].probed_at for host in query.ready) + _COMING
    if coming and query.now < patience:
        turn.send(Wake(patience))
        return  # or all instances would be on the nodes that are quicker than the others
    if restart.phase is Phase.NODES:
        _look_for_tables(turn)
    elif restart.phase is Phase.INSPECT:
        _use_tables(turn)
    elif restart.phase is Phase.CHOOSE:
        _choose(turn)


def answer(turn: Turn, waiting: Outstanding, event: Done | Failed) -> None:
    """The answer to an order of a restart."""
    restart = turn.query.restart
    assert restart is not None
    match waiting.order, event:
        case Inspect(), Done(answer=Inspected(tables)):
            turn.change(restart=replace(restart, found={**restart.found, **tables}))
        case Make(), Done():
            _made(turn)
        case Make(), Failed(reason=reason, damaged=damaged):
            if damaged is not None:
                turn.tell("checkpoint damaged", version=restart.start, reason=reason)
                restart = replace(restart, damaged=restart.damaged | {restart.start})
                turn.change(restart=restart)
            _again(turn, reason)
        case Rewind(), Done():
            _finish(turn)
        case Rewind(), Failed(reason=reason, final=True):
            turn.stop(reason, state_lost=True)
        case Rewind(), Failed(reason=reason):
            _again(turn, reason)


def node_lost(turn: Turn, host: Host) -> None:
    """A node was lost: start again if slices were being made there."""
    restart = turn.query.restart
    if restart is not None and any(each.node == host for each in restart.made):
        _again(turn, f"node {host} was lost")


def _again(turn: Turn, reason: str) -> None:
    restart = turn.query.restart
    assert restart is not None
    turn.tell("restart failed", reason=reason, step=restart.phase.value)
    turn.forget(Owner.RESTART)
    turn.remove(frozenset(each.id for each in restart.made))
    later = turn.query.now + _PAUSE
    turn.change(restart=replace(restart, phase=Phase.CHOOSE, made=(), not_before=later))
    turn.send(Wake(later))


def _look_for_tables(turn: Turn) -> None:
    query, restart = turn.query, turn.query.restart
    assert restart is not None
    if not query.operators and restart.trusted:
        turn.change(restart=None, committed=restart.target)
        return
    had = {each.node for each in query.slices.values()}
    lagging = restart.target > query.committed or query.committed == NO_VERSION
    if not had or lagging or not restart.trusted:
        turn.change(restart=replace(restart, phase=Phase.CHOOSE))
        _choose(turn)
        return
    settled = all(node.readiness is Readiness.READY for node in query.nodes.values())
    if not (had <= query.ready and settled) and query.now < restart.since + _TABLES:
        return
    turn.change(restart=replace(restart, phase=Phase.INSPECT))
    for host in sorted(had & query.ready):
        here = tuple(each for each in query.slices.values() if each.node == host)
        turn.order(Inspect(host, here), Owner.RESTART)


def _use_tables(turn: Turn) -> None:
    """Use the tables in place, if all are there. Otherwise restore them."""
    query, restart = turn.query, turn.query.restart
    assert restart is not None
    whole = all(
        restart.target in restart.found.get(each.id, ()) and each.node in query.nodes
        for each in query.slices.values()
    )
    divided_alike = all(
        each.groups <= query.routed[each.operator].routing.owners[each.instance]
        and query.routed[each.operator].hosts[each.instance] == each.node
        if each.instance < query.routed[each.operator].routing.instances
        else False
        for each in query.slices.values()
    )
    if whole and divided_alike:
        turn.change(
            restart=None,
            trimmed=dict.fromkeys(query.operators, restart.target),
            slices={i: replace(each, base=None) for i, each in query.slices.items()},
        )
        checkpoint.review(turn)
    else:
        turn.change(restart=replace(restart, phase=Phase.CHOOSE))
        _choose(turn)


def _choose(turn: Turn) -> None:
    query, restart = turn.query, turn.query.restart
    assert restart is not None
    now = _newest(query, restart, query.ready)
    best = _newest(query, restart, None)
    waited = query.now >= restart.since + _HOLDERS
    if _version(best) > _version(now) and not waited:
        turn.send(Wake(restart.since + _HOLDERS))
        return
    start = _version(now)
    if start + 1 < query.oldest and start < restart.target and restart.trusted:
        turn.stop(
            f"the state of version {restart.target} is lost; the newest checkpoint is of version "
            f"{start}, and Spark's log no longer has the offsets of batches {start + 1} to "
            f"{query.oldest - 1} after it. Checkpoint more often, or raise "
            "spark.sql.streaming.minBatchesToRetain",
            state_lost=True,
        )
        return
    _make(turn, now)


def _newest(query: Query, restart: Restart, nodes: frozenset[Host] | None) -> Published | None:
    """The newest version whose parts these nodes have; with None, any nodes that may yet come."""
    for published in reversed(query.published):
        if published.version > restart.target or published.version in restart.damaged:
            continue
        parts = [part for of in published.parts.values() for part in of]
        if nodes is None or all(query.policies.backup.available(p, nodes) for p in parts):
            return published
    return None


def _version(published: Published | None) -> Version:
    return NO_VERSION if published is None else published.version


def _make(turn: Turn, published: Published | None) -> None:
    query, restart = turn.query, turn.query.restart
    assert restart is not None
    start = _version(published)
    instances = {name: of.routing.instances for name, of in query.routed.items()}
    before = {name: of.hosts for name, of in query.routed.items()}
    hosts = query.policies.placement.place(instances, query.ready, before)
    routed = {name: Routed(of.routing, tuple(hosts[name])) for name, of in query.routed.items()}
    made = [
        Slice(
            turn.slice_id(), name, instance, hosts[name][instance], groups, Role.ARRIVING, start,
            start if published is not None else None,
        )
        for name, of in routed.items()
        for instance, groups in enumerate(of.routing.owners)
    ]  # fmt: skip
    turn.change(
        restart=replace(restart, phase=Phase.MAKE, start=start, made=tuple(made), routed=routed)
    )
    turn.put(*made)
    for each in made:
        parts: tuple[Part, ...] = ()
        if published is not None:
            inventory = Inventory(published.parts[each.operator])
            names = frozenset(part.name for part in inventory.parts)
            parts = inventory.recipe(each.groups, start, names)
        turn.order(Make(each, parts, start), Owner.RESTART)


def _made(turn: Turn) -> None:
    query, restart = turn.query, turn.query.restart
    assert restart is not None
    if any(waiting.owner is Owner.RESTART for waiting in query.outstanding.values()):
        return
    if not restart.trusted:
        # Nothing later counts, and results of later batches are taken back.
        restart = replace(restart, target=restart.start)
        turn.change(restart=restart, delivered=restart.start)
    if restart.start < restart.target or not restart.trusted:
        # The batch that Spark wants is one of those it will want again.
        turn.change(restart=replace(restart, phase=Phase.REWIND), batch=None)
        turn.order(Rewind(restart.start, restart.target, turn.fence()), Owner.RESTART)
    else:
        _finish(turn)


def _finish(turn: Turn) -> None:
    query, restart = turn.query, turn.query.restart
    assert restart is not None
    mine = {each.id for each in restart.made}
    turn.remove(frozenset(query.slices.keys() - mine))
    turn.put(*(replace(each, role=Role.SERVING) for each in restart.made))
    later = tuple(p.version for p in query.published if p.version > restart.start)
    published = tuple(p for p in query.published if p.version <= restart.start)
    if later:
        turn.send(Withdraw(later, ()))
    turn.change(
        restart=None,
        suspects=frozenset(),
        committed=restart.start,
        delivered=Version(max(restart.target, query.delivered)),
        oldest_offsets=query.oldest,
        published=published,
        inventory=_inventory(query, published),
        trimmed=dict.fromkeys(query.operators, restart.start),
    )
    turn.arrange(restart.routed)
    turn.tell("restarted", start=restart.start, target=restart.target)
    checkpoint.review(turn)


def _inventory(query: Query, published: tuple[Published, ...]) -> dict[str, Inventory]:
    """The parts in published versions, each once."""
    return {
        name: Inventory({p.name: p for each in published for p in each.parts[name]}.values())
        for name in query.operators
    }
