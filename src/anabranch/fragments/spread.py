"""Which nodes hold the fragments of a state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """A node that can hold a fragment: its host, its rack, and how full it is in any unit."""

    host: str
    rack: int | str = ""
    load: float = 0


def spread(
    nodes: Sequence[Holder], fragments: int, parity: int, holding: Collection[Holder] = ()
) -> list[Holder]:
    """The nodes for the fragments of a state: distinct hosts, the least full first.

    At most ``parity`` of all holders are in one rack, so that any rack can be lost. Where the racks
    are too few for that, those with the fewest fragments get more. ``holding`` has fragments of the
    state already. There are fewer nodes in the result if there are not enough hosts. Of nodes that
    are equally full the first ones are taken.

    >>> nodes = [Holder("a", "r1"), Holder("b", "r1"), Holder("c", "r2", 7), Holder("d", "r1", 9)]
    >>> [node.host for node in spread(nodes, 2, parity=1)]
    ['a', 'c']
    >>> [node.host for node in spread(nodes, 3, parity=1)]
    ['a', 'c', 'b']
    >>> [node.host for node in spread(nodes, 1, parity=1, holding=nodes[:1])]
    ['c']
    """
    in_rack = Counter({node.host: node.rack for node in holding}.values())
    hosts = {node.host for node in holding}
    chosen: list[Holder] = []
    skipped: list[Holder] = []
    for node in sorted(nodes, key=lambda node: node.load):
        if node.host not in hosts:
            hosts.add(node.host)
            if in_rack[node.rack] < parity and len(chosen) < fragments:
                in_rack[node.rack] += 1
                chosen.append(node)
            else:
                skipped.append(node)
    while len(chosen) < fragments and skipped:
        node = min(skipped, key=lambda node: in_rack[node.rack])
        skipped.remove(node)
        in_rack[node.rack] += 1
        chosen.append(node)
    return chosen
