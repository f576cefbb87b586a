"""What the tests of nodes share."""

import os
import re
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from anabranch.errors import DidNotHappen
from anabranch.nodes import AgentAddress, Deadline, NodeStore, RemoteNode, Signer
from anabranch.nodes.chunks import TIMEOUT
from anabranch.nodes.requests import Epoch, Ping, Pong, Request, Stop

A = TypeVar("A")

EPOCH = Epoch(1)
LIMIT = 200 << 20
Starter = Callable[..., AgentAddress]


class Reached(NodeStore):
    """The backups of the node at an address, and the node itself."""

    def __init__(
        self,
        address: str,
        signer: Signer,
        *,
        timeout: float = TIMEOUT,
        tls_root: bytes | None = None,
        epoch: int = EPOCH,
        within: float = 120,
    ) -> None:
        node = RemoteNode(address, signer, silence=timeout, tls_root=tls_root)
        super().__init__(node, Epoch(epoch), lambda: Deadline(within))

    def ask(self, request: Request[A], within: float = 120) -> A:
        return self.node.ask(request, Deadline(within))

    def ping(self) -> Pong:
        return self.ask(Ping())

    def stop(self) -> None:
        self.ask(Stop(epoch=self._epoch))

    def __enter__(self) -> "Reached":
        return self

    def __exit__(self, *_: object) -> None:
        self.node.close()


def is_gone(pid: int, timeout: float = 20) -> bool:
    """Whether a process ends in this time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    try:
        return bool(poll.poll(1000 * timeout))
    finally:
        os.close(descriptor)


def wait_until(condition: Callable[[], object], timeout: float = 20) -> None:
    """Return when the condition holds; a node that does not answer is asked again."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            if condition():
                return
        except DidNotHappen:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)


def memory(pid: int) -> int:
    """The private bytes of a process: those that are in no file."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


class Watching:
    """The most memory that processes have while something is done."""

    def __init__(self, *pids: int) -> None:
        self.pids = pids
        self.before = [memory(pid) for pid in pids]
        self.most = list(self.before)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.most = [max(m, memory(p)) for m, p in zip(self.most, self.pids, strict=True)]

    def __enter__(self) -> "Watching":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def grown(self) -> list[int]:
        return [most - before for most, before in zip(self.most, self.before, strict=True)]
