"""Scale out and scale in: an operator over another number of instances, while the stream runs.

The new instances are made from a checkpoint and run the batches after it, while the old ones go
on serving. When they are up to date, rows are sent to them from the next batch on. Until then
nothing of the query has changed, so a failure half way costs only the attempt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from anabranch.coordinator.checkpoints import Taken
from anabranch.coordinator.replay import Replay
from anabranch.coordinator.tables import HERE, Tables
from anabranch.errors import QueryFailed, StateMissing
from anabranch.plan.graph import Stateful
from anabranch.spark.shuffle import Router
from anabranch.state.groups import Routing
from anabranch.units import Version

if TYPE_CHECKING:
    from anabranch.coordinator.coordinator import Coordinator

_log = logging.getLogger("anabranch")
_ATTEMPTS = 5
_AT_ONCE = 2
"""Batches that new instances run again between two batches of the stream: they gain one each
time, and the stream is never held up for long."""
_PATIENCE = 5.0
_LOOK_SECONDS = 0.02


class Scaling:
    """Changes of how operators are divided, one after the other."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._one_at_a_time = threading.Lock()

    def scale(self, operator: str, instances: int) -> None:
        """Divide an operator over so many instances, and wait until it is."""
        with self._one_at_a_time:
            before = self._coordinator.running.routing[operator]
            self._change(operator, before.rescale(instances))

    def rebalance(self) -> None:
        """Move instances to the nodes that have fewer, if any has more than its share."""
        running = self._coordinator.running
        if running.cluster is None:
            return
        with self._one_at_a_time:
            for operator, routing in list(running.routing.items()):
                instances = {name: of.instances for name, of in running.routing.items()}
                wanted = running.placement.place(instances, running.cluster.alive())[operator]
                if sorted(wanted) != sorted(running.tables.placement[operator]):
                    moved = Routing(routing.owners, routing.epoch + 1)
                    self._change(operator, moved, wanted)

    def _change(self, operator: str, after: Routing, hosts: Sequence[str] | None = None) -> None:
        running = self._coordinator.running
        before = running.routing[operator]
        if after == before:
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
                    details["pause"] = self._on_nodes(operator, after, hosts)
                    return
                except Exception as error:
                    running.events.add("scale failed", operator=operator, reason=str(error)[:500])
                    if attempt == _ATTEMPTS or self._coordinator.stopping:
                        raise QueryFailed(
                            f"operator {operator!r} could not be divided over {after.instances} "
                            f"instances; it goes on with {before.instances}: {error}"
                        ) from error
                    _log.warning("scaling %r failed, trying again: %s", operator, error)
                finally:
                    running.needed = None

    def _on_one_machine(self, operator: str, before: Routing, after: Routing) -> None:
        """All tables are here: they are divided between two batches."""
        coordinator = self._coordinator
        running = coordinator.running
        with coordinator.turn:
            hosts = running.tables.placement | {operator: (HERE,) * after.instances}
            if running.committed.version >= 0:
                running.tables.rescale(operator, before, after)
            else:
                running.tables.placement = hosts
                running.tables.create(operator, after)
            self._switch(operator, after, running.tables.placed(hosts))

    def _on_nodes(self, operator: str, after: Routing, hosts: Sequence[str] | None = None) -> float:
        """Returns for how long the stream was held up by the last step."""
        coordinator = self._coordinator
        running = coordinator.running
        assert running.cluster is not None
        start = self._checkpoint()
        manifest = running.checkpoints.manifests.get(start)
        tables = self._placed(operator, after, hosts)
        tables.restore(operator, after, manifest.operators[operator])
        (node,) = [n for n in running.bounds if n.name == operator]
        router = Router(running.bounds[node].hash, after, ordered=running.bounds[node].ordered)
        at = start
        while True:
            with coordinator.turn:
                began = time.perf_counter()
                if coordinator.stopping or coordinator.failure is not None:
                    raise QueryFailed("the query has ended")
                target = running.committed.version
                upto = Version(min(at + _AT_ONCE, target))
                self._replay(node, router, tables, at, upto)
                at = upto
                if at == target:
                    self._switch(operator, after, tables)
                    break
            time.sleep(_LOOK_SECONDS)
        pause = time.perf_counter() - began
        running.tables.keep_only(running.routing, running.cluster.alive())
        return pause

    def _checkpoint(self) -> Version:
        """A checkpoint of now; buffers after it are kept."""
        coordinator = self._coordinator
        running = coordinator.running
        with coordinator.turn:
            running.needed = ordered = running.committed.version
            running.checkpoints.force()
        deadline = time.monotonic() + _PATIENCE
        while running.checkpoints.stored < ordered:
            if time.monotonic() > deadline:
                # There is no batch to take it with.
                with coordinator.turn:
                    files = running.tables.capture_all(running.routing)
                    commit = running.committed
                running.checkpoints.store(Taken(commit, files))
                return commit.version
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

    def _replay(
        self, node: Stateful, router: Router, tables: Tables, at: Version, upto: Version
    ) -> None:
        coordinator = self._coordinator
        running = coordinator.running
        assert running.cluster is not None
        running.fence += 1
        replay = Replay(
            running.plan,
            running.buffers,
            coordinator.routers | {node: router},
            tables,
            running.cluster.alive(),
            {node.name: range(router.routing.instances)},
            running.fence,
            coordinator.reports,
        )
        for version in range(at + 1, upto + 1):
            replay.run(Version(version))

    def _switch(self, operator: str, after: Routing, tables: Tables) -> None:
        """From the next batch on rows go to the new instances."""
        coordinator = self._coordinator
        running = coordinator.running
        if running.cluster is not None:
            gone = set(tables.placement[operator]) - running.cluster.alive()
            if gone:
                raise StateMissing(f"{sorted(gone)} went while the operator was divided")
        running.routing[operator] = after
        running.tables.placement = dict(tables.placement)
        coordinator.reroute()
        running.remember()
        running.checkpoints.start_anew()
