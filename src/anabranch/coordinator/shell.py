"""The shell around the loop: executes orders in threads, and answers them with events.

A pool of threads sends requests to nodes. One thread, the ledger's, writes to the checkpoint
folder, in the order of the orders; events for the user are among them. One more thread runs Spark
jobs that are not batches.

When the query ends, nobody waits for answers any more. Requests to nodes and Spark jobs are then
given up; writes to the checkpoint folder are completed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Protocol

from anabranch.coordinator import story
from anabranch.coordinator.asking import Asking
from anabranch.coordinator.events import Event, Events
from anabranch.coordinator.failures import translated
from anabranch.coordinator.handover import HandOver, TakenBack
from anabranch.coordinator.ledger import Ledger
from anabranch.coordinator.loop import Loop
from anabranch.errors import (
    AnabranchError,
    CheckpointError,
    Deposed,
    DidNotHappen,
    PlanError,
    SchemaChanged,
    StateMissing,
    StoreError,
)
from anabranch.fragments.cost import Cost
from anabranch.nodes import requests
from anabranch.protocols import orders
from anabranch.protocols.events import Done, Failed
from anabranch.protocols.model import Routed, Slice, SliceId
from anabranch.protocols.orders import Order, OrderId

_log = logging.getLogger("anabranch")

_AT_NODES = 32
_LAST_SECONDS = 5.0
"""How long the end of the query waits for orders in progress."""
_LOOK_SECONDS = 0.5


class Replaying(Protocol):
    """Replays batches; see :class:`~anabranch.coordinator.replays.Replays`."""

    def run(self, order: orders.Replay, routed: Mapping[str, Routed]) -> None:
        """Bring slices to a version."""
        ...

    def stop(self) -> None:
        """Cancel the replay in progress."""
        ...


class Rewinding(Protocol):
    """Rewinds Spark; see :class:`~anabranch.coordinator.stream.Stream`."""

    def rewind(self, order: orders.Rewind) -> None:
        """Rewind Spark to a version."""
        ...


class Shell:
    """Executes orders; see :class:`~anabranch.coordinator.loop.Hands`."""

    def __init__(
        self,
        loop: Loop,
        asking: Asking,
        ledger: Ledger,
        events: Events,
        batches: HandOver,
        replays: Replaying,
        stream: Rewinding,
        stopped: Callable[[AnabranchError], None],
    ) -> None:
        self._loop = loop
        self._asking = asking
        self._ledger = ledger
        self._events = events
        self._batches = batches
        self._replays = replays
        self._stream = stream
        self._stopped = stopped
        self._deposed: Deposed | None = None
        """That another driver has taken the query over, once it is known."""
        self._at_nodes = ThreadPoolExecutor(_AT_NODES, "anabranch-node")
        # Whether a node answers must not be asked behind what takes long.
        self._probing = ThreadPoolExecutor(_AT_NODES, "anabranch-probe")
        self._writing = ledger.writer
        self._spark = ThreadPoolExecutor(1, "anabranch-replay")
        self._in_progress: dict[Future[None], ThreadPoolExecutor] = {}
        self._refused: str | None = None
        """Why the last request for nodes was refused, if it was."""

    def carry_out(self, number: OrderId | None, order: Order) -> None:
        """See :meth:`~anabranch.coordinator.loop.Hands.carry_out`."""
        ask = self._asking
        match order:
            case orders.RunBatch():
                self._batches.run(order)
            case orders.CancelBatch():
                self._batches.cancel(order)
            case orders.Make():
                self._execute_answered(self._at_nodes, number, order, lambda: ask.make(order))
            case orders.Advance():
                self._execute_answered(self._at_nodes, number, order, lambda: ask.advance(order))
            case orders.Capture():
                self._execute_answered(self._at_nodes, number, order, lambda: ask.capture(order))
            case orders.Store() | orders.Merge() | orders.Mend():
                self._execute_answered(self._at_nodes, number, order, lambda: ask.store(order))
            case orders.Prepare(host):
                self._execute_answered(self._probing, number, order, lambda: ask.prepare(host))
            case orders.Inspect(host, slices):
                self._execute_answered(
                    self._probing, number, order, lambda: ask.inspect(host, slices)
                )
            case orders.Replay():
                routed = self._loop.query.routed
                self._execute_answered(
                    self._spark, number, order, lambda: self._replay(order, routed)
                )
            case orders.Rewind():
                self._batches.end(TakenBack(f"the query goes back to version {order.start}"))
                self._execute_answered(self._spark, number, order, lambda: self._rewind(order))
            case orders.Publish(published):
                publish = partial(self._ledger.publish, published)
                self._execute_answered(self._writing, number, order, publish)
            case orders.Note():
                self._execute_answered(
                    self._writing, number, order, lambda: self._ledger.note(order)
                )
            case orders.Withdraw():
                self._execute_unanswered(self._writing, order, lambda: self._ledger.withdraw(order))
            case orders.Tell(kind, details):
                event = self._record(kind, details)
                self._execute_unanswered(self._writing, order, lambda: self._events.store(event))
            case orders.Drop():
                self._execute_unanswered(self._at_nodes, order, lambda: ask.drop(order))
            case orders.AskNodes(total):
                self._execute_unanswered(self._at_nodes, order, lambda: self._request_nodes(total))
            case orders.Trim(operator, upto):
                self._execute_unanswered(
                    self._spark, order, lambda: self._batches.trim(operator, upto)
                )
            case _:
                raise TypeError(f"no handler for the order {order}")

    def stop(self, reason: str, kind: type[AnabranchError]) -> None:
        """See :meth:`~anabranch.coordinator.loop.Hands.stop`."""
        failure = self._deposed or self._batches.failure
        if failure is None or (self._deposed is None and str(failure) not in reason):
            failure = kind(reason)
        _log.error("Stopping the query after batch %s: %s", self._loop.query.committed, failure)
        self._stopped(failure)

    def depose(self, error: Deposed) -> None:
        """End the query, because another driver has taken it over."""
        self._deposed = error
        self._loop.tell(Failed(OrderId(0), str(error), fenced=True))

    def close(self) -> None:
        """Accept no more orders, and end those in progress within seconds."""
        self._asking.stopped.set()
        for pool in (self._spark, self._probing, self._at_nodes):
            pool.shutdown(wait=False, cancel_futures=pool is self._spark)
        until = time.monotonic() + _LAST_SECONDS
        while (left := dict(self._in_progress)) and time.monotonic() < until:
            if self._spark in left.values():
                self._replays.stop()  # again and again, because a replay is several jobs
            wait(left, _LOOK_SECONDS)
        # The last one, because it writes that others have failed.
        self._writing.shutdown(wait=not left)
        if left:
            _log.warning(
                "The query ends while %d of its orders are still in progress; they end by "
                "themselves.",
                len(left),
            )

    def _record(self, kind: str, details: Mapping[str, Any]) -> Event:
        """Record an event before its command ends, so that the caller finds it in the events."""
        seconds = float(details.get("seconds", 0.0))
        rest = {name: value for name, value in details.items() if name != "seconds"}
        return self._events.note(kind, seconds, **rest)

    def _request_nodes(self, total: int) -> None:
        try:
            self._asking.request_nodes(total)
        except DidNotHappen as error:
            # The request is repeated; the same refusal is an event only once.
            if str(error) != self._refused:
                self._refused = str(error)
                raise
        else:
            self._refused = None

    def _replay(self, order: orders.Replay, routed: Mapping[str, Routed]) -> None:
        self._replays.run(order, routed)

    def _rewind(self, order: orders.Rewind) -> None:
        # A version whose publication was ordered before exists by then, and can be withdrawn.
        self._writing.submit(lambda: None).result()
        self._stream.rewind(order)

    def _execute_answered(
        self,
        pool: ThreadPoolExecutor,
        number: OrderId | None,
        order: orders.Answered,
        work: Callable[[], object],
    ) -> None:
        assert number is not None

        def run() -> None:
            try:
                answer = work()
            except Exception as error:
                if isinstance(error, Deposed):
                    self._deposed = error
                unexpected = not isinstance(error, AnabranchError)
                _log.info("%s failed: %s", story.name_of(order), error, exc_info=unexpected)
                self._loop.tell(failure(number, order, error))
            else:
                self._loop.tell(_done(number, answer))

        self._submit(pool, run)

    def _execute_unanswered(
        self, pool: ThreadPoolExecutor, order: Order, work: Callable[[], object]
    ) -> None:
        """Execute an order that has no answer."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                if not isinstance(error, AnabranchError):
                    _log.exception("%s failed with an unexpected error.", story.name_of(order))
                self._tell_failed(order, error)

        self._submit(pool, run)

    def _tell_failed(self, order: Order, error: Exception) -> None:
        what, reason = story.name_of(order), str(translated(error))
        if isinstance(order, orders.Tell):  # another event would fail too
            _log.warning("%s failed: %s", what, reason)
            return
        event = self._events.note("order failed", order=what, reason=reason)
        tell = orders.Tell(event.kind, event.details)
        self._execute_unanswered(self._writing, tell, lambda: self._events.store(event))

    def _submit(self, pool: ThreadPoolExecutor, run: Callable[[], None]) -> None:
        try:
            future = pool.submit(run)
        except RuntimeError:  # the query has ended, and the pool with it
            return
        self._in_progress[future] = pool
        future.add_done_callback(lambda done: self._in_progress.pop(done, None))


