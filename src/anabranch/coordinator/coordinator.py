"""Batches, one after the other: run, delivered, committed."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession

from anabranch.coordinator.checkpoints import Checkpoints, Taken
from anabranch.coordinator.commits import NOTHING, Commit, CommitLog
from anabranch.coordinator.failures import lost_worker, translated
from anabranch.coordinator.frames import Frames, Step
from anabranch.coordinator.progress import Progress, operator_progress
from anabranch.coordinator.tables import Tables
from anabranch.errors import QueryFailed, StateMissing
from anabranch.plan.bind import Bound
from anabranch.plan.graph import Plan, Stateful
from anabranch.spark.logs import SparkLogs
from anabranch.spark.reports import Report, Reports
from anabranch.spark.session import tune
from anabranch.spark.shuffle import Router
from anabranch.spark.sinks.sink import Delivery
from anabranch.spark.task import CaptureOrder, OperatorTask
from anabranch.state.groups import Routing
from anabranch.state.keytypes import is_fixed
from anabranch.units import NO_VERSION, Version

_log = logging.getLogger("anabranch")
_ATTEMPTS = 5
_RECENT = 100


@dataclass
class Running:
    """Everything about a query that a batch needs and that lasts longer than a batch."""

    query: str
    plan: Plan
    bounds: Mapping[Stateful, Bound]
    routing: Mapping[str, Routing]
    tables: Tables
    checkpoints: Checkpoints
    commits: CommitLog
    logs: SparkLogs
    local: bool
    fence: int
    committed: Commit = NOTHING
    replay_until: Version = NO_VERSION
    """Batches up to this one were delivered before; they are run again for their state alone."""


class Coordinator:
    """Runs the batches of a query when Spark hands them over.

    ``turn`` is held during a batch: who holds it sees the state between two batches.
    """

    def __init__(self, running: Running, spark: SparkSession) -> None:
        self.running = running
        self.turn = threading.RLock()
        self.stopping = False
        self.failure: BaseException | None = None
        self.recent: deque[Progress] = deque(maxlen=_RECENT)
        self._reports = Reports(spark.sparkContext)
        self._first = True
        self._tuned: SparkSession | None = None
        self._routers = {
            node: Router(bound.hash, running.routing[bound.name], ordered=bound.ordered)
            for node, bound in running.bounds.items()
        }
        self._narrow = all(
            is_fixed(field.type) for bound in running.bounds.values() for field in bound.input
        )
        self._operators = {bound.name: bound.operator for bound in running.bounds.values()}

    def run_batch(self, frame: DataFrame, batch: int) -> None:
        """Called by Spark for every micro-batch, and again for one it does not know to be done."""
        with self.turn:
            if self.stopping:
                raise QueryFailed("the query is being stopped")
            try:
                self._run(frame, Version(batch))
            except BaseException as error:
                self.failure = translated(error)
                raise self.failure from error

    def _run(self, frame: DataFrame, version: Version) -> None:
        committed = self.running.committed.version
        if version <= committed:
            return
        if version != committed + 1:
            raise StateMissing(
                f"Spark is at batch {version}, the last committed one is {committed}"
            )
        if self._tuned is not frame.sparkSession:
            tune(frame.sparkSession, narrow=self._narrow)
            self._tuned = frame.sparkSession
        started = time.perf_counter()
        replayed = version <= self.running.replay_until
        order = None if replayed else self.running.checkpoints.order()
        reports, attempts = self._tried(frame, version, order)
        if replayed:
            self.running.committed = self._committed(version, reports.values())
            return
        self._commit(version, reports.values(), order)
        self._record(version, reports.values(), time.perf_counter() - started, attempts)
        self._first = False

    def _tried(
        self, frame: DataFrame, version: Version, order: CaptureOrder | None
    ) -> tuple[dict[tuple[str, int], Report], int]:
        """Run a batch until it succeeds: a lost worker process costs an attempt, not the query."""
        delivery = Delivery(self.running.query, version, self._first)
        batch_time = self.running.logs.batch_time(version)
        for attempt in range(1, _ATTEMPTS + 1):
            self.running.fence += 1
            frames = Frames(
                self.running.plan, frame, self._steps(version, batch_time, order), self._reports
            )
            try:
                for output in self.running.plan.outputs:
                    if version <= self.running.replay_until:
                        frames.discard(output)
                    else:
                        frames.deliver(output, delivery)
                return self._complete(version), attempt
            except Exception as error:
                if self.stopping or attempt == _ATTEMPTS or not lost_worker(error):
                    raise
                _log.warning("batch %s: a worker was lost, trying again", version)
            finally:
                frames.release()
        raise AssertionError("the last attempt returns or raises")

    def _steps(
        self, version: Version, batch_time: int, order: CaptureOrder | None
    ) -> dict[Stateful, Step]:
        watermarks = self.running.committed.watermarks
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
                    folder=str(
                        self.running.tables.folder(bound.name, self.running.routing[bound.name])
                    ),
                    version=version,
                    fence=self.running.fence,
                    watermark=watermarks.of(bound.name, bound.operator),
                    batch_time=batch_time,
                    track_changes=self.running.checkpoints.policy.tracks_changes,
                    groups=self.running.routing[bound.name].owners,
                    capture=order,
                ),
                self._routers[node],
            )
            for node, bound in self.running.bounds.items()
        }

    def _complete(self, version: Version) -> dict[tuple[str, int], Report]:
        """The reports of all instances; a batch without one of them has not happened."""
        reports = self._reports.take(version)
        for name, routing in self.running.routing.items():
            for instance in range(routing.instances):
                if (name, instance) not in reports:
                    raise QueryFailed(
                        f"operator {name!r}, instance {instance}, did not report on batch "
                        f"{version}; does a sink read only a part of its input?"
                    )
        return reports

    def _commit(
        self, version: Version, reports: Iterable[Report], order: CaptureOrder | None
    ) -> None:
        delivery = Delivery(self.running.query, version, self._first)
        for output in self.running.plan.outputs:
            output.sink.commit(delivery)
        commit = self._committed(version, reports)
        self.running.commits.append(commit)
        self.running.committed = commit
        self.running.checkpoints.committed(_taken(commit, order, reports))

    def _committed(self, version: Version, reports: Iterable[Report]) -> Commit:
        watermarks = self.running.committed.watermarks.advanced(self._operators, reports)
        return Commit(version, watermarks.times)

    def _record(
        self, version: Version, reports: Iterable[Report], seconds: float, attempts: int
    ) -> None:
        watermarks = self.running.committed.watermarks
        operators = tuple(
            operator_progress(name, reports, watermarks.of(name, operator))
            for name, operator in self._operators.items()
        )
        self.recent.append(
            Progress(version, seconds, operators, self.running.checkpoints.stored, attempts)
        )


def _taken(commit: Commit, order: CaptureOrder | None, reports: Iterable[Report]) -> Taken | None:
    if order is None:
        return None
    files: dict[str, tuple[str, ...]] = {}
    for report in reports:
        if report.captured is not None:
            files[report.operator] = (*files.get(report.operator, ()), report.captured)
    return Taken(commit, files)
