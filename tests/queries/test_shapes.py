"""Functions that read an operator's rows in every shape: in part, merged, shifted, several times.

A task knows by the number of its partition which instance it is. Whatever a function does with the
rows, every instance runs its own rows once, and state and results are those of plain Python.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import anabranch as ab
from anabranch.testing.feeds import Feed

SECOND = 1_000_000
SIZE = 10 * SECOND
ROWS = pa.schema([("k", pa.int64()), ("at", pa.timestamp("us", tz="UTC")), ("n", pa.int64())])
Window = tuple[int, int, int, int]
"""Key, start, count and sum."""


def batches() -> list[list[dict[str, Any]]]:
    """Many keys, few keys, no rows: there are instances without rows whose windows are due."""
    every = [
        [
            {"k": k % 97, "at": (100 * batch + k % 37) * SECOND, "n": k}
            for k in range(0, 400, 1 + 3 * (batch % 2))
        ]
        for batch in range(4)
    ]
    every[2] = every[2][:1]
    return [*every, [], [{"k": 5, "at": 900 * SECOND, "n": 1}], [], []]


def expected() -> tuple[list[list[Window]], list[Window]]:
    """The windows that each batch closes, and those that are open in the end."""
    watermark: int | None = None
    open_: dict[tuple[int, int], list[int]] = {}
    closed: list[list[Window]] = []
    for batch in batches():
        for row in batch:
            held = open_.setdefault((row["k"], row["at"] // SIZE * SIZE), [0, 0])
            held[0] += 1
            held[1] += row["n"]
        due = [] if watermark is None else [w for w in open_ if w[1] + SIZE <= watermark]
        closed.append(sorted((*w, *open_.pop(w)) for w in due))
        watermark = max([row["at"] for row in batch] + ([] if watermark is None else [watermark]))
    return closed, sorted((*w, *held) for w, held in open_.items())


CLOSED, OPEN = expected()
ALL = Counter(window for batch in CLOSED for window in batch)


def micros(time: datetime | int) -> int:
    """A time as Spark gives it, local without a zone, or Arrow, or as a state's sub-key."""
    if isinstance(time, int):
        return time
    return round((time if time.tzinfo else time.astimezone(UTC)).timestamp()) * SECOND


def as_window(row: Any) -> Window:
    return row["k"], micros(row["window_start"]), row["c"], row["s"]


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    feed = Feed(tmp_path / "input", ROWS)
    feed.add(*batches())
    return feed


@pytest.fixture
def running() -> Iterator[list[ab.RunningQuery]]:
    """Queries that are stopped after the test, whatever it found."""
    queries: list[ab.RunningQuery] = []
    yield queries
    for query in queries:
        query.stop()


def windows(frame: DataFrame, name: str = "w") -> ab.Stream:
    return (
        ab.stream(frame)
        .key_by("k")
        .window(ab.tumbling("10 seconds", on="at"))
        .aggregate(name=name, c=ab.count(), s=ab.sum("n"))
    )


def check_state(query: ab.RunningQuery, name: str = "w") -> None:
    """The state is right, every batch was committed in one attempt, and all instances ran."""
    state = query.state_table(name).to_pylist()
    assert (
        sorted((r["k"], micros(r["window_start"]), r["c_count"], r["s_sum"]) for r in state) == OPEN
    )
    assert query.version == len(CLOSED) - 1
    assert {progress.attempts for progress in query.recent_progress} == {1}
    assert {len(progress[name].instances) for progress in query.recent_progress} == {4}
    assert [p.operators[0].rows for p in query.recent_progress] == [len(b) for b in batches()]


def written(frame: DataFrame, path: Path) -> list[Any]:
    frame.write.mode("overwrite").parquet(str(path))
    return frame.sparkSession.read.parquet(str(path)).collect()


def swallowed(frame: DataFrame) -> list[Any]:
    """A function that goes on when a job of its own fails."""
    try:
        return frame.coalesce(1).collect()
    except Exception:
        return []


def twice(frame: DataFrame) -> list[Any]:
    assert frame.count() == frame.count()
    return frame.collect()


def cached(frame: DataFrame) -> list[Any]:
    kept = frame.persist()
    try:
        kept.head(1)
        return kept.coalesce(1).collect()
    finally:
        kept.unpersist()


