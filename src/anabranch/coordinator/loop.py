"""The loop that owns the state of a query: events in, one at a time, and orders out.

The state is a frozen value that only the loop replaces. Spark's batch thread, callers of
``query.scale``, timers and the watcher of nodes send events, and never wait for a lock. The
:class:`Hands` execute the orders, in threads of their own.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Protocol

from anabranch.coordinator import story
from anabranch.errors import AnabranchError, QueryFailed
from anabranch.protocols.events import Command, Event, GiveUp, TimePassed
from anabranch.protocols.machine import step
from anabranch.protocols.orders import CommandId, End, Order, OrderId, Stop, Wake
from anabranch.protocols.query import Query

_log = logging.getLogger("anabranch")
_LONGEST_WAIT = 3600.0


class Hands(Protocol):
    """Executes orders. Its methods must not block: slow work runs in another thread."""

    def carry_out(self, number: OrderId | None, order: Order) -> None:
        """Start to execute an order. If it has a number, an event with this number answers it."""
        ...

    def stop(self, reason: str, kind: type[AnabranchError]) -> None:
        """End the query with an error of this kind."""
        ...


def microseconds_now() -> int:
    """The clock of the loop: monotonic, and valid in this process only."""
    return time.monotonic_ns() // 1000


class Given(Future[Any]):
    """The future of a command's result. To cancel it is to give the command up."""

    def __init__(self, give_up: Callable[[], None]) -> None:
        super().__init__()
        self._give_up = give_up
        self.unwanted = False
        """Whether the command was given up."""

    def cancel(self) -> bool:
        """Give the command up, and wait until it has ended.

        False if it was executed, or had failed, before it could be given up.
        """
        if not self.done():
            self.unwanted = True
            self._give_up()
            wait([self])
        return self.cancelled()

    def release(self) -> None:
        """Nobody needs what the command has answered any more, such as captured files."""
        self._give_up()

    def end_unwanted(self) -> None:
        """The command was not executed, because it was given up."""
        super().cancel()
        self.set_running_or_notify_cancel()


class Loop:
    """Feeds events to the protocols, in a thread of its own, until it is closed.

    :meth:`begin` gives it the ``hands``, which need the loop for their answers.
    """

    def __init__(self, query: Query, clock: Callable[[], int] = microseconds_now) -> None:
        self._query = query
        self._clock = clock
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._wakes: list[int] = []
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._commands: dict[CommandId, Given] = {}
        self._over: str | None = None
        self._hands: Hands | None = None
        self._thread = threading.Thread(target=self._run, name="anabranch-loop", daemon=True)

    @property
    def query(self) -> Query:
        """The present state of the query."""
        return self._query

    def begin(self, hands: Hands) -> None:
        """Start to process events, and give orders to these hands."""
        self._hands = hands
        self._thread.start()

    def tell(self, event: Event) -> None:
        """Send an event. May be called from any thread, and never waits."""
        self._events.put(event)

    def command(self, make: Callable[[CommandId], Command]) -> Given:
        """Give a command. Returns the future of its result."""
        number = CommandId(next(self._numbers))
        future = Given(lambda: self.tell(GiveUp(number)))
        with self._changed:
            if self._over is not None:
                raise QueryFailed(f"the query is not running: {self._over}")
            self._commands[number] = future
        self.tell(make(number))
        return future

    def wait_for(
        self, condition: Callable[[Query], bool], timeout: float | None = None
    ) -> Query | None:
        """Wait for a condition, and return the query as it is then, or None if the time is over.

        QueryFailed if the query ends before.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._over is not None or condition(self._query), timeout
            )
            if condition(self._query):
                return self._query
            if self._over is not None:
                raise QueryFailed(self._over)
            return None

    def close(self, reason: str = "it was stopped") -> None:
        """Stop to process events. Commands in progress fail."""
        self._end(reason)
        self._events.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while (event := self._next()) is not None:
                self._take(event)
        except BaseException as error:  # a mistake of ours: the query must not seem to run
            _log.exception("The coordinator failed because of a bug. Stopping the query.")
            reason = f"its coordinator failed because of a bug: {type(error).__name__}: {error}"
            self._end(reason)
            assert self._hands is not None
            self._hands.stop(reason, QueryFailed)

    def _next(self) -> Event | None:
        while True:
            now = self._clock()
            if self._wakes and self._wakes[0] <= now:
                while self._wakes and self._wakes[0] <= now:
                    heapq.heappop(self._wakes)
                return TimePassed()
            wait = (self._wakes[0] - now) / 1e6 if self._wakes else _LONGEST_WAIT
            try:
                return self._events.get(timeout=min(wait, _LONGEST_WAIT))
            except queue.Empty:
                continue

    def _take(self, event: Event) -> None:
        before = self._query
        query, orders = step(before, event, self._clock())
        with self._changed:
            self._query = query
            self._changed.notify_all()
        for number, order in orders:
            self._give(number, order)
        # Not before: what led to it, such as the loss of a node, is told by one of the orders.
        for level, begun in story.beginnings(before, query):
            _log.log(level, "%s", begun)

    def _give(self, number: OrderId | None, order: Order) -> None:
        assert self._hands is not None
        match order:
            case Wake(at):
                heapq.heappush(self._wakes, at)
            case End(command, error, result):
                self._finish(command, error, result)
            case Stop(reason, kind):
                self._hands.stop(reason, kind)
                self._end(reason)
            case _:
                self._hands.carry_out(number, order)

    def _finish(self, command: CommandId, error: str | None, result: object) -> None:
        with self._changed:
            future = self._commands.pop(command, None)
        if future is None:
            return
        if error is None:
            future.set_result(result)
        elif future.unwanted:
            future.end_unwanted()
        else:
            future.set_exception(QueryFailed(error))

    def _end(self, reason: str) -> None:
        with self._changed:
            if self._over is None:
                self._over = reason
            waiting, self._commands = self._commands, {}
            self._changed.notify_all()
        for future in waiting.values():
            if future.unwanted:
                future.end_unwanted()
            else:
                future.set_exception(QueryFailed(f"the query is not running: {reason}"))
