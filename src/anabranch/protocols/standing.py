"""Standing nodes, as far as a query learns of them: a save finds some, and says so with its answer.

If they are too few for the m and k of the backup policy, states are coded with less.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.fragments.cost import Cost
from anabranch.protocols import adaptation
from anabranch.protocols.orders import Answered, Merge, Store
from anabranch.protocols.turn import Turn


def took(turn: Turn, order: Answered, cost: Cost | None) -> None:
    """A part was stored at standing nodes."""
    if not isinstance(order, Store | Merge) or cost is None or cost.standing is None:
        return
    before, now = turn.query.standing, cost.standing
    if before is not None and before.near == now.near:
        # An owner that is a standing node itself has one node less.
        turn.change(standing=replace(now, nodes=min(before.nodes, now.nodes)))
    else:
        turn.change(standing=now)
        adaptation.standing_changed(turn, 0 if before is None else max(0, before.near - now.near))
    if before is not None and before.near < now.near:
        turn.change(lowered=())  # what is still coded with less is news again
    asked, coded = (order.shape.needed, order.shape.parity), (now.data, now.parity)
    if asked != coded and coded not in turn.query.lowered:
        turn.change(lowered=(*turn.query.lowered, coded))
        turn.tell(
            "fragments lowered",
            wanted=list(asked),
            data=now.data,
            parity=now.parity,
            nodes=now.nodes,
        )
