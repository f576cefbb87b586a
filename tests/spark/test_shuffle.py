"""Columns that send rows to instances."""

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from anabranch.spark.hashing import KeyHash
from anabranch.spark.shuffle import Router
from anabranch.state.groups import Routing


@pytest.mark.parametrize("groups", [1, 128, 4096])
def test_rows_go_to_the_instances_of_their_groups(spark: SparkSession, groups: int) -> None:
    frame = spark.range(1000)
    routing = Routing.even(groups, min(3, groups))
    router = Router(KeyHash(frame.schema, ["id"]), routing, ordered=False)
    group = F.pmod(F.xxhash64("id"), F.lit(groups))
    sent = router.sent(frame).select(F.spark_partition_id(), group).collect()
    assert all(routing.table()[at] == partition for partition, at in sent)
    assert len(sent) == 1000


def test_rows_are_addressed_to_partitions_or_to_none(spark: SparkSession) -> None:
    frame = spark.range(1000)
    router = Router(KeyHash(frame.schema, ["id"]), Routing.even(4, 2), ordered=False)
    rows = router.addressed(frame, [-1, 70_000, 0, -1]).select("id", "__target")
    group = F.pmod(F.xxhash64("id"), F.lit(4))
    found = {tuple(row) for row in rows.select(group, "__target").distinct().collect()}
    assert found == {(1, 70_000), (2, 0)}


def test_a_table_of_groups_is_one_value_of_the_plan(spark: SparkSession) -> None:
    frame = spark.range(1)
    router = Router(KeyHash(frame.schema, ["id"]), Routing.even(128, 2), ordered=False)
    plan = router.sent(frame)._jdf.queryExecution().analyzed().toString()
    assert "array(" not in plan
