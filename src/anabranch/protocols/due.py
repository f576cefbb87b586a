"""What is due: which operators the next batch captures, and whether all rows or those that changed.

The policy decides for each operator. Others are captured because somebody wants it, see
:mod:`anabranch.protocols.pending`, or because Spark's log of offsets is half used up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from anabranch.checkpointing.policy import Kind, Situation
from anabranch.protocols import adaptation, coverage, offsets, pending, protect
from anabranch.protocols.events import SliceReport
from anabranch.protocols.model import Slice, SliceId, serving
from anabranch.protocols.orders import SECOND, CaptureWanted
from anabranch.protocols.pending import Checkpoints, Current
from anabranch.protocols.query import Query
from anabranch.protocols.turn import Turn
from anabranch.state.groups import KeyGroups

NOTHING = ""
"""Stands for the state of a query without operators, whose versions record its progress alone."""
LEAST: Kind = "delta"
"""What is captured where no policy says it; all rows where the changes are not known."""


def captures(turn: Turn) -> tuple[CaptureWanted, ...]:
    """The captures for the batch that is about to run."""
    query = turn.query
    mine = pending.of(query)
    if query.batch is None or query.batch.version <= query.delivered:
        return ()
    if mine.current is not None:
        _tell_if_late(turn, mine.current)
        return ()
    if query.now < mine.not_before:
        return ()
    due: dict[str, Kind] = {}
    for name in tuple(query.operators) or (NOTHING,):
        kind = query.policies.checkpointing.decide(_situation(query, mine, name))
        if kind is not None or offsets.urgent(query):
            due[name] = kind or LEAST
    pending.change(turn, ordered=frozenset(due))
    wanted = dict.fromkeys(mine.wanted, LEAST) | due
    if wanted:
        adaptation.adapt(turn)
        query = turn.query
    return tuple(
        capture(query, each, wanted[each.operator])
        for each in serving(query.slices.values())
        if each.operator in wanted
    )


def _tell_if_late(turn: Turn, current: Current) -> None:
    """Let the user know if a checkpoint is due by the number of batches, and waits for another."""
    query, mine = turn.query, pending.of(turn.query)
    if current.late:
        return
    for name in query.operators:
        by_time = _situation(query, mine, name)
        by_batches = replace(by_time, now=by_time.last)
        if query.policies.checkpointing.decide(by_batches) is not None:
            pending.change(turn, current=replace(current, late=True))
            turn.tell(
                "checkpoint late",
                seconds=(query.now - current.since) / SECOND,
                version=current.version,
                committed=query.committed,
                batches=by_batches.batches,
            )
            return


def shares_changed(query: Query, reports: Mapping[SliceId, SliceReport]) -> dict[str, float]:
    """The share of each operator's rows that have changed since its last capture."""
    rows = dict.fromkeys(query.operators, 0)
    changed = dict.fromkeys(query.operators, 0)
    for which, report in reports.items():
        if which in query.slices:
            rows[query.slices[which].operator] += report.rows
            changed[query.slices[which].operator] += report.changed
    return {name: changed[name] / rows[name] if rows[name] else 1.0 for name in query.operators}


def _situation(query: Query, mine: Checkpoints, name: str) -> Situation:
    began = query.taken_over or 0
    last, batches = mine.last.get(name, began), mine.batches.get(name, 0)
    changed, load = mine.changed.get(name, 1.0), mine.loads.get(name, 0.0)
    return Situation(query.now, last, batches, name, changed, load)


def capture(query: Query, each: Slice, kind: Kind) -> CaptureWanted:
    """What to capture of a slice: changes only if they would be of use when its node is lost."""
    inventory = query.inventory[each.operator]
    usable = query.usable(each.operator)
    if protect.is_possible(query, each):
        usable = coverage.surviving(query, each)
    known = (
        kind == "delta"
        and query.policies.checkpointing.tracks_changes
        and each.base is not None
        and each.groups <= inventory.reach(usable).get(each.base, KeyGroups())
    )
    return CaptureWanted(each.id, each.groups, each.base if known else None, clean=True)