Shape = Callable[[DataFrame], list[Any]]
WHOLE: dict[str, Shape] = {
    "collect": lambda df: df.collect(),
    "coalesce to one": lambda df: df.coalesce(1).collect(),
    "coalesce to three": lambda df: df.coalesce(3).collect(),
    "coalesce and swallow": swallowed,
    "repartition": lambda df: df.repartition(3).collect(),
    "repartition by key": lambda df: df.repartition(2, "k").collect(),
    "sort": lambda df: df.orderBy("k").collect(),
    "twice": twice,
    "cached": cached,
    "after itself": lambda df: df.union(df).collect()[::1][: df.count()],
    "shifted": lambda df: df.limit(0).coalesce(1).union(df).collect(),
    "shifted by a table": lambda df: (
        (df.sparkSession.range(3).selectExpr("id as k").unionByName(df, allowMissingColumns=True))
        .where("c is not null")
        .collect()
    ),
    "joined with itself": lambda df: df.join(df.select("k").distinct(), "k").collect(),
    "crossed": lambda df: df.crossJoin(df.sparkSession.range(0, 2, 1, 2)).where("id = 1").collect(),
    "rdd": lambda df: df.rdd.coalesce(2).collect(),
}
PART: dict[str, Shape] = {
    "head": lambda df: df.head(3),
    "first": lambda df: [row for row in [df.first()] if row],
    "limit": lambda df: df.limit(5).collect(),
    "take twice": lambda df: df.take(2)[:0] or df.take(1),
    "show": lambda df: df.show(2) or [],  # type: ignore[func-returns-value]
    "empty": lambda df: [row for row in df.head(1) if not df.isEmpty()],
    "nothing": lambda df: [],
    "none of the rows": lambda df: df.where("1 = 0").collect(),
    "one instance": lambda df: df.rdd.mapPartitionsWithIndex(
        lambda i, rows: rows if i == 1 else iter(())
    ).take(1),
}


@pytest.mark.parametrize("shape", [*WHOLE, *PART])
def test_for_each_batch(
    spark: SparkSession,
    feed: Feed,
    tmp_path: Path,
    running: list[ab.RunningQuery],
    shape: str,
) -> None:
    seen: dict[int, list[Window]] = {}
    read = (WHOLE | PART)[shape]

    def function(frame: DataFrame, version: int) -> None:
        seen[version] = sorted(as_window(row) for row in read(frame))

    query = windows(feed.frame(spark)).for_each_batch(function)
    running.append(query.start(tmp_path / "ck", instances=4))
    running[0].process_all_available()
    check_state(running[0])
    if shape in WHOLE:
        assert [seen[version] for version in sorted(seen)] == CLOSED
    for version, found in seen.items():
        assert not Counter(found) - Counter(CLOSED[version])


def shifted(frame: DataFrame) -> DataFrame:
    """A static table before the operator's rows, with nothing in it that comes out."""
    static = frame.sparkSession.range(0, 9, 1, 3).select(
        *[F.lit(None).cast(field.dataType).alias(field.name) for field in frame.schema]
    )
    return static.union(frame).where("c is not null")


TRANSFORMS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "coalesce": lambda df: df.coalesce(1),
    "coalesce to three": lambda df: df.coalesce(3),
    "union before": lambda df: df.union(df.where("1 = 0")),
    "union after a table": shifted,
    "repartition": lambda df: df.repartition(3),
    "sort": lambda df: df.sort("k"),
    "distinct": lambda df: df.distinct(),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("sink", ["memory", "parquet", "operator"])
def test_transforms(
    spark: SparkSession,
    feed: Feed,
    tmp_path: Path,
    running: list[ab.RunningQuery],
    transform: str,
    sink: str,
) -> None:
    stream = windows(feed.frame(spark)).transform(TRANSFORMS[transform])
    if sink == "operator":
        stream = stream.key_by("k").aggregate(name="total", c=ab.sum("c"), s=ab.sum("s"))
    end = stream.to_parquet(tmp_path / "out") if sink == "parquet" else stream.to_memory("out")
    running.append(end.start(tmp_path / "ck", instances=4))
    running[0].process_all_available()
    check_state(running[0])
    if sink == "operator":
        total: Counter[int] = Counter()
        for (k, _, _, s), times in ALL.items():
            total[k] += s * times
        found = running[0].state_table("total").to_pylist()
        assert {row["k"]: row["s_sum"] for row in found} == total
        return
    if sink == "parquet":
        rows = spark.read.parquet(str(tmp_path / "out")).collect()
    else:
        rows = running[0].memory_table("out").to_pylist()
    assert Counter(as_window(row) for row in rows) == ALL


