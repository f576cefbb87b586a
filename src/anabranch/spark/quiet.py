"""Keeping Spark from crying out over what is meant to happen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

_STREAMS = "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution"


@contextmanager
def stopping(spark: SparkSession) -> Iterator[None]:
    """While a stream is stopped, Spark logs the batch that it gives up as an error: not so here."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    logging = jvm.org.apache.logging.log4j
    before = logging.LogManager.getLogger(_STREAMS).getLevel()
    configurator = logging.core.config.Configurator
    configurator.setLevel(_STREAMS, logging.Level.OFF)
    try:
        yield
    finally:
        configurator.setLevel(_STREAMS, before)
