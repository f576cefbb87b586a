"""The protocol of a node: requests in, answers out, each by a deadline."""

from __future__ import annotations

import threading
import time
from typing import Protocol, TypeVar

from anabranch.errors import DidNotHappen
from anabranch.nodes.requests import Request

A = TypeVar("A")


class Deadline:
    """The time after which a caller does not wait any longer.

    It is over ``seconds`` after it was made, or as soon as ``stopped`` is set.
    """

    def __init__(self, seconds: float, stopped: threading.Event | None = None) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds
        self._stopped = stopped or threading.Event()

    def left(self) -> float:
        """The seconds that are left, 0 when it is over."""
        return 0.0 if self._stopped.is_set() else max(0.0, self._at - time.monotonic())

    def wait(self, seconds: float) -> bool:
        """Wait for some seconds, or until it is over. Whether it is over."""
        self._stopped.wait(min(seconds, self.left()))
        return self.left() == 0

    @property
    def why(self) -> str:
        """Why it is over."""
        if self._stopped.is_set():
            return "the query has ended"
        return f"it took longer than {self.seconds:g} s"

    def check(self, doing: str) -> None:
        """Raise DidNotHappen if it is over. Called before something is changed."""
        if self.left() == 0:
            raise DidNotHappen(f"{doing}: given up, as {self.why}")


class Node(Protocol):
    """One node of a query: this machine, or another one behind its agent.

    A failed request raises an error of :mod:`anabranch.errors`, the same one wherever the node is.
    If a node does not answer in time, that is MayHaveHappened for a
    :class:`~anabranch.nodes.requests.Change`, DidNotHappen otherwise.
    """

    def ask(self, request: Request[A], deadline: Deadline) -> A:
        """Execute a request, and return its answer."""
