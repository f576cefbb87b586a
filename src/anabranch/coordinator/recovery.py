"""Recovery: instances whose node is gone, or whose table is, live on elsewhere.

Only they are restored, from the newest checkpoint, and only they run the batches after it again;
all others keep their state. Recovery is done between two attempts of a batch, so that the batch
never sees anything but whole state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from anabranch.checkpointing.policy import Never
from anabranch.coordinator.failures import translated
from anabranch.coordinator.replay import Replay
from anabranch.errors import CheckpointError, StateMissing
from anabranch.units import NO_VERSION, Version

if TYPE_CHECKING:
    from anabranch.coordinator.coordinator import Coordinator

_log = logging.getLogger("anabranch")
_WAIT_SECONDS = 120.0
_LOOK_SECONDS = 0.05


class Recovery:
    """Finds out which instances are lost, and brings them back."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._known: frozenset[str] = frozenset()
        self._short = 0
        self._preparing: threading.Thread | None = None
        self._unfinished: Mapping[str, Sequence[int]] = {}
        """What a recovery that failed half way was about; its instances are to be made anew."""

    def can_cure(self, error: BaseException) -> bool:
        """Whether a batch failed because state is lost that can be brought back."""
        running = self._coordinator.running
        if running.cluster is None:
            return False
        if isinstance(translated(error), StateMissing):
            return True
        return bool(self._placed() - running.cluster.alive())

    def forget(self) -> None:
        """Nothing is lost any more: all tables were made anew."""
        self._unfinished = {}

    def heal(self, *, thorough: bool = False) -> None:
        """Bring back what is lost, if anything is. ``thorough`` looks at every table."""
        running = self._coordinator.running
        if running.cluster is None:
            return
        alive = self._alive()
        for host in sorted((self._known | self._placed()) - alive):
            running.events.add("failure", host=host)
            running.cluster.forget(host)
        self._known = alive
        self._welcome(alive - running.cluster.ready())
        lost = self._lost(alive, thorough=thorough)
        if lost:
            self._recover(lost, alive)
        self._refill(alive)

    def _welcome(self, new: Collection[str]) -> None:
        """Start an agent, and with it the first Python worker, on nodes before they are needed."""
        cluster = self._coordinator.running.cluster
        if not new or cluster is None or (self._preparing and self._preparing.is_alive()):
            return

        def prepare() -> None:
            try:
                cluster.prepare(sorted(new))
            except Exception as error:  # it is tried again with the next batch
                _log.info("%s not ready yet: %s", sorted(new), error)

        self._preparing = threading.Thread(target=prepare, name="new nodes", daemon=True)
        self._preparing.start()

    def _refill(self, alive: Collection[str]) -> None:
        """Ask for nodes when the pool has become smaller than it should be."""
        running = self._coordinator.running
        assert running.cluster is not None
        missing = running.placement.missing(alive, running.tables.placement)
        if missing > self._short:
            asked = running.cluster.request(len(alive) + missing)
            running.events.add("pool short", nodes=len(alive), missing=missing, asked=asked)
        self._short = missing

    def _alive(self) -> frozenset[str]:
        """The nodes there are, once there are any."""
        cluster = self._coordinator.running.cluster
        assert cluster is not None
        deadline = time.monotonic() + _WAIT_SECONDS
        while not (alive := cluster.alive()):
            if time.monotonic() > deadline:
                raise StateMissing(f"there has been no executor for {_WAIT_SECONDS:.0f} seconds")
            time.sleep(_LOOK_SECONDS)
        return alive

    def _placed(self) -> frozenset[str]:
        placement = self._coordinator.running.tables.placement
        return frozenset(host for hosts in placement.values() for host in hosts)

    def _lost(self, alive: Collection[str], *, thorough: bool) -> dict[str, list[int]]:
        running = self._coordinator.running
        lost: dict[str, list[int]] = {}
        for name, hosts in running.tables.placement.items():
            gone = [i for i, host in enumerate(hosts) if host not in alive]
            if thorough:
                left = [i for i in range(len(hosts)) if i not in gone]
                version = running.committed.version
                gone += running.tables.unusable(name, running.routing[name], version, left)
            gone += [i for i in self._unfinished.get(name, ()) if i not in gone]
            if gone:
                lost[name] = sorted(gone)
        return lost

    def _recover(self, lost: Mapping[str, Sequence[int]], alive: Collection[str]) -> None:
        running = self._coordinator.running
        _log.warning("state was lost, recovering: %s", dict(lost))
        described = {name: list(instances) for name, instances in lost.items()}
        with running.events.timed("recovery", lost=described) as details:
            # What is on its way may be newer than anything stored.
            running.checkpoints.settle()
            lost = self._unfinished = self._divide(lost)
            self._place(alive)
            began = time.perf_counter()
            start = self._restore(lost)
            details["restored"] = start
            details["restore_seconds"] = time.perf_counter() - began
            details["replayed"] = running.committed.version - start
            self._replay(lost, start)
        self._unfinished = {}
        running.checkpoints.start_anew(soon=True)

    def _divide(self, lost: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[int]]:
        """Let several instances share what each lost one had, if that was asked for."""
        running = self._coordinator.running
        parts = running.movement.parallelism
        if parts == 1:
            return lost
        divided: dict[str, Sequence[int]] = {}
        for name, instances in lost.items():
            before = running.routing[name]
            after = before.split(instances, parts)
            if after == before:
                divided[name] = instances
                continue
            after = running.renewed(after)
            kept = [i for i in range(before.instances) if i not in instances]
            running.tables.rename(name, before, after, kept)
            running.routing[name] = after
            divided[name] = [*instances, *range(before.instances, after.instances)]
        self._coordinator.reroute()
        return divided

    def _place(self, alive: Collection[str]) -> None:
        """Give instances without a node another one, if possible one that need not warm up."""
        running = self._coordinator.running
        assert running.cluster is not None
        alive = running.cluster.ready() & frozenset(alive) or alive
        instances = {name: routing.instances for name, routing in running.routing.items()}
        if running.placement.pool and not running.placement.idle(alive, running.tables.placement):
            running.events.add("pool empty", nodes=len(alive))
        placed = running.placement.place(instances, alive, running.tables.placement)
        running.tables.placement = placed
        running.remember()

    def _restore(self, lost: Mapping[str, Sequence[int]]) -> Version:
        """Make the lost tables from the newest checkpoint; the version they are at."""
        running = self._coordinator.running
        manifest = running.checkpoints.manifests.latest(upto=running.committed.version)
        start = NO_VERSION if manifest is None else manifest.version
        if manifest is None and self._windowed():
            kept = [version for name in lost for version in running.buffers.get(name, ())]
            start = Version(min(kept, default=running.committed.version + 1) - 1)
        for name, instances in lost.items():
            routing = running.routing[name]
            if manifest is None:
                running.tables.make(name, routing, start, instances=instances)
                continue
            try:
                parts = manifest.operators[name].parts
                running.tables.make(name, routing, start, parts, instances)
            except CheckpointError as error:
                raise StateMissing(f"the backup of {name!r} is lost as well: {error}") from error
        return start

    def _windowed(self) -> bool:
        """Whether batches that are too old to be kept do not matter any more."""
        policy = self._coordinator.running.checkpoints.policy
        return isinstance(policy, Never) and policy.window is not None

    def _replay(self, lost: Mapping[str, Sequence[int]], start: Version) -> None:
        coordinator = self._coordinator
        running = coordinator.running
        policy = running.checkpoints.policy
        replay = Replay(
            running.plan,
            running.buffers,
            coordinator.routers,
            running.tables,
            lost,
            running.next_fence(),
            coordinator.reports,
            isinstance(policy, Never) and policy.replay == "source",
        )
        with coordinator.watching():
            replay.run(start, running.committed.version)
