"""A cluster and its session in a process of their own: only one session fits into a process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import SparkSession

from anabranch.cluster import LocalCluster

_CONF = {"spark.ui.enabled": False, "spark.log.level": "ERROR"}
_TASK_SECONDS = 0.2


class Seen(NamedTuple):
    """What a task found where it ran."""

    host: str
    state: str
    group: str
    pid: int
    executor: int


class _Here:
    cluster: LocalCluster
    spark: SparkSession


class Driver:
    """Runs functions of this module in the other process, one at a time."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, mp_context=spawn)
        self.pid: int = self.run(os.getpid)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._pool.submit(function, *arguments).result(200)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def start(nodes: int, cpus: float | None) -> tuple[str, Path, bool]:
    _Here.cluster = LocalCluster(nodes, memory="512m", cpus=cpus).start()
    return _Here.cluster.master, _Here.cluster.folder, _Here.cluster.limited


def open_session() -> None:
    _Here.spark = _Here.cluster.session(**_CONF)


def stop() -> None:
    _Here.cluster.stop()


def nodes() -> tuple[str, ...]:
    return _Here.cluster.nodes


def call(method: str, *arguments: Any, **named: Any) -> Any:
    return getattr(_Here.cluster, method)(*arguments, **named)


def kill_keeping_state(host: str) -> None:
    _Here.cluster.kill(host, keep_state=True)


def executor_hosts() -> set[str]:
    status = _Here.spark.sparkContext._jsc.sc().getExecutorMemoryStatus()
    found = status.keySet().mkString(",").split(",")
    return {place.rpartition(":")[0] for place in found} - {"127.0.0.1"}


def job(tasks: int, service: bool = False) -> list[Seen]:
    """Where tasks of a job run. A task can start a service that outlives it, on its node."""
    seconds = _TASK_SECONDS

    def look(_: Iterator[int]) -> Iterator[tuple[str, str, str, int, int]]:
        import os
        import subprocess
        import time
        from pathlib import Path

        time.sleep(seconds)  # so that the tasks are spread over all executors
        if service:
            subprocess.Popen(["sleep", "600"], start_new_session=True)
        parent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
        yield (
            os.environ["SPARK_LOCAL_IP"],
            os.environ["ANABRANCH_STATE_FOLDER"],
            Path("/proc/self/cgroup").read_text(),
            os.getpid(),
            int(parent),
        )

    rows = _Here.spark.sparkContext.parallelize(range(tasks), tasks).mapPartitions(look)
    return [Seen(*row) for row in rows.collect()]


def shout(size: int) -> None:
    """A task that writes so many bytes to its standard error."""

    def write(_: Iterator[int]) -> Iterator[int]:
        import sys

        line = "x" * 1023
        for _ in range(size // 1024):
            print(line, file=sys.stderr)
        print("the end", file=sys.stderr, flush=True)
        yield 0

    _Here.spark.sparkContext.parallelize([0], 1).mapPartitions(write).collect()