def _done(number: OrderId, answer: object) -> Done:
    match answer:
        case requests.Stored(part, cost):
            return Done(number, part, cost)
        case Cost():
            return Done(number, None, answer)
        case _:
            return Done(number, answer)


def failure(number: OrderId, order: orders.Answered, error: Exception) -> Failed:
    """The answer of a failed order: what the protocols must know of the error."""
    told = translated(error)
    of_store = told if isinstance(told, StoreError) else StoreError()
    return Failed(
        number,
        str(told),
        unreachable=of_store.host,
        damaged=told.part if isinstance(told, CheckpointError) else of_store.part,
        damaged_at=of_store.without,
        missing=_slice_in(order) if isinstance(told, StateMissing) else None,
        final=_comes_again(order, told),
        fenced=isinstance(told, Deposed),
        kind=type(told),
    )


def _comes_again(order: orders.Answered, error: AnabranchError) -> bool:
    """Whether an order would fail with this error again, however often it is tried."""
    if isinstance(order, orders.Rewind) and isinstance(error, StateMissing | CheckpointError):
        return True
    return isinstance(error, SchemaChanged | PlanError)


def _slice_in(order: orders.Answered) -> SliceId | None:
    each = getattr(order, "slice", None)
    return each.id if isinstance(each, Slice) else None
