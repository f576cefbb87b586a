"""Protecting again: state whose backup was lost is captured with the next batch.

A slice is protected if it can be brought back without its own node. The loss of any node may end
that, also of one that runs nothing but holds parts, or has sent rows that a replay would need. So
all slices are looked at after every loss, change of places, and checkpoint.
"""

from __future__ import annotations

from anabranch.protocols import coverage, holders, pending
from anabranch.protocols.model import Slice, serving
from anabranch.protocols.query import Query
from anabranch.protocols.turn import Turn
from anabranch.state.part import Part
from anabranch.units import NO_VERSION


def review(turn: Turn) -> None:
    """Order a capture of every slice whose backup was lost, or is on its own node."""
    query = turn.query
    mine = pending.of(query)
    if not query.policies.checkpointing.backs_up or query.committed == NO_VERSION:
        return
    if mine.current is not None:
        return  # looked at again when it is done
    for each in serving(query.slices.values()):
        if each.operator not in mine.wanted and not _is_protected(query, each):
            pending.want(turn, each.operator)


def sent_is_lost(turn: Turn, senders: frozenset[str]) -> None:
    """Rows that operators sent were lost with a node: capture the operators that received them."""
    query = turn.query
    if query.policies.checkpointing.backs_up and query.committed != NO_VERSION:
        behind = [n for n, plan in query.operators.items() if senders.intersection(plan.before)]
        if behind:
            pending.want(turn, *behind)


def _is_protected(query: Query, each: Slice) -> bool:
    """Whether a slice survives the loss of its node, or no better backup is possible."""
    safe = coverage.protected(query, each)
    if safe is not None and safe >= query.trimmed.get(each.operator, NO_VERSION):
        return True
    return each.node not in query.nodes or not is_possible(query, each)


def is_possible(query: Query, each: Slice) -> bool:
    """Whether the next backup of a slice would survive the loss of its node."""
    chosen = holders.choose(query, each)
    shape = query.policies.backup.shape(len(chosen))
    version, groups = query.committed, each.groups
    needed, parity = shape.needed, shape.parity
    next_part = Part("", each.operator, version, None, groups, chosen, needed, parity=parity)
    return query.policies.backup.survives(next_part, each.node, query.nodes.keys())
