"""Spark's streaming query: starting it when the state is ready, stopping it, and rewinding it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from anabranch.coordinator import rewind
from anabranch.coordinator.events import Events
from anabranch.coordinator.failures import another_planned, outage, session_gone, translated
from anabranch.coordinator.handover import HandOver, TakenBack
from anabranch.coordinator.ledger import Ledger
from anabranch.coordinator.loop import Loop
from anabranch.coordinator.rewind import Rewind
from anabranch.errors import AnabranchError, Deposed, DidNotHappen, QueryFailed, StoreError
from anabranch.protocols import orders
from anabranch.protocols.query import Query
from anabranch.spark.session import log_settings, stopping
from anabranch.spark.sinks.sink import Replaceable, Sink
from anabranch.units import Version

_log = logging.getLogger("anabranch")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 20.0
"""Seconds before Spark's query is started again. They double with each failure in a row."""
_RESTART_SECONDS = 300.0
"""Spark's query is started again for so long, unless a batch is committed or it runs this long."""


Take = Callable[[DataFrame, int], None]
"""What Spark calls for every micro-batch."""


class Launching(Protocol):
    """Starts and stops Spark's query."""

    def start(self, take: Take, *, once: bool) -> StreamingQuery:
        """Start it, for one batch or until it is stopped."""
        ...

    def stop(self, query: StreamingQuery) -> None:
        """End it after the batch that runs."""
        ...


@dataclass(frozen=True)
class Launch:
    """Starts Spark's query with given settings; see :class:`Launching`."""

    spark: SparkSession
    frame: DataFrame
    """All sources in one."""
    location: str
    """Where Spark keeps its logs."""
    local: bool
    """Whether that is on a disk of this machine."""
    trigger: Mapping[str, Any] | None
    name: str | None

    def start(self, take: Take, *, once: bool) -> StreamingQuery:
        """See :meth:`Launching.start`."""
        writer: Any = self.frame.writeStream.foreachBatch(take)
        writer = writer.option("checkpointLocation", self.location).outputMode("append")
        if once:
            writer = writer.trigger(once=True)
        elif self.trigger is not None:
            writer = writer.trigger(**self.trigger)
        if not once and self.name is not None:
            writer = writer.queryName(self.name)
        with log_settings(self.spark, local=self.local):
            started: StreamingQuery = writer.start()
            return started

    def stop(self, query: StreamingQuery) -> None:
        """See :meth:`Launching.stop`."""
        try:
            with stopping(self.spark):
                query.stop()
        except Exception as error:
            if not session_gone(error):
                raise
            _log.warning("Spark's query was not stopped, because its session ended: %s", error)


class Lives:
    """Spark's queries: the one that users see, and the one that runs a batch again.

    A start may take long. A query that must end while it is being started is stopped right after
    the start, and nobody waits for that. ``unwanted`` says why no query may run, if so.
    """

    def __init__(self, launch: Launching, take: Take, unwanted: Callable[[], str | None]) -> None:
        self._launch = launch
        self._take = take
        self._unwanted = unwanted
        self._changed = threading.Condition()
        self._starting = False
        self._queries: dict[bool, StreamingQuery] = {}
        """The key says whether the query runs a single batch again."""

    @property
    def seen(self) -> StreamingQuery | None:
        """The one that users see, if it was started."""
        return self._queries.get(False)

    def start(self, *, once: bool) -> StreamingQuery:
        """Start a query; QueryFailed if none may run."""
        with self._changed:
            self._check()
            self._starting = True
        try:
            started = self._launch.start(self._take, once=once)
            with self._changed:
                self._queries[once] = started
        finally:
            with self._changed:
                self._starting = False
                self._changed.notify_all()
        try:
            # A call of end() during the start did not stop this query.
            self._check()
        except QueryFailed:
            self._launch.stop(started)
            raise
        return started

    def end(self, *, started: bool = False) -> None:
        """Stop all queries. With ``started`` it waits for a query that is being started."""
        with self._changed:
            self._changed.wait_for(lambda: not (started and self._starting))
            queries = list(self._queries.values())
        for query in queries:
            self._launch.stop(query)

    def _check(self) -> None:
        why = self._unwanted()
        if why is not None:
            raise QueryFailed(why)


