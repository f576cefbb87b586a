"""Running a batch: Spark jobs run all operators and write to the sinks, then the commit follows.

The protocols decide when a batch runs; see :mod:`anabranch.coordinator.handover`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from anabranch.coordinator.commits import Commit
from anabranch.coordinator.completion import Completion
from anabranch.coordinator.failures import lost_worker, reshaped, translated
from anabranch.coordinator.frames import Frames, Step, packing_of, read_in_part, router_of
from anabranch.coordinator.handover import HandOver
from anabranch.coordinator.ledger import Ledger
from anabranch.coordinator.loop import Loop
from anabranch.coordinator.progress import Progress, fragments_progress, operator_progress
from anabranch.coordinator.sent import Sent
from anabranch.coordinator.watermarks import Times
from anabranch.errors import AnabranchError, Deposed, QueryFailed, Reshaped, StateMissing
from anabranch.nodes.folders import StateRoot
from anabranch.nodes.requests import TableName
from anabranch.plan.graph import Plan, Stateful
from anabranch.protocols.events import (
    BatchCommitted,
    BatchFailed,
    Cause,
    SliceReport,
)
from anabranch.protocols.model import Routed, Slice, SliceId
from anabranch.protocols.orders import CancelBatch, Captured, CaptureWanted, RunBatch
from anabranch.spark.bind import Bound
from anabranch.spark.jobs import Jobs, Stages, tagged
from anabranch.spark.packed_shuffle import PackedRouter
from anabranch.spark.session import chose_partitions, tune
from anabranch.spark.shuffle import Router
from anabranch.state.keytypes import is_fixed
from anabranch.units import NO_VERSION, Version
from anabranch.worker.reports import InstanceReport, Reports
from anabranch.worker.slices import CaptureOrder, SliceOrder
from anabranch.worker.task import OperatorTask

_log = logging.getLogger("anabranch")
_RECENT = 100
_LOST = "it was cancelled, because a slice that it needs was lost"

HERE = ""
"""The host of everything where the driver runs the tasks itself."""


@dataclass(frozen=True)
class Program:
    """The settings of a query that are the same for all of its batches."""

    query: str
    plan: Plan
    bounds: Mapping[Stateful, Bound]
    root: StateRoot
    local: bool
    """Whether the driver runs all tasks itself."""
    epoch: int
    tracks_changes: bool
    window: int | None = None
    """Of what was sent, only rows of so much event time matter, in microseconds."""

    def bound(self, operator: str) -> Bound:
        """An operator by its name."""
        return next(bound for bound in self.bounds.values() if bound.name == operator)


class Batches(HandOver):
    """Runs the batches of a query as jobs of Spark."""

    def __init__(self, program: Program, loop: Loop, ledger: Ledger, spark: SparkSession) -> None:
        super().__init__(loop)
        self.program = program
        self.reports = Reports(spark.sparkContext)
        self.sent = Sent(program.window)
        """What batches have sent, kept to be sent again."""
        self.recent: deque[Progress] = deque(maxlen=_RECENT)
        self._ledger = ledger
        self._context = spark.sparkContext
        self._stages = Stages(spark.sparkContext)
        self._reshapable: set[Stateful] = set()
        self._committed_at = time.perf_counter()
        sinks = [output.sink for output in program.plan.outputs]
        self.completion = Completion(program.query, sinks, ledger)
        """Brings what was computed to its sinks, and commits it."""
        # Asked of the user's session: in the query's own Spark sets what it noted at its start.
        self._chose_partitions = chose_partitions(spark)
        self._tuned: Any = None
        """The session of Spark's query, in the JVM: every batch has another object for it here."""
        self._computed_first = read_in_part(program.plan)
        self._jobs: Jobs | None = None
        self._routers: dict[str, Router | PackedRouter] = {}
        self._narrow = all(
            is_fixed(field.type) for bound in program.bounds.values() for field in bound.input
        )

    def resume(self, commit: Commit) -> None:
        """See :meth:`HandOver.resume`."""
        super().resume(commit)
        self.sent.clear()

    def cancel(self, order: CancelBatch) -> None:
        """See :meth:`HandOver.cancel`."""
        super().cancel(order)
        with self._lock:
            if self._jobs is not None:
                self._jobs.cancel()

    def trim(self, operator: str, upto: Version) -> None:
        """See :meth:`HandOver.trim`."""
        self.sent.trim(operator, upto)

    def router(self, operator: str, routed: Routed) -> Router | PackedRouter:
        """The router that sends rows to the instances of an operator."""
        known = self._routers.get(operator)
        if known is None or known.routing != routed.routing:
            known = router_of(self.program.bound(operator), routed.routing)
            self._routers[operator] = known
        return known

    # An attempt

    def attempt(
        self, frame: DataFrame, order: RunBatch, began: float, attempts: int
    ) -> BatchCommitted | BatchFailed:
        """See :meth:`HandOver.attempt`."""
        steps: dict[Stateful, Step] = {}
        try:
            while True:
                try:
                    return self._run_and_commit(frame, order, steps, began, attempts)
                except Exception as error:
                    _drop_buffers(steps)
                    if not (reshaped(error) and self._compute_first(self._reshapable)):
                        raise
        except Exception as error:
            self.failure = translated(error)
            missing: tuple[SliceId, ...] = ()
            if isinstance(self.failure, StateMissing):
                missing = tuple(map(slice_of, self.failure.tables))
            cause = _cause(error, self.failure, cancelled=self._cancelled)
            reason = _LOST if self._cancelled and cause is Cause.PROCESS_LOST else str(self.failure)
            return BatchFailed(order.version, order.fence, cause, reason, missing)

    def _run_and_commit(
        self,
        frame: DataFrame,
        order: RunBatch,
        steps: dict[Stateful, Step],
        began: float,
        attempts: int,
    ) -> BatchCommitted:
        version = order.version
        self._tune(frame, order)
        with self.completion.begun(order) as delivery:
            steps.update(self._steps(order))
            frames = Frames(self.program.plan, frame, steps, self.reports, self._computed_first)
            try:
                with self._cancellable() as jobs:
                    for output in self.program.plan.outputs:
                        if order.deliver:
                            frames.deliver(output, delivery)
                        else:
                            frames.discard(output)
                    reports = self._complete(order, frames, jobs)
                self._await_tasks(version, reports.values())
            finally:
                self._reshapable = frames.reshapable
                frames.release()
            commit = self.completion.end(order, delivery(), self._times(reports.values()))
        self._commit = commit
        self.sent.keep(version, steps, commit.times)
        self._record(version, reports.values(), time.perf_counter() - began, attempts)
        told = slices_told(order, reports.values())
        obsolete = self.sent.obsolete(version, commit.times)
        now = time.perf_counter()
        loads = loads_of(reports.values(), now - self._committed_at)
        self._committed_at = now
        return BatchCommitted(version, order.fence, told, obsolete, loads)

    def _tune(self, frame: DataFrame, order: RunBatch) -> None:
        session = frame.sparkSession._jsparkSession
        if self._tuned != session:
            instances = [of.routing.instances for of in order.routed.values()]
            tune(
                frame.sparkSession,
                narrow=self._narrow,
                local=self.program.local,
                partitions=None
                if self._chose_partitions
                else max(self._context.defaultParallelism, *instances, 1),
            )
            self._tuned = session

    def _steps(self, order: RunBatch) -> dict[Stateful, Step]:
        batch_time = self._ledger.spark.batch_time(order.version)
        wanted = {each.slice: each for each in order.captures}
        return {
            node: Step(
                bound,
                _task(self.program, bound, order, self._commit, batch_time, wanted),
                self.router(bound.name, order.routed[bound.name]),
            )
            for node, bound in self.program.bounds.items()
        }

    def _complete(
        self, order: RunBatch, frames: Frames, jobs: Jobs
    ) -> dict[tuple[str, int], InstanceReport]:
        """The reports of all instances. A batch without all reports is not committed.

        If a sink or a transform read only a part of the rows, the rest is computed here.
        """
        reports = self.reports.take(order.version)
        missing = _unreported(self.program, order, reports)
        if not missing:
            return reports
        if frames.reshapable - self._computed_first and jobs.any_failed():
            raise Reshaped(
                f"batch {order.version}: a function of the query caught the error of a failed "
                "Spark job"
            )
        self._compute_first(missing)
        frames.finish(missing)
        reports |= self.reports.take(order.version)
        for node in _unreported(self.program, order, reports):
            raise Unreported(
                f"operator {node.name!r}: the reports of some instances on batch {order.version} "
                "are missing"
            )
        return reports

    def _await_tasks(self, version: Version, reports: Iterable[InstanceReport]) -> None:
        """Wait until nobody is left who could begin the batch's version of a table once more.

        A later attempt at a task has the right to roll back what an earlier one has finished. The
        next batch would find the state of before this one, and have to recover it.
        """
        if not self._stages.ended({report.stage for report in reports}):
            raise StillRunning(
                f"batch {version} is computed, but another attempt at one of its tasks still runs; "
                "an attempt of the batch that follows keeps it from the state"
            )

    def _compute_first(self, nodes: Collection[Stateful]) -> bool:
        """Compute these operators by Spark jobs of their own from now on. Whether any is new."""
        new = set(nodes) - self._computed_first
        self._computed_first |= new
        if new:
            names = ", ".join(sorted(node.name for node in new))
            _log.info(
                "A sink or transform reads only some rows of %s, or changes their partitions. From "
                "now on a Spark job of its own computes all of these rows first.",
                names,
            )
        return bool(new)

    @contextmanager
    def _cancellable(self) -> Iterator[Jobs]:
        with tagged(self._context) as jobs:
            with self._lock:
                self._jobs = jobs
                if self._cancelled:
                    jobs.cancel()
            try:
                yield jobs
            finally:
                with self._lock:
                    self._jobs = None

    # What follows from a batch

    def _times(self, reports: Iterable[InstanceReport]) -> Times:
        operators = {bound.name: bound.operator for bound in self.program.bounds.values()}
        return self._commit.watermarks.advanced(operators, reports).times

    def _record(
        self, version: Version, reports: Collection[InstanceReport], seconds: float, attempts: int
    ) -> None:
        watermarks = self._commit.watermarks
        operators = tuple(
            operator_progress(b.name, reports, watermarks.of(b.name, b.operator))
            for b in self.program.bounds.values()
        )
        published = self._loop.query.published
        stored = published[-1].version if published else NO_VERSION
        now, fragments = time.time(), fragments_progress(self._loop.query.policies.backup)
        self.recent.append(Progress(version, seconds, operators, stored, attempts, now, fragments))


