"""Rows that are computed before they are read."""

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from anabranch.coordinator.failures import lost_worker
from anabranch.spark.computed import Computed
from anabranch.spark.jobs import tagged


def test_rows_stay_in_their_partitions_and_are_let_go(spark: SparkSession) -> None:
    frame = spark.range(0, 100, 1, 5).withColumn("of", F.spark_partition_id())
    held = spark.sparkContext._jsc.sc().getPersistentRDDs().size()
    computed = Computed(frame)
    assert spark.sparkContext._jsc.sc().getPersistentRDDs().size() == held + 1
    rows = computed.frame.withColumn("now", F.spark_partition_id()).collect()
    assert [row["id"] for row in rows] == list(range(100))
    assert all(row["of"] == row["now"] for row in rows)
    merged = computed.frame.coalesce(1).collect()
    assert [row["of"] for row in merged] == [row["of"] for row in rows]
    computed.release()
    assert spark.sparkContext._jsc.sc().getPersistentRDDs().size() == held


def test_lost_rows_are_not_computed_again(spark: SparkSession) -> None:
    """Inside the task that reads them they might be computed as another instance."""
    computed = Computed(spark.range(0, 100, 1, 5))
    computed.release()
    with pytest.raises(Exception, match="not found") as error:
        computed.frame.collect()
    assert lost_worker(error.value)


def test_failed_jobs_are_known_though_the_error_was_caught(spark: SparkSession) -> None:
    with tagged(spark.sparkContext) as jobs:
        spark.range(10).collect()
        assert not jobs.any_failed()
        with pytest.raises(Exception, match="zero"):
            spark.range(10).select(F.raise_error(F.lit("zero"))).collect()
        assert jobs.any_failed()
    with tagged(spark.sparkContext) as others:
        spark.range(10).collect()
        assert not others.any_failed()
