"""The handover: the stream is held for the last changes, then rows go to the new slices.

The last changes are captured with a batch. Once it is committed no other one begins until the new
slices have them. From the next batch on rows are routed to these. The slices that groups have left
keep the others, and shed the rows of those that left.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.protocols import catch_up, ends, protect
from anabranch.protocols.model import Role
from anabranch.protocols.moving import MergeSlices, Move, Phase, enter, put
from anabranch.protocols.orders import SECOND
from anabranch.protocols.turn import Turn
from anabranch.units import NO_VERSION


def capture_last(turn: Turn, moving: Move) -> None:
    """Capture the last changes with a batch, and hold the stream once it is committed.

    To capture them while the stream is held would make the pause longer. It is done if Spark has no
    batch for a while.
    """
    query = turn.query
    waited = query.now >= catch_up.latest_batch(query, moving) or moving.at == query.committed
    if (waited and not query.running) or not catch_up.changes_known(query, moving):
        hold(turn, moving)
    elif not moving.wants_capture:
        put(turn, replace(moving, wants_capture=True))


def hold(turn: Turn, moving: Move) -> None:
    """Let no batch begin, and take the last steps once none runs."""
    finish(turn, enter(turn, replace(moving, wants_capture=False), Phase.HOLD))


def finish(turn: Turn, moving: Move) -> None:
    """Apply the last changes while the stream is held, then switch the routing."""
    query = turn.query
    if query.running:
        return
    if moving.held_since is None:
        moving = replace(moving, held_since=query.now)
        put(turn, moving)
    if moving.made and moving.at == query.committed:
        switch(turn, moving)
    elif not moving.made:
        # This is a move without a way to catch up: all of it happens while the stream is held.
        if moving.parts:
            catch_up.make(turn, moving)
        elif query.committed == NO_VERSION:
            catch_up.make_empty(turn, moving)  # the batch that ran when it began has failed
        else:
            catch_up.capture_at_rest(turn, moving)
    elif not catch_up.being_stored(query, moving) and not catch_up.advance(turn, moving):
        if catch_up.changes_known(query, moving):
            catch_up.capture_at_rest(turn, moving)
        elif query.policies.replays:
            catch_up.replay(turn, moving)
        else:
            ends.again(
                turn,
                moving,
                "a batch ran meanwhile, and neither changes nor rows to replay are kept",
            )


def switch(turn: Turn, moving: Move) -> None:
    """Route rows to the new slices from the next batch on."""
    query = turn.query
    assert moving.after is not None
    emptied = []
    for source, groups in moving.moved.items():
        each = query.slices[source]
        if each.groups <= groups:
            emptied.append(source)
        else:
            left = each.leaving | groups
            turn.put(replace(each, groups=each.groups - groups, leaving=left))
    turn.remove(frozenset(emptied))
    turn.put(*(replace(each, role=Role.SERVING) for each in moving.targets))
    turn.arrange({**query.routed, moving.operator: moving.after})
    if isinstance(moving.event, MergeSlices):
        turn.tell("slices merged", operator=moving.operator, slices=[s.id for s in moving.targets])
    else:
        _tell_scaled(turn, moving)
    ends.end(turn, moving, None)
    protect.review(turn)


def _tell_scaled(turn: Turn, moving: Move) -> None:
    query = turn.query
    assert moving.before is not None
    assert moving.after is not None
    held_since = query.now if moving.held_since is None else moving.held_since
    turn.tell(
        "scale",
        seconds=(query.now - moving.since) / SECOND,
        operator=moving.operator,
        before=moving.before.routing.instances,
        after=moving.after.routing.instances,
        slices=[each.id for each in moving.targets],
        bytes=sum(part.bytes for part in moving.parts),
        read=moving.read,
        attempts=moving.attempts,
        batches=query.committed - moving.begun,
        pause=(query.now - held_since) / SECOND,
    )
