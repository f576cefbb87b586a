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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from anabranch.protocols import checkpoint, notes
from anabranch.protocols.events import Done, Failed, Rebalance, Scale, SliceReport
from anabranch.protocols.model import (
    Change,
    Host,
    Readiness,
    Role,
    Routed,
    Slice,
    SliceId,
    serving,
)
from anabranch.protocols.orders import (
    SECOND,
    Advance,
    Capture,
    Captured,
    CaptureWanted,
    CommandId,
    Drop,
    Make,
    Replay,
    Store,
    Wake,
)
from anabranch.protocols.query import Outstanding, Owner, Query, Turn
from anabranch.protocols.transfers import Transfer, balanced, divide, slices_of, unite
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.units import NO_VERSION, Version

ATTEMPTS = 5
_ROUNDS = 5
_NEAR = 2
"""The stream is held for a move whose slices are at most this many batches behind."""
_PATIENCE = 5 * SECOND
"""How long a capture waits for a batch."""
_SHORT = SECOND // 5
"""The same where Spark asks for no batch."""
_PAUSE = SECOND // 2
_MERGE_PAUSE = 60 * SECOND
"""The pause after a failed merge of slices."""


@dataclass(frozen=True, slots=True)
class MergeSlices:
    """Merge the smallest slices of an instance. Treated like a command of a user."""

    command: CommandId
    operator: str
    instance: int


class Phase(Enum):
    """The steps of a move."""

    PREPARE = "waiting for nodes"
    CAPTURE = "capturing the groups that move"
    MAKE = "making slices at their new nodes"
    FOLLOW = "catching up with the stream"
    LAST = "capturing the last changes"
    HOLD = "holding the stream for the last changes"


@dataclass(frozen=True, slots=True)
class Move:
    """A move in progress."""

    event: Scale | Rebalance | MergeSlices
    operator: str
    since: int
    begun: Version
    """The version that was committed when this attempt began."""
    phase: Phase = Phase.PREPARE
    phase_since: int = 0
    before: Routed | None = None
    """How the operator was divided when the move was planned."""
    after: Routed | None = None
    """How it is divided once the move is done."""
    transfers: tuple[Transfer, ...] = ()
    targets: tuple[Slice, ...] = ()
    parts: tuple[Part, ...] = ()
    """The parts that the targets are made of."""
    made: bool = False
    """Whether the targets have tables."""
    read: int = 0
    """Bytes of parts that the targets were told to read."""
    rounds: int = 0
    attempts: int = 1
    not_before: int = 0
    held_since: int | None = None
    """When the batch that ran had ended, and no other one could begin."""
    wants_capture: bool = False
    """Whether the next batch is to capture for this move."""
    capturing: bool = False
    """Whether the batch that runs does."""

    @property
    def command(self) -> CommandId:
        """The command that the move executes."""
        return self.event.command

    @property
    def change(self) -> Change:
        """The present step, the reason, and the start."""
        match self.event:
            case Scale(instances=count):
                kind, why = "move", f"scale to {count} instances"
            case Rebalance():
                kind, why = "move", "rebalance"
            case MergeSlices(instance=instance):
                kind, why = "merge", f"instance {instance} has many slices"
        return Change(kind, self.operator, why, self.phase.value, self.since)

    @property
    def at(self) -> Version:
        """The version of the slices at their new nodes."""
        return min((each.version for each in self.targets), default=NO_VERSION)

    @property
    def moved(self) -> Mapping[SliceId, KeyGroups]:
        """The groups that leave each source."""
        moved: dict[SliceId, KeyGroups] = {}
        for each in self.transfers:
            moved[each.source] = moved.get(each.source, KeyGroups()) | each.groups
        return moved


def command(turn: Turn, event: Scale | Rebalance) -> None:
    """Take a command, which runs at once, or after the commands in progress."""
    turn.change(waiting=(*turn.query.waiting, event))


