"""Holders: the nodes that have the parts of a query's state.

The backup policy chooses them for new parts. What they still have is learnt from orders that were
executed, from nodes that list what they hold, and from parts that could not be read. A version that
is published, and needs a part that no node has any more, does not exist any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from anabranch.protocols.model import Host, Inventory, Published, Slice, serving
from anabranch.protocols.orders import Captured, Store, Withdraw
from anabranch.protocols.query import Query
from anabranch.protocols.turn import Turn
from anabranch.state.part import Part
from anabranch.units import Version


def choose(query: Query, each: Slice) -> tuple[Host, ...]:
    """The nodes that store the parts of a slice."""
    nodes = query.ready or frozenset(query.nodes)
    before = query.operators[each.operator].before
    senders = {s.node for s in serving(query.slices.values()) if s.operator in before} & nodes
    key = f"{each.operator}/{each.id}"
    return query.policies.backup.holders(each.node, key, nodes, senders)


def store(query: Query, captured: Captured, each: Slice) -> Store:
    """The order to store what was captured for a slice."""
    holders = choose(query, each)
    size = query.size(query.slices[captured.slice])
    return Store(captured, holders, size, query.policies.backup.shape(len(holders)))


def add_part(turn: Turn, part: Part) -> None:
    """Record that a part is at its holders."""
    inventory = turn.query.inventory
    turn.change(inventory={**inventory, part.operator: inventory[part.operator].with_part(part)})


def replace_part(turn: Turn, part: Part) -> None:
    """Record that a part has other holders."""
    _replace_parts(turn, lambda each: part if each.name == part.name else each)


def find_fragments(turn: Turn, host: Host, has: Collection[str]) -> None:
    """Record that a node has fragments of parts which it was not known to hold.

    The manifest that a driver begins with tells where they were stored at first.
    """

    def found(part: Part) -> Part:
        new = part.needed > 1 and part.name in has and host not in part.holders
        return replace(part, holders=(*part.holders, host)) if new else part

    _replace_parts(turn, found)


def forget_part(turn: Turn, name: str, at: Collection[Host] = ()) -> None:
    """Record that a part cannot be read, or not at these of its holders."""
    if at:
        for host in at:
            _forget_copies(turn, host, lambda part: part.name == name)
    else:
        inventory = {
            operator: of.without({name}) if any(p.name == name for p in of.parts) else of
            for operator, of in turn.query.inventory.items()
        }
        turn.change(inventory=inventory)
    turn.tell("part damaged", part=name)


def forget_parts(turn: Turn, host: Host, has: frozenset[str]) -> None:
    """Record that of the parts which a node was known to hold it has only these.

    Versions that need one of the others do not exist any more.
    """
    missing = turn.query.nodes[host].known - has
    _forget_copies(turn, host, lambda part: part.name in missing)


def _forget_copies(turn: Turn, host: Host, lacks: Callable[[Part], bool]) -> None:
    def keep(part: Part) -> Part | None:
        if host not in part.holders or not lacks(part):
            return part
        return part.at(*(holder for holder in part.holders if holder != host))

    inventory = dict(turn.query.inventory)
    published, doubtful = list[Published](), list[Published]()
    gone: list[Version] = []
    for name, of in inventory.items():
        kept = [keep(part) for part in of.parts]
        if any(now is not before for now, before in zip(kept, of.parts, strict=True)):
            inventory[name] = Inventory(part for part in kept if part is not None)
    for each in turn.query.manifests:
        parts = {name: [keep(part) for part in of] for name, of in each.parts.items()}
        if all(part is not None for of in parts.values() for part in of):
            whole = {name: tuple(p for p in of if p) for name, of in parts.items()}
            exists = each in turn.query.published
            (published if exists else doubtful).append(Published(each.version, whole))
        else:
            gone.append(each.version)
    turn.change(inventory=inventory, published=tuple(published), doubtful=tuple(doubtful))
    if gone:  # before anything deletes its other parts
        turn.send(Withdraw(tuple(gone), ()))


def _replace_parts(turn: Turn, by: Callable[[Part], Part]) -> None:
    for name, of in turn.query.inventory.items():
        parts = [by(part) for part in of.parts]
        if any(new is not old for new, old in zip(parts, of.parts, strict=True)):
            turn.change(inventory={**turn.query.inventory, name: Inventory(parts)})

    def renewed(published: Published) -> Published:
        parts = {name: tuple(map(by, of)) for name, of in published.parts.items()}
        return Published(published.version, parts)

    published, doubtful = turn.query.published, turn.query.doubtful
    turn.change(published=tuple(map(renewed, published)), doubtful=tuple(map(renewed, doubtful)))