class Unreported(QueryFailed):
    """The report of an instance is missing, so the batch needs another attempt.

    A task can fail after Spark has cached the rows of its operator. Its report is lost, and the
    next task reads the cached rows instead of running the operator again.
    """


class StillRunning(QueryFailed):
    """Tasks of a batch run on though their jobs are over; another attempt has to fence them off."""


def slice_order(each: Slice, wanted: CaptureWanted | None) -> SliceOrder:
    """The order to a task to run a slice."""
    capture = None
    if wanted is not None:
        capture = CaptureOrder(wanted.groups, wanted.base, wanted.clean)
    return SliceOrder(table_of(each), each.groups, each.leaving, capture)


def table_of(each: Slice) -> TableName:
    """The name of a slice's table on its node."""
    return TableName(f"{each.operator}/{each.id}")


def slice_of(table: str) -> SliceId:
    """The id of the slice that a table belongs to."""
    return SliceId(table.rpartition("/")[2])


def loads_of(reports: Iterable[InstanceReport], seconds: float) -> dict[str, float]:
    """For each operator the share of some seconds for which its busiest instance used a core."""
    loads: dict[str, float] = {}
    for report in reports:
        load = report.cpu_seconds / max(seconds, 1e-6)
        loads[report.operator] = max(load, loads.get(report.operator, 0.0))
    return loads


