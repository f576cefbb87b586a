"""The process of one scenario: ``python -m anabranch_bench.faults_side < scenario.json``."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import anabranch as ab
from anabranch.cluster import LocalCluster
from anabranch_bench.faults import Act, Backup, Outcome, Scenario, Scheme
from anabranch_bench.soak.samples import measure_folder

_OPERATOR = "counter"
_TICK = 0.25
_LOOK = 0.1
_FILL = 1_000_000
_DELAY = "2 seconds"
_SCHEMA = "at timestamp, word string"
_STATE = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_CONF: dict[str, str | int | bool] = {
    "spark.log.level": "OFF",
    "spark.ui.enabled": False,
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.stateStore.providerClass": _STATE,
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": True,
}
_AS_SPARK_COMES: dict[str, str | int | bool] = {
    "spark.locality.wait": "3s",
    "spark.shuffle.reduceLocality.enabled": True,
}
"""What our sessions set for pinning would make Spark's side wait for a node that is gone."""
_PATIENCE = 600.0


@dataclass
class Started:
    """A query of either engine, as far as the measurement needs to know it."""

    version: Callable[[], int]
    state_rows: Callable[[], int]
    events: Callable[[], list[dict[str, Any]]]
    scale: Callable[[int, Feed], None]
    used: Callable[[], list[str]]
    check: Callable[[], None]
    stop: Callable[[], None]


class Feed(threading.Thread):
    """Writes rows into a folder: first one for every key if asked to, then at a steady rate."""

    def __init__(self, folder: Path, scenario: Scenario) -> None:
        super().__init__(name="feed", daemon=True)
        self._folder, self._scenario = folder, scenario
        self._numbers = np.random.default_rng(scenario.seed)
        self._files = 0
        self.over = threading.Event()
        self.held = threading.Lock()
        """Whoever has it keeps rows from being written; they are written all the same, later."""

    def fill(self) -> int:
        """Write a row for every key, and the backlog; how many files."""
        scenario = self._scenario
        if scenario.fill:
            for first in range(0, scenario.keys, _FILL):
                self._write(np.arange(first, min(first + _FILL, scenario.keys)))
        for _ in range(scenario.backlog):
            self._write(self._numbers.integers(0, scenario.keys, scenario.rate))
        return self._files

    def run(self) -> None:
        """Write until it is over."""
        rows = max(1, int(self._scenario.rate * _TICK))
        due = time.monotonic()
        while not self.over.wait(max(0.0, due - time.monotonic())):
            with self.held:
                self._write(self._numbers.integers(0, self._scenario.keys, rows))
            due += _TICK

    def _write(self, words: Any) -> None:
        now = pa.scalar(time.time_ns() // 1000, pa.timestamp("us", tz="UTC"))
        text = pa.compute.binary_join_element_wise("w", pa.array(words).cast(pa.string()), "")
        table = pa.table({"at": pa.repeat(now, len(words)), "word": text})
        hidden = self._folder / f".{self._files:06d}"
        pq.write_table(table, hidden)
        hidden.rename(self._folder / f"{self._files:06d}.parquet")
        self._files += 1


def main() -> None:
    """Read a scenario, carry it out, print what came of it."""
    scenario = Scenario.from_json(sys.stdin.read())
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-bench-") as folder,
        LocalCluster(scenario.nodes, memory="1g") as cluster,
    ):
        conf = _CONF | {"spark.sql.shuffle.partitions": scenario.instances}
        if scenario.scheme is Scheme.SPARK:
            conf |= _AS_SPARK_COMES
        spark = cluster.session(**conf)
        outcome = _carry_out(scenario, Path(folder), cluster, spark)
    print(outcome.to_json(), flush=True)


def _carry_out(
    scenario: Scenario, folder: Path, cluster: LocalCluster, spark: SparkSession
) -> Outcome:
    (folder / "input").mkdir()
    feed = Feed(folder / "input", scenario)
    files = feed.fill()
    reader = spark.readStream.schema(_SCHEMA)
    if scenario.backlog:
        reader = reader.option("maxFilesPerTrigger", 1)
    rows = reader.parquet(str(folder / "input"))
    query = (_spark if scenario.scheme is Scheme.SPARK else _ours)(scenario, rows, folder, cluster)
    commits = Commits(query)
    commits.start()
    memory = Memory(cluster, commits.began)
    memory.start()
    if scenario.backlog:
        commits.wait_for(lambda: query.version() >= files - 1)
    elif files:
        commits.wait_for(lambda: query.version() >= 0)
    if not scenario.backlog:
        feed.start()
        time.sleep(scenario.warm)
    happened = time.monotonic() - commits.began
    if scenario.act is Act.KILL:
        cluster.kill(query.used()[0])
    elif scenario.act is Act.SCALE:
        query.scale(scenario.grow_to, feed)
    over = time.monotonic() - commits.began
    if scenario.act is not Act.NOTHING:
        reached = query.version()
        commits.wait_for(lambda: query.version() >= reached + 2)
        time.sleep(scenario.after)
    feed.over.set()
    commits.over.set()
    memory.over.set()
    found = Outcome(happened, over, commits.seen, query.state_rows(), query.events(), memory.seen)
    query.stop()
    return found