def give_up(turn: Turn, which: CommandId) -> None:
    """Cancel a command. The query is unchanged."""
    waiting = tuple(each for each in turn.query.waiting if each.command != which)
    if waiting != turn.query.waiting:
        turn.change(waiting=waiting)
        turn.end(which, "the command was cancelled by its caller")
    elif which in turn.query.moves:
        moving = turn.query.moves[which]
        _clear(turn, moving)
        _end(turn, moving, "the command was cancelled by its caller")


def abandon(turn: Turn, reason: str) -> None:
    """The query is rolled back: cancel all moves."""
    for moving in list(turn.query.moves.values()):
        _clear(turn, moving)
        _end(turn, moving, reason)


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


def holds(query: Query) -> bool:
    """Whether the stream is held for a move."""
    return any(each.phase is Phase.HOLD for each in query.moves.values())


def postpones_checkpoints(query: Query) -> bool:
    """Whether a checkpoint now would take the changes that a move waits for."""
    near = (Phase.FOLLOW, Phase.LAST, Phase.HOLD)
    return any(each.wants_capture or each.phase in near for each in query.moves.values())


def needs(query: Query, operator: str) -> Iterator[Version]:
    """The versions after which rows sent to an operator are still needed."""
    for each in query.moves.values():
        if each.operator == operator:
            yield each.begun


def captures(turn: Turn) -> tuple[CaptureWanted, ...]:
    """The captures for moves in the batch that is about to run."""
    wanted: list[CaptureWanted] = []
    for moving in turn.query.moves.values():
        if moving.wants_capture and _can_capture(turn.query, moving):
            _put(turn, replace(moving, capturing=True))
            wanted += _captures(turn.query, moving)
    return tuple(wanted)


def commit(turn: Turn, reports: Mapping[SliceId, SliceReport]) -> None:
    """A batch was committed: store its captures for moves."""
    if turn.query.moves:
        turn.send(Wake(turn.query.now + _SHORT))
    for moving in list(turn.query.moves.values()):
        if not moving.capturing:
            continue
        moving = replace(moving, capturing=False, wants_capture=False)
        _put(turn, moving)
        if moving.phase is Phase.LAST:
            held_since = turn.query.now
            moving = _next(turn, replace(moving, held_since=held_since), Phase.HOLD)
        found = [reports[source].captured for source in moving.moved if source in reports]
        _store(turn, moving, [each for each in found if each is not None and not each.clean])


def batch_failed(turn: Turn) -> None:
    """A batch failed: its captures do not count, and the next batch captures again."""
    for moving in list(turn.query.moves.values()):
        if moving.capturing:
            _put(turn, replace(moving, capturing=False))


def answer(turn: Turn, waiting: Outstanding, event: Done | Failed) -> None:
    """The answer to an order of a move."""
    moving = None if waiting.command is None else turn.query.moves.get(waiting.command)
    if moving is None:
        return
    match waiting.order, event:
        case _, Failed(reason=reason):
            _again(turn, moving, reason)
        case Capture(), Done(answer=Captured() as captured):
            _store_at_holders(turn, moving, captured)
        case Store(), Done(answer=Part() as part):
            turn.add_part(part)
            _put(turn, replace(moving, parts=(*moving.parts, part)))
        case Make(slice, _, version), Done():
            _reached(turn, replace(moving, made=True), slice.id, version, clean=True)
        case Advance(slice, _, _, upto), Done():
            _reached(turn, moving, slice.id, upto, clean=True)
        case Replay(slices, upto), Done():
            for each in slices:
                _reached(turn, turn.query.moves[moving.command], each.id, upto, clean=False)


def node_lost(turn: Turn, host: Host) -> None:
    """A node was lost: start the moves again that need it."""
    for moving in list(turn.query.moves.values()):
        sources = {turn.query.slices[source].node for source in moving.moved}
        if host in sources or any(each.node == host for each in moving.targets):
            _again(turn, moving, f"node {host} was lost")


def interrupt(turn: Turn) -> None:
    """Slices were lost, and recovery replaces them: start the moves again that need them."""
    for moving in list(turn.query.moves.values()):
        if moving.moved.keys() & turn.query.suspects:
            _again(turn, moving, "slices that it moves groups from were lost")


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
            _put(turn, Move(event, operator, query.now, query.committed, phase_since=query.now))
            return
    notes.end(turn, event.command)


