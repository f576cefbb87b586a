"""How new instances of an operator, made from a checkpoint, catch up with a stream that runs on.

Either they take over the rows that changed since, from later checkpoints of the old instances and
at last from their tables, or they run the batches since then themselves. The first takes no place
on the nodes from the stream, and the stream waits only for the rows of its last batches to be
copied; the second needs no tables that tell what has changed in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from anabranch.backup.manifests import Part
from anabranch.coordinator.replay import Replay
from anabranch.coordinator.routers import router_of
from anabranch.coordinator.tables import Tables
from anabranch.errors import StateMissing
from anabranch.plan.graph import Stateful
from anabranch.state.groups import Routing
from anabranch.units import Version

if TYPE_CHECKING:
    from anabranch.coordinator.coordinator import Coordinator

_ROUNDS = 5
_NEAR = 2
"""So many batches behind is near enough: the one that runs, and the one in the checkpoint."""


@dataclass(frozen=True)
class Newcomers:
    """The tables of an operator's new instances."""

    coordinator: Coordinator
    node: Stateful
    routing: Routing
    tables: Tables

    def make(self, version: Version, parts: tuple[Part, ...]) -> None:
        """Make all of them from a checkpoint."""
        self.tables.make(self.node.name, self.routing, version, parts)

    def replay(self, at: Version, upto: Version, instances: Sequence[int] | None = None) -> None:
        """Run batches on all or some of them, from what was sent to the old ones."""
        coordinator, running = self.coordinator, self.coordinator.running
        if instances is None:
            instances = range(self.routing.instances)
        replay = Replay(
            running.plan,
            running.buffers,
            coordinator.routers | {self.node: router_of(running.bounds[self.node], self.routing)},
            self.tables,
            {self.node.name: instances},
            running.next_fence(),
            coordinator.reports,
        )
        with coordinator.watching(self.tables):
            replay.run(at, upto)


class CatchUp(Protocol):
    """A way for new instances to come to the present."""

    def follow(self) -> None:
        """Come near to the present, while batches run."""

    def finish(self) -> None:
        """Come to the present, between two batches."""


class ByReplay:
    """The new instances run the batches since the checkpoint."""

    def __init__(self, new: Newcomers, at: Version) -> None:
        self._new = new
        self._at = at

    def follow(self) -> None:
        """See :meth:`CatchUp.follow`."""
        running = self._new.coordinator.running
        for _ in range(_ROUNDS):
            if running.committed.version - self._at <= 1:
                break
            self.finish()

    def finish(self) -> None:
        """See :meth:`CatchUp.finish`."""
        upto = self._new.coordinator.running.committed.version
        self._new.replay(self._at, upto)
        self._at = upto


class ByChanges:
    """The new instances take over what changes in the tables of the old ones.

    ``checkpoint`` takes one, and waits until it is stored; it returns its version.
    """

    def __init__(self, new: Newcomers, at: Version, checkpoint: Callable[[], Version]) -> None:
        self._new = new
        self._at = at
        self._checkpoint = checkpoint
        self._before = new.coordinator.running.routing[new.node.name]

    def follow(self) -> None:
        """See :meth:`CatchUp.follow`."""
        running = self._new.coordinator.running
        self._warm()
        for _ in range(_ROUNDS):
            behind = running.committed.version - self._at
            if behind == 0 or (behind <= _NEAR and running.checkpoints.base == self._at):
                break
            self._advance_to(self._checkpoint())

    def finish(self) -> None:
        """See :meth:`CatchUp.finish`."""
        running, name = self._new.coordinator.running, self._new.node.name
        running.checkpoints.wait()
        self._advance_to(running.checkpoints.stored)
        now = running.committed.version
        if now == self._at:
            return
        if running.checkpoints.base != self._at:
            raise StateMissing(f"what changed in {name!r} since version {self._at} is not known")
        fence = running.next_fence()
        files = running.tables.capture(name, self._before, now, fence, self._at)
        self._advance(running.tables.store_all(name, files), now)
        self._at = now

    def _warm(self) -> None:
        """Run one batch where the stream has not run yet: a first one takes a node much longer.

        The tables go back from it to the version of the checkpoint.
        """
        running = self._new.coordinator.running
        if running.committed.version == self._at:
            return
        used = {host for hosts in running.tables.placement.values() for host in hosts}
        placed = self._new.tables.placement[self._new.node.name]
        if cold := [i for i, host in enumerate(placed) if host not in used]:
            self._new.replay(self._at, Version(self._at + 1), cold)

    def _advance_to(self, stored: Version) -> None:
        if stored <= self._at:
            return
        manifest = self._new.coordinator.running.checkpoints.manifests.get(stored)
        saved = manifest.operators[self._new.node.name]
        changes = [part for part in saved.parts if part.version > self._at]
        if any(part.base is None for part in changes):
            self._new.make(stored, saved.parts)
        else:
            self._advance(changes, stored)
        self._at = stored

    def _advance(self, changes: Sequence[Part], upto: Version) -> None:
        fence = self._new.coordinator.running.next_fence()
        name, routing = self._new.node.name, self._new.routing
        self._new.tables.advance(name, routing, tuple(changes), self._at, upto, fence)


def way_to_catch_up(new: Newcomers, at: Version, checkpoint: Callable[[], Version]) -> CatchUp:
    """The better way that is possible."""
    if new.coordinator.running.checkpoints.policy.tracks_changes:
        return ByChanges(new, at, checkpoint)
    return ByReplay(new, at)
