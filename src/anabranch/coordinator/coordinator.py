"""Batches, one after the other: run, delivered, committed."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pyspark.sql import DataFrame, SparkSession

from anabranch.checkpointing.policy import Never
from anabranch.coordinator.checkpoints import Checkpoints, Taken, Wanted
from anabranch.coordinator.cluster import Cluster
from anabranch.coordinator.commits import NOTHING, Commit, CommitLog
from anabranch.coordinator.events import Events
from anabranch.coordinator.failures import lost_worker, reshaped, translated
from anabranch.coordinator.frames import Frames, Step, read_in_part
from anabranch.coordinator.progress import Progress, operator_progress
from anabranch.coordinator.recovery import Recovery
from anabranch.coordinator.replay import Buffers
from anabranch.coordinator.routers import packing_of, router_of
from anabranch.coordinator.scaling import Scaling
from anabranch.coordinator.sentinel import watching
from anabranch.coordinator.tables import Tables
from anabranch.errors import AnabranchError, QueryFailed, Reshaped, StateMissing, StoreError
from anabranch.movement.policy import FromCheckpoint
from anabranch.nodes.folders import StateRoot
from anabranch.placement.even import Even
from anabranch.plan.graph import Plan, Stateful
from anabranch.spark.bind import Bound
from anabranch.spark.jobs import Jobs, tagged
from anabranch.spark.logs import SparkLogs, digest
from anabranch.spark.packed_shuffle import PackedRouter
from anabranch.spark.session import chose_partitions, tune
from anabranch.spark.shuffle import Router
from anabranch.spark.sinks.sink import Delivery, Replaceable, Sink
from anabranch.state.groups import Routing
from anabranch.state.keytypes import is_fixed
from anabranch.units import NO_VERSION, Version, microseconds
from anabranch.worker.reports import Report, Reports
from anabranch.worker.slices import CaptureOrder, SliceOrder
from anabranch.worker.task import OperatorTask

T = TypeVar("T")

_log = logging.getLogger("anabranch")
_ATTEMPTS = 8
_RECENT = 100
_PAUSE, _LONGEST_PAUSE = 0.05, 3.0
_MOST_BUFFERS = 200


@dataclass
class Running:
    """Everything about a query that a batch needs and that lasts longer than a batch."""

    query: str
    plan: Plan
    bounds: Mapping[Stateful, Bound]
    routing: dict[str, Routing]
    root: StateRoot
    tables: Tables
    checkpoints: Checkpoints
    commits: CommitLog
    logs: SparkLogs
    events: Events
    local: bool
    fence: int
    cluster: Cluster | None = None
    """The nodes, or None where the driver runs the tasks itself."""
    placement: Even = field(default_factory=Even)
    movement: FromCheckpoint = field(default_factory=FromCheckpoint)
    buffers: Buffers = field(default_factory=dict)
    needed: Version | None = None
    """Buffers after this version are kept for a change that is under way."""
    remember: Callable[[], None] = lambda: None
    """Notes routing and placement in the checkpoint folder."""
    trusted: bool = True
    """Whether everything that was written is there: the machine has not lost its power since."""
    committed: Commit = NOTHING
    replay_until: Version = NO_VERSION
    """Batches up to this one were delivered before; they are run again for their state alone."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _newest_epoch: int = 0

    def next_fence(self) -> int:
        """A fence above all before it."""
        with self._lock:
            self.fence += 1
            return self.fence

    def renewed(self, routing: Routing) -> Routing:
        """The same routing under an epoch that no other has had: it has tables of its own."""
        with self._lock:
            now = max((of.epoch for of in self.routing.values()), default=0)
            self._newest_epoch = max(self._newest_epoch, now, routing.epoch) + 1
            return replace(routing, epoch=self._newest_epoch)


class Unreported(QueryFailed):
    """An instance did not report on a batch: another attempt has to run it once more.

    A task can fail after Spark has kept the rows of an operator that it ran. What it reported is
    lost with it, and the next task finds the rows and does not run the operator again.
    """


