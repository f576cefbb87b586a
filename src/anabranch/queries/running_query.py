"""A running query: watching it, reading its state, scaling it, stopping it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Literal, overload

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from anabranch.coordinator.assembly import Assembly, Settings, assemble
from anabranch.coordinator.events import Event
from anabranch.coordinator.failures import translated
from anabranch.coordinator.loop import microseconds_now
from anabranch.coordinator.progress import Change, Latency, Progress
from anabranch.errors import AnabranchError, PlanError, QueryFailed
from anabranch.plan.graph import Plan, Stateful
from anabranch.protocols.events import ReadState, Rebalance, Scale, TakeCheckpoint
from anabranch.protocols.model import serving
from anabranch.protocols.orders import Captured
from anabranch.protocols.query import Query as State
from anabranch.spark.bind import Bound
from anabranch.spark.sinks.simple import MemorySink
from anabranch.spark.types import spark_rows, spark_schema
from anabranch.state.checkpoint import read
from anabranch.state.groups import Routing
from anabranch.stores.parts import state_rows
from anabranch.units import NO_VERSION, Version

_log = logging.getLogger("anabranch")
_SAVE_SECONDS = 180.0


class RunningQuery:
    """A started query. All methods may be called from any thread."""

    def __init__(
        self,
        plan: Plan,
        bounds: Mapping[Stateful, Bound],
        spark: SparkSession,
        settings: Settings,
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._ended = threading.Event()
        self._asked_to_stop = threading.Event()
        self._settled = False
        self._failure: AnabranchError | None = None
        self._parts: Assembly = assemble(plan, bounds, spark, settings, self._stopped)
        self._supervisor = threading.Thread(target=self._supervise, name="anabranch", daemon=True)

    @classmethod
    def start(
        cls, plan: Plan, bounds: Mapping[Stateful, Bound], spark: SparkSession, settings: Settings
    ) -> RunningQuery:
        """Take the query over, restore its state, and run it."""
        query = cls(plan, bounds, spark, settings)
        try:
            query._parts.begin()
        except BaseException:
            query._parts.close()
            raise
        query._supervisor.start()
        query._parts.stream.ready.wait()
        if query._failure is not None and not query._parts.stream.has_run:
            query._supervisor.join()
            raise query._failure
        return query

    @property
    def id(self) -> str:
        """The query's id, the same after every restart from its folder."""
        return self._parts.program.query

    @property
    def spark_query(self) -> StreamingQuery:
        """Spark's handle of the query. Its progress also reaches Spark's listeners."""
        return self._parts.stream.spark_query

    @property
    def status(self) -> str:
        """``"running"``, ``"stopped"``, or ``"failed: ..."``."""
        if not self._ended.is_set():
            return "running"
        return "stopped" if self._failure is None else f"failed: {self._failure}"

    @property
    def exception(self) -> AnabranchError | None:
        """The error that ended the query, if it failed."""
        return self._failure

    @property
    def version(self) -> Version:
        """The number of the last committed micro-batch."""
        return self._parts.batches.committed

    @property
    def progress(self) -> Progress | None:
        """Figures of the last committed batch."""
        recent = self.recent_progress
        return recent[-1] if recent else None

    @property
    def recent_progress(self) -> list[Progress]:
        """Figures of the last hundred batches, oldest first."""
        return list(self._parts.batches.recent)

    @property
    def latency(self) -> Latency:
        """Percentiles of the durations of recent batches."""
        return Latency.over(self.recent_progress)

    def explain(self) -> str:
        """The plan as a tree of text."""
        return self._parts.program.plan.tree()

    def state(self, operator: str) -> DataFrame:
        """The state of an operator after the last committed batch.

        Its columns are the key columns, ``key_group``, and the columns of the state. The rows are
        copied between two batches, and the stream waits for the copy. Where that takes too long,
        read a checkpoint with ``spark.read.format("anabranch.state")``.
        """
        rows = spark_rows(self.state_table(operator))
        return self._spark.createDataFrame(rows, spark_schema(rows.schema))

    def state_table(self, operator: str) -> pa.Table:
        """The same as :meth:`state`, as an Arrow table with the types of the state."""
        self._check_operator(operator)
        self._check_outside("the state of the query")
        found = self._parts.loop.command(lambda number: ReadState(number, operator))
        try:
            captured: tuple[Captured, ...] = _awaited(found)
            data = [self._parts.asking.fetch(each) for each in captured]
        finally:
            found.release()  # nobody needs the files any more
        return state_rows([read(each, name=operator) for each in data])

    def memory(self, name: str) -> DataFrame:
        """The rows in the memory sink of this name."""
        rows = self.memory_table(name)
        return self._spark.createDataFrame(rows, spark_schema(rows.schema))

    def memory_table(self, name: str) -> pa.Table:
        """The same as :meth:`memory`, as an Arrow table."""
        for output in self._parts.program.plan.outputs:
            if isinstance(output.sink, MemorySink) and output.sink.name == name:
                return output.sink.table()
        raise PlanError(f"the query has no memory sink {name!r}; add one with to_memory({name!r})")

    @overload
    def checkpoint(self, *, wait: Literal[True] = True) -> Version: ...

    @overload
    def checkpoint(self, *, wait: Literal[False]) -> Future[Version]: ...

    def checkpoint(self, *, wait: bool = True) -> Version | Future[Version]:
        """Take a checkpoint of all state now, and wait until it is stored. Returns its version.

        It is tried three times before this raises, as it fails when a node is lost meanwhile. With
        ``wait=False`` it returns a future of the version at once. Its ``cancel()`` ends the wait;
        the checkpoint may still be taken.
        """
        self._check_outside("checkpoint()")
        saved = self._parts.loop.command(TakeCheckpoint)
        return _awaited(saved) if wait else saved

    def scale(self, operator: str, instances: int, *, wait: bool = True) -> Future[None]:
        """Change the number of instances of an operator while the stream runs.

        Returns when rows are routed to the new instances. With ``wait=False`` it returns a future
        at once, and :attr:`changes` shows the step of the scale. If the scale fails, the query
        runs on with its present instances.

        The future's ``cancel()`` gives the scale up. It returns True if nothing has changed. It
        returns False, and has no effect, if rows are routed to the new instances already, or if the
        scale has failed. If the wait is interrupted, the scale is given up too.
        """
        self._check_operator(operator)
        self._check_outside("scale()")
        self._parts.loop.query.operators[operator].check(instances)
        done = self._parts.loop.command(lambda number: Scale(number, operator, instances))
        if wait:
            _awaited(done)
        return done

    def rebalance(self, *, wait: bool = True) -> Future[None]:
        """Spread instances evenly over the present nodes, for example after new ones joined.

        ``wait`` and the future's ``cancel()`` are as for :meth:`scale`. Operators are moved one
        after the other; those that were moved before the cancellation stay where they are.
        """
        self._check_outside("rebalance()")
        done = self._parts.loop.command(Rebalance)
        if wait:
            _awaited(done)
        return done

    @property
    def routing(self) -> Mapping[str, Routing]:
        """Which key groups each instance of each operator owns."""
        return {name: of.routing for name, of in self._parts.loop.query.routed.items()}

    @property
    def nodes(self) -> Mapping[str, tuple[str, ...]]:
        """The instances on each node that is alive, as ``operator/instance``."""
        state = self._parts.loop.query
        slices = list(serving(state.slices.values()))
        return {
            host: tuple(
                dict.fromkeys(f"{s.operator}/{s.instance}" for s in slices if s.node == host)
            )
            for host in sorted(state.nodes)
        }

    @property
    def events(self) -> list[Event]:
        """The events of this run: failures, recoveries, checkpoints, and so on."""
        return list(self._parts.events.recent)

    @property
    def changes(self) -> list[Change]:
        """Operations in progress: moves, merges, checkpoints, a recovery, a restart.

        Empty while the query only runs batches. Operations that have ended are in :attr:`events`.
        """
        now = microseconds_now()
        return [Change.of(change, now) for change in self._parts.loop.query.changes]

    def await_termination(self, timeout: float | None = None) -> bool:
        """Wait until the query ends, or for at most ``timeout`` seconds. Raises if it failed.

        Returns whether it has ended.
        """
        self._check_outside("await_termination()")
        ended = self._ended.wait(timeout)
        if ended and self._failure is not None:
            raise self._failure
        return ended

    def process_all_available(self) -> None:
        """Wait until all rows that are in the sources now are committed. For tests."""
        self._check_outside("process_all_available()")
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
        """End the query after the batch in progress, and save its state.

        The memory is freed once the state is stored. With :class:`~anabranch.Never` the state
        stays in memory, so that the query can be resumed on this machine.

        A function that runs in a batch may call this too. It then returns at once, and the query
        ends after that batch.
        """
        self._asked_to_stop.set()
        if self._parts.batches.in_batch():
            # Spark's stop waits for the batch, which waits for the function that asks for it.
            threading.Thread(target=self._stop, name="anabranch-stop", daemon=True).start()
            return
        self._stop()
        if threading.current_thread() is not self._supervisor:
            self._supervisor.join()

    def _stop(self) -> None:
        if not self._ended.is_set():
            self._parts.stream.stop()

    def _check_operator(self, operator: str) -> None:
        known = self._parts.loop.query.operators
        if operator not in known:
            raise PlanError(f"no operator {operator!r}; the query has {sorted(known)}")

    def _check_outside(self, what: str) -> None:
        """Refuse calls from inside a batch that wait for its end."""
        if self._parts.batches.in_batch():
            raise QueryFailed(
                f"{what} was called inside a batch, by a function given to for_each_batch, where "
                "the state is between two versions; call it from another thread, for which the "
                "function does not wait"
            )

    # The supervisor

    def _stopped(self, reason: AnabranchError) -> None:
        """End the query, because the loop has found that it cannot continue."""
        if self._failure is None:
            self._failure = reason
        self._parts.batches.end(reason)
        # Spark may have no batch to run with which the query would end. Its stop waits for threads.
        threading.Thread(
            target=self._parts.stream.give_up, name="anabranch-give-up", daemon=True
        ).start()

    def _supervise(self) -> None:
        """Wait for the end of the query, then release everything and record the failure, if any."""
        try:
            failure = self._parts.stream.run(self._settle)
            self._failure = self._failure or failure
        except AnabranchError as error:
            self._failure = self._failure or error
        except BaseException as error:
            _log.exception("The query ended with an unexpected error.")
            self._failure = self._failure or translated(error)
        try:
            self._release()
        finally:
            self._ended.set()
            self._parts.stream.ready.set()

    def _settle(self, state: State) -> None:
        """The state is restored: resume the sinks, and scale as the program asks."""
        parts = self._parts
        stored = state.published[-1].version if state.published else NO_VERSION
        parts.batches.completion.take_over(stored)
        if self._settled:
            return
        self._settled = True
        for operator, instances in parts.asked.items():
            self.scale(operator, instances)
            # Not before: a driver that dies on the way leaves it to the next one.
            parts.ledger.note_asked(operator, instances)

    def _release(self) -> None:
        """Save the state and release all resources. Errors become events; none is raised."""
        ended = f"the query ended at version {self.version}, but"
        self._attempt(f"{ended} its state was not saved", self._save)
        for consequence, close in self._parts.closing():
            self._attempt(f"{ended} {consequence}", close)
        asked = self._asked_to_stop.is_set()
        why = "stop() was called" if asked else "Spark's query ended"
        self._parts.tell_end(self._failure, why)

    def _attempt(self, consequence: str, action: Callable[[], None]) -> None:
        """Run an action whose failure must not keep the next ones from running."""
        try:
            action()
        except Exception as error:
            told = f"{consequence}: {error}"
            if not isinstance(error, AnabranchError):
                _log.exception("Closing the query failed with an unexpected error.")
            self._parts.events.add("release failed", reason=told)
            if self._failure is None and not isinstance(error, AnabranchError):
                self._failure = QueryFailed(f"{told} ({type(error).__name__})")
                self._failure.__cause__ = error

    def _save(self) -> None:
        """Save the state of a query that did not fail, and free its memory."""
        parts = self._parts
        if self._failure is not None or not self._settings.checkpointing.backs_up:
            return
        version = self.version
        if version == NO_VERSION:
            return
        published = parts.loop.query.published
        if not published or published[-1].version < version:
            _awaited(parts.loop.command(TakeCheckpoint), _SAVE_SECONDS)
        parts.forget_tables()


def _awaited(command: Future[Any], seconds: float | None = None) -> Any:
    """What comes of a command. It is given up if nobody waits for it any longer."""
    try:
        return command.result(seconds)
    except BaseException:  # of the command itself, or of who waits for it
        command.cancel()
        raise
