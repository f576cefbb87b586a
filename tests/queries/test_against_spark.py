"""The same random stream through our operators and through Spark's own, which must agree."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import anabranch as ab
from anabranch.testing.feeds import Feed

ROWS = pa.schema(
    [
        ("at", pa.timestamp("us", tz="UTC")),
        ("k", pa.string()),
        ("j", pa.int32()),
        ("n", pa.int64()),
        ("x", pa.float64()),
        ("s", pa.string()),
    ]
)
SECOND = 1_000_000
BATCHES = 4


def batch(numbers: np.random.Generator, number: int) -> pa.Table:
    """Rows of about a minute, out of order by up to 20 seconds, with nulls everywhere."""
    size = int(numbers.integers(1, 300))

    def some(values: list[Any]) -> list[Any]:
        return [
            None if hole else v for v, hole in zip(values, numbers.random(size) < 0.1, strict=True)
        ]

    at = number * 60 * SECOND + numbers.integers(-20 * SECOND, 60 * SECOND, size)
    return pa.table(
        {
            "at": [int(t) for t in at],
            "k": some([f"k{v}" for v in numbers.integers(0, 12, size)]),
            "j": some([int(v) for v in numbers.integers(0, 3, size)]),
            "n": some([int(v) for v in numbers.integers(-50, 50, size)]),
            "x": some([float(v) for v in numbers.normal(0, 10, size)]),
            "s": some([f"s{v}" for v in numbers.integers(0, 40, size)]),
        },
        schema=pa.schema([f if f.name != "at" else pa.field("at", pa.int64()) for f in ROWS]),
    ).cast(ROWS)


@pytest.fixture(params=[11, 12])
def feed(request: pytest.FixtureRequest, tmp_path: Path) -> Feed:
    made = Feed(tmp_path / "input", ROWS)
    numbers = np.random.default_rng(request.param)
    made.add(*[batch(numbers, number) for number in range(BATCHES)])
    # Far rows on both sides of the join: the first ones move the watermark past everything, the
    # second ones show it.
    for later in (1, 2):
        far = {"at": (10_000 + later) * SECOND, "k": "end", "n": 0, "x": 0.0, "s": ""}
        made.add([{**far, "j": side} for side in (0, 1)])
    return made


def run(query: ab.Query, folder: Path) -> pa.Table:
    started = query.start(folder, available_now=True)
    started.await_termination()
    return started.memory_table("out")


def same(ours: pa.Table, theirs: DataFrame, keys: list[str]) -> None:
    """The same rows in any order; floating-point sums may differ in the last digits."""
    expected = theirs.select(ours.column_names).toArrow()

    def rows(table: pa.Table) -> list[dict[str, Any]]:
        return sorted(table.to_pylist(), key=lambda row: repr([row[key] for key in keys]))

    mine, spark = rows(ours), rows(expected)
    assert len(mine) == len(spark)
    for one, other in zip(mine, spark, strict=True):
        for name, value in one.items():
            want = other[name]
            if isinstance(value, float) and want is not None:
                assert value == pytest.approx(want, rel=1e-9, abs=1e-9), (name, one, other)
            else:
                assert value == want, (name, one, other)


def test_running_aggregates(spark: SparkSession, feed: Feed, tmp_path: Path) -> None:
    stream = (
        ab.stream(feed.frame(spark))
        .key_by("k", "j")
        .aggregate(
            name="a",
            c=ab.count(),
            cn=ab.count("n"),
            sn=ab.sum("n"),
            sx=ab.sum("x"),
            lo=ab.min("x"),
            hi=ab.max("s"),
            avg=ab.mean("n"),
            var=ab.variance("x"),
        )
    )
    updates = run(stream.to_memory("out"), tmp_path / "ck")
    newest = {(row["k"], row["j"]): row for row in updates.to_pylist()}
    table = pa.Table.from_pylist(list(newest.values()), schema=updates.schema)
    batches = spark.read.parquet(str(feed.folder))
    theirs = batches.groupBy("k", "j").agg(
        F.count("*").alias("c"),
        F.count("n").alias("cn"),
        F.sum("n").alias("sn"),
        F.sum("x").alias("sx"),
        F.min("x").alias("lo"),
        F.max("s").alias("hi"),
        F.avg("n").alias("avg"),
        F.var_samp("x").alias("var"),
    )
    same(table, theirs, ["k", "j"])


def in_windows(frame: DataFrame, window: Any) -> DataFrame:
    counted = frame.groupBy("k", window.alias("w")).agg(
        F.count("*").alias("c"), F.sum("n").alias("sn"), F.max("x").alias("hi")
    )
    # The window of the last row is still open.
    return (
        counted.select("*", "w.start", "w.end")
        .selectExpr("k", "start as window_start", "end as window_end", "c", "sn", "hi")
        .where("k is null or k != 'end'")
    )


@pytest.mark.parametrize("kind", ["tumbling", "sliding", "session"])
def test_windows(spark: SparkSession, feed: Feed, tmp_path: Path, kind: str) -> None:
    ours, theirs = {
        "tumbling": (ab.tumbling("30 seconds", on="at"), F.window("at", "30 seconds")),
        "sliding": (
            ab.sliding("40 seconds", "15 seconds", on="at"),
            F.window("at", "40 seconds", "15 seconds"),
        ),
        "session": (ab.session_window("3 seconds", on="at"), F.session_window("at", "3 seconds")),
    }[kind]
    stream = (
        ab.stream(feed.frame(spark))
        .key_by("k")
        .window(ours, watermark="10 minutes")
        .aggregate(name="w", c=ab.count(), sn=ab.sum("n"), hi=ab.max("x"))
        .transform(lambda df: df.where("k is null or k != 'end'"))
    )
    found = run(stream.to_memory("out"), tmp_path / "ck")
    same(found, in_windows(spark.read.parquet(str(feed.folder)), theirs), ["k", "window_start"])


def test_join(spark: SparkSession, feed: Feed, tmp_path: Path) -> None:
    frame = feed.frame(spark)
    left = ab.stream(frame).transform(lambda df: df.where("j = 0").select("k", "at", "n"))
    right = ab.stream(frame).transform(
        lambda df: df.where("j = 1").selectExpr("k as r", "at as seen", "x")
    )
    joined = left.key_by("k").join(
        right.key_by("r"), on=("at", "seen"), within="5 seconds", how="left", watermark="10 minutes"
    )
    found = run(
        joined.transform(lambda df: df.where("k is null or k != 'end'")).to_memory("out"),
        tmp_path / "ck",
    )
    batches = spark.read.parquet(str(feed.folder)).where("k is null or k != 'end'")
    a, b = batches.where("j = 0"), batches.where("j = 1")
    theirs = a.alias("a").join(
        b.alias("b"),
        (F.col("a.k") == F.col("b.k"))
        & (F.abs(F.unix_micros("a.at") - F.unix_micros("b.at")) <= 5 * SECOND),
        "left",
    )
    shown = theirs.selectExpr("a.k", "a.at", "a.n", "b.at as seen", "b.x")
    same(found, shown, ["k", "at", "n", "seen", "x"])