class Coordinator:
    """Runs the batches of a query when Spark hands them over.

    ``turn`` is held during a batch: who holds it sees the state between two batches.
    """

    def __init__(self, running: Running, spark: SparkSession) -> None:
        self.running = running
        self.turn = threading.RLock()
        self.stopping = False
        self.failure: AnabranchError | None = None
        self.recent: deque[Progress] = deque(maxlen=_RECENT)
        self._context = spark.sparkContext
        self._reports = Reports(spark.sparkContext)
        self._first = True
        self._runs_batch: int | None = None
        self._unflushed_sinks = not all(
            isinstance(output.sink, Replaceable) for output in running.plan.outputs
        )
        # Asked of the user's session: in the query's own Spark sets what it noted at its start.
        self._chose_partitions = chose_partitions(spark)
        self._tuned: SparkSession | None = None
        self._computed_first = read_in_part(running.plan)
        self.routers: dict[Stateful, Router | PackedRouter] = {}
        self.reroute()
        self._recovery = Recovery(self)
        self.scaling = Scaling(self)
        self._narrow = all(
            is_fixed(field.type) for bound in running.bounds.values() for field in bound.input
        )
        self._operators = {bound.name: bound.operator for bound in running.bounds.values()}

    @property
    def reports(self) -> Reports:
        """Where the tasks of the query report."""
        return self._reports

    def reroute(self) -> None:
        """Send rows by the routing as it is now."""
        running = self.running
        for node, bound in running.bounds.items():
            routing = running.routing[bound.name]
            if node not in self.routers or self.routers[node].routing != routing:
                self.routers[node] = router_of(bound, routing)

    def run_batch(self, frame: DataFrame, batch: int) -> None:
        """Called by Spark for every micro-batch, and again for one it does not know to be done."""
        with self.turn:
            if self.stopping:
                raise QueryFailed("the query is being stopped")
            self._runs_batch = threading.get_ident()
            try:
                self._run(frame, Version(batch))
            except BaseException as error:
                self.failure = translated(error)
                raise self.failure from error
            finally:
                self._runs_batch = None

    def in_batch(self) -> bool:
        """Whether the thread that asks is running a batch, as a function of for_each_batch is."""
        return self._runs_batch == threading.get_ident()

    def check_outside(self, what: str) -> None:
        """Refuse what looks at state as it is between two batches, from inside a batch."""
        if self.in_batch():
            raise QueryFailed(
                f"{what} was called inside a batch, from a function given to for_each_batch, while "
                "the state is between two versions; call it from another thread"
            )

    def _run(self, frame: DataFrame, version: Version) -> None:
        committed = self.running.committed.version
        if version <= committed:
            return
        if version != committed + 1:
            raise StateMissing(
                f"Spark is at batch {version}, the last committed one is {committed}"
            )
        if self._tuned is not frame.sparkSession:
            tune(
                frame.sparkSession,
                narrow=self._narrow,
                local=self.running.cluster is None,
                partitions=self._partitions(),
            )
            self._tuned = frame.sparkSession
        started = time.perf_counter()
        replayed = version <= self.running.replay_until
        if self._unflushed_sinks and not replayed:
            # Whatever it is given under a version must be what it would be given again.
            self.running.logs.flush(version)
        reports, order, attempts = self._tried(frame, version)
        if replayed:
            self.running.committed = self._committed(version, reports.values())
            return
        self._commit(version, reports.values(), order)
        seconds, at = time.perf_counter() - started, time.time()
        self._trim()
        self._record(version, reports.values(), seconds, attempts, at)
        self._first = False

    def _partitions(self) -> int | None:
        """How many partitions a shuffle inside a transform has, unless the user has said so."""
        if self._chose_partitions:
            return None
        instances = [routing.instances for routing in self.running.routing.values()]
        return max(self._context.defaultParallelism, *instances, 1)

    def _tried(
        self, frame: DataFrame, version: Version
    ) -> tuple[dict[tuple[str, int], Report], Wanted | None, int]:
        """Run a batch until it succeeds: a lost worker process costs an attempt, not the query.

        Returns what the instances reported, what they were told to capture, and the attempts.
        """
        delivery = Delivery(self.running.query, version, self._first)
        batch_time = self.running.logs.batch_time(version)
        suspicious = False
        attempt = 0
        while attempt < _ATTEMPTS:
            attempt += 1
            if not self._healed(thorough=suspicious, last=attempt == _ATTEMPTS):
                suspicious = True
                time.sleep(_pause(attempt))
                continue
            # A recovery just now may have changed on what the next checkpoint builds.
            replayed = version <= self.running.replay_until
            order = None if replayed else self.running.checkpoints.order()
            steps = self._steps(version, batch_time, order)
            frames = Frames(self.running.plan, frame, steps, self._reports, self._computed_first)
            try:
                with self.watching(), tagged(self._context) as jobs:
                    for output in self.running.plan.outputs:
                        if replayed:
                            frames.discard(output)
                        else:
                            frames.deliver(output, delivery)
                    complete = self._complete(version, frames, jobs)
                self._keep(version, steps)
                return complete, order, attempt
            except Exception as error:
                _trim(steps.values())
                if not self.stopping and reshaped(error) and self._compute_first(frames.reshapable):
                    attempt -= 1  # not the fault of a worker
                    continue
                suspicious = isinstance(translated(error), StateMissing)
                curable = (
                    lost_worker(error)
                    or isinstance(error, Unreported)
                    or self._recovery.can_cure(error)
                )
                if self.stopping or attempt == _ATTEMPTS or not curable:
                    raise
                _log.warning(
                    "Batch %s failed for want of a process (attempt %s of %s); running it again.",
                    version,
                    attempt,
                    _ATTEMPTS,
                )
                if self.running.cluster is not None:
                    # Spark may not have noticed yet which executor is gone.
                    time.sleep(_pause(attempt))
            finally:
                frames.release()
        raise AssertionError("the last attempt returns or raises")

    def watching(self, tables: Tables | None = None) -> AbstractContextManager[None]:
        """Jobs that are started in this block end with any node that has one of the tables."""
        if self.running.cluster is None:
            return nullcontext()
        placement = (tables or self.running.tables).placement
        needed = {host for hosts in placement.values() for host in hosts}
        return watching(self._context, self.running.cluster.alive, needed)

    def at_rest(self, action: Callable[[], T]) -> T:
        """Do something with all tables, as they are between two batches.

        A node may have gone since the last batch; what it had is brought back first.
        """
        self.check_outside("the state of the query")
        with self.turn:
            if self.stopping:
                return action()
            for attempt in range(1, _ATTEMPTS + 1):
                last = attempt == _ATTEMPTS
                try:
                    if self._healed(thorough=attempt > 1, last=last):
                        return action()
                except (StoreError, StateMissing):
                    if self.running.cluster is None or last or self.stopping:
                        raise
                time.sleep(_pause(attempt))
        raise AssertionError("the last attempt returns or raises")

    def checkpoint(self) -> Version:
        """Save all state now, without waiting for a batch; the version that is stored."""
        self.check_outside("checkpoint()")
        with self.turn:
            taken = self.at_rest(self._captured)
            # Before any later version is on its way.
            self.running.checkpoints.store(taken)
        taken.stored.result()
        return taken.commit.version

    def _captured(self) -> Taken:
        running = self.running
        commit = running.committed
        fence = running.next_fence()
        files = running.tables.capture_all(running.routing, commit.version, fence)
        return Taken(commit, files)

    def restarted(self) -> None:
        """All tables are at the last committed version again."""
        self._recovery.forget()
        self.failure = None

    def _healed(self, *, thorough: bool, last: bool) -> bool:
        """Whether nothing is lost any more; not so if another node went during a recovery."""
        try:
            self._recovery.heal(thorough=thorough)
            return True
        except Exception as error:
            curable = isinstance(error, StoreError) or lost_worker(error)
            if last or self.stopping or not curable:
                raise
            _log.warning("a recovery failed, trying again: %s", error)
            return False

    def _keep(self, version: Version, steps: Mapping[Stateful, Step]) -> None:
        """Keep what was sent to operators, to be sent again."""
        for step in steps.values():
            if step.buffer is not None:
                self.running.buffers.setdefault(step.bound.name, {})[version] = step

    def _trim(self) -> None:
        """Let go of what was sent to operators and is in a checkpoint, or too old to matter."""
        running = self.running
        policy, newest = running.checkpoints.policy, running.committed.version
        window = policy.window if isinstance(policy, Never) else None
        stored = running.checkpoints.stored
        if running.needed is not None:
            stored = min(stored, running.needed)
        for name, kept in running.buffers.items():
            seen = [time for time in running.committed.times.get(name, ()) if time is not None]
            oldest = newest - _MOST_BUFFERS
            if newest in kept and seen:
                kept[newest].time = max(seen)
                if window is not None:
                    delay = kept[newest].bound.operator.watermark_delay
                    since = min(seen) - delay - microseconds(window, what="window")
                    oldest = min(v for v, step in kept.items() if (step.time or 0) >= since) - 1
            for version in [v for v in kept if v <= max(stored, oldest)]:
                step = kept.pop(version)
                if step.buffer is not None:
                    step.buffer.trim()

    def _steps(
        self, version: Version, batch_time: int, order: Wanted | None
    ) -> dict[Stateful, Step]:
        watermarks = self.running.committed.watermarks
        fence = self.running.next_fence()
        return {
            node: Step(
                bound,
                OperatorTask(
                    name=bound.name,
                    operator=bound.operator,
                    keys=bound.keys,
                    layout=bound.layout,
                    output=bound.output,
                    side=bound.input if bound.side else None,
                    root=self.running.root,
                    version=version,
                    fence=fence,
                    watermark=watermarks.of(bound.name, bound.operator),
                    batch_time=batch_time,
                    track_changes=self.running.checkpoints.policy.tracks_changes,
                    slices=self._slices(bound.name, order),
                    instances=tuple(range(self.running.routing[bound.name].instances)),
                    hosts=()
                    if self.running.cluster is None
                    else self.running.tables.placement[bound.name],
                    packing=packing_of(bound) if bound.packed else None,
                    ordered=bound.ordered,
                ),
                self.routers[node],
            )
            for node, bound in self.running.bounds.items()
        }

    def _slices(self, name: str, order: Wanted | None) -> tuple[tuple[SliceOrder, ...], ...]:
        """One slice for each instance of an operator."""
        running = self.running
        return tuple(
            (
                SliceOrder(
                    running.tables.name(name, running.routing[name], instance),
                    owned,
                    capture=None if order is None else CaptureOrder(owned, order.base),
                ),
            )
            for instance, owned in enumerate(running.routing[name].owners)
        )

    def _complete(
        self, version: Version, frames: Frames, jobs: Jobs
    ) -> dict[tuple[str, int], Report]:
        """The reports of all instances; a batch without one of them has not happened.

        Where a sink or a transform read only a part of the rows, operators are run to their end.
        """
        reports = self._reports.take(version)
        missing = self._missing(reports)
        if not missing:
            return reports
        if frames.reshapable - self._computed_first and jobs.any_failed():
            raise Reshaped(
                f"batch {version}: a job failed inside a function of the query, which went on"
            )
        self._compute_first(missing)
        frames.finish(missing)
        reports |= self._reports.take(version)
        for node in self._missing(reports):
            raise Unreported(
                f"operator {node.name!r}: not all of its instances reported on batch {version}"
            )
        return reports

    def _missing(self, reports: Mapping[tuple[str, int], Report]) -> set[Stateful]:
        return {
            node
            for node in self.running.bounds
            for instance in range(self.running.routing[node.name].instances)
            if (node.name, instance) not in reports
        }

    def _compute_first(self, nodes: Collection[Stateful]) -> bool:
        """Compute these operators by jobs of their own from now on; whether any was not before."""
        new = set(nodes) - self._computed_first
        self._computed_first |= new
        if new:
            names = ", ".join(sorted(node.name for node in new))
            _log.info("The results of %s are computed before they are handed on.", names)
        return bool(new)

    def _commit(self, version: Version, reports: Iterable[Report], order: Wanted | None) -> None:
        delivery = Delivery(self.running.query, version, self._first)
        for output in self.running.plan.outputs:
            sink: Sink = output.sink
            sink.commit(delivery)
        commit = self._committed(version, reports)
        self.running.commits.append(commit)
        self.running.committed = commit
        taken = _taken(commit, order, reports)
        slices = [each for report in reports for each in report.slices]
        failed = [each.not_captured for each in slices if each.not_captured is not None]
        if failed and taken is not None:
            self.running.checkpoints.committed(None)
            self.running.checkpoints.skipped(taken, failed[0])
        else:
            self.running.checkpoints.committed(taken)

    def _committed(self, version: Version, reports: Iterable[Report]) -> Commit:
        watermarks = self.running.committed.watermarks.advanced(self._operators, reports)
        return Commit(version, watermarks.times, digest(self.running.logs.offsets(version)))

    def _record(
        self,
        version: Version,
        reports: Iterable[Report],
        seconds: float,
        attempts: int,
        at: float,
    ) -> None:
        watermarks = self.running.committed.watermarks
        operators = tuple(
            operator_progress(name, reports, watermarks.of(name, operator))
            for name, operator in self._operators.items()
        )
        self.recent.append(
            Progress(version, seconds, operators, self.running.checkpoints.stored, attempts, at)
        )


def _trim(steps: Iterable[Step]) -> None:
    """Let go of what a batch that failed has sent: another attempt sends it anew."""
    for step in steps:
        if step.buffer is not None:
            step.buffer.trim()


def _pause(attempt: int) -> float:
    return min(_LONGEST_PAUSE, _PAUSE * float(2**attempt))


def _taken(commit: Commit, order: Wanted | None, reports: Iterable[Report]) -> Taken | None:
    if order is None:
        return None
    files: dict[str, dict[int, str]] = {}
    for report in reports:
        for each in report.slices:
            if each.captured is not None:
                files.setdefault(report.operator, {})[report.instance] = each.captured
    return Taken(commit, files)
