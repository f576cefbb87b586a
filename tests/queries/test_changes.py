"""What is under way in a query, as its user sees it."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import anabranch as ab
from anabranch.queries.running_query import RunningQuery
from anabranch.testing.feeds import Feed

pytestmark = pytest.mark.spark
ROWS = pa.schema([("k", pa.int64())])


@pytest.fixture
def query(spark: SparkSession, tmp_path: Path) -> RunningQuery:
    feed = Feed(tmp_path / "in", ROWS)
    feed.add([{"k": key} for key in range(100)])
    counted = ab.stream(feed.frame(spark)).key_by("k").aggregate(name="op", n=ab.count())
    started = counted.to_memory("out").start(
        tmp_path / "ck", instances=2, checkpointing=ab.Periodic("1 hour")
    )
    started.process_all_available()
    return started


def test_a_scale_is_under_way_until_it_is_done(query: RunningQuery) -> None:
    assert query.changes == []
    # Without rows there is no batch to capture with, so that it takes a moment.
    scaled = query.scale("op", 3, wait=False)
    seen = []
    while not scaled.done():
        seen += query.changes
        time.sleep(0.005)
    assert scaled.result() is None
    assert query.changes == []
    assert query.routing["op"].instances == 3
    moving = [each for each in seen if each.kind == "move"]
    noting = [each for each in seen if each.kind == "note"]
    assert moving + noting == seen, "it is written when it is done"
    assert {(each.what, each.why) for each in moving} == {("op", "scale to 3 instances")}
    assert "capturing the groups that move" in {each.step for each in moving}
    assert [each.seconds for each in moving] == sorted(each.seconds for each in moving)
    (event,) = [event for event in query.events if event.kind == "scale"]
    assert (event.details["before"], event.details["after"]) == (2, 3)
    assert 0 <= moving[-1].seconds <= event.seconds + 1
    query.stop()


def test_a_checkpoint_is_under_way_until_it_is_stored(query: RunningQuery) -> None:
    assert query.checkpoint() == query.version
    assert query.changes == []
    (event,) = [event for event in query.events if event.kind == "checkpoint"]
    assert event.details["version"] == query.version
    assert event.details["bytes"] > 0
    query.stop()


class Gate:
    """A sink outside, in which a batch stays as long as a test wants."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, frame: DataFrame, version: int) -> None:
        frame.count()
        if version > 0:
            self.reached.set()
            assert self.open.wait(60)


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """Whoever has started the program loses his patience, and presses Ctrl-C."""
    main = threading.main_thread().ident
    assert main is not None
    # Spark's handler would cancel all jobs, also that of the batch.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


def test_what_is_given_up_has_changed_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """A move waits for the batch that runs, so that it is not done before it is given up."""
    feed, gate = Feed(tmp_path / "in", ROWS), Gate()
    feed.add([{"k": key} for key in range(100)])
    counted = ab.stream(feed.frame(spark)).key_by("k").aggregate(name="op", n=ab.count())
    query = counted.for_each_batch(gate).start(
        tmp_path / "ck", instances=2, checkpointing=ab.Periodic("1 hour")
    )
    query.process_all_available()
    before = query.routing
    feed.add([{"k": key} for key in range(50)])
    assert gate.reached.wait(60)
    for given in (
        query.scale("op", 3, wait=False),
        query.checkpoint(wait=False),
        query.rebalance(wait=False),
    ):
        assert given.cancel() or (given.done() and given.exception() is None)
    scaled = query.scale("op", 3, wait=False)
    assert scaled.cancel()
    assert scaled.cancelled()
    for blocking in (
        lambda: query.scale("op", 3),
        query.checkpoint,
        lambda: query.state_table("op"),
    ):
        with interrupted(0.3), pytest.raises(KeyboardInterrupt):
            blocking()
    assert query.changes == []
    assert query._parts.loop.query.reads == ()
    gate.open.set()
    query.process_all_available()
    assert query.routing == before
    counts = query.state_table("op")["n_count"].to_pylist()
    assert sorted(counts) == [1] * 50 + [2] * 50
    assert query.scale("op", 3).result() is None
    assert not query.scale("op", 4).cancel(), "it is done"
    assert query.routing["op"].instances == 4
    query.stop()
    last = query.events[-1]
    assert (last.kind, last.details["reason"]) == ("query stopped", "stop() was called")