def _merge_small_slices(turn: Turn) -> None:
    """Merge the smallest slices of an instance that has too many."""
    query = turn.query
    for name, routed in query.routed.items():
        for instance in range(routed.routing.instances):
            if len(slices_of(query, name, instance)) > query.policies.most_slices:
                event = MergeSlices(CommandId(-turn.number()), name, instance)
                _put(turn, Move(event, name, query.now, query.committed, phase_since=query.now))
                return


def _step(turn: Turn, moving: Move) -> None:
    query = turn.query
    if moving.before not in (None, query.routed[moving.operator]):
        _again(turn, moving, "a recovery changed the routing of the operator")
        return
    if any(waiting.command == moving.command for waiting in query.outstanding.values()):
        return
    match moving.phase:
        case Phase.PREPARE:
            if query.ready:
                _prepare(turn, moving)
        case Phase.CAPTURE:
            if moving.parts:
                _make(turn, moving)
            else:
                _capture(turn, moving)
        case Phase.MAKE:
            _follow(turn, _next(turn, moving, Phase.FOLLOW))
        case Phase.FOLLOW:
            _follow(turn, moving)
        case Phase.LAST:
            _capture_last(turn, moving)
        case Phase.HOLD:
            _finish(turn, moving)


def _prepare(turn: Turn, moving: Move) -> None:
    """Decide which groups move, and to which nodes."""
    query, name = turn.query, moving.operator
    now = query.routed[name]
    match moving.event:
        case Scale(instances=count):
            routing = now.routing.scaled(count)
            instances = {each: of.routing.instances for each, of in query.routed.items()}
            before = {each: of.hosts for each, of in query.routed.items()}
            place = query.policies.placement.place
            hosts = place(instances | {name: count}, query.ready, before)[name]
            targets, transfers = divide(turn, name, now, Routed(routing, tuple(hosts)))
        case Rebalance():
            routing, hosts = now.routing, balanced(query, name)
            targets, transfers = divide(turn, name, now, Routed(routing, tuple(hosts)))
        case MergeSlices(instance=instance):
            routing, hosts = now.routing, now.hosts
            targets, transfers = unite(turn, name, instance)
    if not targets:
        _end(turn, moving, None)
        return
    moving = replace(
        moving,
        before=now,
        after=Routed(routing, tuple(hosts)),
        targets=targets,
        transfers=transfers,
        begun=query.committed,
    )
    turn.put(*targets)
    if _before_the_first_batch(query):
        _make_empty(turn, _next(turn, moving, Phase.MAKE))
    elif query.policies.replays or query.policies.checkpointing.tracks_changes:
        _capture(turn, _next(turn, moving, Phase.CAPTURE))
    else:
        # There is no way to catch up, so the groups are copied while the stream waits.
        _hold(turn, moving)


def _before_the_first_batch(query: Query) -> bool:
    return query.committed == NO_VERSION and not query.running


def _make_empty(turn: Turn, moving: Move) -> None:
    _put(turn, replace(moving, wants_capture=False))
    for each in moving.targets:
        turn.order(Make(each, (), NO_VERSION), Owner.MOVE, moving.command)


def _capture(turn: Turn, moving: Move) -> None:
    """Capture with the next batch, or between two batches if none comes for a while."""
    query = turn.query
    if not moving.made and _before_the_first_batch(query):
        # The batch that was to be captured with has failed.
        _make_empty(turn, _next(turn, moving, Phase.MAKE))
        return
    if not moving.wants_capture:
        moving = _next(turn, replace(moving, wants_capture=True), moving.phase)
    if not query.running and query.now >= _latest_batch(query, moving):
        moving = replace(moving, wants_capture=False)
        _put(turn, moving)
        _capture_at_rest(turn, moving)


def _latest_batch(query: Query, moving: Move) -> int:
    """The time until which the step of a move waits for a batch."""
    if query.batch is None:
        return max(moving.phase_since, query.idle_since) + _SHORT
    return moving.phase_since + _PATIENCE


def _capture_at_rest(turn: Turn, moving: Move) -> None:
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


