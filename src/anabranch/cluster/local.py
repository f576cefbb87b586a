"""A Spark cluster on this machine, whose nodes can be killed and added."""

from __future__ import annotations

import ipaddress
import math
import re
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from anabranch.cluster import links, quotas, spark
from anabranch.cluster.master import Master, Registered
from anabranch.cluster.node import Node
from anabranch.cluster.resources import Resources
from anabranch.cluster.waiting import until
from anabranch.errors import ClusterFailed, PlanError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MOST_NODES = 250
_SECONDS = 180.0  # a machine that is busy with other things is slow to start JVMs


class LocalCluster:
    """A Spark master and workers, each worker its own host on its own address of this machine.

    Every node has a state folder, which its processes find in ``ANABRANCH_STATE_FOLDER``. If this
    process ends without :meth:`stop`, all processes and folders are removed all the same. Methods
    may be called from several threads. The cluster is open to every user of this machine, as
    Spark's standalone clusters are.

    ::

        with LocalCluster(nodes=2) as cluster:
            spark = cluster.session()
            cluster.kill(cluster.nodes[0])
    """

    def __init__(
        self,
        nodes: int = 4,
        cores: int = 1,
        memory: str = "1g",
        cpus: float | None = None,
        folder: str | Path | None = None,
        link: str | None = None,
    ) -> None:
        """Configure a cluster; :meth:`start`, or ``with``, starts it.

        Args:
            nodes: How many workers to start with.
            cores: How many tasks a node runs at a time.
            memory: The heap of a node's executor.
            cpus: The CPU quota of a node in cores, set by a control group. It applies once the
                node is ready, not while its processes start. None for no limit.
            folder: An empty or new folder for state and logs, which keeps the logs. By default
                everything is in memory and is removed at the end.
            link: The rate of a node's link, the same in both directions, such as ``"100 Mbit"``.
                Nodes then have addresses in a network of their own, which reaches only the driver
                and each other. It takes root and the programs of iproute2. None for no limit.
        """
        if not 1 <= nodes <= MOST_NODES:
            raise PlanError(f"nodes={nodes}: a cluster has 1 to {MOST_NODES} nodes")
        if cores < 1:
            raise PlanError(f"cores={cores}: a node runs at least one task at a time")
        if cpus is not None and not (math.isfinite(cpus) and cpus >= quotas.SMALLEST):
            raise PlanError(f"cpus={cpus}: a node has at least {quotas.SMALLEST} of a core")
        given = None if folder is None else Path(folder).expanduser().absolute()
        if given is not None and given.exists() and not _is_empty(given):
            raise PlanError(f"{given} is not an empty folder; give a new one")
        if given is not None and re.search(r"[\s,\"']", str(given)):
            raise PlanError(f"the folder {str(given)!r} has a space, comma or quote in its name")
        self._count = nodes
        self._cores = cores
        self._memory = spark.check_memory(memory)
        self._cpus = cpus
        self._given = given
        self._link = None if link is None else links.check_link(link)
        self._lock = threading.RLock()
        self._nodes: dict[str, Node] = {}
        self._used = 1  # the last number of an address that was given to a node
        self._resources: Resources | None = None

    def start(self) -> LocalCluster:
        """Start the master and all nodes, and wait until they are registered."""
        with self._lock:
            if self._resources is not None:
                raise ClusterFailed(f"the cluster {self.master} is running already; stop it first")
            self._resources = Resources(self._given, self._cpus, self._link)
            try:
                self._launch([self._fresh() for _ in range(self._count)])
            except BaseException:
                self.stop()
                raise
        return self

    @property
    def master(self) -> str:
        """The URL of the master, for ``anabranch.session(url)``."""
        return self._up().master.url

    @property
    def nodes(self) -> tuple[str, ...]:
        """The addresses of the nodes that are up."""
        return tuple(host for host, node in self._nodes.items() if node.is_up)

    @property
    def folder(self) -> Path:
        """Where the nodes' folders are, each named by its address."""
        return self._up().site.folder

    @property
    def limited(self) -> bool:
        """Whether the CPU quota of nodes is enforced."""
        return self._resources is not None and self._resources.site.groups is not None

    @property
    def linked(self) -> bool:
        """Whether nodes have links of the rate that was asked for."""
        return self._resources is not None and self._resources.site.network is not None

    def session(self, **conf: str | int | bool) -> SparkSession:
        """A session on this cluster, ready when every node has an executor.

        Settings are given by their names, as to :func:`anabranch.session`.
        """
        nodes: dict[str, str | int | bool] = {
            "spark.executor.memory": self._memory,
            "spark.executor.cores": self._cores,
        }
        session = self._up().sessions.open(self.master, nodes | conf)
        self.await_executors()
        return session

    def await_executors(self, seconds: float = _SECONDS) -> None:
        """Wait until every node has an executor of the session. Quotas are lifted meanwhile."""
        resources = self._up()
        missing = resources.sessions.without_executor(self.nodes)
        self._limit(missing, None)
        try:
            until(lambda: not resources.sessions.without_executor(self.nodes), seconds)
        finally:
            self._limit(missing, self._cpus)
        missing = resources.sessions.without_executor(self.nodes)
        if missing:
            raise ClusterFailed(
                f"after {seconds:.0f} s there is no executor on {', '.join(missing)}. "
                + self._nodes[missing[0]].complaint()
            )

    def kill(self, host: str, *, keep_state: bool = False) -> None:
        """Kill every process of a node at once, as when a machine is lost.

        Its state folder is removed too, unless you keep it for a node that comes back.
        """
        with self._lock:
            self._node(host).kill(keep_state=keep_state)

    def kill_executor(self, host: str) -> None:
        """Kill the executor of a node with its Python workers; the worker starts another."""
        with self._lock:
            self._node(host).kill_executors()

    def add(self, host: str | None = None) -> str:
        """Start one more node on a fresh address, or one that was killed again.

        Returns its address when the master has registered it. Its executor comes a little later:
        :meth:`await_executors`.
        """
        with self._lock:
            self._up()
            host = self._fresh() if host is None else self._free(host)
            if host in self._nodes:  # its worker may have crashed and left others behind
                self._nodes[host].kill(keep_state=True)
            self._launch([host])
            return host

    def stop(self) -> None:
        """End the session, all processes, and remove what they have written."""
        with self._lock:
            resources, self._resources = self._resources, None
            nodes, self._nodes = self._nodes, {}
            self._used = 1
            if resources is not None:
                resources.stop(nodes.values())

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _up(self) -> Resources:
        resources = self._resources
        if resources is None:
            raise ClusterFailed("the cluster is not running; start it, or use it in a with block")
        return resources

    def _node(self, host: str) -> Node:
        self._up()
        if host not in self.nodes:
            raise PlanError(f"no node {host!r} is up; there are {', '.join(self.nodes) or 'none'}")
        return self._nodes[host]

    def _fresh(self) -> str:
        site = self._up().site
        while True:
            self._used += 1
            if self._used > 254:
                raise ClusterFailed("all addresses for nodes are used up; start a new cluster")
            host = site.address(self._used)
            if host not in self._nodes:
                return host

    def _free(self, host: str) -> str:
        site = self._up().site
        try:
            address = ipaddress.IPv4Address(host)
        except ValueError as error:
            raise PlanError(f"{host!r} is not an address such as {site.address(9)}") from error
        if not site.has(address):
            some = f"{site.address(2)}, {site.address(3)}"
            raise PlanError(f"{host} cannot be a node: take one of {some}, ...")
        if host in self.nodes:
            raise PlanError(f"the node {host} is up already")
        return host

    def _launch(self, hosts: Collection[str]) -> None:
        resources = self._up()
        before = resources.master.workers()
        started: dict[str, Node] = {}
        try:
            for host in hosts:
                started[host] = Node(
                    resources.master.url,
                    host,
                    resources.site.folder / host,
                    cores=self._cores,
                    memory=self._memory,
                    site=resources.site,
                )
            self._limit(hosts, None)
            _await_registration(resources.master, started, before)
        except BaseException:
            for node in started.values():
                node.kill(keep_state=True)
            raise
        self._limit(hosts, self._cpus)
        self._nodes = self._nodes | started

    def _limit(self, hosts: Collection[str], cpus: float | None) -> None:
        groups = self._up().site.groups
        if groups is not None:
            for host in hosts:
                groups.limit(host, cpus)


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _await_registration(
    master: Master, nodes: Mapping[str, Node], before: Collection[Registered]
) -> None:
    def absent() -> list[str]:
        joined = {worker.host for worker in master.workers() if worker not in before}
        return [host for host in nodes if host not in joined]

    until(lambda: not absent() or not all(node.is_up for node in nodes.values()), _SECONDS)
    missing = absent()
    if missing:
        raise ClusterFailed(
            f"{', '.join(missing)} did not join the cluster. {nodes[missing[0]].complaint()}"
        )
