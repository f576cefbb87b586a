"""The rule by which a message finds the node that is closest to a key."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from anabranch.ring.ids import NodeId, closest, distance, shared_digits
from anabranch.ring.leafset import LeafSet
from anabranch.ring.table import RoutingTable


def next_hop(
    key: int, leaves: LeafSet, table: RoutingTable, avoid: Collection[int] = ()
) -> NodeId | None:
    """The node that a message for a key goes to next. None: this node is the closest one.

    If the key is among the leaves, it is the closest of them. Otherwise it is the node of the
    routing table that has one digit more in common with the key. In the rare case that there is
    none, or it is to be avoided, it is any known node that is closer to the key than this one and
    has no fewer digits in common with it.

    >>> leaves = LeafSet(NodeId(100), 2, map(NodeId, [90, 110]))
    >>> next_hop(108, leaves, RoutingTable(NodeId(100)))
    NodeId('0000:000000000000000000000000006e')
    >>> next_hop(101, leaves, RoutingTable(NodeId(100))) is None
    True
    """
    me = leaves.center
    own, shared = distance(key, me), shared_digits(key, me)
    if leaves.covers(key):
        found = leaves.closest(key, avoid)
        if found != me:
            return found
        # Beyond a leaf that is avoided there may be a closer node.
        beyond = (
            [id for id in table if id not in avoid and distance(key, id) < own] if avoid else []
        )
        return closest(key, beyond) if beyond else None
    forward = table.toward(key)
    if forward is not None and forward not in avoid:
        return forward
    nearer = [id for id in chain(leaves, table) if id not in avoid and distance(key, id) < own]
    fitting = [id for id in nearer if shared_digits(key, id) >= shared]
    if not fitting:
        # Nodes between this one and the key are unknown or avoided: get closer in any way.
        return closest(key, nearer) if nearer else None
    most = max(shared_digits(key, id) for id in fitting)
    return closest(key, [id for id in fitting if shared_digits(key, id) == most])