def test_a_transform_that_reads_only_a_part(
    spark: SparkSession, feed: Feed, tmp_path: Path, running: list[ab.RunningQuery]
) -> None:
    stream = (
        windows(feed.frame(spark))
        .transform(lambda df: df.limit(2))
        .key_by("k")
        .aggregate(name="some", n=ab.count())
    )
    running.append(stream.to_memory("out").start(tmp_path / "ck", instances=4))
    running[0].process_all_available()
    check_state(running[0])
    counted = sum(row["n_count"] for row in running[0].state_table("some").to_pylist())
    assert counted == sum(min(2, len(batch)) for batch in CLOSED)


def test_the_console_prints_the_first_rows(
    spark: SparkSession,
    feed: Feed,
    tmp_path: Path,
    running: list[ab.RunningQuery],
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert max(len(batch) for batch in CLOSED) > 4 * 21
    running.append(windows(feed.frame(spark)).to_console().start(tmp_path / "ck", instances=4))
    running[0].process_all_available()
    check_state(running[0])
    assert capfd.readouterr().out.count("only showing top 20 rows") >= 2


def test_several_sinks_of_one_operator(
    spark: SparkSession, feed: Feed, tmp_path: Path, running: list[ab.RunningQuery]
) -> None:
    merged: list[Window] = []
    stream = windows(feed.frame(spark))
    query = ab.query(
        stream.for_each_batch(
            lambda df, version: merged.extend(as_window(r) for r in df.coalesce(1).collect())
        ),
        stream.to_console(1),
        stream.transform(lambda df: df.limit(1)).to_memory("one"),
        stream.to_memory("all"),
        stream.key_by("k").aggregate(name="total", s=ab.sum("s")).to_memory("total"),
    )
    running.append(query.start(tmp_path / "ck", instances=4))
    running[0].process_all_available()
    check_state(running[0])
    everything = running[0].memory_table("all").to_pylist()
    assert Counter(merged) == Counter(as_window(row) for row in everything) == ALL


@pytest.mark.parametrize("sides", ["right", "both", "itself", "left"])
def test_joins_of_operators(
    spark: SparkSession, feed: Feed, tmp_path: Path, running: list[ab.RunningQuery], sides: str
) -> None:
    """Every window is joined with the rows, or windows, of its key that are close to it."""
    plain = ab.stream(feed.frame(spark)).transform(lambda df: df.select("k", "at", "n"))
    closed = windows(feed.frame(spark))
    other = windows(feed.frame(spark), "v") if sides == "both" else closed
    renamed = other.transform(
        lambda df: df.selectExpr("k as key", "window_start as at", "c as n", "s as sum")
    )
    left, right, on = {
        "right": (plain.key_by("k"), closed.key_by("k"), ("at", "window_start")),
        "left": (closed.key_by("k"), plain.key_by("k"), ("window_start", "at")),
        "both": (closed.key_by("k"), renamed.key_by("key"), ("window_start", "at")),
        "itself": (closed.key_by("k"), renamed.key_by("key"), ("window_start", "at")),
    }[sides]
    stream = left.join(right, within="15 seconds", on=on, watermark="1 hour", name="j")
    running.append(stream.to_memory("out").start(tmp_path / "ck", instances=4))
    running[0].process_all_available()
    check_state(running[0])
    if sides == "both":
        check_state(running[0], "v")
    rows = [(r["k"], r["at"], r["n"]) for batch in batches() for r in batch]
    if sides in ("both", "itself"):
        rows = [(k, start, c) for k, start, c, _ in ALL]
    pairs = Counter(
        (k, start, at, n)
        for k, start, _, _ in ALL
        for other_k, at, n in rows
        if k == other_k and abs(start - at) <= 15 * SECOND
    )
    found = running[0].memory_table("out").to_pylist()
    assert len(pairs) > 100
    assert pairs == Counter(
        (r["k"], micros(r["window_start"]), micros(r["at"]), r["n"]) for r in found
    )


def test_a_function_that_fails_is_not_tried_again(
    spark: SparkSession, feed: Feed, tmp_path: Path
) -> None:
    calls: list[int] = []

    def function(frame: DataFrame, version: int) -> None:
        calls.append(version)
        frame.collect()
        raise KeyError("speed")

    query = windows(feed.frame(spark)).for_each_batch(function).start(tmp_path / "ck")
    with pytest.raises(ab.errors.QueryFailed, match="KeyError: 'speed'"):
        query.await_termination(60)
    assert calls == [0]
