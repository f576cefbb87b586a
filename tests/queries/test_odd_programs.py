"""Ordinary programs in unexpected shapes: odd names, no rows, null keys, failures and restarts."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import anabranch as ab
from anabranch.testing.feeds import Feed

# Workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SECOND = 1_000_000
NAMES = ["a.b", "a`b", "a b", "Größe", "KEY", "key_group", "rank_", "n", "count", "state_x", "a,b"]
NAMES += ["'", '"', "{}", "(x)", "*", "a.`b`"]


@pytest.fixture
def running() -> Iterator[list[ab.RunningQuery]]:
    """Queries that are stopped after the test, whatever it found."""
    queries: list[ab.RunningQuery] = []
    yield queries
    for query in queries:
        query.stop()


@pytest.mark.parametrize("name", NAMES)
def test_columns_of_any_name(
    spark: SparkSession, tmp_path: Path, running: list[ab.RunningQuery], name: str
) -> None:
    """As key, value and time, through every kind of step, out into files and state."""
    value, time = f"{name}v", f"{name}t"
    schema = pa.schema(
        [(name, pa.string()), (value, pa.int64()), (time, pa.timestamp("us", tz="UTC"))]
    )
    feed = Feed(tmp_path / "input", schema)
    keys = ["a", "b", None, "a"]
    feed.add(
        *[
            [{name: k, value: i, time: (i + 60 * batch) * SECOND} for i, k in enumerate(keys)]
            for batch in range(2)
        ]
    )
    rows = ab.stream(feed.frame(spark))
    totals = rows.key_by(name).aggregate(name="totals", **{value: ab.sum(value), "z": ab.count()})
    windows = (
        rows.key_by(name)
        .window(ab.tumbling("10 seconds", on=time))
        .aggregate(name="windows", **{value: ab.max(value)})
    )
    best = rows.key_by(name).top_k(1, by=value, name="best")
    new = rows.key_by(name).deduplicate(name="new", ttl="1 hour", on=time, watermark="1 hour")
    other = rows.transform(lambda df: df.toDF(*[f"{column}_2" for column in df.columns])).key_by(
        f"{name}_2"
    )
    pairs = rows.key_by(name).join(
        other, within="0 seconds", on=(time, f"{time}_2"), watermark="1 hour", name="pairs"
    )
    query = ab.query(
        totals.to_memory("totals"),
        windows.to_memory("windows"),
        best.to_memory("best"),
        new.to_memory("new"),
        pairs.to_memory("pairs"),
        totals.key_by(name).aggregate(name="again", **{value: ab.last(value)}).to_memory("again"),
    )
    running.append(query.start(tmp_path / "ck", instances=3))
    running[0].process_all_available()
    state = {row[name]: row[f"{value}_sum"] for row in running[0].state("totals").collect()}
    assert state == {"a": 6, "b": 2, None: 4}
    assert {r[name] for r in running[0].memory("new").collect()} == {"a", "b", None}
    assert len(running[0].memory_table("new")) == 3
    assert Counter(r[name] for r in running[0].memory_table("pairs").to_pylist()) == {
        "a": 4,
        "b": 2,
    }
    best_rows = running[0].memory_table("best").to_pylist()
    assert {(r[name], r[value]) for r in best_rows} == {("a", 3), ("b", 1), (None, 2)}
    again = {row[name]: row for row in running[0].state_table("again").to_pylist()}
    assert set(again) == {"a", "b", None}
    running[0].stop()
    assert running[0].status == "stopped"
    stored = spark.read.format("anabranch.state").option("operator", "windows")
    assert {row[0] for row in stored.load(str(tmp_path / "ck")).collect()} == {"a", "b", None}


WORDS = pa.schema([("word", pa.string()), ("n", pa.int64())])


def words(text: str) -> list[dict[str, Any]]:
    return [{"word": word, "n": len(word)} for word in text.split()]


def counted(frame: DataFrame) -> ab.Stream:
    return ab.stream(frame).key_by("word").aggregate(name="counter", n=ab.count())


def test_no_rows_ever(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "input", WORDS)
    for _ in range(2):
        query = (
            counted(feed.frame(spark)).to_memory("out").start(tmp_path / "ck", available_now=True)
        )
        assert query.await_termination(60)
        assert query.status == "stopped"
        assert query.memory("out").count() == 0
        assert query.version == -1
    feed.add([], [])
    query = counted(feed.frame(spark)).to_parquet(tmp_path / "out").start(tmp_path / "ck")
    query.process_all_available()
    assert query.state("counter").count() == 0
    assert query.checkpoint() >= -1
    query.stop()
    assert query.status == "stopped"


def test_transforms_that_let_nothing_pass(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "input", WORDS)
    feed.add(words("the river"), words("the sea"))
    stream = (
        ab.stream(feed.frame(spark))
        .transform(lambda df: df.where("1 = 0"))
        .key_by("word")
        .aggregate(name="counter", n=ab.count())
        .transform(lambda df: df.limit(0))
        .key_by("word")
        .deduplicate(name="new")
    )
    query = stream.to_memory("out").start(tmp_path / "ck", instances=2)
    query.process_all_available()
    assert query.version == 1
    assert query.state("new").count() == query.state("counter").count() == 0
    query.stop()


def test_failed_and_started_again(spark: SparkSession, tmp_path: Path) -> None:
    """A function that raises fails the query with its own words; the batch is run again later."""
    feed = Feed(tmp_path / "input", WORDS)
    feed.add(words("the river"), words("the sea"), words("the bank"))
    broken = [True]
    seen: dict[int, list[tuple[str, int]]] = {}

    def function(frame: DataFrame, version: int) -> None:
        seen[version] = sorted((row["word"], row["n"]) for row in frame.collect())
        if version == 1 and broken[0]:
            raise LookupError("no such table")

    query = counted(feed.frame(spark)).for_each_batch(function).start(tmp_path / "ck")
    with pytest.raises(ab.errors.QueryFailed, match="LookupError: no such table"):
        query.await_termination(60)
    assert query.status.startswith("failed: LookupError")
    assert query.version == 0
    query.stop()

    broken[0] = False
    again = counted(feed.frame(spark)).for_each_batch(function).start(tmp_path / "ck")
    again.process_all_available()
    again.stop()
    assert seen == {
        0: [("river", 1), ("the", 1)],
        1: [("sea", 1), ("the", 2)],
        2: [("bank", 1), ("the", 3)],
    }


def fail(key: Any, rows: ab.Rows, state: Any) -> Any:
    raise ZeroDivisionError(f"nothing to divide {key[0]!r} by")


def test_a_function_of_a_task_that_raises(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "input", WORDS)
    feed.add(words("river"))
    query = (
        ab.stream(feed.frame(spark))
        .key_by("word")
        .per_key(fail, state=ab.schema(n=ab.int64), output=ab.schema(n=ab.int64), name="f")
        .to_memory("out")
        .start(tmp_path / "ck")
    )
    with pytest.raises(ab.errors.QueryFailed, match="ZeroDivisionError: nothing to divide 'river'"):
        query.await_termination(60)
    query.stop()


def test_the_same_stream_twice(
    spark: SparkSession, tmp_path: Path, running: list[ab.RunningQuery]
) -> None:
    feed = Feed(tmp_path / "input", WORDS)
    feed.add(words("the river the sea"), words("the bank"))
    rows = ab.stream(feed.frame(spark))
    upper = rows.transform(lambda df: df.select(F.upper("word").alias("word"), "n"))
    query = ab.query(
        upper.key_by("word").aggregate(name="one", n=ab.count()).to_memory("one"),
        upper.key_by("n").aggregate(name="two", c=ab.count()).to_memory("two"),
        upper.to_memory("all"),
        rows.to_memory("all"),
    )
    running.append(query.start(tmp_path / "ck"))
    running[0].process_all_available()
    state = running[0].state_table("two").to_pylist()
    assert {row["n"]: row["c_count"] for row in state} == {3: 4, 4: 1, 5: 1}
