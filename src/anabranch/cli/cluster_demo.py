"""The demo on a cluster: words per window, an operator that is scaled, a node that is killed.

The demo prints the log of the query.

The stream is made of numbers, so that plain Spark can compute the expected result in one batch for
the comparison.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from anabranch.cli.quiet import quiet_start
from anabranch.errors import QueryFailed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from anabranch.cluster import LocalCluster
    from anabranch.queries.running_query import RunningQuery

_OPERATOR = "counter"
_CONF = {"spark.log.level": "OFF", "spark.ui.enabled": "false"}
_SENTENCES = 4_000
_STEP_MS = 5_000
_START_MS = 1_700_000_010_000
_WINDOW, _DELAY = "30 seconds", "10 seconds"
_BATCHES = 9
"""Batches of each act. A window is closed every six."""
_LOOK_SECONDS = 0.2
_PATIENCE = 180.0


def tell(nodes: int, console: Console) -> bool:
    """Run the whole demo. Returns whether the result was right."""
    from anabranch.cluster import LocalCluster

    with (
        _log_on(console),
        tempfile.TemporaryDirectory(prefix="anabranch-demo-") as folder,
        console.status(f"starting a Spark cluster of {nodes} nodes") as status,
        LocalCluster(nodes, memory="512m") as cluster,
    ):
        with quiet_start():
            spark = cluster.session(**_CONF)
        status.stop()
        console.print(f"{nodes} nodes: {', '.join(cluster.nodes)}")
        query = _start(spark, Path(folder))
        try:
            _acts(query, cluster, console)
        finally:
            query.stop()
        with console.status("computing the expected result without a stream"):
            return _verdict(spark, Path(folder), query, console)


class _Printed(logging.Handler):
    """Prints log records."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(f"  {record.getMessage()}", style="dim", markup=False)


@contextmanager
def _log_on(console: Console) -> Iterator[None]:
    """Print the log of the library, and nowhere else, for a while."""
    log, handler = logging.getLogger("anabranch"), _Printed(console)
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


def _start(spark: SparkSession, folder: Path) -> RunningQuery:
    from pyspark.sql import functions as F

    import anabranch as ab
    from anabranch.cli.sentences import sentence

    source = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", _SENTENCES)
        .option("startTimestamp", _START_MS)
        .option("advanceMillisPerBatch", _STEP_MS)
        .option("numPartitions", spark.sparkContext.defaultParallelism)
        .load()
    )
    sentences = source.select(
        F.col("timestamp").alias("at"), sentence(F.col("value")).alias("text")
    )
    return (
        ab.stream(sentences)
        .transform(_words)
        .key_by("word")
        .window(ab.tumbling(_WINDOW, on="at"), watermark=_DELAY)
        .aggregate(name=_OPERATOR, mode="append", n=ab.count())
        .to_parquet(folder / "counts")
        .start(folder / "checkpoints", instances=1)
    )


def _words(sentences: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    return sentences.select("at", F.explode(F.split("text", " ")).alias("word"))


def _acts(query: RunningQuery, cluster: LocalCluster, console: Console) -> None:
    _batches(query, console, "1 instance")
    query.scale(_OPERATOR, 3)
    _batches(query, console, "3 instances")
    victim = [host for host, has in query.nodes.items() if has][-1]
    console.print(f"killing node {victim}, which runs {', '.join(query.nodes[victim])}")
    cluster.kill(victim)
    _until(query, lambda: any(event.kind == "recovery" for event in query.events))
    _batches(query, console, "3 instances on one node fewer")


def _batches(query: RunningQuery, console: Console, title: str) -> None:
    target = query.version + _BATCHES
    _until(query, lambda: query.version >= target)
    recent = query.recent_progress[-_BATCHES + 2 :]
    rows = sum(progress.rows for progress in recent)
    seconds = sum(progress.seconds for progress in recent)
    last = recent[-1]
    console.print(
        f"batch {last.version}: {title}, {rows / seconds:,.0f} words/s, "
        f"{seconds / len(recent) * 1000:.0f} ms a batch, {last.state_rows:,} counts in the state"
    )


def _until(query: RunningQuery, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        query.await_termination(_LOOK_SECONDS)
        if time.monotonic() > deadline:
            raise QueryFailed(f"the query made no progress for {_PATIENCE:.0f} seconds")


def _verdict(spark: SparkSession, folder: Path, query: RunningQuery, console: Console) -> bool:
    from pyspark.sql import functions as F

    from anabranch.cli.sentences import sentence

    found = spark.read.parquet(str(folder / "counts")).select("window_start", "word", "n")
    closed = found.select("window_start").distinct()
    number = F.col("id")
    at = F.timestamp_millis(F.lit(_START_MS) + F.floor(number / _SENTENCES) * _STEP_MS)
    numbers = spark.range(0, (query.version + 1) * _SENTENCES)
    words = _words(numbers.select(at.alias("at"), sentence(number).alias("text")))
    counted = words.groupBy(F.window("at", _WINDOW).start.alias("window_start"), "word").agg(
        F.count("*").alias("n")
    )
    expected = counted.join(closed, "window_start", "left_semi").select(*found.columns)
    wrong = found.exceptAll(expected).count() + expected.exceptAll(found).count()
    rows, windows = found.count(), closed.count()
    if wrong or not rows:
        console.print(f"WRONG: {wrong} of {rows:,} counts differ from a computation without faults")
        return False
    console.print(
        f"RIGHT: all {rows:,} counts of {windows} windows equal those of a computation without "
        "faults"
    )
    return True
