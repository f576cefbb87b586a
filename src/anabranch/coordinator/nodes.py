"""The driver's access to the nodes of a query: this machine alone, or one agent on each host.

How executors are watched: see :mod:`anabranch.spark.nodes`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from pyspark.sql import SparkSession

from anabranch.errors import AnabranchError, DidNotHappen, StoreError
from anabranch.nodes.local import LocalNode
from anabranch.nodes.node import Deadline
from anabranch.nodes.remote import NodeStore, RemoteNode
from anabranch.nodes.requests import Address, Epoch, List, Ping, Request, Stop
from anabranch.nodes.tickets import Secret, Signer
from anabranch.protocols.model import Host
from anabranch.spark.nodes import Executors, request_nodes
from anabranch.spark.pinning import one_task_each
from anabranch.stores.store import BackupStore
from anabranch.worker.here import ANSWER, AgentStart

A = TypeVar("A")

_log = logging.getLogger("anabranch")
_PING_SECONDS = 3.0
_LIST_SECONDS = 60.0
_LOOK_SECONDS = 0.05
_PAUSE_SECONDS = 1.0
"""The interval of polls that fail."""


class Nodes(Protocol):
    """The nodes that have the tables of a query."""

    def alive(self) -> frozenset[Host]:
        """The hosts that have an executor now."""
        ...

    def prepare(self, host: Host) -> None:
        """Make sure that a node answers, if need be by a new agent. StoreError if it does not."""
        ...

    def ask(self, host: Host, request: Request[A], deadline: Deadline) -> A:
        """Send a request to a prepared node, and return its answer."""
        ...

    def held(self, host: Host) -> frozenset[str]:
        """The names of the parts that a node keeps for other nodes."""
        ...

    def peers(self) -> Mapping[Host, Address]:
        """The nodes that keep backups for each other, and their addresses."""
        ...

    def request(self, total: int) -> bool:
        """Request nodes from the cluster manager. Whether it supports that."""
        ...

    def close(self) -> None:
        """Release all nodes."""
        ...


class OneNode:
    """This machine, where the driver runs the tasks itself. It is always available."""

    def __init__(self, node: LocalNode, host: Host) -> None:
        self._node = node
        self._host = host

    def alive(self) -> frozenset[Host]:
        """See :meth:`Nodes.alive`."""
        return frozenset([self._host])

    def prepare(self, host: Host) -> None:
        """See :meth:`Nodes.prepare`."""

    def ask(self, host: Host, request: Request[A], deadline: Deadline) -> A:
        """See :meth:`Nodes.ask`."""
        return self._node.ask(request, deadline)

    def held(self, host: Host) -> frozenset[str]:
        """See :meth:`Nodes.held`: there are no others."""
        return frozenset()

    def peers(self) -> Mapping[Host, Address]:
        """See :meth:`Nodes.peers`: there are no others."""
        return {}

    def request(self, total: int) -> bool:
        """See :meth:`Nodes.request`."""
        return False

    def close(self) -> None:
        """See :meth:`Nodes.close`."""


@dataclass
class Agents:
    """One agent on every host that has an executor.

    An agent that does not answer is replaced. An agent ends with its executor.
    """

    spark: SparkSession
    epoch: Epoch
    secret: Secret
    start: AgentStart
    """How an agent is started; the hosts are filled in."""
    silence: float
    trusted: bytes | None = None

    def __post_init__(self) -> None:
        self._signer = Signer(self.secret)
        self._agents: dict[Host, RemoteNode] = {}
        self._executors = Executors(self.spark)
        self._closed = threading.Event()

    def alive(self) -> frozenset[Host]:
        """See :meth:`Nodes.alive`."""
        return self._executors.hosts()

    def prepare(self, host: Host) -> None:
        """See :meth:`Nodes.prepare`."""
        agent = self._agents.get(host)
        if agent is not None:
            try:
                agent.ask(Ping(), Deadline(_PING_SECONDS))
                return
            except StoreError as error:
                _log.info("The agent of node %s does not answer; replacing it: %s", host, error)
                self._forget(host)
        if host not in self.alive():
            raise DidNotHappen(
                f"node {host} has no executor any more, so no agent can be started there"
            )
        run = replace(self.start, hosts=(host,)).run
        for found, address in one_task_each(self.spark, [host]).mapInArrow(run, ANSWER).collect():
            if address is not None:
                self._agents[found] = RemoteNode(
                    address,
                    self._signer,
                    host=host,
                    silence=self.silence,
                    tls_root=self.trusted,
                )
        if host not in self._agents:
            raise DidNotHappen(
                f"the agent of node {host} was not started: Spark ran its task on another node"
            )

    def ask(self, host: Host, request: Request[A], deadline: Deadline) -> A:
        """See :meth:`Nodes.ask`."""
        agent = self._agents.get(host)
        if agent is None:
            raise DidNotHappen(f"node {host} has no agent now", host=host)
        return agent.ask(request, deadline)

    def held(self, host: Host) -> frozenset[str]:
        """See :meth:`Nodes.held`."""
        names: tuple[str, ...] = self.ask(host, List(prefix=""), Deadline(_LIST_SECONDS))
        return frozenset(names)

    def stores(self) -> Mapping[str, BackupStore]:
        """The stores in which each node with an agent keeps backups of others."""
        deadline = partial(Deadline, _LIST_SECONDS, self._closed)
        agents = dict(self._agents)
        return {host: NodeStore(agent, self.epoch, deadline) for host, agent in agents.items()}

    def peers(self) -> Mapping[Host, Address]:
        """See :meth:`Nodes.peers`."""
        return {host: Address(agent.address) for host, agent in dict(self._agents).items()}

    def request(self, total: int) -> bool:
        """See :meth:`Nodes.request`."""
        return request_nodes(self.spark, total)

    def close(self) -> None:
        """See :meth:`Nodes.close`: the agents end."""
        self._closed.set()
        agents = dict(self._agents)
        if agents:
            with ThreadPoolExecutor(len(agents), "anabranch-end") as pool:
                list(pool.map(self._end, agents))

    def _end(self, host: Host) -> None:
        try:
            self.ask(host, Stop(epoch=self.epoch), Deadline(_PING_SECONDS))
        except AnabranchError as error:
            _log.info(
                "The agent of node %s was not stopped; it ends with its executor: %s", host, error
            )
        self._forget(host)

    def _forget(self, host: Host) -> None:
        agent = self._agents.pop(host, None)
        if agent is not None:
            agent.close()


class Watcher:
    """Watches which hosts have an executor, and reports changes."""

    def __init__(
        self,
        alive: Callable[[], frozenset[Host]],
        came: Callable[[Host], None],
        lost: Callable[[Host], None],
    ) -> None:
        self._alive = alive
        self._came = came
        self._lost = lost
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="anabranch-nodes", daemon=True)

    def begin(self) -> None:
        """Report the present hosts, and then every change."""
        self._thread.start()

    def close(self) -> None:
        """Stop to watch, and wait for the thread."""
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        known: frozenset[Host] = frozenset()
        failed = False
        while not self._over.wait(_PAUSE_SECONDS if failed else _LOOK_SECONDS):
            try:
                now = self._alive()
            except Exception as error:
                # The known nodes are not lost. If Spark has ended, the batches fail too.
                if not failed:
                    _log.warning(
                        "Executors cannot be polled, so new and lost nodes are not noticed; trying "
                        "again every %.0f s: %s: %s",
                        _PAUSE_SECONDS,
                        type(error).__name__,
                        error,
                    )
                failed = True
                continue
            if failed:
                _log.warning("Executors are polled again.")
                failed = False
            for host in sorted(known - now):
                self._lost(host)
            for host in sorted(now - known):
                self._came(host)
            known = now
