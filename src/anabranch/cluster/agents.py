"""Agents of nodes on this machine, without Spark and its executors."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from anabranch.cluster.links import check_link
from anabranch.cluster.site import Site
from anabranch.errors import ClusterFailed, PlanError
from anabranch.nodes import AgentAddress, Secret, start_agent

A = TypeVar("A")

MOST = 250
_SECONDS = 180.0  # a machine that is busy with other things is slow to start processes
_END = 10.0


class LocalAgents:
    """Agents that keep backups, each its own host, with a rate-limited link if there is one.

    Their backups are in memory. If this process ends without leaving the block, all processes,
    links and folders are removed all the same.

    ::

        with LocalAgents(20, link="100 Mbit") as agents:
            agents.kill(agents.hosts[0])
    """

    def __init__(self, count: int, link: str | None = None) -> None:
        """Configure the agents; ``with`` starts them.

        Args:
            count: How many agents.
            link: As that of :class:`~anabranch.cluster.LocalCluster`.
        """
        if not 1 <= count <= MOST:
            raise PlanError(f"count={count}: there are 1 to {MOST} agents")
        self.secret = Secret.new()
        """Requests to the agents are signed with it."""
        self._count = count
        self._rate = None if link is None else check_link(link)
        self._running: dict[str, tuple[AgentAddress, int]] = {}
        """With a handle of the process, by host."""
        self._started: Site | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses of all agents, also of those that were killed."""
        site = self._site
        return tuple(site.address(number) for number in range(2, 2 + self._count))

    @property
    def linked(self) -> bool:
        """Whether agents have links of the rate that was asked for."""
        return self._started is not None and self._started.network is not None

    @property
    def addresses(self) -> dict[str, AgentAddress]:
        """Where the agents are that were not killed, by host."""
        return {host: address for host, (address, _) in self._running.items()}

    @property
    def folder(self) -> Path:
        """Where the agents' folders are, each named by its host."""
        return self._site.folder

    def inside(self, host: str, function: Callable[[], A]) -> A:
        """Call a function in the network of a host.

        Sockets that it opens use the link of the host, as do processes and threads that it starts.
        """
        return self._site.inside(self._known(host), function)

    def start(self, host: str) -> None:
        """Start the agent of a host again; it finds the backups that it had."""
        site = self._site
        if self._known(host) in self._running:
            raise PlanError(f"the agent of {host} is running already")
        folder = site.folder / host
        folder.mkdir(exist_ok=True)
        address = site.inside(
            host,
            lambda: start_agent(
                secret=self.secret,
                host=host,
                folder=folder / "backups",
                limit=None,
                watch_pid=os.getpid(),
                log=folder / "agent.log",
                timeout=_SECONDS,
            ),
        )
        self._running[host] = address, os.pidfd_open(address.pid)

    def send(self, host: str, number: signal.Signals) -> None:
        """Send a signal to an agent, such as SIGSTOP; nothing happens if it has ended by itself."""
        if self._known(host) not in self._running:
            raise PlanError(f"the agent of {host} is not running")
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._running[host][1], number)

    def kill(self, host: str) -> None:
        """Kill an agent at once. What it has written stays for its next start."""
        self.send(host, signal.SIGKILL)
        _, handle = self._running.pop(host)
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if not poll.poll(1000 * _END):
                raise ClusterFailed(f"the agent of {host} still runs {_END:.0f} s after its kill")
        finally:
            os.close(handle)

    def __enter__(self) -> LocalAgents:
        if self._started is not None:
            raise ClusterFailed("the agents are running already")
        self._started = Site(None, None, self._rate)
        try:
            for host in self.hosts:
                self.start(host)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        site = self._site
        try:
            for host in [*self._running]:
                self.kill(host)
        finally:
            site.clear()
            self._started = None

    @property
    def _site(self) -> Site:
        if self._started is None:
            raise ClusterFailed("the agents are not running; use them in a with block")
        return self._started

    def _known(self, host: str) -> str:
        if host not in self.hosts:
            raise PlanError(f"there is no agent of {host!r}; there are {', '.join(self.hosts)}")
        return host
