"""The nodes in Spark's view, on the driver: a node is the host of an executor.

Executors are polled, because a listener is too expensive from Python. A listener in Python is a
py4j proxy of ``SparkListenerInterface``. A proxy gets every call of the interface: two for each
task, and more for jobs, stages and blocks. Each call holds Spark's listener bus until Python has
its interpreter lock, and a bus that is held drops events of other listeners. The poll is cheap
instead: it asks the scheduler for the ids of the executors. It reads the list of hosts, which is a
request to the block manager, only when the ids have changed, and once a second.
"""

from __future__ import annotations

import time

from pyspark.sql import SparkSession

_HOSTS_SECONDS = 1.0


class Executors:
    """The hosts that have an executor. One thread or several may ask, as often as they like."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        # The driver is in the list as if it were an executor, on its own host.
        self._driver = spark.sparkContext.getConf().get("spark.driver.host")
        self._context = spark.sparkContext._jsc.sc()
        self._scheduler = self._context.schedulerBackend()
        self._known: tuple[str, float, frozenset[str]] | None = None

    def hosts(self) -> frozenset[str]:
        """The hosts that have an executor now."""
        ids, now = self._ids(), time.monotonic()
        if self._known is not None:
            before, at, hosts = self._known
            if before == ids and now < at + _HOSTS_SECONDS:
                return hosts
        found = self._hosts()
        # An executor has an id before it is in the list of hosts: then it is looked for again.
        settled = len(found) == len(ids.split(",") if ids else ())
        hosts = frozenset(found)
        self._known = (ids, now, hosts) if settled else None
        return hosts

    def _ids(self) -> str:
        return str(self._scheduler.getExecutorIds().mkString(","))

    def _hosts(self) -> list[str]:
        known = self._context.getExecutorMemoryStatus().keys().mkString(",")
        hosts = [address.rpartition(":")[0] for address in known.split(",")]
        if self._driver in hosts:
            hosts.remove(self._driver)
        return hosts


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
