"""Rings as the protocol leaves them after a while, made at once: for simulations of many nodes."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Collection, Iterator

from anabranch.ring.ids import BITS, COLUMNS, DIGITS, NodeId
from anabranch.ring.messages import Contact, Settings
from anabranch.ring.network import Network


def converged(
    nodes: Collection[Contact], settings: Settings, seed: int = 0, latency: float = 0.0005
) -> Network:
    """A network of nodes that have joined, all of which know what they have to know.

    >>> network = converged([Contact(NodeId(i), str(i), str(i)) for i in range(9)], Settings())
    >>> len(network.peers["3"].neighbours.leaves)
    8
    """
    network = Network(settings, seed, latency=latency)
    by_id = {node.id: node for node in nodes}
    ids = sorted(by_id)
    tables = routing_tables(ids, random.Random(seed))
    for node in nodes:
        alive = [*leaf_set(node.id, ids, settings.leaves), *tables[node.id]]
        network.add(node, alive=[by_id[id] for id in dict.fromkeys(alive)])
    return network


def leaf_set(me: NodeId, ids: list[NodeId], size: int) -> list[NodeId]:
    """The neighbours of a node, of all ids in order."""
    at, half = bisect_left(ids, me), size // 2
    if len(ids) <= size + 1:
        return [id for id in ids if id != me]
    return [ids[(at + i) % len(ids)] for i in range(-half, half + 1) if i]


def routing_tables(ids: list[NodeId], chance: random.Random) -> dict[NodeId, list[NodeId]]:
    """The nodes in the routing table of each node: any that fits in every place."""
    tables: dict[NodeId, list[NodeId]] = {id: [] for id in ids}
    todo = [(0, 0, len(ids))]
    while todo:
        row, start, end = todo.pop()
        if row < DIGITS and end - start > 1:
            parts = list(_by_digit(ids, row, start, end))
            todo += [(row + 1, a, b) for a, b in parts]
            for at in range(start, end):
                tables[ids[at]] += [
                    ids[chance.randrange(a, b)] for a, b in parts if not a <= at < b
                ]
    return tables


def _by_digit(ids: list[NodeId], row: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Ranges of ids that have the same digit in a row, of those with the same digits before it."""
    unit = 1 << (BITS - 4 * (row + 1))
    first = ids[start] // (unit * COLUMNS) * (unit * COLUMNS)
    at = start
    for column in range(COLUMNS):
        until = bisect_left(ids, first + (column + 1) * unit, at, end)
        if until > at:
            yield at, until
        at = until
