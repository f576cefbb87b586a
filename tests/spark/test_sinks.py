"""Sinks hold every batch exactly once, however often it is written."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from anabranch.coordinator.failures import lost_worker, translated
from anabranch.errors import SinkFailed
from anabranch.spark.sinks.delta import DeltaSink
from anabranch.spark.sinks.parquet import ParquetSink
from anabranch.spark.sinks.sink import Delivery
from anabranch.units import Version


def rows(spark: SparkSession, start: int, stop: int, partitions: int = 2) -> DataFrame:
    return spark.range(start, stop, numPartitions=partitions)


def ids(folder: Path) -> list[int]:
    return sorted(pq.read_table(folder)["id"].to_pylist())


def test_parquet_is_invisible_until_committed(spark: SparkSession, tmp_path: Path) -> None:
    sink = ParquetSink(str(tmp_path / "out"))
    delivery = Delivery("q", Version(0), first=True)
    sink.write(rows(spark, 0, 10), delivery)
    assert ids(tmp_path / "out") == [] if any((tmp_path / "out").glob("part*")) else True
    assert list((tmp_path / "out").glob("part-*")) == []
    sink.commit(delivery)
    assert ids(tmp_path / "out") == list(range(10))
    assert spark.read.parquet(str(tmp_path / "out")).count() == 10


def test_parquet_replaces_a_repeated_batch(spark: SparkSession, tmp_path: Path) -> None:
    sink = ParquetSink(str(tmp_path / "out"))
    for version, first in ((0, True), (1, False)):
        delivery = Delivery("q", Version(version), first=first)
        sink.write(rows(spark, version * 10, version * 10 + 10, partitions=3), delivery)
        sink.commit(delivery)
    # Another run repeats batch 1 with fewer partitions; a file of the old attempt would stay.
    again = ParquetSink(str(tmp_path / "out"))
    delivery = Delivery("q", Version(1), first=True)
    again.write(rows(spark, 10, 20, partitions=1), delivery)
    again.commit(delivery)
    assert ids(tmp_path / "out") == list(range(20))
    assert not list((tmp_path / "out").glob("_anabranch*"))


def test_parquet_sweeps_what_a_dead_run_left(spark: SparkSession, tmp_path: Path) -> None:
    dead = ParquetSink(str(tmp_path / "out"))
    dead.write(rows(spark, 0, 5), Delivery("q", Version(0), first=True))
    other = ParquetSink(str(tmp_path / "out"))
    delivery = Delivery("q", Version(1), first=True, epoch=1)
    other.write(rows(spark, 5, 9), delivery)
    other.commit(delivery)
    assert ids(tmp_path / "out") == [5, 6, 7, 8]
    assert not list((tmp_path / "out").glob("_anabranch*"))


def test_parquet_takes_nothing_from_a_driver_that_was_paused(
    spark: SparkSession, tmp_path: Path
) -> None:
    """It wakes up between writing a batch and giving the files their names: too late."""
    out = str(tmp_path / "out")
    paused, newer = ParquetSink(out), ParquetSink(out)
    late = Delivery("q", Version(0), first=True, epoch=1)
    paused.write(rows(spark, 0, 6).repartition(3), late)
    delivery = Delivery("q", Version(0), first=True, epoch=2)
    newer.write(rows(spark, 0, 6).repartition(2), delivery)
    newer.commit(delivery)
    with pytest.raises(SinkFailed):
        paused.commit(late)
    assert sorted(ids(tmp_path / "out")) == list(range(6))


def test_a_folder_that_cannot_be_written_is_told_from_an_error_of_the_query(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    sink = ParquetSink(str(tmp_path / "file" / "out"))
    with pytest.raises(PySparkException) as failed:
        sink.write(rows(spark, 0, 10), Delivery("q", Version(0), first=True))
    assert lost_worker(failed.value)
    error = translated(failed.value)
    assert isinstance(error, SinkFailed)
    assert str(error).startswith(f"results could not be written to {sink.path}: ")


def test_delta_knows_what_it_has(spark: SparkSession, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    uri = str(tmp_path / "delta")
    for version in (0, 1, 1, 0):
        delivery = Delivery("q", Version(version), first=False)
        sink = DeltaSink(uri)
        sink.write(rows(spark, version * 3, version * 3 + 3), delivery)
        sink.commit(delivery)
    assert sorted(deltalake.DeltaTable(uri).to_pyarrow_table()["id"].to_pylist()) == list(range(6))
