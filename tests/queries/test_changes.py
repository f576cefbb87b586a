"""What is under way in a query, as its user sees it."""

import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

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
    assert {(each.kind, each.what, each.why) for each in seen} == {
        ("move", "op", "scale to 3 instances")
    }
    assert "capturing the groups that move" in {each.step for each in seen}
    assert [each.seconds for each in seen] == sorted(each.seconds for each in seen)
    (event,) = [event for event in query.events if event.kind == "scale"]
    assert (event.details["before"], event.details["after"]) == (2, 3)
    assert 0 <= seen[-1].seconds <= event.seconds + 1
    query.stop()


def test_a_checkpoint_is_under_way_until_it_is_stored(query: RunningQuery) -> None:
    assert query.checkpoint() == query.version
    assert query.changes == []
    (event,) = [event for event in query.events if event.kind == "checkpoint"]
    assert event.details["version"] == query.version
    assert event.details["bytes"] > 0
    query.stop()
