"""The whole query through Spark: fed, stopped, started again, checked."""

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from anabranch_linearroad import (
    Traffic,
    check,
    make_history,
    read_answers,
    reference,
    replicate,
    write_input,
)
from anabranch_linearroad.clock import Clock
from anabranch_linearroad.copies import FED, Copies
from anabranch_linearroad.feeder import Feed, Feeder
from anabranch_linearroad.ledger import Ledger
from anabranch_linearroad.query import linear_road

COPIES = 3


@pytest.fixture(scope="module")
def rows() -> pa.Table:
    return Traffic(seed=3, seconds=420, rates=(60.0, 120.0), accidents=120.0).table()


def test_copies_are_those_of_replicas(rows: pa.Table, tmp_path: Path) -> None:
    write_input(tmp_path, rows)
    replicas = replicate(tmp_path, COPIES)
    spans = (replicas.spans["VID"], replicas.spans["QID"], replicas.spans["XWay"])
    copies = Copies(str(tmp_path), 0, COPIES, spans)
    expected = pa.concat_tables([table for _, table in replicas.seconds(50, 130)])
    expected = expected.filter(np.asarray(expected["Type"]) != 4).select(FED.names[:-1])
    by_all = [(name, "ascending") for name in expected.column_names]
    cuts = [500, 501, 611, 899, 1300]
    parts = [batch for a, b in pairwise(cuts) for batch in copies.between(a, b)]
    fed = pa.Table.from_batches(parts)
    assert (np.asarray(fed["Slice"]) // 10 == np.asarray(fed["Time"])).all()
    assert fed.drop_columns("Slice").sort_by(by_all).equals(expected.sort_by(by_all))


def test_the_feeder_follows_the_clock(rows: pa.Table, tmp_path: Path) -> None:
    write_input(tmp_path / "input", rows)
    clock = tmp_path / "clock"
    feeder = Feeder(
        Feed(str(tmp_path / "input"), paced_from=100, end=200, pace=20.0, clock=str(clock))
    )
    assert feeder.latestOffset({"slice": 0}, None) == {"slice": 1000}
    assert Clock.read(clock) is None
    first = feeder.latestOffset({"slice": 1000}, None)["slice"]
    assert 1001 <= first < 1100
    time.sleep(0.2)
    started = Clock.read(clock)
    assert started is not None
    second = feeder.latestOffset({"slice": first}, None)["slice"]
    assert 1000 + 200 * 0.2 <= second <= 1001 + 200 * (time.time() - started.started)
    again = Feeder(Feed(str(tmp_path / "input"), paced_from=100, pace=20.0, clock=str(clock)))
    assert again.latestOffset({"slice": first}, None)["slice"] >= second
    few = Feeder(Feed(str(tmp_path / "input"), pace=0.0, most_rows=100))
    assert 1 <= few.latestOffset({"slice": 0}, None)["slice"] <= 20
    ended = feeder.latestOffset({"slice": 2000}, None)
    assert ended == {"slice": 2000}


@pytest.mark.spark
def test_exact_through_spark_with_a_restart(
    spark: SparkSession, rows: pa.Table, tmp_path: Path
) -> None:
    history = make_history(rows, seed=3)
    write_input(tmp_path / "input", rows)
    replicas = replicate(tmp_path / "input", COPIES)
    spans = replicas.spans
    ledger = Ledger.write(
        history, tmp_path / "ledger", vehicles=spans["VID"], expressways=spans["XWay"]
    )
    answers = tmp_path / "answers"
    for end in (200, None):
        feed = Feed(
            str(tmp_path / "input"),
            copies=COPIES,
            vehicles=spans["VID"],
            requests=spans["QID"],
            expressways=spans["XWay"],
            end=end,
            pace=0.0,
            most_rows=20_000,
        )
        query = linear_road(feed.stream(spark), ledger, answers).start(tmp_path / "query")
        query.process_all_available()
        query.stop()
    verdict = check(read_answers(answers), replicas.expected(reference(rows, history)))
    assert verdict.passed, verdict
    assert verdict.received > 10_000
