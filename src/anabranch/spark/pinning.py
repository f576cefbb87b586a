"""Pinning: every partition of an RDD on a chosen host.

Spark has no public API to choose the host of a partition. Some of its own RDD classes can, and are
combined here: an RDD without rows that prefers the wanted hosts, and a union, partition by
partition, of it and the RDD to be pinned. ``tests/spark/test_pinning.py`` fails if a new version of
Spark changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

_ROW = "org.apache.spark.sql.catalyst.InternalRow"


def pinned(spark: SparkSession, rdd: Any, schema: StructType, hosts: Sequence[str]) -> DataFrame:
    """An RDD of Spark's internal rows as a DataFrame, partition i computed on ``hosts[i]``."""
    jvm = _jvm(spark)
    context = spark.sparkContext._jsc.sc()
    both = jvm.PythonUtils.toSeq([_no_rows(spark, hosts), rdd])
    union = jvm.org.apache.spark.rdd.SQLPartitioningAwareUnionRDD(
        context, both, len(hosts), _row_tag(spark)
    )
    return frame_of(spark, union, schema)


def one_task_each(spark: SparkSession, hosts: Sequence[str]) -> DataFrame:
    """A DataFrame without rows, with a partition on each of these hosts."""
    return frame_of(spark, _no_rows(spark, hosts), StructType())


def frame_of(spark: SparkSession, rdd: Any, schema: StructType) -> DataFrame:
    """An RDD of Spark's internal rows as a DataFrame."""
    java_schema = _jvm(spark).org.apache.spark.sql.types.DataType.fromJson(schema.json())
    return DataFrame(spark._jsparkSession.internalCreateDataFrame(rdd, java_schema, False), spark)


def _no_rows(spark: SparkSession, hosts: Sequence[str]) -> Any:
    jvm = _jvm(spark)
    preferred = jvm.java.util.HashMap()
    for partition, host in enumerate(hosts):
        preferred.put(partition, jvm.PythonUtils.toSeq([host]))
    return jvm.org.apache.spark.rdd.ParallelCollectionRDD(
        spark.sparkContext._jsc.sc(),
        jvm.PythonUtils.toSeq([]),
        len(hosts),
        jvm.PythonUtils.toScalaMap(preferred),
        _row_tag(spark),
    )


def _row_tag(spark: SparkSession) -> Any:
    jvm = _jvm(spark)
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    return jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName(_ROW, True, loader))


def _jvm(spark: SparkSession) -> Any:
    return spark.sparkContext._jvm
