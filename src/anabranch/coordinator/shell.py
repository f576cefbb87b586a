"""The shell around the loop: executes orders in threads, and answers them with events.

A pool of threads sends requests to nodes. One thread writes to the checkpoint folder, in the order
of the orders; events for the user are among them. One more thread runs Spark jobs that are not
batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from anabranch.coordinator import story
from anabranch.coordinator.batches import slice_of, table_of
from anabranch.coordinator.events import Event, Events
from anabranch.coordinator.failures import translated
from anabranch.coordinator.handover import HandOver, TakenBack
from anabranch.coordinator.ledger import Ledger
from anabranch.coordinator.loop import Loop
from anabranch.coordinator.nodes import Nodes
from anabranch.errors import (
    AnabranchError,
    CheckpointError,
    Deposed,
    PlanError,
    Refused,
    SchemaChanged,
    StateMissing,
    StoreError,
)
from anabranch.nodes import requests
from anabranch.nodes.captures import fence_of
from anabranch.nodes.node import Deadline
from anabranch.nodes.requests import CaptureFile, Epoch, Instance, OperatorName, Request, TableName
from anabranch.protocols import orders
from anabranch.protocols.events import Done, Failed, Inspected
from anabranch.protocols.model import Host, Routed, Slice, SliceId
from anabranch.protocols.orders import SECOND, Captured, Order, OrderId, patience
from anabranch.protocols.query import Query, node_of
from anabranch.state.capture import CheckpointSchema
from anabranch.state.part import Part
from anabranch.state.table import TableLayout

_log = logging.getLogger("anabranch")
A = TypeVar("A")

_AT_NODES = 32
_SHORT, _LONG = 60.0, 3600.0


@dataclass
class Asking:
    """Translates orders into requests to nodes."""

    nodes: Nodes
    epoch: Epoch
    query: str
    layouts: Mapping[str, TableLayout]

    def __post_init__(self) -> None:
        self._tables: dict[SliceId, TableName] = {}
        """The known tables by slice, present or lost."""

    def make(self, order: orders.Make) -> None:
        """Make the table of a slice."""
        each = order.slice
        self._tables[each.id] = table_of(each)
        request = requests.Make(
            epoch=self.epoch,
            peers=self.nodes.peers(),
            table=table_of(each),
            layout=self.layouts[each.operator],
            version=order.version,
            groups=each.groups,
            parts=order.parts,
        )
        self._ask(each.node, request, order)

    def advance(self, order: orders.Advance) -> None:
        """Advance the table of a slice by changes."""
        each = order.slice
        request = requests.Advance(
            epoch=self.epoch,
            peers=self.nodes.peers(),
            table=table_of(each),
            layout=self.layouts[each.operator],
            since=order.after,
            upto=order.upto,
            groups=each.groups,
            parts=order.parts,
            fence=order.fence,
        )
        self._ask(each.node, request, order)

    def capture(self, order: orders.Capture) -> Captured:
        """Write rows of a slice to a file of its node."""
        each, wanted = order.slice, order.wanted
        request = requests.Capture(
            epoch=self.epoch,
            table=table_of(each),
            layout=self.layouts[each.operator],
            operator=OperatorName(each.operator),
            instance=Instance(each.instance),
            groups=wanted.groups,
            version=order.version,
            base=wanted.base,
            fence=order.fence,
        )
        file = self._ask(each.node, request, order)
        return Captured(
            file,
            each.id,
            each.operator,
            each.node,
            order.version,
            wanted.base,
            wanted.groups,
            wanted.clean,
        )

    def store(self, order: orders.Store) -> Part:
        """Store a captured file at its holders."""
        request = requests.Store(
            epoch=self.epoch,
            peers=self.nodes.peers(),
            file=CaptureFile(order.captured.file),
            under=requests.Prefix(f"{self.query}/"),
            holders=tuple(map(requests.Host, order.holders)),
        )
        return self._ask(order.captured.node, request, order)

    def merge(self, order: orders.Merge) -> Part:
        """Merge parts into one."""
        each = order.slice
        request = requests.Merge(
            epoch=self.epoch,
            peers=self.nodes.peers(),
            schema=CheckpointSchema.of(self.layouts[each.operator]),
            parts=order.parts,
            groups=order.groups,
            version=order.version,
            under=requests.Prefix(f"{self.query}/"),
            holders=tuple(map(requests.Host, order.holders)),
        )
        return self._ask(each.node, request, order)

    def prepare(self, host: Host) -> Inspected:
        """Prepare a node, which then refuses earlier drivers."""
        self.nodes.prepare(host)
        self.nodes.ask(host, requests.Drop(epoch=self.epoch), Deadline(_SHORT))
        return self.inspect(host)

    def inspect(self, host: Host, slices: Sequence[Slice] = ()) -> Inspected:
        """The tables and parts on a node, and the versions of some slices."""
        layouts = {table_of(each): self.layouts[each.operator] for each in slices}
        request = requests.Inspect(layouts=layouts)
        tables = self.nodes.ask(host, request, Deadline(_SHORT))
        self._tables.update({slice_of(table): table for table in tables})
        found = {slice_of(table): frozenset(versions) for table, versions in tables.items()}
        files = self.nodes.ask(host, requests.Captures(), Deadline(_SHORT))
        fences = {str(file): fence_of(file) for file in files}
        return Inspected(found, self.nodes.held(host), fences)

    def drop(self, order: orders.Drop) -> None:
        """Delete tables and captured files on a node."""
        request = requests.Drop(
            epoch=self.epoch,
            tables=tuple(self._tables[i] for i in order.slices if i in self._tables),
            captures=tuple(CaptureFile(file) for file in order.files),
        )
        self.nodes.ask(order.host, request, Deadline(_SHORT))

    def tables_at(self, query: Query) -> dict[Host, list[TableName]]:
        """The tables of a query's slices, by host."""
        found: dict[Host, list[TableName]] = {}
        for each in query.slices.values():
            found.setdefault(each.node, []).append(table_of(each))
        return found

    def drop_tables(self, host: Host, tables: Sequence[TableName]) -> None:
        """Delete tables on a node."""
        request = requests.Drop(epoch=self.epoch, tables=tuple(tables))
        self.nodes.ask(host, request, Deadline(_SHORT))

    def fetch(self, captured: Captured) -> pa.Buffer:
        """Read a captured file."""
        request = requests.Fetch(file=CaptureFile(captured.file))
        return self.nodes.ask(captured.node, request, Deadline(_LONG))

    def _ask(self, host: Host, request: Request[A], order: orders.Answered) -> A:
        return self.nodes.ask(host, request, Deadline(patience(order) / SECOND))


