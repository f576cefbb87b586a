"""The driver's side of a local cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from anabranch.errors import ClusterFailed, PlanError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Sessions:
    """The Spark session of this process, which has an address, on a cluster, if there is one."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._session: SparkSession | None = None

    def open(self, master: str, conf: Mapping[str, str | int | bool]) -> SparkSession:
        """Start, or get, the session with this master."""
        from pyspark import SparkContext

        from anabranch.spark.session import session

        active = SparkContext._active_spark_context
        if active is not None and active.master != master:
            raise PlanError(
                f"this program has an open Spark session on {active.master}, and there can be "
                "only one; stop that session first"
            )
        settings: dict[str, Any] = {
            "spark.driver.host": self._host,
            "spark.driver.bindAddress": self._host,
        }
        self._session = session(master, **(settings | dict(conf)))
        return self._session

    def without_executor(self, hosts: Iterable[str]) -> list[str]:
        """Those of the hosts on which the session has no executor."""
        if self._session is None or self._session.sparkContext._jsc is None:
            raise ClusterFailed("no session is open on this cluster; get one with session()")
        context = self._session.sparkContext._jsc.sc()
        if context.isStopped():
            raise ClusterFailed("Spark has stopped the session; its log says why")
        blocks = context.getExecutorMemoryStatus().keySet().mkString(",")
        present = {place.rpartition(":")[0] for place in blocks.split(",")}
        return [host for host in hosts if host not in present]

    def close(self) -> None:
        """Stop the session if it is still open."""
        session, self._session = self._session, None
        if session is not None and session.sparkContext._jsc is not None:
            session.stop()
