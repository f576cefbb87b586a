"""Nodes as Spark sees them: which are alive, and on which one a Python worker runs.

A node is the host of an executor. Spark passes the host to the executor's process as an argument,
whatever the cluster manager; that is where a worker reads it.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import SparkSession

_HOST_ARGUMENT = b"--hostname"


class Executor(NamedTuple):
    """The executor process that a Python worker belongs to."""

    pid: int
    host: str | None
    """None when the driver itself runs the tasks."""


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
    """Ask the cluster manager for so many executors in all; whether it takes such requests."""
    context = spark.sparkContext
    gateway = context._gateway
    assert gateway is not None
    nowhere = gateway.jvm.PythonUtils.toScalaMap(gateway.jvm.java.util.HashMap())
    return bool(context._jsc.sc().requestTotalExecutors(total, 0, nowhere))


def is_local(spark: SparkSession) -> bool:
    """Whether the driver runs all tasks itself, in its own process."""
    return bool(spark.sparkContext._jsc.sc().isLocal())


@cache
def executor() -> Executor:
    """The executor of the Python worker that asks: the first Java process above it."""
    pid = os.getpid()
    while pid > 1:
        status = Path(f"/proc/{pid}/stat").read_text()
        pid = int(status.rpartition(")")[2].split()[1])
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if arguments[0].endswith(b"java"):
            at = arguments.index(_HOST_ARGUMENT) + 1 if _HOST_ARGUMENT in arguments else 0
            return Executor(pid, arguments[at].decode() if at else None)
    raise RuntimeError("this process does not run below a Spark executor")