class Stream:
    """Spark's query, which is started again as often as needed. :meth:`run` returns at its end."""

    def __init__(
        self,
        launch: Launching,
        batches: HandOver,
        query: str,
        sinks: Sequence[Sink],
        ledger: Ledger,
        events: Events,
        loop: Loop,
    ) -> None:
        self._lives = Lives(launch, self._take, self._unwanted)
        self._batches = batches
        self._id = query
        self._sinks = sinks
        self._ledger = ledger
        self._events = events
        self._loop = loop
        self._stopping = threading.Event()
        self._again: tuple[Version, Rewind] | None = None
        self._untrusted = False
        self.has_run = False
        """Whether Spark's query was started."""
        self.ready = threading.Event()
        """Set when Spark's query has been started for the first time."""

    @property
    def spark_query(self) -> StreamingQuery:
        """Spark's handle of the query that was started last."""
        if self._lives.seen is None:
            raise QueryFailed("the query has not been started")
        return self._lives.seen

    def run(self, settle: Callable[[Query], None]) -> AnabranchError | None:
        """Run until the stream ends. Returns its error, if it failed.

        ``settle`` is called whenever the state is restored and batches can run.
        """
        while not self._stopping.is_set():
            query = self._loop.wait_for(lambda q: q.settled)
            assert query is not None
            self._batches.resume(self._ledger.commit_of(query.committed))
            settle(query)
            try:
                self._run_again()
                # Not before: a driver that dies on the way must go the whole way once more.
                self._ledger.note_boot()
                self._run_on()
                return None
            except Exception as error:
                if self._stopping.is_set():
                    return None
                if not self._batches.taken_back:
                    return self._deposed() or self._batches.failure or translated(error)
        return None

    def _run_on(self) -> None:
        """Run batches until the stream ends.

        A driver that was paused may wake up between two batches, and write the offsets of a batch
        before it finds that it was deposed. Spark's query then ends here; it is started again, and
        runs the batch with these offsets. It is also started again after an outage of a source, or
        of the store of Spark's logs.
        """
        since: float | None = None
        pause = _FIRST_PAUSE
        while True:
            began, at = time.monotonic(), self._batches.committed
            try:
                self._lives.start(once=False)
                self.has_run = True
                self.ready.set()
                self.spark_query.awaitTermination()
                return
            except Exception as error:
                if self._is_final(error):
                    raise
                if (deposed := self._deposed()) is not None:
                    raise deposed from error
                now, committed = time.monotonic(), self._batches.committed
                calm = committed != at or now >= began + _RESTART_SECONDS
                if since is None or calm:
                    since, pause = now, _FIRST_PAUSE
                if now >= since + _RESTART_SECONDS:
                    raise
                _log.warning(
                    "Spark's query ended after batch %s, because %s; restarting it in %.1f s: %s",
                    committed,
                    "a deposed driver wrote the offsets of the next batch"
                    if another_planned(error)
                    else "a source or the store of its logs did not answer",
                    pause,
                    translated(error),
                )
            if self._stopping.wait(pause):
                raise QueryFailed("the query is being stopped")
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _is_final(self, error: Exception) -> bool:
        """Whether Spark's query must not be started again after an error."""
        if self._stopping.is_set() or self._batches.taken_back or not self.has_run:
            return True
        return not (another_planned(error) or outage(error))

    def _deposed(self) -> Deposed | None:
        """The Deposed error, if another driver has the query. It explains all other failures."""
        try:
            self._ledger.reign.check()
        except Deposed as error:
            return error
        except StoreError as error:
            _log.info("The epochs in the checkpoint folder cannot be read: %s", error)
        return None

    def stop(self) -> None:
        """End after the batch that runs."""
        self._stopping.set()
        with suppress(QueryFailed):  # it has ended by itself
            self._loop.wait_for(lambda q: not q.running)
        self._batches.end(QueryFailed("the query is being stopped"))
        self._lives.end()

    def give_up(self) -> None:
        """End without waiting for a batch, because the query cannot continue."""
        self._stopping.set()
        self._lives.end()

    def rewind(self, order: orders.Rewind) -> None:
        """Rewind Spark to a version. The batches up to the target run again.

        DidNotHappen if a batch has begun after this was ordered, as it must not be undone.
        """
        if order.fence < self._batches.fence:
            raise DidNotHappen(f"rewinding to version {order.start} was given up")
        self._batches.end(TakenBack(f"the query is rolled back to version {order.start}"))
        # Spark's logs must not change while a query is being started on them.
        self._lives.end(started=True)
        start, ledger = order.start, self._ledger
        begun = rewind.pending(ledger.store)
        if self._untrusted:
            again = self._after_power_failure(start, begun)
        else:
            again = rewind.plan(start, order.target, ledger.spark, ledger.commits, begun)
        # Spark's logs cannot be taken on to what is newer than where they are cut.
        ledger.withdraw_after(start)
        known = {} if start in ledger.spark.planned() else ledger.offsets_of(start)
        again.begin(start, known, ledger.store, ledger.spark)
        self._again = (start, again)

    def distrust(self) -> None:
        """Note that the machine was rebooted: what was not flushed may be lost."""
        self._untrusted = True

    def _after_power_failure(self, start: Version, begun: Rewind | None) -> Rewind:
        """Roll back to the newest complete version, up to which everything was flushed.

        Later results are removed, computed again and delivered again.
        """
        ledger, sinks = self._ledger, self._sinks
        replaceable = [sink for sink in sinks if isinstance(sink, Replaceable)]
        known = ledger.offsets_of(start)
        again = rewind.plan_after_power_failure(
            start, known, ledger.spark, begun, replaceable=len(replaceable) == len(sinks)
        )
        self._events.add("power failure", restored=start, again=again.target - start)
        again.note(ledger.store)
        ledger.forget_after(start)
        for sink in replaceable:
            sink.take_back(self._id, start)
        ledger.spark.forget_after(start)
        ledger.spark.repair(start, known)
        self._untrusted = False
        return again

    def _run_again(self) -> None:
        again, self._again = self._again, None
        if again is None:
            return
        start, batches = again
        batches.finish(start, self._ledger.store, self._ledger.spark, self._run_one)

    def _run_one(self) -> None:
        self._lives.start(once=True).awaitTermination()

    def _take(self, frame: DataFrame, batch: int) -> None:
        self._batches.take(frame, Version(batch))

    def _unwanted(self) -> str | None:
        """Why no query of Spark may run now, if so."""
        if self._stopping.is_set():
            return "the query is being stopped"
        return "the query is being taken back" if self._batches.taken_back else None
