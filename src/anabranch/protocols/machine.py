"""One step of the coordinator: an event changes the query, and orders go out.

The protocol that an event belongs to handles it. Then every protocol looks at the query and takes
its next step. So no protocol waits for another one, only for a state of the query.
"""

from __future__ import annotations

from anabranch.protocols import (
    adaptation,
    batches,
    checkpoint,
    ends,
    holders,
    mend,
    move,
    nodes,
    notes,
    pending,
    protect,
    read,
    recover,
    restart,
    retention,
    standing,
)
from anabranch.protocols.events import (
    BatchAsked,
    BatchCommitted,
    BatchFailed,
    BatchLeft,
    Done,
    Event,
    Failed,
    GiveUp,
    NodeCame,
    NodeLost,
    ReadState,
    Rebalance,
    Scale,
    Started,
    TakeCheckpoint,
    TimePassed,
)
from anabranch.protocols.model import Host, Role, serving
from anabranch.protocols.orders import (
    SECOND,
    Captured,
    Drop,
    Inspect,
    Order,
    OrderId,
    Prepare,
    Withdraw,
    node_of,
)
from anabranch.protocols.query import Outstanding, Owner, Query
from anabranch.protocols.turn import Turn
from anabranch.state.part import Part


def step(query: Query, event: Event, now: int) -> tuple[Query, list[tuple[OrderId | None, Order]]]:
    """The query after an event, and the orders that follow. Orders with an answer have a number."""
    turn = Turn(query)
    if now > query.now:
        turn.change(now=now)
    if query.stopped is None:
        _take(turn, event)
    if turn.query.stopped is None:
        _go_on(turn)
    return turn.query, turn.orders


def _take(turn: Turn, event: Event) -> None:
    match event:
        case Started(facts):
            restart.take_over(turn, facts)
        case NodeCame(host):
            nodes.add(turn, host)
        case NodeLost(host):
            turn.change(banned={h: at for h, at in turn.query.banned.items() if h != host})
            _lose(turn, host)
        case BatchAsked(version):
            batches.ask(turn, version)
        case BatchLeft(version):
            batches.leave(turn, version)
        case BatchCommitted():
            batches.commit(turn, event)
            batches.trim(turn)
        case BatchFailed():
            batches.fail(turn, event)
        case Done() | Failed():
            _answer(turn, event)
        case Scale() | Rebalance():
            move.command(turn, event)
        case TakeCheckpoint(command):
            pending.want(turn, *turn.query.operators, command=command)
        case ReadState():
            read.want(turn, event)
        case GiveUp(command):
            ends.give_up(turn, command)
            notes.give_up(turn, command)
            checkpoint.give_up(turn, command)
            read.give_up(turn, command)
        case TimePassed():
            pass


def _go_on(turn: Turn) -> None:
    _fail_what_is_late(turn)
    nodes.look(turn)
    restart.run(turn)
    recover.run(turn)
    move.run(turn)
    read.look(turn)
    checkpoint.look(turn)
    notes.look(turn)
    mend.look(turn)
    batches.run(turn)
    nodes.ask_for_more(turn)


def _fail_what_is_late(turn: Turn) -> None:
    now = turn.query.now
    for number, waiting in list(turn.query.outstanding.items()):
        if waiting.deadline <= now and number in turn.query.outstanding:
            host, seconds = node_of(waiting.order), (waiting.deadline - waiting.since) / SECOND
            what = f"the order to {type(waiting.order).__name__.lower()}"
            where = f" at node {host}" if host else ""
            reason = f"{what}{where} was not answered within {seconds:.0f} s"
            _answer(turn, Failed(number, reason, unreachable=host))


def _answer(turn: Turn, event: Done | Failed) -> None:
    if isinstance(event, Failed) and event.fenced:
        turn.stop("another driver has taken over")
        return
    waiting = turn.query.outstanding.get(event.order)
    if waiting is None:
        _drop_unwanted(turn, event)
        return
    rest = {n: w for n, w in turn.query.outstanding.items() if n != event.order}
    turn.change(outstanding=rest)
    if isinstance(event, Done):
        standing.took(turn, waiting.order, event.cost)
        adaptation.took(turn, node_of(waiting.order), event.cost)
        event = nodes.certain(turn, event)
    _hand_over(turn, waiting, event)
    if isinstance(event, Failed):
        if event.damaged is not None:
            holders.forget_part(turn, event.damaged, event.damaged_at)
            protect.review(turn)
        if event.unreachable is not None:
            nodes.unreachable(turn, event.unreachable)
        suspect = turn.query.slices.get(event.missing) if event.missing is not None else None
        if suspect is not None and suspect.role is Role.SERVING:
            turn.change(suspects=turn.query.suspects | {suspect.id})


def _drop_unwanted(turn: Turn, event: Done | Failed) -> None:
    """Delete the files of an answer that came twice, or after its order was given up."""
    query = turn.query
    match event:
        case Done(answer=Captured(file, node=host)) if host in query.nodes:
            if file not in query.named_files:
                turn.send(Drop(host, files=(file,)))
        case Done(answer=Part() as part) if not query.knows(part):
            turn.send(Withdraw((), (part,)))
        case _:
            pass


def _hand_over(turn: Turn, waiting: Outstanding, event: Done | Failed) -> None:
    match waiting.owner:
        case Owner.NODES:
            known = turn.query.nodes.keys()
            nodes.answer(turn, waiting, event)
            for host in known - turn.query.nodes.keys():
                _after_loss(turn, host)
            if isinstance(waiting.order, Inspect) and isinstance(event, Failed):
                _fail_orders_at(turn, waiting.order.host, "does not answer")
            protect.review(turn)
            mend.review(turn)
        case Owner.NOTE:
            notes.answer(turn, waiting, event)
        case Owner.CHECKPOINT:
            checkpoint.answer(turn, waiting, event)
            batches.trim(turn)
            mend.review(turn)
        case Owner.MERGE:
            retention.merge(turn, waiting, event)
        case Owner.MEND:
            mend.answer(turn, waiting, event)
        case Owner.MOVE:
            move.answer(turn, waiting, event)
        case Owner.RECOVERY:
            recover.answer(turn, waiting, event)
        case Owner.RESTART:
            restart.answer(turn, waiting, event)
        case Owner.READ:
            read.answer(turn, waiting, event)


def _lose(turn: Turn, host: Host) -> None:
    if host in turn.query.nodes:
        nodes.remove(turn, host)
        _after_loss(turn, host)


def _after_loss(turn: Turn, host: Host) -> None:
    """Start all operations again, or fail them, that need a lost node."""
    slices = serving(turn.query.slices.values())
    protect.sent_is_lost(turn, frozenset(s.operator for s in slices if s.node == host))
    restart.node_lost(turn, host)
    recover.node_lost(turn, host)
    ends.node_lost(turn, host)
    _fail_orders_at(turn, host, "was lost")
    protect.review(turn)
    mend.review(turn)


def _fail_orders_at(turn: Turn, host: Host, why: str) -> None:
    for number, waiting in list(turn.query.outstanding.items()):
        is_there = node_of(waiting.order) == host and not isinstance(waiting.order, Prepare)
        if is_there and number in turn.query.outstanding:
            _answer(turn, Failed(number, f"node {host} {why}"))
