"""The nodes in Spark's view, on the driver: a node is the host of an executor."""

from __future__ import annotations

from pyspark.sql import SparkSession


def live_hosts(spark: SparkSession) -> frozenset[str]:
    """The hosts that have an executor now. Empty where the driver runs the tasks itself."""
    context = spark.sparkContext
    known = context._jsc.sc().getExecutorMemoryStatus().keys().mkString(",")
    hosts = [address.rpartition(":")[0] for address in known.split(",")]
    # The driver is in the list as if it were an executor, on its own host.
    driver = context.getConf().get("spark.driver.host")
    if driver in hosts:
        hosts.remove(driver)
    return frozenset(hosts)


def request_nodes(spark: SparkSession, total: int) -> bool:
    """Request a total number of executors from the cluster manager. Whether it supports that."""
    context = spark.sparkContext
    gateway = context._gateway
    assert gateway is not None
    nowhere = gateway.jvm.PythonUtils.toScalaMap(gateway.jvm.java.util.HashMap())
    return bool(context._jsc.sc().requestTotalExecutors(total, 0, nowhere))


def is_local(spark: SparkSession) -> bool:
    """Whether the driver runs all tasks itself, in its own process."""
    return bool(spark.sparkContext._jsc.sc().isLocal())
