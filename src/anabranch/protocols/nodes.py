"""Nodes and their agents.

A node is alive while it has an executor, and ready while its agent answers. Tasks run on nodes that
are alive; orders go to nodes that are ready. An agent that does not answer is replaced. A node
whose agent cannot be replaced is treated as lost, and tried again later. A node that takes long
with an order or a batch is probed. An idle node is probed less often, as it may hold backups.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.protocols import adaptation, holders
from anabranch.protocols.events import Done, Failed, Inspected
from anabranch.protocols.model import (
    NO_GROUPS,
    Host,
    Node,
    Readiness,
    instances_of,
    named,
    serving,
)
from anabranch.protocols.orders import (
    SECOND,
    Advance,
    AskNodes,
    Capture,
    Drop,
    Inspect,
    Make,
    Mend,
    Merge,
    Prepare,
    Store,
    Wake,
    Withdraw,
    node_of,
)
from anabranch.protocols.query import Outstanding, Owner, Query
from anabranch.protocols.turn import PROBE, Turn
from anabranch.state.part import Part
from anabranch.units import NO_VERSION

_TRIES = 3
_PAUSE = 1 * SECOND
_BANNED = 30 * SECOND
_IDLE = 60 * SECOND
"""The interval of probes of idle nodes."""
_ASK_AGAIN = 60 * SECOND
"""The interval of requests for missing nodes, as the cluster manager may have refused earlier."""


def add(turn: Turn, host: Host) -> None:
    """A host has an executor: start an agent there."""
    if host not in turn.query.nodes:
        _put(turn, Node(host, since=turn.query.now))
        adaptation.nodes_changed(turn, lost=False)
        _prepare(turn, host)


def remove(turn: Turn, host: Host) -> None:
    """A node was lost. The slices that it served may be lost too."""
    query = turn.query
    if host not in query.nodes:
        return
    left = {name: node for name, node in query.nodes.items() if name != host}
    # What was asked of the node before it went does not count when it is there again.
    turn.change(
        outstanding={
            number: waiting
            for number, waiting in query.outstanding.items()
            if waiting.order != Prepare(host)
        }
    )
    gone = {each.id: each for each in serving(query.slices.values()) if each.node == host}
    turn.change(nodes=left, suspects=query.suspects | gone.keys())
    adaptation.nodes_changed(turn, lost=True)
    turn.tell("failure", host=host, slices=sorted(gone), instances=instances_of(gone.values()))


def answer(turn: Turn, waiting: Outstanding, event: Done | Failed) -> None:
    """The answer of a node to Prepare or to a probe. Unknown tables are then dropped."""
    match waiting.order, event:
        case Prepare(host), Done(answer=Inspected() as found) if host in turn.query.nodes:
            holders.forget_parts(turn, host, found.parts)
            holders.find_fragments(turn, host, found.parts)
            prepared = turn.query.nodes[host].prepared
            _put(turn, Node(host, Readiness.READY, probed_at=turn.query.now, prepared=prepared))
            _drop_strangers(turn, host, found)
        case Inspect(host), Done(answer=Inspected() as found):
            _drop_strangers(turn, host, found)
        case Prepare(host), Failed(reason=reason) if host in turn.query.nodes:
            node = turn.query.nodes[host]
            if node.failures + 1 >= _TRIES:
                turn.tell(
                    "node does not answer",
                    host=host,
                    reason=reason,
                    attempts=_TRIES,
                    pause=_BANNED / SECOND,
                )
                remove(turn, host)
                turn.change(banned={**turn.query.banned, host: turn.query.now + _BANNED})
                turn.send(Wake(turn.query.now + _BANNED))
            else:
                retry = turn.query.now + _PAUSE
                node = replace(node, readiness=Readiness.NEW, retry_at=retry)
                _put(turn, replace(node, failures=node.failures + 1))
                turn.send(Wake(retry))

        case Inspect(host), Failed(reason=reason):
            turn.tell("node does not answer", host=host, reason=reason)
            unreachable(turn, host)


def certain(turn: Turn, event: Done) -> Done | Failed:
    """An answer without the holders of a part that may have lost it since the order was given.

    They were lost meanwhile, or silent. If no other holder has the part, the order has failed.
    """
    part, nodes = event.answer, turn.query.nodes
    if not isinstance(part, Part):
        return event
    doubtful = tuple(h for h in part.holders if h in nodes and nodes[h].prepared > event.order)
    if not doubtful:
        return event
    left = part.at(*(host for host in part.holders if host not in doubtful))
    if left is not None:
        return Done(event.order, left)
    if not turn.query.knows(part):  # as it is if it was mended
        turn.send(Withdraw((), (part,)))
    return Failed(event.order, f"{named(doubtful)} may have lost the part, as it was away")


def _drop_strangers(turn: Turn, host: Host, found: Inspected) -> None:
    """Drop the tables, captured files and parts on a node that nothing needs."""
    query = turn.query
    tables = found.tables.keys() - query.slices.keys() if query.settled else ()
    files = found.files.keys() - _wanted_files(query, found)
    if tables or files:
        turn.send(Drop(host, tuple(sorted(tables)), tuple(sorted(files))))
    # While a manifest cannot be read nobody knows which parts it names.
    can_tell = query.settled and not query.unreadable
    strays = sorted(_strays(turn, host, found.parts)) if can_tell else ()
    if strays:
        # After manifests that could not be deleted yet, as one of these may name them.
        turn.send(Withdraw((), tuple(_stray(name, host) for name in strays)))


def _stray(name: str, host: Host) -> Part:
    """A part of which nothing but the name is known."""
    return Part(name, "", NO_VERSION, None, NO_GROUPS, (host,))


def _strays(turn: Turn, host: Host, held: frozenset[str]) -> frozenset[str]:
    """The parts on a node that nothing names, and that are not being stored there now.

    The name of a part is not known while it is being stored. As long as an order stores something
    on the node, a part is stray only if it was there, and unnamed, before that order was given.
    """
    query = turn.query
    node = query.nodes.get(host)
    if node is None:
        return frozenset()
    strays = held - _named(query)
    _put(turn, replace(node, strays=strays, inspected_at=query.now))
    storing = [
        waiting.since
        for waiting in query.outstanding.values()
        if isinstance(waiting.order, Store | Mend | Merge) and host in waiting.order.holders
    ]
    if storing and min(storing) <= node.inspected_at:
        return frozenset()
    return strays & node.strays if storing else strays


def _named(query: Query) -> set[str]:
    """The names of all parts that something in the query names."""
    parts = [part for of in query.inventory.values() for part in of.parts]
    for published in query.manifests:
        parts += [part for of in published.parts.values() for part in of]
    for waiting in query.outstanding.values():
        if isinstance(waiting.order, Make | Advance | Merge):
            parts += waiting.order.parts
        elif isinstance(waiting.order, Mend):
            parts.append(waiting.order.part)
    return {part.name for part in parts} | {part.own_name for part in parts if part.owner}


def _wanted_files(query: Query, found: Inspected) -> frozenset[str]:
    """The captured files that somebody names, or may yet name: they are of what is under way.

    Whatever is captured later than these are seen has a higher fence than all that is under way.
    """
    orders = [waiting.order for waiting in query.outstanding.values()]
    fences = [order.fence for order in orders if isinstance(order, Capture)]
    if query.batch is not None and query.batch.fence is not None:
        fences.append(query.batch.fence)
    under_way = (file for file, fence in found.files.items() if fences and fence >= min(fences))
    return query.named_files.union(under_way)


def unreachable(turn: Turn, host: Host) -> None:
    """A node did not answer an order: replace its agent, unless it answers now."""
    node = turn.query.nodes.get(host)
    if node is not None and node.readiness is Readiness.READY:
        _put(turn, replace(node, since=turn.query.now))
        _prepare(turn, host)


def look(turn: Turn) -> None:
    """Try nodes again whose pause is over, and probe agents."""
    query = turn.query
    if (query.deserted_since is None) is not bool(query.ready):
        turn.change(deserted_since=None if query.ready else query.now)
    for node in list(query.nodes.values()):
        if node.readiness is Readiness.NEW and node.retry_at <= query.now:
            _prepare(turn, node.host)
    for host, until in list(query.banned.items()):
        if until <= query.now:
            rest = {name: at for name, at in turn.query.banned.items() if name != host}
            turn.change(banned=rest)
            add(turn, host)
    _probe(turn)


def _probe(turn: Turn) -> None:
    """Probe the agents that are slow with an order, and idle ones at longer intervals."""
    query = turn.query
    if query.now < query.probe_at or not query.nodes:
        return
    slow: set[Host | None] = set()
    busy, batch = query.running, query.batch
    if batch is not None and batch.fence is not None and batch.begun + PROBE <= query.now:
        slow |= {each.node for each in serving(query.slices.values())}
    for waiting in query.outstanding.values():
        host = node_of(waiting.order)
        busy = busy or host is not None
        if waiting.owner is not Owner.NODES and waiting.since + PROBE <= query.now:
            slow.add(host)
    later = query.now + (PROBE if busy else _IDLE)
    turn.change(probe_at=later)
    turn.send(Wake(later))
    for node in query.nodes.values():
        since = query.now - node.probed_at
        due = since >= _IDLE or (node.host in slow and since >= PROBE)
        if due and node.readiness is Readiness.READY:
            _put(turn, replace(node, probed_at=query.now))
            turn.order(Inspect(node.host), Owner.NODES)


def ask_for_more(turn: Turn) -> None:
    """Request nodes if there are fewer than the placement wants."""
    query = turn.query
    if query.restart is not None:
        return  # nothing is placed yet, and nodes become known one by one
    placed = {name: routed.hosts for name, routed in query.routed.items()}
    missing = query.policies.placement.missing(query.nodes.keys(), placed)
    total = len(query.nodes) + missing if missing else 0
    if total != query.asked_nodes:
        turn.change(asked_nodes=total, ask_again_at=query.now)
        if total:
            turn.tell("pool short", nodes=len(query.nodes), missing=missing)
    if total and turn.query.ask_again_at <= query.now:
        turn.change(ask_again_at=query.now + _ASK_AGAIN)
        turn.send(AskNodes(total))
        turn.send(Wake(query.now + _ASK_AGAIN))


def _prepare(turn: Turn, host: Host) -> None:
    query, node = turn.query, turn.query.nodes[host]
    parts = (p for each in query.manifests for of in each.parts.values() for p in of)
    stored = (part for of in query.inventory.values() for part in of.parts)
    known = frozenset(p.name for p in (*parts, *stored) if host in p.holders)
    number = turn.order(Prepare(host), Owner.NODES)
    _put(turn, replace(node, readiness=Readiness.PREPARING, known=known, prepared=number))


def _put(turn: Turn, node: Node) -> None:
    turn.change(nodes={**turn.query.nodes, node.host: node})
