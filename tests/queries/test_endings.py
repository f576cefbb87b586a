"""How queries end: stopped from anywhere, failed in any way, and always told."""

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import anabranch as ab
from anabranch.coordinator.assembly import Assembly
from anabranch.coordinator.identity import DriverLock
from anabranch.testing.feeds import Feed

WORDS = pa.schema([("word", pa.string()), ("n", pa.int64())])
_PATIENCE = 60.0


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


def counted(frame: DataFrame) -> ab.Stream:
    return ab.stream(frame).key_by("word").aggregate(name="counter", n=ab.count())


def test_a_query_without_an_operator(spark: SparkSession, feed: Feed, tmp_path: Path) -> None:
    def start() -> ab.RunningQuery:
        shouted = ab.stream(feed.frame(spark)).transform(lambda df: df.select(F.upper("word")))
        return shouted.to_parquet(tmp_path / "out").start(tmp_path / "ck")

    def written() -> list[str]:
        return sorted(pq.read_table(tmp_path / "out").column(0).to_pylist())

    feed.add(words("the river"), words("the sea"))
    query = start()
    query.process_all_available()
    assert query.checkpoint() == 1
    query.stop()
    assert query.status == "stopped"
    assert query.await_termination(0)
    assert written() == ["RIVER", "SEA", "THE", "THE"]

    feed.add(words("a bank"))
    again = start()
    again.process_all_available()
    again.stop()
    assert again.status == "stopped"
    assert again.version == 2
    assert written() == ["A", "BANK", "RIVER", "SEA", "THE", "THE"]


def test_a_query_without_an_operator_ends_by_itself(
    spark: SparkSession, feed: Feed, tmp_path: Path
) -> None:
    feed.add(words("the river"))
    seen: list[int] = []
    query = (
        ab.stream(feed.frame(spark))
        .for_each_batch(lambda df, version: seen.append(df.count()))
        .start(tmp_path / "ck", available_now=True)
    )
    assert query.await_termination(_PATIENCE)
    assert seen == [2]


@pytest.mark.parametrize("error", [OSError("no space left"), MemoryError(), KeyError("table")])
def test_an_error_at_the_end_is_told(
    spark: SparkSession,
    feed: Feed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    feed.add(words("the river"))
    query = counted(feed.frame(spark)).to_memory("out").start(tmp_path / "ck")
    query.process_all_available()

    def forget(self: Assembly) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Assembly, "forget_tables", forget)
        query.stop()
    assert query.status.startswith("failed: the query ended at version 0, but its state")
    with pytest.raises(ab.errors.QueryFailed, match=type(error).__name__):
        query.await_termination(_PATIENCE)
    assert [event.kind for event in query.events if event.failed] == ["release failed"]

    feed.add(words("the sea"))
    again = counted(feed.frame(spark)).to_memory("out").start(tmp_path / "ck")
    again.process_all_available()
    again.stop()
    assert {(r["word"], r["n"]) for r in again.memory_table("out").to_pylist()} == {
        ("the", 2),
        ("sea", 1),
    }


def test_every_step_of_the_end_is_taken(
    spark: SparkSession, feed: Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also an error of the lock itself does not leave a query that never says that it ended."""
    feed.add(words("the river"))
    query = counted(feed.frame(spark)).to_memory("out").start(tmp_path / "ck")
    query.process_all_available()
    release = DriverLock.release

    def failing(self: DriverLock) -> None:
        release(self)
        raise OSError("the file system is gone")

    with monkeypatch.context() as patched:
        patched.setattr(DriverLock, "release", failing)
        query.stop()
    assert "its lock was not released" in query.status


def test_stopped_by_a_function_of_a_batch(
    spark: SparkSession, feed: Feed, tmp_path: Path, running: list[ab.RunningQuery]
) -> None:
    feed.add(words("the river"), words("the sea"), words("the bank"))
    started = threading.Event()
    seen: list[tuple[int, int]] = []

    def count(frame: DataFrame, version: int) -> None:
        assert started.wait(_PATIENCE)
        seen.append((version, frame.count()))
        if version == 1:
            running[0].stop()

    running.append(counted(feed.frame(spark)).for_each_batch(count).start(tmp_path / "ck"))
    started.set()
    assert running[0].await_termination(_PATIENCE)
    assert running[0].status == "stopped"
    assert running[0].version == 1, "the batch that asked is committed"
    assert seen == [(0, 2), (1, 2)]

    again = counted(feed.frame(spark)).to_memory("out").start(tmp_path / "ck")
    again.process_all_available()
    again.stop()
    assert {(r["word"], r["n"]) for r in again.memory_table("out").to_pylist()} == {
        ("the", 3),
        ("bank", 1),
    }


def test_stopping_twice(spark: SparkSession, feed: Feed, tmp_path: Path) -> None:
    feed.add(words("the river"))
    query = counted(feed.frame(spark)).to_memory("out").start(tmp_path / "ck")
    query.stop()
    query.stop()
    assert query.status == "stopped"


PROGRAM = """
import os, signal, sys
from pathlib import Path
import pyarrow as pa
import anabranch as ab
from anabranch.testing.feeds import Feed

work, end = Path(sys.argv[1]), sys.argv[2]
spark = ab.session("local[1]", **{"spark.ui.enabled": False, "spark.log.level": "OFF"})
feed = Feed(work / "input", pa.schema([("word", pa.string())]))
if end != "again":
    feed.add([{"word": "a"}, {"word": "b"}], [{"word": "a"}])
stream = ab.stream(feed.frame(spark)).key_by("word").aggregate(name="counter", n=ab.count())
query = stream.to_memory("out").start(work / "ck", state_folder=work / "state")
query.process_all_available()
counts = sorted((r["word"], r["n_count"]) for r in query.state_table("counter").to_pylist())
if end == "session":
    spark.stop()
if end == "jvm":
    os.kill(spark.sparkContext._gateway.proc.pid, signal.SIGKILL)
query.stop()
assert query.status != "running"
print("ended", query.status, query.version, counts)
"""


@pytest.mark.parametrize("end", ["session", "jvm"])
def test_stopped_without_spark(tmp_path: Path, end: str) -> None:
    """The session was stopped, or its JVM was killed: the query ends, and can be started again."""

    def run(how: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), how],
            capture_output=True,
            text=True,
            timeout=3 * _PATIENCE,
            env=os.environ | {"PYSPARK_PYTHON": sys.executable},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    assert "ended" in run(end)
    assert "ended stopped 1 [('a', 2), ('b', 1)]" in run("again")
