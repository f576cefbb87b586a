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

from anabranch.errors import StateMissing
from anabranch.protocols import checkpoint, ends, protect
from anabranch.protocols.attempts import NONE_YET, Attempts
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
    named,
)
from anabranch.protocols.orders import SECOND, Inspect, Make, Publish, Rewind, Wake, Withdraw
from anabranch.protocols.query import Outstanding, Owner, Query
from anabranch.protocols.turn import DESERTED, Turn
from anabranch.state.part import Part
from anabranch.units import NO_VERSION, Version

_TABLES = 5 * SECOND
"""So long the nodes are waited for that had the tables."""
_COMING = 30 * SECOND
"""So long nodes are waited for whose agents are being started, once another one is ready."""
_HOLDERS = 30 * SECOND
"""So long nodes are waited for that hold parts of newer versions, if an older one can be used."""


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
    attempts: Attempts = NONE_YET
    not_before: int = 0
    trusted: bool = True
    """Whether what was committed after the newest published version counts."""
    rewinding: bool = False
    """Whether a driver before began to take Spark back, and did not finish."""
    waits_for: str | None = None
    """The nodes that are waited for, though others are ready."""

    @property
    def change(self) -> Change:
        """The present step, the reason, and the start."""
        what = f"version {self.start}" if self.made else f"up to version {self.target}"
        step = self.waits_for or self.phase.value
        return Change("restart", what, self.why, step, self.since)


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
        # They are noted before any batch runs with them, and those of a later arrangement are none
        # that a batch has run with. Whether they are at the last version is seen from the tables.
        slices=facts.slices if facts.noted >= facts.arrangement else {},
        arrangement=max(facts.noted, facts.arrangement),
        noted=facts.noted,
        inventory=inventory,
        published=facts.published,
        unreadable=facts.unreadable,
        committed=facts.committed,
        delivered=facts.delivered,
        oldest_offsets=facts.oldest_offsets,
        restart=Restart(
            query.now, target, Phase.NODES, trusted=facts.trusted, rewinding=facts.rewinding
        ),
    )
    for wait in (_TABLES, _HOLDERS, DESERTED):
        turn.send(Wake(query.now + wait))


def begin(turn: Turn, reason: str, since: int) -> None:
    """Roll a running query back to a published version; nodes are waited for ``since`` then."""
    query = turn.query
    turn.tell("going back", reason=reason, committed=query.committed)
    target = Version(max(query.committed, query.delivered))
    turn.forget(Owner.RECOVERY, Owner.MERGE, Owner.MOVE)
    why = f"the query was rolled back to an earlier version: {reason}"
    ends.abandon(turn, why)
    checkpoint.abandon(turn, why)
    turn.change(restart=Restart(since, target, Phase.CHOOSE, reason), recovery=None)
    for wait in (_HOLDERS, DESERTED):
        turn.send(Wake(since + wait))
    run(turn)  # nothing else may happen for long


def run(turn: Turn) -> None:
    """Take the next step."""
    query, restart = turn.query, turn.query.restart
    if restart is None or query.stopped or query.now < restart.not_before:
        return
    if any(
        waiting.owner is Owner.RESTART or isinstance(waiting.order, Publish)
        for waiting in query.outstanding.values()
    ):
        return  # a version that is being published exists, or does not, before one is chosen
    if not query.ready:
        turn.wait_for_any_node()
        return
    coming = sorted(node.host for node in query.nodes.values() if not node.is_ready)
    patience = min(query.nodes[host].probed_at for host in query.ready) + _COMING
    if coming and query.now < patience:
        _wait(turn, f"waiting for the agents of {named(coming)}", patience)
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
        case Make(), Failed(reason=reason, damaged=damaged, damaged_at=holders):
            if damaged is not None and not holders:
                turn.tell("checkpoint damaged", version=restart.start, reason=reason)
                restart = replace(restart, damaged=restart.damaged | {restart.start})
                turn.change(restart=restart)
            _again(turn, reason, event)
        case Rewind(), Done():
            _finish(turn)
        case Rewind(), Failed(reason=reason, final=True):
            turn.stop(reason, StateMissing)
        case Rewind(), Failed(reason=reason):
            _again(turn, reason, event)


def node_lost(turn: Turn, host: Host) -> None:
    """A node was lost: start again if slices were being made there."""
    restart = turn.query.restart
    if restart is not None and any(each.node == host for each in restart.made):
        _again(turn, f"node {host} was lost")


def _again(turn: Turn, reason: str, failed: Failed | None = None) -> None:
    """Begin again with what is known now; or stop, if an error comes back again and again."""
    restart = turn.query.restart
    assert restart is not None
    turn.forget(Owner.RESTART)
    turn.remove(frozenset(each.id for each in restart.made))
    attempts = restart.attempts.after(failed)
    pause = None if attempts.over else attempts.pause / SECOND
    turn.tell("restart failed", reason=reason, step=restart.phase.value, pause=pause)
    later = turn.query.now + attempts.pause
    restart = replace(
        restart, phase=Phase.CHOOSE, made=(), attempts=attempts, not_before=later, waits_for=None
    )
    turn.change(restart=restart)
    turn.send(Wake(later))
    attempts.stop_if_over(turn, "the restart")


def _wait(turn: Turn, what: str, until: int) -> None:
    """Let it be seen what is waited for, and look again then at the latest."""
    restart = turn.query.restart
    assert restart is not None
    turn.change(restart=replace(restart, waits_for=what))
    if until > turn.query.now:
        turn.send(Wake(until))


