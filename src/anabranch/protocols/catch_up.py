"""Catching up: the ways in which the new slices of a move come to the version of the stream.

They are made of captures of the groups that move. Then they advance by what changed since: captured
with a batch, or stored by a checkpoint meanwhile. Where changes are not known they replay the rows
that were sent. A capture is taken with the next batch, so that nothing waits for it, or between two
batches if Spark has none for a while.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from anabranch.protocols import ends, holders
from anabranch.protocols.events import SliceReport
from anabranch.protocols.model import Role, SliceId, serving
from anabranch.protocols.moving import PATIENCE, SHORT, Move, Phase, enter, put
from anabranch.protocols.orders import (
    Advance,
    Capture,
    Captured,
    CaptureWanted,
    Make,
    Replay,
    Store,
    Wake,
)
from anabranch.protocols.query import Owner, Query
from anabranch.protocols.turn import Turn
from anabranch.units import NO_VERSION, Version


def captures(turn: Turn) -> tuple[CaptureWanted, ...]:
    """The captures for moves in the batch that is about to run."""
    wanted: list[CaptureWanted] = []
    for moving in turn.query.moves.values():
        if moving.wants_capture and can_capture(turn.query, moving):
            put(turn, replace(moving, capturing=True))
            wanted += _captures(turn.query, moving)
    return tuple(wanted)


def commit(turn: Turn, reports: Mapping[SliceId, SliceReport]) -> None:
    """A batch was committed: store its captures for moves."""
    if turn.query.moves:
        turn.send(Wake(turn.query.now + SHORT))
    for moving in list(turn.query.moves.values()):
        if not moving.capturing:
            continue
        moving = replace(moving, capturing=False, wants_capture=False)
        put(turn, moving)
        if moving.phase is Phase.LAST:
            held_since = turn.query.now
            moving = enter(turn, replace(moving, held_since=held_since), Phase.HOLD)
        found = [reports[source].captured for source in moving.moved if source in reports]
        _store_all(turn, moving, [each for each in found if each is not None and not each.clean])


def batch_failed(turn: Turn) -> None:
    """A batch failed: its captures do not count, and the next batch captures again."""
    for moving in list(turn.query.moves.values()):
        if moving.capturing:
            put(turn, replace(moving, capturing=False))


def before_the_first_batch(query: Query) -> bool:
    """Whether there is no state yet that could be captured."""
    return query.committed == NO_VERSION and not query.running


def make_empty(turn: Turn, moving: Move) -> None:
    """Make the new slices before there is any state."""
    put(turn, replace(moving, wants_capture=False))
    for each in moving.targets:
        turn.order(Make(each, (), NO_VERSION), Owner.MOVE, moving.command)


def capture(turn: Turn, moving: Move) -> None:
    """Capture with the next batch, or between two batches if none comes for a while."""
    query = turn.query
    if not moving.made and before_the_first_batch(query):
        # The batch that was to be captured with has failed.
        make_empty(turn, enter(turn, moving, Phase.MAKE))
        return
    if not moving.wants_capture:
        moving = enter(turn, replace(moving, wants_capture=True), moving.phase)
    if not query.running and query.now >= latest_batch(query, moving):
        moving = replace(moving, wants_capture=False)
        put(turn, moving)
        capture_at_rest(turn, moving)


def latest_batch(query: Query, moving: Move) -> int:
    """The time until which the step of a move waits for a batch."""
    if query.batch is None:
        return max(moving.phase_since, query.idle_since) + SHORT
    return moving.phase_since + PATIENCE


def capture_at_rest(turn: Turn, moving: Move) -> None:
    """Capture between two batches; the stream waits for it."""
    query, fence = turn.query, turn.fence()
    for wanted in _captures(query, moving):
        source = query.slices[wanted.slice]
        order = Capture(wanted, source, query.committed, fence, query.size(source))
        turn.order(order, Owner.MOVE, moving.command)


def _captures(query: Query, moving: Move) -> list[CaptureWanted]:
    """Captures of the groups that move: all rows first, then the rows that changed."""
    return [
        CaptureWanted(
            source, groups, query.slices[source].base if moving.parts else None, clean=False
        )
        for source, groups in moving.moved.items()
    ]


def _store_all(turn: Turn, moving: Move, captured: list[Captured]) -> None:
    if len(captured) < len(moving.moved):
        ends.again(turn, moving, "not all groups that move could be captured")
        return
    for each in captured:
        store(turn, moving, each)


def store(turn: Turn, moving: Move, captured: Captured) -> None:
    """Store a captured file where those of the first new slice are stored."""
    order = holders.store(turn.query, captured, moving.targets[0])
    turn.order(order, Owner.MOVE, moving.command)


def make(turn: Turn, moving: Move) -> None:
    """Make the new slices of the stored parts."""
    versions = {part.version for part in moving.parts}
    if len(versions) > 1:
        ends.again(turn, moving, f"groups were captured at different versions: {sorted(versions)}")
        return
    for target in moving.targets:
        parts = tuple(part for part in moving.parts if part.groups & target.groups)
        moving = replace(moving, read=moving.read + sum(part.bytes for part in parts))
        turn.order(Make(target, parts, min(versions)), Owner.MOVE, moving.command)
    put(turn, moving)
    if moving.phase is not Phase.HOLD:
        enter(turn, moving, Phase.MAKE)


def reached(turn: Turn, moving: Move, which: SliceId, version: Version, *, clean: bool) -> None:
    """A new slice has come to a version. ``clean``: its table counts as unchanged since then."""
    targets = tuple(
        replace(each, role=Role.STANDBY, version=version, base=version if clean else each.base)
        if each.id == which
        else each
        for each in moving.targets
    )
    turn.put(*targets)
    put(turn, replace(moving, targets=targets))


def advance(turn: Turn, moving: Move) -> bool:
    """Advance the new slices by stored parts. Whether there are any."""
    query = turn.query
    inventory, at = query.inventory[moving.operator], moving.at
    chains = {each: inventory.after(each.groups, at) for each in moving.transfers}
    versions = [{part.version for part in chain} for chain in chains.values()]
    upto = max(set.intersection(*versions), default=at) if versions else at
    if upto <= at:
        return False
    for target in moving.targets:
        parts = {
            part.name: part
            for transfer, chain in chains.items()
            for part in chain
            if transfer.target == target.id and part.version <= upto
        }
        order = Advance(target, tuple(parts.values()), at, upto, turn.fence())
        turn.order(order, Owner.MOVE, moving.command)
        moving = replace(moving, read=moving.read + sum(part.bytes for part in order.parts))
    put(turn, moving)
    return True


def replay(turn: Turn, moving: Move) -> None:
    """Replay the batches since, on those new slices that lag behind."""
    slices = tuple(each for each in moving.targets if each.version < turn.query.committed)
    order = Replay(slices, turn.query.committed, turn.fence())
    turn.order(order, Owner.MOVE, moving.command)


def can_capture(query: Query, moving: Move) -> bool:
    """Whether a capture can still bring what the move waits for.

    After a checkpoint in between, the source slices know only the changes since then.
    """
    return not moving.parts or changes_known(query, moving)


def being_stored(query: Query, moving: Move) -> bool:
    """Whether a checkpoint is storing the changes of the source slices."""
    return any(
        isinstance(waiting.order, Store) and waiting.order.captured.slice in moving.moved
        for waiting in query.outstanding.values()
    )


def changes_known(query: Query, moving: Move) -> bool:
    """Whether the source slices know the changes since the version of the new slices."""
    bases = [query.slices[source].base for source in moving.moved]
    return query.policies.checkpointing.tracks_changes and all(
        base is not None and base <= moving.at for base in bases
    )


def wants_warm_up(query: Query, moving: Move) -> bool:
    """Whether to replay a batch first, even if changes are known.

    The first batch on a node loads classes and compiles the plan, which takes about as long as a
    batch. A replay does this while the stream runs. It is left out if Spark has no batch for a
    while, and in the next attempt if it fails.
    """
    serve = {each.node for each in serving(query.slices.values(), moving.operator)}
    return (
        query.policies.replays
        and query.committed != NO_VERSION
        and moving.rounds == 0
        and moving.attempts == 1
        and any(each.node not in serve for each in moving.targets)
        and (moving.at < query.committed or query.now < latest_batch(query, moving))
    )
