"""The nodes of a query, as the driver knows them: who is alive, and the agent of each."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial

from pyspark.sql import SparkSession

from anabranch.backup.store import BackupStore
from anabranch.backup.upstream import Upstream
from anabranch.errors import AnabranchError, DidNotHappen, QueryFailed, StoreError
from anabranch.nodes.folders import StateRoot
from anabranch.nodes.node import Deadline
from anabranch.nodes.remote import NodeStore, RemoteNode
from anabranch.nodes.requests import Epoch, Ping, Stop
from anabranch.nodes.tickets import Secret, Signer
from anabranch.nodes.tls import Tls
from anabranch.spark.nodes import live_hosts, request_nodes
from anabranch.spark.pinning import one_task_each
from anabranch.worker.here import ANSWER, AgentStart

_log = logging.getLogger("anabranch")
_PING_SECONDS = 3.0
_STORE_SECONDS = 60.0
"""The driver itself only lists and deletes what nodes keep."""
_TRUSTED_SECONDS = 2.0
"""Who has just answered is not asked again: what it is wanted for would fail, and be retried."""
_TRIES = 3


class Cluster:
    """One agent on every node that the query uses, started when it is first needed.

    An agent that has died alone is started again; one whose executor is gone is gone with it.
    ``epoch`` is the number of this run of the query. ``files`` is the place of the backups, or None
    if the nodes keep them for each other. ``upstream`` says how much they keep, and how long they
    are waited for. With ``keep`` the state of a dead query stays on its nodes, because it is
    nowhere else.
    """

    def __init__(
        self,
        spark: SparkSession,
        root: StateRoot,
        epoch: int,
        files: str | None,
        secret: Secret,
        tls: Tls | None = None,
        upstream: Upstream = Upstream(),  # noqa: B008
        *,
        keep: bool = False,
    ) -> None:
        self._spark = spark
        self._root = root
        self._epoch = Epoch(epoch)
        self._files = files
        self._secret = secret
        self._signer = Signer(secret)
        self._tls = tls
        self._upstream = upstream
        self._keep = keep
        self._trusted = None if tls is None else tls.trusted()
        self._agents: dict[str, RemoteNode] = {}
        self._answered: dict[str, float] = {}
        self._starting = threading.RLock()

    def alive(self) -> frozenset[str]:
        """The hosts that have an executor now."""
        return live_hosts(self._spark)

    def ready(self) -> frozenset[str]:
        """The hosts whose agents have been started: work can begin there at once."""
        return self.alive() & frozenset(self._agents)

    def request(self, total: int) -> bool:
        """Ask the cluster manager for so many nodes in all; whether it takes such requests."""
        return request_nodes(self._spark, total)

    def node(self, host: str) -> RemoteNode:
        """The node of a host, with an agent that answers."""
        self.prepare([host])
        agent = self._agents.get(host)
        if agent is None:
            raise DidNotHappen(f"node {host} was lost while it was asked")
        return agent

    def addresses(self) -> Mapping[str, str]:
        """Where the agents are that have been started, by host."""
        return {host: agent.address for host, agent in dict(self._agents).items()}

    def stores(self) -> Mapping[str, BackupStore]:
        """The backups at each node that is alive."""
        alive = self.alive()
        self.prepare(sorted(alive))
        deadline = partial(Deadline, _STORE_SECONDS)
        return {
            host: NodeStore(agent, self._epoch, deadline)
            for host, agent in dict(self._agents).items()
            if host in alive
        }

    def prepare(self, hosts: Sequence[str]) -> None:
        """Have an agent on each of these nodes."""
        # Those that are there need not wait until others are started.
        hosts = [host for host in hosts if not self._answers(host)]
        if not hosts:
            return
        with self._starting:
            for _ in range(_TRIES):
                missing = [host for host in hosts if not self._answers(host)]
                if not missing:
                    return
                if gone := sorted(set(missing) - self.alive()):
                    raise DidNotHappen(f"no executor is left on {', '.join(gone)}")
                self._start(missing)
            raise QueryFailed(
                f"no agent could be started on {missing}: see agent.log in its folder of backups"
            )

    def forget(self, host: str) -> None:
        """A node is gone."""
        self._answered.pop(host, None)
        agent = self._agents.pop(host, None)
        if agent is not None:
            agent.close()

    def close(self) -> None:
        """End all agents."""
        for host, agent in list(self._agents.items()):
            try:
                agent.ask(Stop(epoch=self._epoch), Deadline(_PING_SECONDS))
            except AnabranchError as error:
                _log.info("the agent of %s could not be told to stop: %s", host, error)
            self.forget(host)

    def _answers(self, host: str) -> bool:
        agent = self._agents.get(host)
        if agent is None:
            return False
        if time.monotonic() - self._answered.get(host, -_TRUSTED_SECONDS) < _TRUSTED_SECONDS:
            return True
        try:
            agent.ask(Ping(), Deadline(_PING_SECONDS))
        except StoreError:
            self.forget(host)
            return False
        self._answered[host] = time.monotonic()
        return True

    def _start(self, hosts: Sequence[str]) -> None:
        timeout = self._upstream.timeout_seconds
        context = {
            "secret": self._secret.to_hex(),
            "files": self._files,
            "timeout": timeout,
            "keep": self._keep,
        }
        capacity = self._upstream.capacity_bytes
        start = AgentStart(tuple(hosts), self._root, context, self._tls, capacity, timeout)
        rows = one_task_each(self._spark, hosts).mapInArrow(start.run, ANSWER).collect()
        for host, address in rows:
            if address is not None:
                self._agents[host] = RemoteNode(
                    address,
                    self._signer,
                    silence=timeout,
                    tls_root=self._trusted,
                )
