"""The node of a Python worker: its host, and starting its agent."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark import TaskContext

from anabranch.nodes.folders import StateRoot
from anabranch.nodes.requests import Epoch
from anabranch.nodes.starting import start_agent
from anabranch.nodes.tickets import Secret
from anabranch.nodes.tls import Tls

_HOST_ARGUMENT = b"--hostname"

ANSWER = "host string, address string"
"""The rows of :meth:`AgentStart.run`."""


class Executor(NamedTuple):
    """The executor process that a Python worker belongs to."""

    pid: int
    host: str | None
    """None when the driver itself runs the tasks."""


@cache
def executor() -> Executor:
    """The executor of this Python worker: the first Java process above it.

    Spark passes the host to the executor's process as an argument, whatever the cluster manager.
    """
    pid = os.getpid()
    while pid > 1:
        status = Path(f"/proc/{pid}/stat").read_text()
        pid = int(status.rpartition(")")[2].split()[1])
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if arguments[0].endswith(b"java"):
            at = arguments.index(_HOST_ARGUMENT) + 1 if _HOST_ARGUMENT in arguments else 0
            return Executor(pid, arguments[at].decode() if at else None)
    raise RuntimeError("this process does not run below a Spark executor")


@dataclass(frozen=True)
class AgentStart:
    """Starts an agent on each of some hosts, in a Spark job with one task on each."""

    hosts: tuple[str, ...]
    root: StateRoot
    context: Mapping[str, Any]
    """What the node of the agent is made with; ``root``, ``host`` and ``trusted`` are added."""
    tls: Tls | None
    capacity: int | None
    """The most that a node keeps for others, in bytes."""
    timeout: float
    """The seconds that a transfer may stand still."""
    epoch: Epoch
    """Of the driver. Agents of earlier ones are ended."""

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One row: the host, and the address of the agent there, or null if the task is elsewhere.

        A task that runs on another node does nothing; it has to be sent again.
        """
        for _ in batches:
            continue
        task = TaskContext.get()
        assert task is not None, "an agent is started inside a Spark task"
        wanted, here = self.hosts[task.partitionId()], executor()
        address = self._start(wanted, here.pid) if here.host == wanted else None
        yield pa.RecordBatch.from_pydict(
            {"host": [wanted], "address": pa.array([address], pa.string())}
        )

    def _start(self, host: str, pid: int) -> str:
        backups, tls = self.root.backups(host), self.tls
        context = {**self.context, "root": str(self.root.path(host)), "host": host}
        if tls is not None:
            context["trusted"] = tls.root
        started = start_agent(
            secret=Secret.from_hex(self.context["secret"]),
            host=host,
            folder=backups,
            limit=self.capacity,
            transfer_timeout=self.timeout,
            watch_pid=pid,
            epoch=self.epoch,
            node="anabranch.nodes.serving:make",
            context=context,
            warm="anabranch.worker.warm:warm",
            # On a disk: a log is of no use to state, and would take memory from it.
            log=backups / "agent.log",
            tls_cert=None if tls is None else Path(tls.certificate),
            tls_key=None if tls is None else Path(tls.key),
            tls_root=None if tls is None else Path(tls.root),
        )
        return str(started)
