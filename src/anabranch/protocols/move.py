"""Moves: key groups go to other instances while the stream runs.

Scale out, scale in and rebalance are moves. The groups that move are captured at their slices. New
slices are made of the captures at the new nodes. They catch up by the rows that changed since, or
by replaying the batches since. When they are at most two batches behind, the next batch captures
the last changes. The stream is held after it until the new slices have them, and rows go to these
from the batch after that on. The query is unchanged until then: a move that fails starts again,
and one that is given up leaves nothing behind. Groups that stay keep their tables. Slices that
groups have left shed their rows later.

If an instance has too many slices, a move merges the smallest ones: their groups go to a new slice
on the same node. The routing does not change. A slice that sheds may be among them, since the new
slice has only rows of groups that are served.

:mod:`~anabranch.protocols.transfers` says what goes where, :mod:`~anabranch.protocols.catch_up` how
the new slices come to the version of the stream, :mod:`~anabranch.protocols.handover` how rows come
to them, and :mod:`~anabranch.protocols.ends` what is left of a move that fails.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.protocols import catch_up, ends, handover, holders, notes, transfers
from anabranch.protocols.events import Done, Failed, Rebalance, Scale
from anabranch.protocols.model import Readiness
from anabranch.protocols.moving import MergeSlices, Move, Phase, enter, put
from anabranch.protocols.orders import (
    Advance,
    Capture,
    Captured,
    CommandId,
    Make,
    Replay,
    Store,
)
from anabranch.protocols.query import Outstanding, Query
from anabranch.protocols.transfers import balanced, slices_of
from anabranch.protocols.turn import Turn
from anabranch.state.part import Part

_ROUNDS = 5
_NEAR = 2
"""The stream is held for a move whose slices are at most this many batches behind."""


def command(turn: Turn, event: Scale | Rebalance) -> None:
    """Take a command, which runs at once, or after the commands in progress."""
    turn.change(waiting=(*turn.query.waiting, event))


def run(turn: Turn) -> None:
    """Begin waiting commands, and take the next step of every move."""
    query = turn.query
    if query.restart or query.recovery or query.suspects or query.stopped:
        return
    if not turn.query.moves and turn.query.now >= turn.query.merge_after:
        _merge_small_slices(turn)
    while turn.query.waiting and not turn.query.moves:
        if isinstance(turn.query.waiting[0], Rebalance) and _nodes_are_coming(turn.query):
            break
        event, *rest = turn.query.waiting
        turn.change(waiting=tuple(rest))
        _begin(turn, event)
    for which in list(turn.query.moves):
        moving = turn.query.moves[which]
        if turn.query.now >= moving.not_before:
            _step(turn, moving)


def answer(turn: Turn, waiting: Outstanding, event: Done | Failed) -> None:
    """The answer to an order of a move."""
    moving = None if waiting.command is None else turn.query.moves.get(waiting.command)
    if moving is None:
        return
    match waiting.order, event:
        case _, Failed(reason=reason):
            ends.again(turn, moving, reason)
        case Capture(), Done(answer=Captured() as captured):
            catch_up.store(turn, moving, captured)
        case Store(), Done(answer=Part() as part):
            holders.add_part(turn, part)
            put(turn, replace(moving, parts=(*moving.parts, part)))
        case Make(slice, _, version), Done():
            catch_up.reached(turn, replace(moving, made=True), slice.id, version, clean=True)
        case Advance(slice, _, _, upto), Done():
            catch_up.reached(turn, moving, slice.id, upto, clean=True)
        case Replay(slices, upto), Done():
            for each in slices:
                catch_up.reached(turn, turn.query.moves[moving.command], each.id, upto, clean=False)


def _nodes_are_coming(query: Query) -> bool:
    """Whether the agents of some nodes have not answered yet."""
    return any(node.readiness is not Readiness.READY for node in query.nodes.values())


def _begin(turn: Turn, event: Scale | Rebalance) -> None:
    query = turn.query
    for operator, routed in query.routed.items():
        match event:
            case Scale(operator=chosen, instances=instances):
                different = routed.routing.scaled(instances) != routed.routing
                wanted = operator == chosen and different
            case Rebalance():
                wanted = sorted(balanced(query, operator)) != sorted(routed.hosts)
        if wanted:
            put(turn, Move(event, operator, query.now, query.committed, phase_since=query.now))
            return
    notes.end(turn, event.command)


def _merge_small_slices(turn: Turn) -> None:
    """Merge the smallest slices of an instance that has too many."""
    query = turn.query
    if len(query.slices) <= query.policies.most_slices:
        return  # as nearly always, and this is asked with every event
    for name, routed in query.routed.items():
        for instance in range(routed.routing.instances):
            if len(slices_of(query, name, instance)) > query.policies.most_slices:
                event = MergeSlices(CommandId(-turn.number()), name, instance)
                put(turn, Move(event, name, query.now, query.committed, phase_since=query.now))
                return


def _step(turn: Turn, moving: Move) -> None:
    query = turn.query
    if moving.before not in (None, query.routed[moving.operator]):
        ends.again(turn, moving, "a recovery changed the routing of the operator")
        return
    if any(waiting.command == moving.command for waiting in query.outstanding.values()):
        return
    match moving.phase:
        case Phase.PREPARE:
            if query.ready:
                _prepare(turn, moving)
        case Phase.CAPTURE:
            if moving.parts:
                catch_up.make(turn, moving)
            else:
                catch_up.capture(turn, moving)
        case Phase.MAKE:
            _follow(turn, enter(turn, moving, Phase.FOLLOW))
        case Phase.FOLLOW:
            _follow(turn, moving)
        case Phase.LAST:
            handover.capture_last(turn, moving)
        case Phase.HOLD:
            handover.finish(turn, moving)


def _follow(turn: Turn, moving: Move) -> None:
    """Let the new slices catch up while batches run."""
    query = turn.query
    if moving.wants_capture and not catch_up.can_capture(query, moving):
        moving = replace(moving, wants_capture=False)
        put(turn, moving)
    if moving.wants_capture:
        catch_up.capture(turn, moving)
    elif catch_up.being_stored(query, moving):
        pass  # these parts bring the targets on
    elif catch_up.wants_warm_up(query, moving):
        if moving.at < query.committed:
            put(turn, replace(moving, rounds=1))
            catch_up.replay(turn, moving)
    elif catch_up.advance(turn, moving):
        pass  # stored parts bring the targets on, and nobody waits for it
    elif query.committed - moving.at <= _NEAR or moving.rounds >= _ROUNDS:
        handover.capture_last(turn, enter(turn, moving, Phase.LAST))
    else:
        moving = replace(moving, rounds=moving.rounds + 1)
        put(turn, moving)
        if catch_up.changes_known(query, moving):
            catch_up.capture(turn, moving)
        else:
            catch_up.replay(turn, moving)


def _prepare(turn: Turn, moving: Move) -> None:
    """Decide which groups move, and to which nodes, and begin with their state."""
    moving = transfers.plan(turn, moving)
    query = turn.query
    if not moving.targets:
        ends.end(turn, moving, None)
        return
    turn.put(*moving.targets)
    if catch_up.before_the_first_batch(query):
        catch_up.make_empty(turn, enter(turn, moving, Phase.MAKE))
    elif query.policies.replays or query.policies.checkpointing.tracks_changes:
        catch_up.capture(turn, enter(turn, moving, Phase.CAPTURE))
    else:
        # There is no way to catch up, so the groups are copied while the stream waits.
        handover.hold(turn, moving)
