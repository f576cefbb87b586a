"""Operators that hand rows to each other packed give what they give with Spark in between."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.testing.feeds import Feed

RIDES = pa.schema([("user", pa.string()), ("city", pa.int32()), ("fare", pa.float64())])
PACKED = pa.schema([("data", pa.binary())])


def rides(seed: int, rows: int = 300) -> list[dict[str, Any]]:
    numbers = np.random.default_rng(seed)
    return [
        {"user": f"u{user}", "city": int(city), "fare": float(fare)}
        for user, city, fare in zip(
            numbers.integers(0, 40, rows),
            numbers.integers(0, 9, rows),
            numbers.integers(1, 50, rows),
            strict=True,
        )
    ]


def packed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, RIDES) as writer:
        writer.write_table(pa.Table.from_pylist(rows, RIDES))
    return {"data": sink.getvalue().to_pybytes()}


def chained(start: ab.Stream, *, through_spark: bool) -> ab.Stream:
    """Three operators for which the order of rows counts."""

    def between(stream: ab.Stream) -> ab.Stream:
        return stream.transform(lambda df: df) if through_spark else stream

    users = (
        between(start).key_by("user").aggregate(name="users", n=ab.count(), city=ab.last("city"))
    )
    cities = (
        between(users).key_by("city").aggregate(name="cities", n=ab.sum("n"), by=ab.last("user"))
    )
    return between(cities).key_by("by").aggregate(name="by", last=ab.last("n"), most=ab.max("city"))


@pytest.fixture
def results(spark: SparkSession, tmp_path: Path) -> list[list[dict[str, Any]]]:
    """The same rides as rows through Spark, as rows packed later, as values packed before."""
    found = []
    for kind in ("spark", "chain", "source"):
        feed = Feed(tmp_path / kind, PACKED if kind == "source" else RIDES)
        for seed in range(3):
            given = rides(seed)
            feed.add([packed(given[:100]), packed(given[100:])] if kind == "source" else given)
        start = ab.stream(feed.frame(spark))
        if kind == "source":
            start = start.unpack("data", "user string, city int, fare double")
        chain = chained(start, through_spark=kind == "spark")
        query = chain.to_memory("out").start(tmp_path / "checkpoints" / kind, instances=3)
        query.process_all_available()
        rows = query.memory_table("out").to_pylist()
        state = query.state_table("cities").sort_by("city").to_pylist()
        query.stop()
        found.append([*sorted(rows, key=str), *state])
    return found


def test_packed_or_not_the_result_is_the_same(results: list[list[dict[str, Any]]]) -> None:
    through_spark, chain, source = results
    assert len(through_spark) > 20
    assert chain == through_spark
    assert source == through_spark


def test_what_cannot_be_unpacked_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "input", RIDES)
    feed.add(rides(1))
    stream = ab.stream(feed.frame(spark))
    for column, reason in (("data", "no column 'data'"), ("user", "string, not binary")):
        unpacked = stream.unpack(column, RIDES).key_by("user").deduplicate(name="new")
        with pytest.raises(ab.PlanError, match=reason):
            unpacked.to_memory("out").start(tmp_path / "checkpoint")