def slices_told(order: RunBatch, reports: Iterable[InstanceReport]) -> dict[SliceId, SliceReport]:
    """The reports of instances, by slice."""
    slices = {each.id: each for each in order.slices}
    wanted = {each.slice: each for each in order.captures}
    told: dict[SliceId, SliceReport] = {}
    for report in reports:
        for found in report.slices:
            each = slices[slice_of(found.table)]
            captured = None
            if found.captured is not None:
                asked = wanted[each.id]
                captured = Captured(
                    found.captured,
                    each.id,
                    each.operator,
                    each.node,
                    order.version,
                    found.base,
                    asked.groups,
                    asked.clean,
                )
            told[each.id] = SliceReport(
                captured,
                found.not_captured,
                found.state_rows,
                found.changed,
                found.left_to_shed,
                found.state_bytes,
            )
    return told


def _drop_buffers(steps: dict[Stateful, Step]) -> None:
    """Drop the output buffers of a failed attempt: the next attempt sends its rows again."""
    for step in steps.values():
        step.trim()
    steps.clear()


def _task(
    program: Program,
    bound: Bound,
    order: RunBatch,
    commit: Commit,
    batch_time: int,
    wanted: Mapping[SliceId, CaptureWanted],
) -> OperatorTask:
    """The task of an operator in the batch after the last commit."""
    routed = order.routed[bound.name]
    slices: list[list[SliceOrder]] = [[] for _ in routed.hosts]
    mine = [each for each in order.slices if each.operator == bound.name]
    for each in sorted(mine, key=lambda s: s.groups.ranges):
        slices[each.instance].append(slice_order(each, wanted.get(each.id)))
    return OperatorTask(
        name=bound.name,
        operator=bound.operator,
        keys=bound.keys,
        layout=bound.layout,
        output=bound.output,
        late=bound.input if bound.late else None,
        root=program.root,
        version=order.version,
        fence=order.fence,
        watermark=commit.watermarks.of(bound.name, bound.operator),
        batch_time=batch_time,
        track_changes=program.tracks_changes,
        instances=tuple(range(routed.routing.instances)),
        slices=tuple(tuple(each) for each in slices),
        hosts=() if program.local else routed.hosts,
        packing=packing_of(bound) if bound.packed else None,
        ordered=bound.ordered,
    )


def _unreported(
    program: Program, order: RunBatch, reports: Mapping[tuple[str, int], InstanceReport]
) -> set[Stateful]:
    """The operators with missing reports of instances."""
    return {
        node
        for node in program.bounds
        for instance in range(order.routed[node.name].routing.instances)
        if (node.name, instance) not in reports
    }


def _cause(error: Exception, failure: AnabranchError, *, cancelled: bool) -> Cause:
    """The cause of a failed attempt: ``error`` as raised, ``failure`` as users see it."""
    if isinstance(failure, Deposed):
        return Cause.FENCED
    if isinstance(failure, StateMissing):
        return Cause.STATE_MISSING
    if cancelled or lost_worker(error) or isinstance(error, Unreported | StillRunning):
        return Cause.PROCESS_LOST
    return Cause.ERROR
