"""Transfers: which key groups of an operator go from which slices to which new ones.

New slices are only for groups that change instance or node. Groups that stay keep their slices.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.protocols.events import Rebalance, Scale
from anabranch.protocols.model import Host, Role, Routed, Slice, serving
from anabranch.protocols.moving import MergeSlices, Move, Transfer
from anabranch.protocols.query import Query
from anabranch.protocols.turn import Turn
from anabranch.state.groups import KeyGroups


def balanced(query: Query, operator: str) -> tuple[Host, ...]:
    """The hosts of an operator's instances if all of them were placed again."""
    instances = {name: of.routing.instances for name, of in query.routed.items()}
    nodes = query.ready or frozenset(query.nodes)
    if not nodes:
        return query.routed[operator].hosts
    return tuple(query.policies.placement.place(instances, nodes, {})[operator])


def plan(turn: Turn, moving: Move) -> Move:
    """The move with its new slices, or without any if nothing is to be moved."""
    query, name = turn.query, moving.operator
    now = query.routed[name]
    match moving.event:
        case Scale(instances=count):
            routing = now.routing.scaled(count)
            instances = {each: of.routing.instances for each, of in query.routed.items()}
            before = {each: of.hosts for each, of in query.routed.items()}
            place = query.policies.placement.place
            hosts = place(instances | {name: count}, query.ready, before)[name]
            targets, transfers = divide(turn, name, now, Routed(routing, tuple(hosts)))
        case Rebalance():
            routing, hosts = now.routing, balanced(query, name)
            targets, transfers = divide(turn, name, now, Routed(routing, tuple(hosts)))
        case MergeSlices(instance=instance):
            routing, hosts = now.routing, now.hosts
            targets, transfers = unite(turn, name, instance)
    return replace(
        moving,
        before=now,
        after=Routed(routing, tuple(hosts)),
        targets=targets,
        transfers=transfers,
        begun=query.committed,
    )


def divide(
    turn: Turn, operator: str, now: Routed, after: Routed
) -> tuple[tuple[Slice, ...], tuple[Transfer, ...]]:
    """New slices for the groups that change instance or node, and their present slices."""
    targets: list[Slice] = []
    transfers: list[Transfer] = []
    for instance, owned in enumerate(after.routing.owners):
        host = after.hosts[instance]
        stays = instance < now.routing.instances and now.hosts[instance] == host
        gained = owned - now.routing.owners[instance] if stays else owned
        if not gained:
            continue
        target = Slice(turn.slice_id(), operator, instance, host, gained, Role.ARRIVING)
        targets.append(target)
        for each in serving(turn.query.slices.values(), operator):
            if each.groups & gained:
                transfers.append(Transfer(each.id, target.id, each.groups & gained))
    return tuple(targets), tuple(transfers)


def unite(
    turn: Turn, operator: str, instance: int
) -> tuple[tuple[Slice, ...], tuple[Transfer, ...]]:
    """A new slice for the groups of the smallest slices of an instance, and their present slices.

    Half of the allowed number of slices is left, so that the next merge is not soon.
    """
    query = turn.query
    most = query.policies.most_slices
    found = sorted(slices_of(query, operator, instance), key=lambda each: len(each.groups))
    if len(found) <= most:
        return (), ()
    small = found[: len(found) - max(1, most // 2) + 1]
    groups = KeyGroups()
    for each in small:
        groups = groups | each.groups
    host = query.routed[operator].hosts[instance]
    target = Slice(turn.slice_id(), operator, instance, host, groups, Role.ARRIVING)
    return (target,), tuple(Transfer(each.id, target.id, each.groups) for each in small)


def slices_of(query: Query, operator: str, instance: int) -> list[Slice]:
    """The slices that serve for an instance."""
    return [s for s in serving(query.slices.values(), operator) if s.instance == instance]
