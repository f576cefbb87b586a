"""What a query owes to its user, judged by what there is in the world.

The query's own inventory, trims and decisions are what is judged, so none of them is asked: parts
are looked for where they are, and rows that were sent where they are kept. Only which parts a
driver could know of is taken from what it was told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from anabranch.protocols.model import OperatorPlan, Slice
from anabranch.state.part import Part
from anabranch.units import NO_VERSION, Version
from protocols.world import Buffers, World

Operators = Mapping[str, OperatorPlan]


def reachable(group: int, parts: Iterable[Part]) -> set[Version]:
    """The versions at which a group can be made of parts."""
    found: set[Version] = set()
    for part in sorted(parts, key=lambda part: part.version):
        follows = part.base is None or any(part.base <= v < part.version for v in found)
        if group in part.groups and follows:
            found.add(part.version)
    return found


def newest(group: int, parts: Iterable[Part], upto: int) -> Version:
    """The newest version up to another one at which a group can be made; it begins empty."""
    return max((v for v in reachable(group, parts) if v <= upto), default=NO_VERSION)


def keeps(operators: Operators, parts: Collection[Part], buffers: Buffers, committed: int) -> bool:
    """Whether all state could be made again of parts and of the rows that are kept.

    An operator makes the rows again that it sent. So it must not begin later than those behind it.
    """
    oldest: dict[str, Version] = {}
    for name in reversed(list(operators)):
        behind = [v for other, v in oldest.items() if name in operators[other].before]
        mine = [part for part in parts if part.operator == name]
        upto = min([committed, *behind])
        groups = range(operators[name].key_groups)
        oldest[name] = min(newest(group, mine, upto) for group in groups)
        if oldest[name] < buffers.kept_after(name, committed):
            return False
    return True


def can_restart(
    world: World,
    without: Collection[Version],
    gone: Collection[str],
    whole: Callable[[Part], bool],
) -> bool:
    """Whether a driver could begin from some version, without manifests and parts that are named.

    ``whole``: whether a part is thought to be readable. Nodes that are away count, as they may come
    back.
    """
    if world.durable.oldest_offsets == 0:
        return True
    for version, manifest in world.durable.manifests.items():
        parts = [part for of in manifest.parts.values() for part in of]
        if (
            version not in without
            and version + 1 >= world.durable.oldest_offsets
            and all(p.name not in gone and whole(p) for p in parts)
        ):
            return True
    return False


def can_recover(
    operators: Operators,
    lost: Collection[Slice],
    parts: Collection[Part],
    buffers: Buffers,
    committed: int,
    sends: Callable[[str, int], bool],
) -> bool:
    """Whether lost slices can be brought to the last version of these parts, without going back.

    ``sends``: whether a host, with how many executors it had, still has the rows that it sent.
    """
    begins: dict[str, dict[int, Version]] = {}
    for name in reversed(list(operators)):
        behind = [min(begins[o].values()) for o in begins if name in operators[o].before]
        mine = [part for part in parts if part.operator == name]
        upto = min([committed, *behind])
        kept = buffers.kept_after(name, committed)
        found = {g: newest(g, mine, upto) for s in lost if s.operator == name for g in s.groups}
        if any(version < kept for version in found.values()):
            return False
        if found:
            begins[name] = found
    for name, found in begins.items():
        for number in range(min(found.values()) + 1, committed + 1):
            for upstream, sent in buffers.sent[(name, Version(number))].items():
                again = {g for g, v in begins.get(upstream, {}).items() if v < number}
                for host, (generation, groups) in sent.senders.items():
                    if not sends(host, generation) and not set(groups) <= again:
                        return False
    return True
