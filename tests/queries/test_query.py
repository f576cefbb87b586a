"""A query from end to end: built, started, read, stopped, started again."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import anabranch as ab
from anabranch.testing.feeds import Feed

WORDS = pa.schema([("word", pa.string()), ("n", pa.int64())])


def words(*texts: str) -> list[dict[str, Any]]:
    return [{"word": word, "n": len(word)} for text in texts for word in text.split()]


def counted(feed_frame: DataFrame) -> ab.Stream:
    return (
        ab.stream(feed_frame)
        .key_by("word")
        .aggregate(name="counter", n=ab.count(), size=ab.sum("n"))
    )


def as_dict(table: pa.Table) -> dict[str, int]:
    return dict(zip(table["word"].to_pylist(), table["n"].to_pylist(), strict=True))


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    return Feed(tmp_path / "input", WORDS)


def test_counts_and_carries_on(spark: SparkSession, feed: Feed, tmp_path: Path) -> None:
    feed.add(words("the river", "the bank"), words("the sea"))
    query = counted(feed.frame(spark)).to_memory("counts").start(tmp_path / "ck")
    query.process_all_available()
    assert query.memory_table("counts").to_pylist() == query.memory("counts").toArrow().to_pylist()
    rows = sorted((r["word"], r["n"]) for r in query.memory_table("counts").to_pylist())
    assert rows == [("bank", 1), ("river", 1), ("sea", 1), ("the", 2), ("the", 3)]
    state = query.state("counter").select("word", F.col("n_count").alias("n")).toArrow()
    assert as_dict(state) == {"the": 3, "river": 1, "bank": 1, "sea": 1}
    query.stop()
    assert query.status == "stopped"

    feed.add(words("the river"))
    again = counted(feed.frame(spark)).to_memory("counts").start(tmp_path / "ck")
    again.process_all_available()
    assert sorted((r["word"], r["n"]) for r in again.memory_table("counts").to_pylist()) == [
        ("river", 2),
        ("the", 4),
    ]
    assert again.id == query.id
    again.stop()


@pytest.mark.parametrize("instances", [1, 3])
def test_restart_with_other_instances(
    spark: SparkSession, feed: Feed, tmp_path: Path, instances: int
) -> None:
    texts = [
        " ".join(f"w{i % 7} x{i % 11}" for i in range(start, start + 40)) for start in range(6)
    ]
    feed.add(*[words(text) for text in texts[:3]])
    query = (
        counted(feed.frame(spark)).to_parquet(tmp_path / "out").start(tmp_path / "ck", instances=2)
    )
    query.process_all_available()
    query.stop()
    feed.add(*[words(text) for text in texts[3:]])
    again = (
        counted(feed.frame(spark))
        .to_parquet(tmp_path / "out")
        .start(tmp_path / "ck", instances=instances)
    )
    again.process_all_available()
    progress = again.progress
    assert progress is not None
    assert len(progress["counter"].instances) == instances
    state = again.state_table("counter")
    again.stop()
    expected = Counter(word for text in texts for word in text.split())
    newest: dict[str, int] = {}
    for row in pq.read_table(tmp_path / "out").to_pylist():
        newest[row["word"]] = max(newest.get(row["word"], 0), row["n"])
    assert newest == expected
    assert state.num_rows == len(expected)


def test_three_operators_branches_sources_and_sinks(
    spark: SparkSession, tmp_path: Path, feed: Feed
) -> None:
    other = Feed(tmp_path / "other", WORDS)
    feed.add(words("a b c a"), words("a d"))
    other.add(words("x a x"), words("y"))
    seen: list[tuple[int, int]] = []
    first = ab.stream(feed.frame(spark)).key_by("word").aggregate(name="one", n=ab.count())
    second = first.key_by("n").aggregate(name="two", words=ab.count(), last=ab.last("word"))
    third = second.key_by("last").aggregate(name="three", most=ab.max("words"))
    elsewhere = ab.stream(other.frame(spark)).key_by("word").deduplicate(name="new")
    query = ab.query(
        third.to_memory("third"),
        second.to_parquet(tmp_path / "second"),
        first.for_each_batch(lambda df, version: seen.append((version, df.count()))),
        elsewhere.to_memory("new"),
    ).start(tmp_path / "ck")
    query.process_all_available()
    assert sorted(r["word"] for r in query.memory_table("new").to_pylist()) == ["a", "x", "y"]
    assert sum(n for _, n in seen) == 5
    assert {r["last"] for r in query.memory_table("third").to_pylist()} <= {"a", "b", "c", "d"}
    assert query.progress is not None
    assert [o.name for o in query.progress.operators] == ["one", "two", "three", "new"]
    query.stop()
    assert "see #1" in query.explain()


def test_own_operator_with_inferred_output(spark: SparkSession, feed: Feed, tmp_path: Path) -> None:
    feed.add(words("aa bbbb cccccc bbbb"), words("bbbb aa"))
    query = (
        ab.stream(feed.frame(spark))
        .key_by("word")
        .process(Long(), name="long")
        .to_memory("long")
        .start(tmp_path / "ck")
    )
    query.process_all_available()
    found = sorted((r["word"], r["times"]) for r in query.memory_table("long").to_pylist())
    query.stop()
    assert found == [("bbbb", 1), ("bbbb", 2), ("bbbb", 3), ("cccccc", 1)]


# Workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Long(ab.Operator):
    state = ab.schema(times=ab.int32)
    whole_batch = True

    def process(self, rows: ab.Rows, state: ab.State, context: ab.Context) -> ab.Rows:
        rows = rows.filter(rows["n"] > 3)
        out = []
        for i in range(len(rows)):
            row = rows.take(pa.array([i]).to_numpy())
            at = state.rows(row)
            state.add("times", at, 1)
            out.append(state["times"][at][0])
        return rows.append_column("times", pa.array(out, pa.int32()))


def test_late_rows_are_a_stream(spark: SparkSession, tmp_path: Path) -> None:
    schema = pa.schema([("at", pa.timestamp("us", tz="UTC")), ("k", pa.int64())])
    feed = Feed(tmp_path / "input", schema)
    second = 1_000_000
    feed.add(
        [{"at": 1 * second, "k": 1}, {"at": 12 * second, "k": 1}],
        [{"at": 40 * second, "k": 1}],
        [{"at": 2 * second, "k": 7}, {"at": 41 * second, "k": 1}],
        [{"at": 90 * second, "k": 1}],
        [{"at": 91 * second, "k": 1}],
    )
    windows = (
        ab.stream(feed.frame(spark))
        .key_by("k")
        .window(ab.tumbling("10 seconds", on="at"), watermark="5 seconds")
        .aggregate(name="w", n=ab.count())
    )
    query = ab.query(windows.to_memory("main"), windows.late.to_memory("late")).start(
        tmp_path / "ck"
    )
    query.process_all_available()
    main = query.memory_table("main").to_pylist()
    late = query.memory_table("late").to_pylist()
    query.stop()
    starts = sorted((r["window_start"].timestamp(), r["n"]) for r in main)
    assert starts == [(0, 1), (10, 1), (40, 2)]
    assert [(r["k"], r["at"].timestamp()) for r in late] == [(7, 2.0)]
