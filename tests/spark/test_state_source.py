"""State as a DataFrame, from checkpoints at any retained version and from the live query."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.testing.feeds import Feed


@pytest.fixture
def folder(spark: SparkSession, tmp_path: Path) -> Path:
    feed = Feed(tmp_path / "input", pa.schema([("word", pa.string()), ("x", pa.int64())]))
    for value in (1, 2, 3):
        feed.add([{"word": "a", "x": value}, {"word": None, "x": value}, {"word": "b", "x": 10}])
    query = (
        ab.stream(feed.frame(spark))
        .key_by("word")
        .aggregate(name="sums", total=ab.sum("x"))
        .to_memory("out")
        .start(tmp_path / "ck", checkpointing=ab.Periodic(0, retain=10))
    )
    query.process_all_available()
    live = query.state("sums")
    assert live.columns[:2] == ["word", "key_group"]
    assert live.count() == 3
    query.stop()
    assert live.count() == 3, "a copy, which does not change with the stream"
    return tmp_path / "ck"


def totals(spark: SparkSession, folder: Path, version: int | None = None) -> dict[str | None, int]:
    reader = spark.read.format("anabranch.state").option("operator", "sums")
    if version is not None:
        reader = reader.option("version", version)
    frame = reader.load(str(folder))
    column = frame.columns[2]
    return {row["word"]: row[column] for row in frame.collect()}


def test_versions(spark: SparkSession, folder: Path) -> None:
    assert totals(spark, folder) == {"a": 6, None: 6, "b": 30}
    assert totals(spark, folder, 0) == {"a": 1, None: 1, "b": 10}


def test_what_is_not_there_is_told(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PySparkException, match="no checkpoint of version 77"):
        totals(spark, folder, 77)
    with pytest.raises(PySparkException, match=r"operator='tally'; version 2 .* has \['sums'\]"):
        spark.read.format("anabranch.state").option("operator", "tally").load(str(folder))
    with pytest.raises(PySparkException, match="no checkpoints in"):
        spark.read.format("anabranch.state").load(str(tmp_path / "nowhere"))