class Replaying(Protocol):
    """Replays batches; see :class:`~anabranch.coordinator.replays.Replays`."""

    def run(self, order: orders.Replay, routed: Mapping[str, Routed]) -> None:
        """Bring slices to a version."""
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
        self._writing = ThreadPoolExecutor(1, "anabranch-ledger")
        self._spark = ThreadPoolExecutor(1, "anabranch-replay")

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
            case orders.Store():
                self._execute_answered(self._at_nodes, number, order, lambda: ask.store(order))
            case orders.Merge():
                self._execute_answered(self._at_nodes, number, order, lambda: ask.merge(order))
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
                self._execute_unanswered(self._writing, order, lambda: self._ledger.note(order))
            case orders.Withdraw():
                self._execute_unanswered(self._writing, order, lambda: self._ledger.withdraw(order))
            case orders.Tell(kind, details):
                event = self._record(kind, details)
                self._execute_unanswered(self._writing, order, lambda: self._events.store(event))
            case orders.Drop():
                self._execute_unanswered(self._at_nodes, order, lambda: ask.drop(order))
            case orders.AskNodes(total):
                self._execute_unanswered(self._at_nodes, order, lambda: ask.nodes.request(total))
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
        """Wait for orders in progress, and accept no more."""
        for pool in (self._spark, self._probing, self._at_nodes, self._writing):
            pool.shutdown(wait=True, cancel_futures=pool is self._spark)

    def _record(self, kind: str, details: Mapping[str, Any]) -> Event:
        """Record an event before its command ends, so that the caller finds it in the events."""
        seconds = float(details.get("seconds", 0.0))
        rest = {name: value for name, value in details.items() if name != "seconds"}
        return self._events.note(kind, seconds, **rest)

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
                self._loop.tell(Done(number, answer))

        pool.submit(run)

    def _execute_unanswered(
        self, pool: ThreadPoolExecutor, order: Order, work: Callable[[], object]
    ) -> None:
        """Execute an order that has no answer."""

        def run() -> None:
            try:
                work()
            except AnabranchError as error:
                _log.warning("%s failed: %s", story.name_of(order), error)
            except Exception:
                _log.exception("%s failed with an unexpected error.", story.name_of(order))

        pool.submit(run)


def failure(number: OrderId, order: orders.Answered, error: Exception) -> Failed:
    """The answer of a failed order: what the protocols must know of the error."""
    host = node_of(order)
    told = translated(error)
    return Failed(
        number,
        str(told),
        unreachable=host if _is_silent(told) else None,
        damaged=_part_in(order, told) if isinstance(told, CheckpointError) else None,
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


def _is_silent(error: AnabranchError) -> bool:
    """Whether the error says that a node did not answer."""
    return isinstance(error, StoreError) and not isinstance(error, Refused)


def _part_in(order: orders.Answered, error: CheckpointError) -> str | None:
    """The part of the order that the error names."""
    parts: tuple[Part, ...] = getattr(order, "parts", ())
    return next((part.name for part in parts if part.name in str(error)), None)


def _slice_in(order: orders.Answered) -> SliceId | None:
    each = getattr(order, "slice", None)
    return each.id if isinstance(each, Slice) else None
