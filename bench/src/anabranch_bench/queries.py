"""What the queries of all sides share: the input, the sink, the cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from anabranch_bench.inputs import SCHEMAS
from anabranch_bench.plan import FILES_PER_BATCH, Run, Totals

CORES = 2
"""Cores, shuffle partitions and instances, the same for every engine."""

MASTER = f"local[{CORES}]"

WINDOW, DELAY = "30 seconds", "10 seconds"
"""The windows of the words, and how far the watermark stays behind."""

CONF = {
    "spark.driver.memory": "4g",
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": str(CORES),
    "spark.sql.streaming.numRecentProgressUpdates": "100000",
    # What our session sets on one machine, for all: uncompressed shuffles, larger buffers.
    "spark.shuffle.compress": "false",
    "spark.buffer.size": "1048576",
    # The default manager starts a shell for every file on a local disk; no side shall pay that.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing."
        "FileSystemBasedCheckpointFileManager"
    ),
}
"""The configuration that is the same for every engine."""


@dataclass(frozen=True)
class Started:
    """A query that runs. Both sides are timed by Spark's own progress of the query."""

    spark: StreamingQuery
    ended: Callable[[int], bool]
    """Waits for so many seconds at most, and says whether the query is over and cleared up."""
    totals: Callable[[], Totals]
    """Reads the final state, once the query is over."""


def source(spark: SparkSession, run: Run) -> DataFrame:
    """The stream of a run's input, a fixed number of files to a batch."""
    reader = spark.readStream.schema(SCHEMAS[run.workload])
    return reader.option("maxFilesPerTrigger", FILES_PER_BATCH).parquet(run.input)


def words(sentences: DataFrame) -> DataFrame:
    """A row for each word of each sentence."""
    return sentences.select("at", F.explode(F.split("text", " ")).alias("word"))


def discard(rows: DataFrame, version: int) -> None:
    """The sink of all sides: every row is computed, none is kept."""
    rows.write.format("noop").mode("overwrite").save()
