"""A query that runs: watching it, asking it, stopping it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from anabranch.backup.parts import state_rows
from anabranch.backup.store import Backup
from anabranch.backup.upstream import Upstream
from anabranch.checkpointing.policy import Checkpointing, Never
from anabranch.coordinator import startup
from anabranch.coordinator.coordinator import Coordinator, Running
from anabranch.coordinator.events import Event
from anabranch.coordinator.failures import session_gone, translated
from anabranch.coordinator.identity import DriverLock
from anabranch.coordinator.progress import Latency, Progress
from anabranch.coordinator.startup import Place
from anabranch.coordinator.tables import HERE
from anabranch.errors import AnabranchError, PlanError, QueryFailed, StateMissing, StoreError
from anabranch.movement.policy import FromCheckpoint
from anabranch.nodes.tls import Tls
from anabranch.placement.even import Even
from anabranch.plan.graph import Plan, Stateful
from anabranch.spark import quiet
from anabranch.spark.bind import Bound
from anabranch.spark.session import log_settings
from anabranch.spark.sinks.simple import MemorySink
from anabranch.spark.sources import combine
from anabranch.spark.types import spark_rows, spark_schema
from anabranch.state.checkpoint import read
from anabranch.state.groups import Routing
from anabranch.units import Version

_log = logging.getLogger("anabranch")
_RECOVERIES = 5


@dataclass(frozen=True)
class Settings:
    """How a query is to be run; see :meth:`anabranch.Query.start`."""

    folder: str | Path
    checkpointing: Checkpointing
    backup: Backup | Upstream | None
    placement: Even
    movement: FromCheckpoint
    instances: int | None
    trigger: Mapping[str, Any] | None
    state_folder: str | Path | None
    tls: Tls | None
    name: str | None


class RunningQuery:
    """A started query. All methods may be called from any thread."""

    def __init__(
        self,
        place: Place,
        spark: SparkSession,
        settings: Settings,
        running: Running,
        lock: DriverLock,
    ) -> None:
        self._place = place
        self._spark = spark
        self._settings = settings
        self._running = running
        self._lock = lock
        self._coordinator = Coordinator(running, spark)
        self._combined = combine([source.frame for source in running.plan.sources()])
        self._ended = threading.Event()
        self._asked_to_stop = threading.Event()
        self._failure: AnabranchError | None = None
        self._spark_query: StreamingQuery | None = None
        self._supervisor = threading.Thread(target=self._supervise, name="anabranch", daemon=True)

    @classmethod
    def start(
        cls, plan: Plan, bounds: Mapping[Stateful, Bound], spark: SparkSession, settings: Settings
    ) -> RunningQuery:
        """Take the query over, recover its state, and let it run."""
        place = Place.of(settings.folder, settings.backup, settings.state_folder, settings.tls)
        instances = settings.instances or spark.sparkContext.defaultParallelism
        before, routing = startup.identify(place, bounds, instances)
        running, lock = startup.assemble(
            place,
            plan,
            bounds,
            settings.checkpointing,
            settings.placement,
            settings.movement,
            before,
            routing,
            spark,
        )
        query = cls(place, spark, settings, running, lock)
        try:
            query._recover(before.routing)
            query._launch()
        except BaseException:
            query._release()
            raise
        query._supervisor.start()
        return query

    @property
    def id(self) -> str:
        """The query's id, the same after every restart from its folder."""
        return self._running.query

    @property
    def spark_query(self) -> StreamingQuery:
        """Spark's handle of the query; its progress also reaches Spark's listeners."""
        if self._spark_query is None:
            raise QueryFailed("the query has not been started")
        return self._spark_query

    @property
    def status(self) -> str:
        """``"running"``, ``"stopped"``, or ``"failed: ..."``."""
        if not self._ended.is_set():
            return "running"
        return "stopped" if self._failure is None else f"failed: {self._failure}"

    @property
    def exception(self) -> AnabranchError | None:
        """Why the query failed, if it did."""
        return self._failure

    @property
    def version(self) -> Version:
        """The last committed micro-batch."""
        return self._running.committed.version

    @property
    def progress(self) -> Progress | None:
        """The last committed batch."""
        recent = self.recent_progress
        return recent[-1] if recent else None

    @property
    def recent_progress(self) -> list[Progress]:
        """The last hundred batches, oldest first."""
        return list(self._coordinator.recent)

    @property
    def latency(self) -> Latency:
        """Percentiles of the time that recent batches took."""
        return Latency.over(self.recent_progress)

    def explain(self) -> str:
        """The plan as a tree of text."""
        return self._running.plan.tree()

    def state(self, operator: str) -> DataFrame:
        """The state of an operator as it is after the last committed batch.

        Key columns, ``key_group``, and the state's columns. The rows are copied between two
        batches, so the stream waits for the copy; read a checkpoint with
        ``spark.read.format("anabranch.state")`` where that would be too long.
        """
        rows = spark_rows(self.state_table(operator))
        return self._spark.createDataFrame(rows, spark_schema(rows.schema))

    def state_table(self, operator: str) -> pa.Table:
        """The same as :meth:`state`, as an Arrow table with the types of the state."""
        routing = self._running.routing.get(operator)
        if routing is None:
            raise PlanError(
                f"no operator {operator!r}; the query has {sorted(self._running.routing)}"
            )
        return self._coordinator.at_rest(lambda: self._rows_of(operator))

    def _rows_of(self, operator: str) -> pa.Table:
        running, tables = self._running, self._running.tables
        version, fence = running.committed.version, running.next_fence()
        files = tables.capture(operator, running.routing[operator], version, fence)
        data = tables.fetch(operator, files)
        return state_rows([read(pa.py_buffer(each), name=operator) for each in data])

    def memory(self, name: str) -> DataFrame:
        """The rows that have come into the memory sink of this name."""
        rows = self.memory_table(name)
        return self._spark.createDataFrame(rows, spark_schema(rows.schema))

    def memory_table(self, name: str) -> pa.Table:
        """The same as :meth:`memory`, as an Arrow table."""
        for output in self._running.plan.outputs:
            if isinstance(output.sink, MemorySink) and output.sink.name == name:
                return output.sink.table()
        raise PlanError(f"the query has no memory sink {name!r}; add one with to_memory({name!r})")

    def checkpoint(self) -> Version:
        """Save all state now and wait until it is stored. Returns the version saved."""
        return self._coordinator.checkpoint()

    def scale(self, operator: str, instances: int) -> None:
        """Divide an operator over another number of instances while the stream goes on.

        Returns when rows are sent to the new instances. If it fails the query goes on as before.
        """
        if operator not in self._running.routing:
            raise PlanError(
                f"no operator {operator!r}; the query has {sorted(self._running.routing)}"
            )
        self._coordinator.scaling.scale(operator, instances)

    def rebalance(self) -> None:
        """Spread instances over the nodes that there are now, such as ones that have come back."""
        self._coordinator.scaling.rebalance()

    @property
    def routing(self) -> Mapping[str, Routing]:
        """Which key groups each instance of each operator owns."""
        return dict(self._running.routing)

    @property
    def nodes(self) -> Mapping[str, tuple[str, ...]]:
        """The instances on each node that is alive, as ``operator/instance``."""
        cluster = self._running.cluster
        placement = self._running.tables.placement
        alive = {HERE} if cluster is None else cluster.alive()
        return {
            host: tuple(
                f"{name}/{i}"
                for name, hosts in placement.items()
                for i, placed in enumerate(hosts)
                if placed == host
            )
            for host in sorted(alive)
        }

    @property
    def events(self) -> list[Event]:
        """What has happened to the query in this run: failures, recoveries, checkpoints, ..."""
        return list(self._running.events.recent)

    def await_termination(self, timeout: float | None = None) -> bool:
        """Wait until the query ends, or for so many seconds. Raises if it failed.

        Returns whether it has ended.
        """
        ended = self._ended.wait(timeout)
        if ended and self._failure is not None:
            raise self._failure
        return ended

    def process_all_available(self) -> None:
        """Wait until everything that is in the sources now has been committed. For tests."""
        while not self._ended.is_set():
            query = self.spark_query
            try:
                query.processAllAvailable()
                return
            except Exception:
                # The query failed, or is being restarted after its state was lost; the
                # supervisor knows which.
                if self._ended.wait(0.1):
                    break
                if query is self.spark_query and query.isActive:
                    raise
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the query after the batch it is in, and save its state.

        Its memory is given back once the state is stored. With :class:`~anabranch.Never` the state
        is left in memory, so that the query can be started again on this machine.

        A function that runs in a batch may call this too: it returns at once, and the query ends
        after that batch.
        """
        self._asked_to_stop.set()
        if self._coordinator.in_batch():
            # Spark's stop waits for the batch, which waits for the function that asks for it.
            threading.Thread(target=self._stop, name="anabranch-stop", daemon=True).start()
            return
        self._stop()
        if threading.current_thread() is not self._supervisor:
            self._supervisor.join()

    def _stop(self) -> None:
        with self._coordinator.turn:
            self._coordinator.stopping = True
        if self._ended.is_set():
            return
        try:
            with quiet.stopping(self._spark):
                self.spark_query.stop()
        except Exception as error:
            if not session_gone(error):
                raise
            _log.warning("Spark's query cannot be stopped, its session is gone: %s", error)

    def _run_batch(self, frame: DataFrame, batch: int) -> None:
        """Called by Spark for every micro-batch."""
        if self._asked_to_stop.is_set():
            raise QueryFailed("the query is being stopped")
        self._coordinator.run_batch(frame, batch)

    def _recover(self, before: Any) -> None:
        again = startup.recover(self._place, self._running, before)
        if again is not None:
            start = self._running.committed.version
            _log.warning(
                "state restored at version %s; running batches up to %s again", start, again.target
            )
            again.replay(start, self._place.store, self._running.logs, self._run_one)
        startup.settle(self._place, self._running)
        self._coordinator.restarted()

    def _writer(self) -> Any:
        return (
            self._combined.writeStream.foreachBatch(self._run_batch)
            .option("checkpointLocation", self._place.spark)
            .outputMode("append")
        )

    def _run_one(self) -> None:
        with log_settings(self._spark, local=self._running.local):
            once = self._writer().trigger(once=True).start()
        try:
            once.awaitTermination()
        except Exception as error:
            raise self._coordinator.failure or error from error

    def _launch(self) -> None:
        writer = self._writer()
        if self._settings.trigger is not None:
            writer = writer.trigger(**self._settings.trigger)
        if self._settings.name is not None:
            writer = writer.queryName(self._settings.name)
        with log_settings(self._spark, local=self._running.local):
            self._spark_query = writer.start()

    def _supervise(self) -> None:
        """Wait for the end of the query; whatever happens, say that it has ended and why."""
        try:
            self._failure = self._outcome()
        except BaseException as error:
            _log.exception("the query ended with an unexpected error")
            self._failure = translated(error)
        try:
            self._coordinator.stopping = True
            self._release()
        finally:
            self._ended.set()

    def _outcome(self) -> AnabranchError | None:
        """Why the query failed, if it did. Where state was lost it is brought back instead."""
        failures, reached = 0, self.version
        while (cause := self._watch(restart=failures > 0)) is not None:
            if self._coordinator.stopping or self._asked_to_stop.is_set():
                break
            failures = 1 if self.version > reached else failures + 1
            reached = self.version
            if not isinstance(cause, StateMissing | StoreError) or failures > _RECOVERIES:
                return cause
            _log.warning("state was lost, recovering: %s", cause)
        return None

    def _watch(self, *, restart: bool) -> AnabranchError | None:
        """Wait until Spark's query ends, or start it again first; why it failed, if it did."""
        try:
            if restart:
                self._recover(self._running.routing)
                self._launch()
                if self._asked_to_stop.is_set():
                    # Who asked may have stopped the query before this one.
                    self.spark_query.stop()
            self.spark_query.awaitTermination()
            return None
        except AnabranchError as error:
            return error
        except Exception as error:
            return self._coordinator.failure or translated(error)

    def _release(self) -> None:
        """Save what is to be saved and let go of everything. Raises nothing: errors are told."""
        cluster = self._running.cluster
        self._attempt("its state was not saved", self._save)
        self._attempt("its checkpoints were not closed", self._running.checkpoints.close)
        if cluster is not None:
            self._attempt("its nodes were not let go", cluster.close)
        self._attempt("its lock was not let go", self._lock.release)

    def _attempt(self, consequence: str, action: Callable[[], None]) -> None:
        """Do something at the end of the query. What goes wrong does not keep the rest from it."""
        try:
            action()
        except Exception as error:
            told = f"the query ended at version {self.version}, but {consequence}: {error}"
            _log.warning("%s", told, exc_info=not isinstance(error, AnabranchError))
            self._running.events.add("release failed", error=told)
            if self._failure is None and not isinstance(error, AnabranchError):
                self._failure = QueryFailed(f"{told} ({type(error).__name__})")
                self._failure.__cause__ = error

    def _save(self) -> None:
        """Save the state of a query that did not fail, and give its memory back."""
        running = self._running
        running.checkpoints.wait()
        keeps = isinstance(self._settings.checkpointing, Never)
        if self._failure is not None or keeps or running.committed.version < 0:
            return
        if running.checkpoints.stored < running.committed.version:
            self.checkpoint()
        if running.checkpoints.stored == running.committed.version:
            running.tables.destroy()