def _store(turn: Turn, moving: Move, captured: list[Captured]) -> None:
    if len(captured) < len(moving.moved):
        _again(turn, moving, "not all groups that move could be captured")
        return
    for each in captured:
        _store_at_holders(turn, moving, each)


def _store_at_holders(turn: Turn, moving: Move, captured: Captured) -> None:
    order = turn.query.store(captured, moving.targets[0])
    turn.order(order, Owner.MOVE, moving.command)


def _make(turn: Turn, moving: Move) -> None:
    versions = {part.version for part in moving.parts}
    if len(versions) > 1:
        _again(turn, moving, f"groups were captured at different versions: {sorted(versions)}")
        return
    for target in moving.targets:
        parts = tuple(part for part in moving.parts if part.groups & target.groups)
        moving = replace(moving, read=moving.read + sum(part.bytes for part in parts))
        turn.order(Make(target, parts, min(versions)), Owner.MOVE, moving.command)
    _put(turn, moving)
    if moving.phase is not Phase.HOLD:
        _next(turn, moving, Phase.MAKE)


def _follow(turn: Turn, moving: Move) -> None:
    """Let the new slices catch up while batches run."""
    query = turn.query
    if moving.wants_capture and not _can_capture(query, moving):
        moving = replace(moving, wants_capture=False)
        _put(turn, moving)
    if moving.wants_capture:
        _capture(turn, moving)
    elif _being_stored(query, moving):
        pass  # these parts bring the targets on
    elif _wants_warm_up(query, moving):
        if moving.at < query.committed:
            _put(turn, replace(moving, rounds=1))
            _replay(turn, moving)
    elif _advance(turn, moving):
        pass  # stored parts bring the targets on, and nobody waits for it
    elif query.committed - moving.at <= _NEAR or moving.rounds >= _ROUNDS:
        _capture_last(turn, _next(turn, moving, Phase.LAST))
    else:
        moving = replace(moving, rounds=moving.rounds + 1)
        _put(turn, moving)
        if _changes_known(query, moving):
            _capture(turn, moving)
        else:
            _replay(turn, moving)


def _capture_last(turn: Turn, moving: Move) -> None:
    """Capture the last changes with a batch, and hold the stream once it is committed.

    To capture them while the stream is held would make the pause longer. It is done if Spark has no
    batch for a while.
    """
    query = turn.query
    waited = query.now >= _latest_batch(query, moving) or moving.at == query.committed
    if (waited and not query.running) or not _changes_known(query, moving):
        _hold(turn, moving)
    elif not moving.wants_capture:
        _put(turn, replace(moving, wants_capture=True))


def _hold(turn: Turn, moving: Move) -> None:
    """Let no batch begin, and take the last steps once none runs."""
    _finish(turn, _next(turn, replace(moving, wants_capture=False), Phase.HOLD))


def _wants_warm_up(query: Query, moving: Move) -> bool:
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
        and (moving.at < query.committed or query.now < _latest_batch(query, moving))
    )


def _finish(turn: Turn, moving: Move) -> None:
    """Apply the last changes while the stream is held, then switch the routing."""
    query = turn.query
    if query.running:
        return
    if moving.held_since is None:
        moving = replace(moving, held_since=query.now)
        _put(turn, moving)
    if moving.made and moving.at == query.committed:
        _switch(turn, moving)
    elif not moving.made:
        # This is a move without a way to catch up: all of it happens while the stream is held.
        if moving.parts:
            _make(turn, moving)
        elif query.committed == NO_VERSION:
            _make_empty(turn, moving)  # the batch that ran when it began has failed
        else:
            _capture_at_rest(turn, moving)
    elif not _being_stored(query, moving) and not _advance(turn, moving):
        if _changes_known(query, moving):
            _capture_at_rest(turn, moving)
        elif query.policies.replays:
            _replay(turn, moving)
        else:
            _again(
                turn,
                moving,
                "a batch ran meanwhile, and neither changes nor rows to replay are kept",
            )


