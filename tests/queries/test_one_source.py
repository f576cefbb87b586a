"""Several streams of one streaming DataFrame: Spark reads it once, and notes it several times."""

from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.queries.running_query import RunningQuery
from anabranch.spark.logs import SparkLogs
from anabranch.spark.sources import combine, logs_of
from anabranch.testing.feeds import Feed

ROWS = pa.schema([("k", pa.int64())])


def counts(query: RunningQuery, name: str) -> dict[int, int]:
    rows = query.state_table(name).select(["k", "n_count"]).to_pylist()
    return {row["k"]: row["n_count"] for row in rows}


def test_streams_of_one_source_are_checkpointed_and_restarted(
    spark: SparkSession, tmp_path: Path
) -> None:
    one, other = Feed(tmp_path / "one", ROWS), Feed(tmp_path / "other", ROWS)

    def start() -> RunningQuery:
        frame = one.frame(spark)
        streams = {"all": frame, "even": frame.where("k % 2 = 0"), "other": other.frame(spark)}
        return ab.query(
            *[
                ab.stream(each).key_by("k").aggregate(name=name, n=ab.count()).to_memory(name)
                for name, each in streams.items()
            ]
        ).start(tmp_path / "checkpoint", checkpointing=ab.Periodic("1 hour"), instances=1)

    for round in (1, 2):
        query = start()
        for _ in range(3):
            one.add([{"k": key} for key in range(4)])
        other.add([{"k": 9}])
        query.process_all_available()
        assert query.checkpoint() == query.version
        assert counts(query, "all") == dict.fromkeys(range(4), 3 * round)
        assert counts(query, "even") == dict.fromkeys((0, 2), 3 * round)
        assert counts(query, "other") == {9: round}
        query.stop()
        assert query.exception is None


def test_the_logs_of_sources_are_found_by_their_numbers(
    spark: SparkSession, tmp_path: Path
) -> None:
    one, other = (Feed(tmp_path / name, ROWS).frame(spark) for name in ("one", "other"))
    assert logs_of(one) == (0,)
    assert logs_of(combine([one, other])) == (0, 1)
    assert logs_of(combine([one, one.where("k > 0"), other, one])) == (0, 0, 1, 0)
    constant = spark.range(3).withColumnRenamed("id", "k")
    assert logs_of(combine([one.join(constant, "k"), other])) == (0, 1)


def test_offsets_are_of_the_logs_that_their_sources_have(tmp_path: Path) -> None:
    offsets = 'v1\n{}\n{"logOffset":4}\n{"logOffset":4}\n{"logOffset":2}'
    logs = SparkLogs(str(tmp_path), (0, 0, 1))
    assert logs._entries_in(offsets) == {0: 4, 1: 2}
    assert SparkLogs(str(tmp_path))._entries_in(offsets) == {0: 4, 1: 4, 2: 2}
