"""Scale out and scale in: an operator over another number of instances, while the stream runs.

The new instances are made from a checkpoint and catch up with the old ones, which go on serving.
When they are but a batch or two behind, the stream is held up for these, and rows are sent to them
from the next one on. Until then nothing of the query has changed, so a failure half way costs only
the attempt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from anabranch.coordinator.catching_up import Newcomers, way_to_catch_up
from anabranch.coordinator.tables import HERE, Tables
from anabranch.errors import AnabranchError, QueryFailed, StateMissing
from anabranch.state.groups import Routing
from anabranch.units import NO_VERSION, Version

if TYPE_CHECKING:
    from anabranch.coordinator.coordinator import Coordinator

_log = logging.getLogger("anabranch")
_ATTEMPTS = 5
_PATIENCE = 5.0
_RESTART_SECONDS = 180.0
_LOOK_SECONDS = 0.02


class Scaling:
    """Changes of how operators are divided, one after the other."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._one_at_a_time = threading.Lock()
        self._used = self._failed_with = NO_VERSION

    def scale(self, operator: str, instances: int) -> None:
        """Divide an operator over so many instances, and wait until it is."""
        self._coordinator.check_outside("scale()")
        with self._one_at_a_time:
            self._change(operator, lambda before: before.rescale(instances))

    def rebalance(self) -> None:
        """Move instances to the nodes that have fewer, if any has more than its share."""
        self._coordinator.check_outside("rebalance()")
        running = self._coordinator.running
        if running.cluster is None:
            return
        with self._one_at_a_time:
            for operator in list(running.routing):
                instances = {name: of.instances for name, of in running.routing.items()}
                wanted = running.placement.place(instances, running.cluster.alive())[operator]
                if sorted(wanted) != sorted(running.tables.placement[operator]):
                    self._change(operator, lambda before: before, wanted)

    def _change(
        self,
        operator: str,
        change: Callable[[Routing], Routing],
        hosts: Sequence[str] | None = None,
    ) -> None:
        """Give an operator another routing, or the same on other hosts."""
        running = self._coordinator.running
        before = running.routing[operator]
        after = change(before)
        if after == before and hosts is None:
            return
        with running.events.timed(
            "scale", operator=operator, before=before.instances, after=after.instances
        ) as details:
            if running.cluster is None:
                self._on_one_machine(operator, before, after)
                return
            for attempt in range(1, _ATTEMPTS + 1):
                details["attempts"] = attempt
                try:
                    self._wait_until_running()
                    # A recovery may have divided the operator since the last attempt.
                    after = running.renewed(change(running.routing[operator]))
                    details |= self._on_nodes(operator, after, hosts)
                    return
                except Exception as error:
                    self._failed_with = self._used
                    running.events.add("scale failed", operator=operator, reason=str(error)[:500])
                    if attempt == _ATTEMPTS or self._coordinator.stopping:
                        raise QueryFailed(
                            f"operator {operator!r} could not be divided over {after.instances} "
                            f"instances; it goes on with {running.routing[operator].instances}: "
                            f"{error}"
                        ) from error
                    _log.warning("scaling %r failed, trying again: %s", operator, error)
                finally:
                    running.needed = None

    def _wait_until_running(self) -> None:
        """Wait while the query is taken back to a checkpoint."""
        coordinator = self._coordinator
        deadline = time.monotonic() + _RESTART_SECONDS
        while coordinator.failure is not None and not coordinator.stopping:
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK_SECONDS)
        self._check_running()

    def _check_running(self) -> None:
        if self._coordinator.stopping or self._coordinator.failure is not None:
            raise QueryFailed(f"the query does not run: {self._coordinator.failure}")

    def _on_one_machine(self, operator: str, before: Routing, after: Routing) -> None:
        """All tables are here: they are divided between two batches."""
        coordinator = self._coordinator
        running = coordinator.running
        with coordinator.turn:
            hosts = running.tables.placement | {operator: (HERE,) * after.instances}
            if running.committed.version >= 0:
                version, fence = running.committed.version, running.next_fence()
                running.tables.rescale(operator, before, after, version, fence)
            else:
                running.tables.placement = hosts
                running.tables.make(operator, after, NO_VERSION)
            self._switch(operator, after, running.tables.placed(hosts))
            running.tables.drop(operator, before, {HERE})

    def _on_nodes(
        self, operator: str, after: Routing, hosts: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Returns how long each step took, and for how long the stream was held up: ``pause``."""
        clock = _Steps()
        coordinator = self._coordinator
        running = coordinator.running
        assert running.cluster is not None
        before = running.routing[operator]
        start = self._used = self._checkpoint()
        clock.step("checkpoint_seconds")
        (node,) = [n for n in running.bounds if n.name == operator]
        new = Newcomers(coordinator, node, after, self._placed(operator, after, hosts))
        try:
            self._bring_up(new, before, start, clock)
        except BaseException:
            if running.routing[operator] != after:
                self._drop(operator, after, set(new.tables.placement[operator]))
            raise
        self._drop(operator, before, running.cluster.alive())
        return clock.steps | {"batches": running.committed.version - start}

    def _bring_up(self, new: Newcomers, before: Routing, start: Version, clock: _Steps) -> None:
        """Make new instances from a checkpoint, let them catch up, and send rows to them."""
        coordinator, operator = self._coordinator, new.node.name
        running = coordinator.running
        new.make(start, running.checkpoints.manifests.get(start).operators[operator].parts)
        clock.step("restore_seconds")
        way = way_to_catch_up(new, start, self._checkpoint)
        way.follow()
        clock.step("catch_up_seconds")
        # Should the stream be too fast to be caught up with, it now waits for what is left.
        with coordinator.turn:
            clock.step("wait_seconds")
            self._check_running()
            if running.routing[operator] != before:
                raise StateMissing(f"{operator!r} was divided in another way by a recovery")
            way.finish()
            self._switch(operator, new.routing, new.tables)
            clock.step("pause")

    def _drop(self, operator: str, routing: Routing, hosts: Collection[str]) -> None:
        """Remove tables that nothing uses; a node that has just gone took its own along."""
        try:
            self._coordinator.running.tables.drop(operator, routing, hosts)
        except AnabranchError as error:
            _log.info("Tables of %s@%s were not all removed: %s", operator, routing.epoch, error)

    def _checkpoint(self) -> Version:
        """A checkpoint of now; buffers after it are kept."""
        coordinator = self._coordinator
        running = coordinator.running
        with coordinator.turn:
            running.needed = running.committed.version
            # Of the one that an attempt has failed with a part may be lost.
            ordered = max(running.committed.version, self._failed_with + 1)
            running.checkpoints.force()
        deadline = time.monotonic() + _PATIENCE
        while running.checkpoints.stored < ordered:
            if time.monotonic() > deadline:
                # There is no batch to take it with.
                self._check_running()
                self._failed_with = NO_VERSION
                return coordinator.checkpoint()
            time.sleep(_LOOK_SECONDS)
        return running.checkpoints.stored

    def _placed(self, operator: str, after: Routing, hosts: Sequence[str] | None = None) -> Tables:
        running = self._coordinator.running
        assert running.cluster is not None
        if hosts is not None:
            return running.tables.placed(running.tables.placement | {operator: tuple(hosts)})
        instances = {name: of.instances for name, of in running.routing.items()}
        alive = running.cluster.alive()
        placed = running.placement.place(
            instances | {operator: after.instances}, alive, running.tables.placement
        )
        return running.tables.placed(running.tables.placement | {operator: placed[operator]})

    def _switch(self, operator: str, after: Routing, tables: Tables) -> None:
        """From the next batch on rows go to the new instances."""
        coordinator = self._coordinator
        running = coordinator.running
        if running.cluster is not None:
            gone = set(tables.placement[operator]) - running.cluster.alive()
            if gone:
                raise StateMissing(f"{sorted(gone)} went while the operator was divided")
        running.routing[operator] = after
        # The others may have been placed anew by a recovery in the meantime.
        running.tables.placement |= {operator: tables.placement[operator]}
        coordinator.reroute()
        running.remember()
        running.checkpoints.start_anew(soon=False)


class _Steps:
    """Notes how long each step of several took, in seconds."""

    def __init__(self) -> None:
        self.steps: dict[str, Any] = {}
        self._last = time.perf_counter()

    def step(self, name: str) -> None:
        now = time.perf_counter()
        self.steps[name], self._last = now - self._last, now
