"""Checkpoint folders that are copied, and programs that ask for other instances."""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.testing.feeds import Feed

WORDS = pa.schema([("word", pa.string()), ("n", pa.int64())])
TEXTS = ["the river", "the sea", "a river", "the bank of a river", "a sea"]


def words(text: str) -> list[dict[str, Any]]:
    return [{"word": word, "n": len(word)} for word in text.split()]


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    return Feed(tmp_path / "input", WORDS)


@pytest.fixture
def running() -> Iterator[list[ab.RunningQuery]]:
    """Queries that are stopped after the test, whatever it found."""
    queries: list[ab.RunningQuery] = []
    yield queries
    for query in queries:
        query.stop()


def start(spark: SparkSession, feed: Feed, folder: Path, **settings: Any) -> ab.RunningQuery:
    counted = ab.stream(feed.frame(spark)).key_by("word").aggregate(name="counter", n=ab.count())
    return counted.to_memory("out").start(folder, **settings)


def state_of(query: ab.RunningQuery) -> dict[str, int]:
    query.process_all_available()
    return {row["word"]: row["n_count"] for row in query.state_table("counter").to_pylist()}


def counts(texts: list[str]) -> Counter[str]:
    return Counter(word for text in texts for word in text.split())


def test_a_copied_folder_runs_beside_the_first_one(
    spark: SparkSession, feed: Feed, tmp_path: Path, running: list[ab.RunningQuery]
) -> None:
    feed.add(*map(words, TEXTS[:2]))
    first = start(spark, feed, tmp_path / "ck")
    assert state_of(first) == counts(TEXTS[:2])
    first.stop()
    shutil.copytree(tmp_path / "ck", tmp_path / "copy")

    folders = {"ck": first.id, "copy": None}
    for texts in (TEXTS[:3], TEXTS[:4], TEXTS):
        feed.add(words(texts[-1]))
        started = {name: start(spark, feed, tmp_path / name) for name in folders}
        running += started.values()
        assert len({query.spark_query.id for query in started.values()}) == 2
        for name, query in started.items():
            assert query.id == (folders[name] or query.id), "it is the same query ever after"
            folders[name] = query.id
            assert state_of(query) == counts(texts), name
        assert all(query.status == "running" for query in started.values())
        assert len(set(folders.values())) == 2
        for query in started.values():
            query.stop()
            assert query.status == "stopped"


def test_a_folder_that_was_moved_is_the_same_query(
    spark: SparkSession, feed: Feed, tmp_path: Path, running: list[ab.RunningQuery]
) -> None:
    feed.add(words(TEXTS[0]))
    first = start(spark, feed, tmp_path / "ck")
    first.process_all_available()
    first.stop()
    (tmp_path / "ck").rename(tmp_path / "elsewhere")
    feed.add(words(TEXTS[1]))
    running.append(again := start(spark, feed, tmp_path / "elsewhere"))
    assert again.id == first.id
    assert state_of(again) == counts(TEXTS[:2])


def test_instances_that_could_not_be_had_are_asked_for_again(
    spark: SparkSession,
    feed: Feed,
    tmp_path: Path,
    running: list[ab.RunningQuery],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ab.errors.QueryFailed("the scale failed")

    feed.add(words(TEXTS[0]))
    first = start(spark, feed, tmp_path / "ck", instances=2)
    first.process_all_available()
    first.stop()
    with monkeypatch.context() as patch:
        patch.setattr(ab.RunningQuery, "scale", fail)
        with pytest.raises(ab.errors.QueryFailed, match="the scale failed"):
            start(spark, feed, tmp_path / "ck", instances=3)
    running.append(again := start(spark, feed, tmp_path / "ck", instances=3))
    assert again.routing["counter"].instances == 3
    again.scale("counter", 4)
    again.stop()
    running.append(kept := start(spark, feed, tmp_path / "ck", instances=3))
    assert kept.routing["counter"].instances == 4, "the program asks for what it asked for before"
    assert state_of(kept) == counts(TEXTS[:1])
