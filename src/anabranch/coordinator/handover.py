"""Spark hands its batches over in a thread of its own, and they run when the protocols say so.

The thread asks for its batch and waits for the order to run it. An attempt that fails is told to
the protocols, which see to what was lost and order the batch again. The thread goes back to Spark
once the batch is committed, or if the stream is to end or to be taken back.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from anabranch.coordinator.commits import NOTHING, Commit
from anabranch.coordinator.loop import Loop
from anabranch.errors import AnabranchError, QueryFailed, StateMissing
from anabranch.protocols.events import BatchAsked, BatchCommitted, BatchFailed, BatchLeft
from anabranch.protocols.orders import CancelBatch, RunBatch
from anabranch.units import Version

_log = logging.getLogger("anabranch")


class TakenBack(QueryFailed):
    """Spark is to run earlier batches again, and this one when it comes to it."""


@dataclass
class _Ticket:
    """A batch that Spark's thread waits to run."""

    version: Version
    orders: queue.SimpleQueue[RunBatch | BaseException] = field(default_factory=queue.SimpleQueue)


class HandOver(ABC):
    """Takes batches from Spark, and runs each when it is ordered; how, a subclass says."""

    def __init__(self, loop: Loop) -> None:
        self.failure: AnabranchError | None = None
        """What the batch that ran last has failed with."""
        self._loop = loop
        self._commit = NOTHING
        self._ticket: _Ticket | None = None
        self._ended: BaseException | None = None
        self.fence = 0
        """That of the newest batch which may run."""
        self._lock = threading.Lock()
        self._runs: int | None = None
        self._cancelled = False
        """Whether the batch that runs is to end, as it cannot succeed."""

    @abstractmethod
    def attempt(
        self, frame: Any, order: RunBatch, began: float, attempts: int
    ) -> BatchCommitted | BatchFailed:
        """Run a batch, which takes its commit to be the last one if it succeeds."""

    @abstractmethod
    def trim(self, operator: str, upto: Version) -> None:
        """Let go of what was sent to an operator."""

    # Spark's thread

    def take(self, frame: Any, version: Version) -> None:
        """Called by Spark for every micro-batch, and again for one it does not know to be done."""
        if version <= self._commit.version:
            return
        if version != self._commit.version + 1:
            raise StateMissing(
                f"Spark's next batch is {version}, but the last committed batch is "
                f"{self._commit.version}: spark/ and commits/ in the checkpoint folder do not "
                "belong together. Restore a complete copy of the folder, or start in a new one"
            )
        ticket = _Ticket(version)
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._ticket = ticket
        self._runs = threading.get_ident()
        began, attempts = time.perf_counter(), 0
        try:
            self._loop.tell(BatchAsked(version))
            while True:
                order = ticket.orders.get()
                if isinstance(order, BaseException):
                    raise order
                attempts += 1
                event = self.attempt(frame, order, began, attempts)
                self._loop.tell(event)
                if isinstance(event, BatchCommitted):
                    return
        except BaseException:
            self._loop.tell(BatchLeft(version))
            raise
        finally:
            with self._lock:
                self._ticket = None
            self._runs = None

    @property
    def committed(self) -> Version:
        """The last committed batch."""
        return self._commit.version

    def in_batch(self) -> bool:
        """Whether the thread that asks is running a batch, as a function of for_each_batch is."""
        return self._runs == threading.get_ident()

    # The loop and the stream

    def run(self, order: RunBatch) -> None:
        """The batch that Spark waits for may run."""
        self._cancelled = False
        self.fence = order.fence
        with self._lock:
            ticket = self._ticket
        if ticket is not None and ticket.version == order.version:
            ticket.orders.put(order)

    def cancel(self, order: CancelBatch) -> None:
        """End the jobs of a batch that cannot succeed."""
        _log.warning("Cancelling batch %s: a slice that it needs was lost.", order.version)
        self._cancelled = True

    def end(self, error: BaseException) -> None:
        """Let Spark's thread go, now and whenever it comes, with an error; see resume."""
        with self._lock:
            self._ended = error
            ticket = self._ticket
        if ticket is not None:
            ticket.orders.put(error)

    def resume(self, commit: Commit) -> None:
        """Go on after a committed batch; what was sent before is of another time line."""
        with self._lock:
            self._ended = None
        self._commit = commit
        self.failure = None

    @property
    def taken_back(self) -> bool:
        """Whether Spark is to run earlier batches again."""
        return isinstance(self._ended, TakenBack)
