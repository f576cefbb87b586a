"""Mending: fragments that were lost with their holders are made again at other nodes.

A part that has lost some of its fragments can still be read. It is mended before it loses more, one
part at a time, by the node that keeps its file. If there is none, a node that is to hold one of the
fragments does it, and reads as many of those that are left as give the part.
"""

from __future__ import annotations

from anabranch.protocols import adaptation, holders
from anabranch.protocols.events import Done, Failed
from anabranch.protocols.model import Host, serving
from anabranch.protocols.orders import SECOND, Mend, Wake, Withdraw
from anabranch.protocols.query import Outstanding, Owner, Query
from anabranch.protocols.turn import Turn
from anabranch.state.part import Part

_PAUSE = 10 * SECOND
"""The pause after mending has failed."""


def review(turn: Turn) -> None:
    """Order new fragments of a part that has lost some, unless another part is being mended."""
    query = turn.query
    if not query.settled or query.stopped or query.now < query.mend_after:
        return
    if any(waiting.owner is Owner.MEND for waiting in query.outstanding.values()):
        return
    for of in query.inventory.values():
        for part in of.parts:
            others = _substitutes(query, part)
            if others:
                host = part.owner if part.owner in query.ready else others[0]
                turn.order(Mend(part, host, others), Owner.MEND)
                return


def _substitutes(query: Query, part: Part) -> tuple[Host, ...]:
    """The nodes that are to hold fragments of a part too, and whose agents answer."""
    backup, nodes = query.policies.backup, query.nodes.keys()
    if not backup.substitutes(part, (), nodes):
        return ()  # as nearly always
    slices = serving(query.slices.values(), part.operator)
    owners = {each.node for each in slices if each.groups & part.groups}
    wanted = backup.substitutes(part, owners, nodes)
    return tuple(host for host in wanted if host in query.ready)


def look(turn: Turn) -> None:
    """Try again after a pause."""
    if 0 < turn.query.mend_after <= turn.query.now:
        turn.change(mend_after=0)
        review(turn)


def answer(turn: Turn, waiting: Outstanding, event: Done | Failed) -> None:
    """The answer to an order to mend a part."""
    match waiting.order, event:
        case Mend(), Done(answer=Part() as part):
            if turn.query.knows(part):
                holders.replace_part(turn, part)
                adaptation.mended(turn)
                turn.tell("part mended", part=part.name, holders=list(part.holders))
            else:
                turn.send(Withdraw((), (part,)))
            review(turn)
        case Mend(part), Failed(reason=reason):
            turn.tell("mending failed", part=part.name, reason=reason, pause=_PAUSE / SECOND)
            turn.change(mend_after=turn.query.now + _PAUSE)
            turn.send(Wake(turn.query.mend_after))
