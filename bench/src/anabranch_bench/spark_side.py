"""Spark's side: its own aggregation on either of its state stores, and its Python state API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from anabranch_bench.plan import Engine, Run, Totals, Workload
from anabranch_bench.queries import CONF, DELAY, MASTER, WINDOW, Started, discard, source, words

_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_STATE = "org.apache.spark.sql.execution.streaming.state"
_HDFS = {_PROVIDER: f"{_STATE}.HDFSBackedStateStoreProvider"}
_STORES = {
    Engine.ROCKSDB: {
        _PROVIDER: f"{_STATE}.RocksDBStateStoreProvider",
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    },
    Engine.HDFS: _HDFS,
    Engine.PANDAS: _HDFS,
}


def session(engine: Engine) -> SparkSession:
    """A plain session with the state store of this engine."""
    builder = SparkSession.builder.master(MASTER).appName(f"bench: {engine}")
    for name, value in (CONF | _STORES[engine]).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def start(spark: SparkSession, engine: Engine, run: Run, folder: Path) -> Started:
    """Start the query of a run. It ends by itself once all input is read."""
    rows = source(spark, run)
    if engine is Engine.PANDAS:
        counted = _in_pandas(rows)
    elif run.workload is Workload.KEYED:
        counted = rows.groupBy("key").agg(F.count("*").alias("n"), F.sum("x").alias("total"))
    else:
        late = words(rows.withWatermark("at", DELAY))
        counted = late.groupBy(F.window("at", WINDOW), "word").agg(F.count("*").alias("n"))
    writer = counted.writeStream.outputMode("update").foreachBatch(discard)
    query = writer.option("checkpointLocation", str(folder)).trigger(availableNow=True).start()
    return Started(
        query, lambda seconds: bool(query.awaitTermination(seconds)), lambda: _totals(spark, folder)
    )


def _totals(spark: SparkSession, folder: Path) -> Totals:
    state = spark.read.format("statestore").load(str(folder))
    n, total = state.select("value.*").columns[:2]
    sums = state.agg(F.count("*"), F.sum(f"value.`{n}`"), F.sum(f"value.`{total}`")).collect()[0]
    return Totals(*sums)


def _in_pandas(rows: DataFrame) -> DataFrame:
    return rows.groupBy("key").applyInPandasWithState(
        _count,
        "key BIGINT, n BIGINT, total BIGINT",
        "n BIGINT, total BIGINT",
        "update",
        GroupStateTimeout.NoTimeout,
    )


def _count(
    key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState
) -> Iterator[pd.DataFrame]:
    n, total = state.get if state.exists else (0, 0)
    for frame in frames:
        n += len(frame)
        total += int(frame["x"].sum())
    state.update((n, total))
    yield pd.DataFrame({"key": [key[0]], "n": [n], "total": [total]})