class Commits(threading.Thread):
    """Notes when batches are committed."""

    def __init__(self, query: Started) -> None:
        super().__init__(name="commits", daemon=True)
        self._query = query
        self.began = time.monotonic()
        self.seen: list[tuple[float, int]] = []
        self.over = threading.Event()

    def run(self) -> None:
        """Look often."""
        last = -1
        while not self.over.wait(0.005):
            version = self._query.version()
            if version > last:
                last = version
                self.seen.append((time.monotonic() - self.began, version))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the query is to do."""
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            self._query.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no progress for {_PATIENCE:.0f} s")
            time.sleep(0.02)


class Memory(threading.Thread):
    """Notes what state and captures take up on the nodes."""

    def __init__(self, cluster: LocalCluster, began: float) -> None:
        super().__init__(name="memory", daemon=True)
        self._cluster, self._began = cluster, began
        self.seen: list[tuple[float, int]] = []
        self.over = threading.Event()

    def run(self) -> None:
        """Look often."""
        while not self.over.wait(_LOOK):
            folders = [self._cluster.folder / host / "state" for host in self._cluster.nodes]
            taken = sum(measure_folder(folder)[1] for folder in folders)
            self.seen.append((time.monotonic() - self._began, taken))


def _ours(scenario: Scenario, rows: DataFrame, folder: Path, _: LocalCluster) -> Started:
    keyed = ab.stream(rows).key_by("word")
    if scenario.window is None:
        counted = keyed.aggregate(name=_OPERATOR, n=ab.count())
    else:
        windows = keyed.window(ab.tumbling(scenario.window, on="at"), watermark=_DELAY)
        counted = windows.aggregate(name=_OPERATOR, mode="update", n=ab.count())
    checkpoints = scenario.scheme is Scheme.CHECKPOINT and scenario.checkpoints
    query = counted.for_each_batch(_discard).start(
        folder / "checkpoint",
        checkpointing=ab.Periodic(scenario.interval) if checkpoints else ab.Never(),
        backup=_backup(scenario),
        instances=scenario.instances,
        movement=_movement(scenario),
    )

    def state_rows() -> int:
        return query.progress.state_rows if query.progress is not None else 0

    def scale(instances: int, _: Feed) -> None:
        query.scale(_OPERATOR, instances)

    def check() -> None:
        query.await_termination(0)

    return Started(
        lambda: int(query.version),
        state_rows,
        lambda: [json.loads(event.to_json()) for event in query.events],
        scale,
        lambda: [host for host, has in query.nodes.items() if has],
        check,
        query.stop,
    )


def _backup(scenario: Scenario) -> ab.Upstream | ab.Fragments | None:
    if scenario.backup is Backup.UPSTREAM:
        return ab.Upstream()
    return ab.Fragments(*scenario.fragments) if scenario.backup is Backup.FRAGMENTS else None


def _movement(scenario: Scenario) -> ab.FromCheckpoint | ab.FromInput:
    if scenario.scheme is Scheme.CHECKPOINT:
        return ab.FromCheckpoint(scenario.parallelism)
    if scenario.window is None:
        raise ValueError(f"{scenario.scheme} needs a window: other state depends on all input")
    return ab.FromInput(last=scenario.window, source=scenario.scheme is Scheme.SOURCE)


def _spark(scenario: Scenario, rows: DataFrame, folder: Path, cluster: LocalCluster) -> Started:
    if scenario.window is None:
        counted = rows.groupBy("word").agg(F.count("*").alias("n"))
    else:
        late = rows.withWatermark("at", _DELAY)
        counted = late.groupBy(F.window("at", scenario.window), "word").agg(F.count("*").alias("n"))
    writer = counted.writeStream.outputMode("update").foreachBatch(_discard)
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    spark = rows.sparkSession
    running = [writer.start()]
    reached = [-1]

    def version() -> int:
        last = running[0].lastProgress
        # A query that was started again has no progress until its first batch is done.
        reached[0] = max(reached[0], int(last["batchId"]) if last else -1)
        return reached[0]

    def state_rows() -> int:
        last = running[0].lastProgress
        return int(last["stateOperators"][0]["numRowsTotal"]) if last else 0

    def check() -> None:
        if not running[0].isActive:
            raise RuntimeError(f"Spark's query has ended: {running[0].exception()}")

    def scale(instances: int, feed: Feed) -> None:
        """Spark's way: stop, divide the state in the checkpoint folder, start again."""
        with feed.held:
            # Stopping may not break a batch off: Spark divides the state only after a whole one,
            # and over one that it is told to skip its file source fails when started again.
            running[0].processAllAvailable()
            running[0].stop()
        spark._streamingCheckpointManager.repartition(str(folder / "checkpoint"), instances)
        # Dividing counts as a batch of its own.
        reached[0] += 1
        running[0] = writer.start()

    def used() -> list[str]:
        """Nodes that have a state store, by the folders that these keep open there."""
        named = "scratch/*/*/*/StateStoreId*"
        return [host for host in cluster.nodes if any((cluster.folder / host).glob(named))]

    stop = lambda: running[0].stop()  # noqa: E731
    return Started(version, state_rows, list, scale, used, check, stop)


def _discard(rows: DataFrame, version: int) -> None:
    rows.write.format("noop").mode("overwrite").save()


if __name__ == "__main__":
    main()
