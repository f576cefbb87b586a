"""Queries beside each other: in one store, in nested folders, and one of them twice."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.backup import Files
from anabranch.queries.running_query import RunningQuery
from anabranch.testing.feeds import Feed

ROWS = pa.schema([("k", pa.int64())])
OFTEN = ab.Periodic("0 seconds", retain=1)


def query_over(feed: Feed, spark: SparkSession, instances: int | None = None) -> ab.Query:
    counted = ab.stream(feed.frame(spark)).key_by("k")
    return counted.aggregate(name="op", n=ab.count(), instances=instances).to_memory("out")


def feed_in(folder: Path, batches: int = 6) -> Feed:
    feed = Feed(folder, ROWS)
    feed.add(*[[{"k": key} for key in range(20)]] * batches)
    return feed


def run(query: ab.Query, folder: Path, **settings: object) -> RunningQuery:
    started = query.start(folder, available_now=True, checkpointing=OFTEN, **settings)  # type: ignore[arg-type]
    started.await_termination()
    return started


def saved(spark: SparkSession, folder: Path) -> set[tuple[int, int]]:
    rows = spark.read.format("anabranch.state").load(str(folder)).select("k", "n_count").collect()
    return {(row.k, row.n_count) for row in rows}


@pytest.fixture(autouse=True)
def registered(spark: SparkSession) -> None:
    from anabranch.spark.state_source import StateSource

    spark.dataSource.register(StateSource)


def test_two_queries_with_one_store(spark: SparkSession, tmp_path: Path) -> None:
    shared = ab.Files(str(tmp_path / "shared"))
    for round in (1, 2):
        for name in ("a", "b"):
            feed = feed_in(tmp_path / "in" / name / str(round))
            if round == 2:
                feed = feed_in(tmp_path / "in" / name / "1", 12)
            run(query_over(feed, spark), tmp_path / name, backup=shared)
    for name in ("a", "b"):
        assert saved(spark, tmp_path / name) == {(key, 12) for key in range(20)}
    owners = {name.split("/")[0] for name in Files(str(tmp_path / "shared")).open().list()}
    assert len(owners) == 2, "every file is under the id of its query"


def test_a_query_in_the_folder_of_another(spark: SparkSession, tmp_path: Path) -> None:
    inner, outer = feed_in(tmp_path / "inner"), feed_in(tmp_path / "outer")
    run(query_over(inner, spark), tmp_path / "ck" / "b")
    run(query_over(outer, spark), tmp_path / "ck")
    outer.add([{"k": 3}])
    run(query_over(outer, spark), tmp_path / "ck")
    inner.add([{"k": 3}])
    run(query_over(inner, spark), tmp_path / "ck" / "b")
    expected = {(key, 7 if key == 3 else 6) for key in range(20)}
    assert saved(spark, tmp_path / "ck" / "b") == expected
    assert saved(spark, tmp_path / "ck") == expected


def test_a_folder_among_the_files_of_another_query_is_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    feed = feed_in(tmp_path / "in", 1)
    run(query_over(feed, spark), tmp_path / "ck")
    with pytest.raises(ab.PlanError, match="among the files of the query"):
        query_over(feed, spark).start(tmp_path / "ck" / "manifests" / "mine")
    run(query_over(feed, spark), tmp_path / "other" / "spark")
    with pytest.raises(ab.PlanError, match=r"spark/ in it belongs to another query"):
        query_over(feed, spark).start(tmp_path / "other")


def test_one_driver_at_a_time_wherever_its_state_is(spark: SparkSession, tmp_path: Path) -> None:
    feed = feed_in(tmp_path / "in", 1)
    query = query_over(feed, spark).start(tmp_path / "ck", state_folder=tmp_path / "state")
    with pytest.raises(ab.PlanError, match="running already"):
        query_over(feed, spark).start(tmp_path / "ck", state_folder=tmp_path / "elsewhere")
    query.stop()


def test_what_was_scaled_stays_until_the_program_changes(
    spark: SparkSession, tmp_path: Path
) -> None:
    feed = feed_in(tmp_path / "in", 2)
    query = query_over(feed, spark, 2).start(tmp_path / "ck")
    query.process_all_available()
    query.scale("op", 3)
    query.stop()
    for asked, expected in ((2, 3), (2, 3), (4, 4), (4, 4)):
        feed.add([{"k": 1}])
        again = query_over(feed, spark, asked).start(tmp_path / "ck")
        again.process_all_available()
        assert again.routing["op"].instances == expected
        again.stop()
    assert saved(spark, tmp_path / "ck") == {(key, 6 if key == 1 else 2) for key in range(20)}


def test_state_cannot_be_asked_for_inside_a_batch(spark: SparkSession, tmp_path: Path) -> None:
    feed = feed_in(tmp_path / "in", 3)
    refused: list[str] = []
    counts: list[int] = []
    queries: list[RunningQuery] = []

    def look(frame: object, version: int) -> None:
        counts.append(sum(row.n for row in frame.collect()))  # type: ignore[attr-defined]
        calls: list[Callable[[RunningQuery], object]] = [
            lambda q: q.state("op"),
            lambda q: q.checkpoint(),
            lambda q: q.scale("op", 1),
            lambda q: q.rebalance(),
            lambda q: q.await_termination(),
            lambda q: q.process_all_available(),
        ]
        for call in calls if queries else []:
            with pytest.raises(ab.QueryFailed, match="inside a batch"):
                call(queries[0])
            refused.append(str(version))

    counted = ab.stream(feed.frame(spark)).key_by("k").aggregate(name="op", n=ab.count())
    query = counted.for_each_batch(look).start(tmp_path / "ck")
    query.process_all_available()
    queries.append(query)
    feed.add(*[[{"k": key} for key in range(20)]] * 2)
    query.process_all_available()
    assert counts == [20, 40, 60, 80, 100], "no batch was rolled back"
    assert len(refused) == 12
    assert query.state("op").count() == 20
    query.stop()


def test_checkpoints_by_hand_beside_periodic_ones(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    query = query_over(feed, spark).start(tmp_path / "ck", checkpointing=OFTEN)
    for _ in range(8):
        feed.add([{"k": key} for key in range(20)], [{"k": 1}])
        before = query.version
        version = query.checkpoint() if before >= 0 else -1
        published = query._parts.loop.query.published
        stored = published[-1].version if published else -1
        assert stored >= version, "what is stored never goes back"
    query.process_all_available()
    version = query.checkpoint()
    rows = spark.read.format("anabranch.state").option("version", version)
    assert rows.load(str(tmp_path / "ck")).count() == 20, "what was promised is there"
    query.stop()