def _advance(turn: Turn, moving: Move) -> bool:
    """Advance the new slices by stored parts. Whether there are any."""
    query = turn.query
    inventory, at = query.inventory[moving.operator], moving.at
    chains = {each: inventory.after(each.groups, at) for each in moving.transfers}
    reached = [{part.version for part in chain} for chain in chains.values()]
    upto = max(set.intersection(*reached), default=at) if reached else at
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
    _put(turn, moving)
    return True


def _can_capture(query: Query, moving: Move) -> bool:
    """Whether a capture can still bring what the move waits for.

    After a checkpoint in between, the source slices know only the changes since then.
    """
    return not moving.parts or _changes_known(query, moving)


def _being_stored(query: Query, moving: Move) -> bool:
    """Whether a checkpoint is storing the changes of the source slices."""
    return any(
        isinstance(waiting.order, Store) and waiting.order.captured.slice in moving.moved
        for waiting in query.outstanding.values()
    )


def _changes_known(query: Query, moving: Move) -> bool:
    """Whether the source slices know the changes since the version of the new slices."""
    bases = [query.slices[source].base for source in moving.moved]
    return query.policies.checkpointing.tracks_changes and all(
        base is not None and base <= moving.at for base in bases
    )


def _replay(turn: Turn, moving: Move) -> None:
    slices = tuple(each for each in moving.targets if each.version < turn.query.committed)
    order = Replay(slices, turn.query.committed, turn.fence())
    turn.order(order, Owner.MOVE, moving.command)


def _reached(turn: Turn, moving: Move, which: SliceId, version: Version, *, clean: bool) -> None:
    targets = tuple(
        replace(each, role=Role.STANDBY, version=version, base=version if clean else each.base)
        if each.id == which
        else each
        for each in moving.targets
    )
    turn.put(*targets)
    _put(turn, replace(moving, targets=targets))


def _switch(turn: Turn, moving: Move) -> None:
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
    _end(turn, moving, None)
    checkpoint.review(turn)


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


def _again(turn: Turn, moving: Move, reason: str) -> None:
    """Start a move again, or give it up after the last attempt."""
    kind = "merge failed" if isinstance(moving.event, MergeSlices) else "scale failed"
    turn.tell(kind, operator=moving.operator, attempt=moving.attempts, reason=reason)
    _clear(turn, moving)
    if moving.attempts >= ATTEMPTS:
        _end(turn, moving, reason)
        return
    later, attempts = turn.query.now + _PAUSE, moving.attempts + 1
    turn.send(Wake(later))
    again = Move(moving.event, moving.operator, moving.since, turn.query.committed)
    _put(turn, replace(again, attempts=attempts, phase_since=later, not_before=later))


def _clear(turn: Turn, moving: Move) -> None:
    """Drop everything that a move has made."""
    for waiting in turn.forget(Owner.MOVE, command=moving.command):
        if isinstance(waiting.order, Store) and waiting.order.captured.node in turn.query.nodes:
            captured = waiting.order.captured
            turn.send(Drop(captured.node, files=(captured.file,)))
    turn.remove(frozenset(each.id for each in moving.targets))


def _end(turn: Turn, moving: Move, error: str | None) -> None:
    moves = {c: m for c, m in turn.query.moves.items() if c != moving.command}
    turn.change(moves=moves)
    if error is None and isinstance(moving.event, Rebalance):
        turn.change(waiting=(moving.event, *turn.query.waiting))  # there may be other operators
        return
    if error is not None and isinstance(moving.event, MergeSlices):
        turn.change(merge_after=turn.query.now + _MERGE_PAUSE)
        turn.send(Wake(turn.query.now + _MERGE_PAUSE))
    if error is None:
        notes.end(turn, moving.command)
    else:
        turn.end(moving.command, error)


def _next(turn: Turn, moving: Move, phase: Phase) -> Move:
    moving = replace(moving, phase=phase, phase_since=turn.query.now)
    _put(turn, moving)
    turn.send(Wake(turn.query.now + _SHORT))
    turn.send(Wake(turn.query.now + _PATIENCE))
    return moving


def _put(turn: Turn, moving: Move) -> None:
    turn.change(moves={**turn.query.moves, moving.command: moving})
