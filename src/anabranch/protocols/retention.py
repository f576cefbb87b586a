"""What of the checkpoints is kept: older versions and parts are deleted when nothing needs them.

Long chains of parts are merged into one full part, beside the stream.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.protocols import coverage, holders
from anabranch.protocols.events import Done, Failed
from anabranch.protocols.model import serving
from anabranch.protocols.orders import Advance, Make, Mend, Merge, Withdraw
from anabranch.protocols.query import Outstanding, Owner, Query
from anabranch.protocols.turn import Turn
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.units import NO_VERSION


def tidy(turn: Turn) -> None:
    """Delete older versions and parts that nothing needs, and merge long chains."""
    query = turn.query
    retain = query.policies.checkpointing.retain
    kept, old = query.published[-retain:], [p.version for p in query.published[:-retain]]
    doubtful = tuple(p for p in query.doubtful if not kept or p.version > kept[-1].version)
    old += [p.version for p in query.doubtful if p not in doubtful]
    if len(kept) == retain:
        # Not before: what is damaged may be mended, and is the only copy of something older.
        old += [version for version in query.unreadable if version < kept[0].version]
    unreadable = tuple(version for version in query.unreadable if version not in old)
    turn.change(published=kept, doubtful=doubtful, unreadable=unreadable)
    needed = _needed(turn.query)
    dropped: list[Part] = []
    inventory = dict(query.inventory)
    for name, of in query.inventory.items():
        useless = [part for part in of.parts if part.name not in needed]
        inventory[name] = of.without({part.name for part in useless})
        dropped += useless
    turn.change(inventory=inventory)
    if old or dropped:
        turn.send(Withdraw(tuple(sorted(old)), tuple(dropped)))
    _merge_longest(turn)


def merge(turn: Turn, waiting: Outstanding, event: Done | Failed) -> None:
    """The answer to an order to merge a chain of parts."""
    match waiting.order, event:
        case Merge(), Done(answer=Part() as part):
            holders.add_part(turn, part)
            turn.tell("merge", operator=part.operator, version=part.version, bytes=part.bytes)
        case Merge(slice), Failed(reason=reason):
            # A chain that cannot be merged must not grow any more.
            if slice.id in turn.query.slices:
                turn.put(replace(turn.query.slices[slice.id], base=None))
            turn.tell("merge failed", slice=slice.id, reason=reason)


def _needed(query: Query) -> set[str]:
    """The names of the parts that are still needed."""
    needed = {p.name for manifest in query.manifests for of in manifest.parts.values() for p in of}
    readable = {name: query.usable(name) for name in query.operators}
    # A node that is away may come back with its parts, while the newer ones may be lost.
    stored = {name: frozenset(p.name for p in of.parts) for name, of in query.inventory.items()}
    for usable in (readable, stored):
        anchors = coverage.anchors(query, usable)
        for name, plan in query.operators.items():
            inventory, names = query.inventory[name], usable[name]
            newest = inventory.lots(KeyGroups.all(plan.key_groups), names, query.committed)
            for version, groups in (*newest.items(), *anchors[name].items()):
                if version != NO_VERSION:
                    needed |= {part.name for part in inventory.recipe(groups, version, names)}
    for waiting in query.outstanding.values():
        match waiting.order:
            case Make(_, parts) | Advance(_, parts) | Merge(_, parts):
                needed |= {part.name for part in parts}
            case Mend(part):
                needed.add(part.name)
    # A manifest that cannot be read may be mended, and nobody knows which parts it names.
    unknown = max(query.unreadable, default=NO_VERSION)
    for of in query.inventory.values():
        needed |= {part.name for part in of.parts if part.version <= unknown}
    for moving in query.moves.values():
        for part in query.inventory[moving.operator].parts:
            if part.version >= moving.begun:
                needed.add(part.name)
    return needed


def _merge_longest(turn: Turn) -> None:
    query = turn.query
    if any(waiting.owner is Owner.MERGE for waiting in query.outstanding.values()):
        return
    found: list[Merge] = []
    for each in serving(query.slices.values()):
        inventory, usable = query.inventory[each.operator], query.usable(each.operator)
        version = inventory.newest(each.groups, usable)
        if version is not None and each.node in query.ready:
            chain = inventory.recipe(each.groups, version, usable)
            chosen = holders.choose(query, each)
            shape = query.policies.backup.shape(len(chosen))
            found.append(Merge(each, chain, each.groups, version, chosen, shape))
    longest = max(found, key=lambda merge: len(merge.parts), default=None)
    if longest is not None and len(longest.parts) > query.policies.longest_chain:
        turn.order(longest, Owner.MERGE)
