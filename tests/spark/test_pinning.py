"""What is relied on of Spark's internals. A new version of Spark that fails here cannot be used."""

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from anabranch.spark.buffers import Buffer
from anabranch.spark.hashing import KeyHash
from anabranch.spark.nodes import is_local
from anabranch.spark.pinning import one_task_each
from anabranch.spark.shuffle import Router
from anabranch.state.groups import Routing

pytestmark = pytest.mark.spark
HOSTS = ["10.0.0.1", "10.0.0.2", "10.0.0.1"]


def preferred(spark: SparkSession, frame: DataFrame) -> list[str]:
    """Where Spark's scheduler would like to compute each partition."""
    context = spark.sparkContext._jsc.sc()
    rdd = frame._jdf.queryExecution().toRdd()
    return [
        context.getPreferredLocs(rdd, partition).mkString(",")
        for partition in range(rdd.getNumPartitions())
    ]


@pytest.fixture
def buffer(spark: SparkSession) -> Buffer:
    frame = spark.range(0, 1000, 1, 4)
    router = Router(KeyHash(frame.schema, ["id"]), Routing.even(16, 3), ordered=False)
    return Buffer(spark, router.sent(frame))


def rows(frame: DataFrame) -> list[tuple[int, int]]:
    """Rows with the partition that they are in."""
    return sorted((r[0], r[1]) for r in frame.select("id", F.spark_partition_id()).collect())


def test_partitions_prefer_the_hosts_they_are_pinned_to(
    spark: SparkSession, buffer: Buffer
) -> None:
    assert preferred(spark, one_task_each(spark, HOSTS)) == HOSTS
    assert preferred(spark, buffer.pinned(HOSTS)) == HOSTS


def test_pinning_changes_neither_rows_nor_partitions(buffer: Buffer) -> None:
    assert rows(buffer.pinned(HOSTS)) == rows(buffer.unpinned())
    assert [number for number, _ in rows(buffer.unpinned())] == list(range(1000))


def test_a_buffer_gives_the_rows_of_some_instances_and_senders(buffer: Buffer) -> None:
    sent = rows(buffer.unpinned())
    of_one = [number for number, instance in sent if instance == 1]
    assert buffer.senders == 4
    assert [number for number, _ in rows(buffer.part([1]))] == of_one
    # Sender i has the numbers from 250 i on.
    without = [number for number in of_one if number // 250 != 2]
    assert [number for number, _ in rows(buffer.part([1], without=[2]))] == without


def test_senders_can_be_given_up(buffer: Buffer) -> None:
    assert buffer.unpinned().count() == 1000
    assert buffer.lost() == []
    kept = [number for number, _ in rows(buffer.part([1], without=[0]))]
    assert buffer.lost() == [0]
    missing = buffer._tracker().findMissingPartitions(buffer._shuffle).get().mkString(",")
    assert missing == "", "what was given up is made again"
    assert kept == [number for number, _ in rows(buffer.part([1], without=[0]))]


def test_what_was_sent_is_not_computed_again(spark: SparkSession) -> None:
    computed = spark.sparkContext.accumulator(0)

    def count(batches):  # type: ignore[no-untyped-def]
        for batch in batches:
            computed.add(batch.num_rows)
            yield batch

    frame = spark.range(0, 1000, 1, 4).mapInArrow(count, "id long")
    router = Router(KeyHash(frame.schema, ["id"]), Routing.even(16, 3), ordered=True)
    buffer = Buffer(spark, router.sent(frame))
    assert buffer.pinned(HOSTS).count() == buffer.part([0, 1, 2]).count() == 1000
    assert computed.value == 1000
    assert buffer.computed_again().count() == 1000
    assert computed.value == 2000


def test_the_driver_runs_the_tasks_itself(spark: SparkSession) -> None:
    assert is_local(spark)


def test_a_trimmed_buffer_is_forgotten_at_once(spark: SparkSession) -> None:
    frame = spark.range(0, 1000, 1, 4)
    router = Router(KeyHash(frame.schema, ["id"]), Routing.even(16, 3), ordered=False)
    kept, trimmed = (Buffer(spark, router.sent(frame)) for _ in range(2))
    for buffer in (kept, trimmed):
        assert len(rows(buffer.unpinned())) == 1000
    tracker = kept._tracker()
    assert tracker.containsShuffle(trimmed._shuffle)
    trimmed.trim()
    assert not tracker.containsShuffle(trimmed._shuffle), "no garbage collector is waited for"
    assert len(rows(kept.unpinned())) == 1000
