"""What a session must be like, and what a query sets in its own."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark import SparkConf
from pyspark.sql import DataFrame, SparkSession

import anabranch as ab
from anabranch.spark import session as sessions
from anabranch.testing.feeds import Feed

_CLUSTER = {"spark.shuffle.reduceLocality.enabled": "false", "spark.locality.wait": "365d"}


@pytest.fixture
def on_a_cluster(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, str]], SparkSession]:
    """A session that says it is on a cluster and was started with these settings."""
    monkeypatch.setattr(sessions, "is_local", lambda spark: False)

    def made(settings: dict[str, str]) -> Any:
        conf = SparkConf(loadDefaults=False, _jvm=spark.sparkContext._jvm)
        for name, value in settings.items():
            conf.set(name, value)
        context = SimpleNamespace(
            getConf=lambda: conf,
            _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(conf=lambda: conf._jconf)),
        )
        return SimpleNamespace(
            _jsparkSession=spark._jsparkSession, conf=spark.conf, sparkContext=context
        )

    return made


def test_a_session_of_ours_passes(on_a_cluster: Callable[[dict[str, str]], SparkSession]) -> None:
    assert sessions._ON_A_CLUSTER.items() >= _CLUSTER.items()
    sessions.check(on_a_cluster(_CLUSTER))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spark.locality.wait": "30s"}, r"spark\.locality\.wait is 30s.*=365d"),
        ({"spark.locality.wait.node": "0"}, r"spark\.locality\.wait\.node is 0.*node=365d"),
        ({"spark.excludeOnFailure.enabled": "true"}, "excludeOnFailure.*Set .*=false"),
        ({"spark.excludeOnFailure.application.enabled": "true"}, "application.enabled=false"),
        ({"spark.shuffle.reduceLocality.enabled": "true"}, "reduceLocality"),
    ],
)
def test_a_session_is_refused(
    on_a_cluster: Callable[[dict[str, str]], SparkSession], settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ab.PlanError, match=message):
        sessions.check(on_a_cluster(_CLUSTER | settings))


def test_a_session_without_a_wait_is_refused(
    on_a_cluster: Callable[[dict[str, str]], SparkSession],
) -> None:
    bare = {"spark.shuffle.reduceLocality.enabled": "false"}
    with pytest.raises(ab.PlanError, match=r"spark\.locality\.wait is 3s"):
        sessions.check(on_a_cluster(bare))
    sessions.check(on_a_cluster(bare | {"spark.locality.wait.node": "2h"}))


@pytest.mark.parametrize("chosen", [None, 5])
def test_a_shuffle_in_a_transform_has_few_partitions(
    spark: SparkSession, tmp_path: Path, chosen: int | None
) -> None:
    own = spark.newSession()
    own.conf.unset("spark.sql.shuffle.partitions")
    if chosen is not None:
        own.conf.set("spark.sql.shuffle.partitions", chosen)
    feed = Feed(tmp_path / "input", pa.schema([("word", pa.string())]))
    partitions: list[int] = []

    def counted(frame: DataFrame) -> DataFrame:
        counts = frame.groupBy("word").count()
        partitions.append(counts._jdf.queryExecution().toRdd().getNumPartitions())
        return counts

    def run() -> None:
        partitions.clear()
        query = (
            ab.stream(feed.frame(own))
            .transform(counted)
            .key_by("word")
            .aggregate(name="total", n=ab.sum("count"))
            .to_memory("out")
            .start(tmp_path / "ck", instances=3, available_now=True)
        )
        query.await_termination()

    feed.add([{"word": "a"}, {"word": "b"}])
    run()
    assert partitions[-1] == (chosen or 3)
    feed.add([{"word": "a"}])
    run()  # Spark sets in the query's session what it noted at the first start
    assert partitions[-1] == (chosen or 3)
    default = own.conf.get("spark.sql.shuffle.partitions")
    assert default == str(chosen or 200), "the user's session is left alone"


def test_the_session_says_how_many_batches_are_kept_in_the_log(spark: SparkSession) -> None:
    name = "spark.sql.streaming.minBatchesToRetain"
    assert sessions.batches_in_log(spark) == sessions.BATCHES_IN_LOG
    spark.conf.set(name, "70")
    try:
        assert sessions.batches_in_log(spark) == 70
    finally:
        spark.conf.unset(name)


def test_a_session_is_tuned_again_without_a_trace(spark: SparkSession) -> None:
    own = spark.newSession()
    rules = "spark.sql.optimizer.excludedRules"
    own.conf.set(rules, "org.apache.spark.sql.catalyst.optimizer.CollapseProject")
    sessions.tune(own, narrow=True, local=True)
    once = own.conf.get(rules)
    sessions.tune(own, narrow=True, local=True)
    assert own.conf.get(rules) == once
    assert len(once.split(",")) == 2
