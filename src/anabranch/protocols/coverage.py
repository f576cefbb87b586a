"""Coverage: at which versions state can be made again, and of which parts.

It is known for each slice, and asked by everything that takes away or relies on a part: trimming,
retention, checkpoints, and whoever protects slices again.
"""

from __future__ import annotations

from collections.abc import Mapping

from anabranch.protocols.model import Published, Slice
from anabranch.protocols.query import Query
from anabranch.state.groups import KeyGroups
from anabranch.units import NO_VERSION, Version


def anchors(
    query: Query, usable: Mapping[str, frozenset[str]]
) -> dict[str, dict[Version, KeyGroups]]:
    """The versions from which parts with these names would recover all groups of operators.

    Rows that an operator sends may be lost with it. So it is not recovered from a later version
    than the operators that receive them.
    """
    anchors: dict[str, dict[Version, KeyGroups]] = {}
    for name, plan in reversed(list(query.operators.items())):
        behind = [min(anchors[n]) for n in anchors if name in query.operators[n].before]
        upto = min([query.committed, *behind])
        everything = KeyGroups.all(plan.key_groups)
        anchors[name] = query.inventory[name].lots(everything, usable[name], upto)
    return anchors


def surviving(query: Query, each: Slice) -> frozenset[str]:
    """The names of the parts that a slice can be recovered from when its node is lost."""
    inventory, nodes = query.inventory[each.operator], frozenset(query.nodes)
    return inventory.surviving(query.policies.backup, each.node, nodes)


def protected(query: Query, each: Slice) -> Version | None:
    """The oldest version from which a slice is recovered if its own node is lost, if it can."""
    safe = surviving(query, each)
    oldest = min(query.inventory[each.operator].lots(each.groups, safe, query.committed))
    return None if oldest == NO_VERSION else oldest


def whole(query: Query, version: Version) -> Published | None:
    """The manifest of a version, if all operators can be restored at it from readable parts."""
    parts = {}
    for name, plan in query.operators.items():
        usable, everything = query.usable(name), KeyGroups.all(plan.key_groups)
        inventory = query.inventory[name]
        if not everything <= inventory.reach(usable).get(version, KeyGroups()):
            return None
        parts[name] = inventory.recipe(everything, version, usable)
    return Published(version, parts)