def _look_for_tables(turn: Turn) -> None:
    query, restart = turn.query, turn.query.restart
    assert restart is not None
    if not query.operators and restart.trusted and not restart.rewinding:
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
        _withdraw_after(turn, restart.target)
        protect.review(turn)
    else:
        turn.change(restart=replace(restart, phase=Phase.CHOOSE))
        _choose(turn)


def _choose(turn: Turn) -> None:
    query, restart = turn.query, turn.query.restart
    assert restart is not None
    now = _newest(query, restart, query.ready)
    here = _newest(query, restart, frozenset(query.nodes))
    best = _newest(query, restart, None)
    start = _version(now)
    # After a power failure Spark plans batches anew, from any checkpoint, but not from none.
    reaches = start + 1 >= query.oldest if restart.trusted else _reaches_anew(query, start)
    lost = start < restart.target and not reaches
    if _version(here) > start:
        # They are there, or are seen to be gone once their agents did not start.
        starting = named(query.nodes.keys() - query.ready)
        _wait(turn, f"waiting for the agents of {starting}, which hold a newer version",
              restart.since + _HOLDERS)  # fmt: skip
        return
    absent = _absent(query, best)
    until = restart.since + (DESERTED if lost or now is None else _HOLDERS)
    if _version(best) > start and query.now < until:
        _wait(turn, f"waiting for {absent}, which hold a newer version", until)
        return
    if lost:
        turn.stop(_lost(query, restart.target, now, best), StateMissing)
        return
    _make(turn, now)


def _reaches_anew(query: Query, start: Version) -> bool:
    return start != NO_VERSION or query.oldest_offsets == 0


def _absent(query: Query, published: Published | None) -> str:
    """The nodes that are not there and hold parts of a version."""
    parts = () if published is None else (p for of in published.parts.values() for p in of)
    holders = frozenset(holder for part in parts for holder in part.holders)
    return "nodes " + named(holders - query.nodes.keys())


def _lost(query: Query, target: Version, now: Published | None, best: Published | None) -> str:
    """That no version can be had from which all later batches can be run again."""
    start = _version(now)
    said = (
        f"the state of version {target} is lost; the newest checkpoint is of version {start}, and "
        f"Spark's log no longer has the offsets of batches {start + 1} to {query.oldest - 1} after "
        "it. "
    )
    if _version(best) > start:
        return said + (
            f"Checkpoint {_version(best)} is held by {_absent(query, best)}, which did not come: "
            "start executors there, and the query again"
        )
    return said + "Checkpoint more often, or raise spark.sql.streaming.minBatchesToRetain"


def _newest(query: Query, restart: Restart, nodes: frozenset[Host] | None) -> Published | None:
    """The newest version whose parts these nodes have; with None, any nodes that may yet come."""
    for published in reversed(query.manifests):
        if published.version > restart.target or published.version in restart.damaged:
            continue
        parts = [part for of in published.parts.values() for part in of]
        if nodes is None or all(p.available(nodes) for p in parts):
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
        restart=replace(
            restart,
            phase=Phase.MAKE,
            start=start,
            made=tuple(made),
            routed=routed,
            waits_for=None,
        )
    )
    turn.put(*made)
    for each in made:
        parts: tuple[Part, ...] = ()
        if published is not None:
            inventory = Inventory(published.parts[each.operator])
            names = frozenset(part.name for part in inventory.parts)
            parts = inventory.recipe(each.groups, start, names)
        turn.order(Make(each, parts, start), Owner.RESTART)
    if not made:
        _made(turn)  # a query without operators


def _made(turn: Turn) -> None:
    query, restart = turn.query, turn.query.restart
    assert restart is not None
    if any(waiting.owner is Owner.RESTART for waiting in query.outstanding.values()):
        return
    if not restart.trusted:
        # Nothing later counts, and results of later batches are taken back.
        restart = replace(restart, target=restart.start)
        turn.change(restart=restart, delivered=restart.start)
    # None that is newer may be there once Spark's logs are cut: a driver could not go on from it.
    _withdraw_after(turn, restart.start)
    if restart.start < restart.target or not restart.trusted or restart.rewinding:
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
    turn.change(
        restart=None,
        suspects=frozenset(),
        committed=restart.start,
        delivered=Version(max(restart.target, query.delivered)),
        # After a power failure Spark plans all later batches anew.
        oldest_offsets=query.oldest if restart.trusted else restart.start + 1,
        inventory=_inventory(query, query.manifests),
        trimmed=dict.fromkeys(query.operators, restart.start),
    )
    turn.arrange(restart.routed)
    turn.tell("restarted", start=restart.start, target=restart.target)
    protect.review(turn)


def _withdraw_after(turn: Turn, version: Version) -> None:
    """Delete the manifests of all later versions, those that cannot be read among them."""
    query = turn.query
    later = [p.version for p in query.manifests if p.version > version]
    later += [each for each in query.unreadable if each > version]
    if later:
        turn.send(Withdraw(tuple(sorted(later)), ()))
    turn.change(
        published=tuple(p for p in query.published if p.version <= version),
        doubtful=tuple(p for p in query.doubtful if p.version <= version),
        unreadable=tuple(each for each in query.unreadable if each <= version),
    )


def _inventory(query: Query, published: tuple[Published, ...]) -> dict[str, Inventory]:
    """The parts in published versions, each once."""
    return {
        name: Inventory({p.name: p for each in published for p in each.parts[name]}.values())
        for name in query.operators
    }
