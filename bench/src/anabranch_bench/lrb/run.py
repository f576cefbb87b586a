"""One run of the query of Linear Road over a window of the stream, watched."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.cluster import LocalCluster
from anabranch_bench.lrb.world import World
from anabranch_linearroad.answers import Answers
from anabranch_linearroad.clock import SLICES, Clock
from anabranch_linearroad.query import linear_road

_CONF: dict[str, str | int | bool] = {
    "spark.log.level": "ERROR",
    "spark.ui.enabled": False,
    "spark.driver.memory": "3g",
}
_POLL = 0.2
_PATIENCE = 60.0  # seconds that a run may be behind before it is given up


@dataclass(frozen=True)
class Window:
    """From which second of the stream to which, and from when on at the pace of the clock."""

    start: int
    paced_from: int
    end: int
    pace: float = 1.0


@dataclass
class Outcome:
    """What a run has done."""

    xways: int
    window: Window
    clock: Clock
    batches: list[ab.Progress]
    phases: dict[int, dict[str, int]]
    """Where Spark says the time of each batch went, in milliseconds."""
    events: list[ab.Event]
    answers: Answers
    complete: bool
    seconds: float
    """All of the run, the start of the query included."""
    faults: list[str] = field(default_factory=list)

    @property
    def paced(self) -> list[ab.Progress]:
        """The batches since the clock was started."""
        return [batch for batch in self.batches if batch.at - batch.seconds >= self.clock.started]

    @property
    def measured(self) -> list[ab.Progress]:
        """The batches that figures are about: all of them if there was no clock."""
        return self.paced or self.batches

    @property
    def rate(self) -> float:
        """Rows per second of the paced part."""
        paced = self.paced
        if not paced:
            return 0.0
        return sum(batch.rows for batch in paced) / (paced[-1].at - self.clock.started)


@contextmanager
def session(nodes: int | None) -> Iterator[tuple[SparkSession, LocalCluster | None]]:
    """Spark in this process, or on a cluster of so many nodes."""
    if nodes is None:
        spark = ab.session("local[2]", app_name="lrb", **_CONF)
        yield spark, None
        spark.stop()
        return
    with LocalCluster(nodes, memory="1g") as cluster:
        yield cluster.session(**_CONF), cluster


def run(
    spark: SparkSession,
    world: World,
    xways: int,
    window: Window,
    folder: Path,
    *,
    tick: Callable[[int], None] = lambda second: None,
    cluster: LocalCluster | None = None,
    faults: bool = False,
    most_rows: int = 2_000_000,
) -> Outcome:
    """Run the query over a window; what it has written stays in the folder."""
    began = time.monotonic()
    clock = folder / "clock"
    feed = replace(
        world.feed(xways),
        start=window.start,
        paced_from=window.paced_from,
        end=window.end,
        pace=window.pace,
        most_rows=most_rows,
        clock=str(clock),
        partitions=2 if cluster is None else len(cluster.nodes),
    )
    ledger = world.ledger(xways, folder / "ledger")
    with tempfile.TemporaryDirectory(prefix="anabranch-lrb-") as state:
        query = linear_road(feed.stream(spark), ledger, folder / "answers").start(state)
        watch = _Watch(query, clock, window, tick)
        trouble = _Trouble(query, cluster, window, clock) if faults and cluster else None
        try:
            complete = watch.until_end()
        finally:
            if trouble is not None:
                trouble.end()
            query.stop()
        query.await_termination(0)
        if trouble is not None and trouble.failure is not None:
            raise trouble.failure
    watch.look()
    started = Clock.read(clock) or Clock(time.time(), window.end, window.pace or 1.0)
    return Outcome(
        xways,
        window,
        started,
        [watch.batches[version] for version in sorted(watch.batches)],
        watch.phases,
        query.events,
        Answers(folder / "answers", {v: b.at for v, b in watch.batches.items()}, started),
        complete,
        time.monotonic() - began,
        trouble.done if trouble is not None else [],
    )


class _Watch:
    """Keeps what a query says about its batches, of which it remembers only the last."""

    def __init__(
        self, query: ab.RunningQuery, clock: Path, window: Window, tick: Callable[[int], None]
    ) -> None:
        self._query, self._clock, self._window, self._tick = query, clock, window, tick
        self.batches: dict[int, ab.Progress] = {}
        self.phases: dict[int, dict[str, int]] = {}
        self._reached = 0

    def until_end(self) -> bool:
        """Wait until all is answered; False if the query fell behind for too long."""
        while self._reached < self._window.end * SLICES:
            if self._query.await_termination(_POLL):
                return False
            self.look()
            started = Clock.read(self._clock)
            if started is not None and self._window.pace:
                late = time.time() - started.arrival(max(self._reached, started.second * SLICES))
                if late > _PATIENCE:
                    return False
        return True

    def look(self) -> None:
        """See what is new."""
        for progress in self._query.recent_progress:
            self.batches.setdefault(progress.version, progress)
        last: Any = self._query.spark_query.lastProgress
        if last and last["sources"][0]["endOffset"]:
            self.phases[last["batchId"]] = dict(last["durationMs"])
            offset = last["sources"][0]["endOffset"]
            found = json.loads(offset) if isinstance(offset, str) else offset
            self._reached = max(self._reached, int(found["slice"]))
            self._tick(self._reached // SLICES)


class _Trouble:
    """Scales both operators, kills a node and scales one of them back, a fifth of the run apart."""

    def __init__(
        self, query: ab.RunningQuery, cluster: LocalCluster, window: Window, clock: Path
    ) -> None:
        self._query, self._cluster = query, cluster
        self._window, self._clock = window, clock
        self._over = threading.Event()
        self.done: list[str] = []
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="trouble", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Do nothing more, and wait for what is being done."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._act()
        except Exception as error:  # raised by the thread that waits for the run
            self.failure = error

    def _act(self) -> None:
        instances = self._query.routing["tolls"].instances
        acts: list[tuple[float, str, Callable[[], object]]] = [
            (0.2, "tolls scaled up", lambda: self._query.scale("tolls", instances + 1)),
            (0.4, "accounts scaled up", lambda: self._query.scale("accounts", instances + 1)),
            (0.6, "node killed", self._kill),
            (0.8, "tolls scaled back", lambda: self._query.scale("tolls", instances)),
        ]
        for share, name, act in acts:
            if not self._wait(share):
                return
            act()
            self.done.append(name)

    def _wait(self, share: float) -> bool:
        length = self._window.end - self._window.paced_from
        while not self._over.wait(_POLL):
            clock = Clock.read(self._clock)
            if clock is not None:
                reached = clock.second_at(time.time()) - clock.second
                if reached >= share * length:
                    return True
        return False

    def _kill(self) -> None:
        self._cluster.kill(next(host for host, has in self._query.nodes.items() if has))
