"""Taking batches from Spark, and running them when the protocols order it.

Spark calls :meth:`HandOver.take` for each batch, in a thread of its own. The thread asks the
protocols for the batch and waits for the order to run it. A failed attempt is reported to the
protocols, which recover what was lost and order the batch again. The call returns once the batch
is committed. It raises if the stream ends, or if Spark must run earlier batches again.

Unlike other orders, the order to run a batch has no deadline: only its user knows how long a batch
may take. An executor that hangs misses Spark's heartbeats, and is lost. While a batch is slow, the
nodes that it runs on are asked whether their agents answer; see :mod:`anabranch.protocols.nodes`. A
batch is cancelled when one of its nodes is lost, and is run again.
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
    """Ends a call of Spark's, because Spark must run earlier batches again first."""


@dataclass
class _Ticket:
    """A batch that Spark's thread waits to run."""

    version: Version
    orders: queue.SimpleQueue[RunBatch | BaseException] = field(default_factory=queue.SimpleQueue)


class HandOver(ABC):
    """Takes batches from Spark and runs each when it is ordered. A subclass runs the batch."""

    def __init__(self, loop: Loop) -> None:
        self.failure: AnabranchError | None = None
        """The error of the last batch, if it failed."""
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
        """Run a batch, and commit it if it succeeds."""

    @abstractmethod
    def trim(self, operator: str, upto: Version) -> None:
        """Drop the kept rows that were sent to an operator, up to a version."""

    # Spark's thread

    def take(self, frame: Any, version: Version) -> None:
        """Called by Spark for every micro-batch, and again for one without a commit of Spark's."""
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
        """Whether the calling thread runs a batch, as a function of for_each_batch does."""
        return self._runs == threading.get_ident()

    # The loop and the stream

    def run(self, order: RunBatch) -> None:
        """Let the waiting batch run."""
        self._cancelled = False
        self.fence = order.fence
        with self._lock:
            ticket = self._ticket
        if ticket is not None and ticket.version == order.version:
            ticket.orders.put(order)

    def cancel(self, order: CancelBatch) -> None:
        """Cancel the Spark jobs of a batch that cannot succeed."""
        _log.warning("Cancelling batch %s: a slice that it needs was lost.", order.version)
        self._cancelled = True

    def end(self, error: BaseException) -> None:
        """Let Spark's thread go, now and whenever it comes, with an error.

        If that is TakenBack, until :meth:`resume`; any other is for good.
        """
        with self._lock:
            if self._ended is None or self.taken_back:
                self._ended = error
            ticket = self._ticket
        if ticket is not None:
            ticket.orders.put(error)

    def resume(self, commit: Commit) -> None:
        """Continue after a committed batch. Rows kept from before are of another history."""
        with self._lock:
            if self.taken_back:
                self._ended = None
        self._commit = commit
        self.failure = None

    @property
    def taken_back(self) -> bool:
        """Whether Spark must run earlier batches again."""
        return isinstance(self._ended, TakenBack)
