"""Orders as requests to nodes: what each verb asks of them, and what their answers mean."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pyarrow as pa

from anabranch.coordinator.batches import slice_of, table_of
from anabranch.coordinator.nodes import Nodes
from anabranch.errors import DidNotHappen
from anabranch.fragments.cost import Cost
from anabranch.nodes import requests
from anabranch.nodes.captures import fence_of
from anabranch.nodes.node import Deadline
from anabranch.nodes.requests import (
    CaptureFile,
    Epoch,
    Instance,
    OperatorName,
    Request,
    TableName,
)
from anabranch.protocols import orders
from anabranch.protocols.events import Inspected
from anabranch.protocols.model import Host, Slice, SliceId
from anabranch.protocols.orders import SECOND, Captured, patience
from anabranch.protocols.query import Query
from anabranch.state.capture import CheckpointSchema
from anabranch.state.part import Shape
from anabranch.state.table import TableLayout

A = TypeVar("A")

_SHORT, _LONG = 60.0, 3600.0


@dataclass
class Asking:
    """Translates orders into requests to nodes."""

    nodes: Nodes
    epoch: Epoch
    query: str
    layouts: Mapping[str, TableLayout]
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set when the query ends: requests in progress are then given up."""

    def __post_init__(self) -> None:
        self._tables: dict[SliceId, TableName] = {}
        """The known tables by slice, present or lost."""

    def make(self, order: orders.Make) -> Cost:
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
        return self._ask(each.node, request, order)

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

    def store(self, order: orders.Store | orders.Merge | orders.Mend) -> requests.Stored:
        """Store a part: what was captured, merged parts, or lost fragments."""
        peers, under = self.nodes.peers(), requests.Prefix(f"{self.query}/")
        holders = tuple(map(requests.Host, order.holders))
        request: requests.Request[requests.Stored]
        match order:
            case orders.Store(captured):
                request = requests.Store(
                    epoch=self.epoch,
                    peers=peers,
                    file=CaptureFile(captured.file),
                    under=under,
                    holders=holders,
                    needed=order.shape.needed,
                    row=order.shape.row,
                    parity=order.shape.parity,
                )
                return _promised(self._ask(captured.node, request, order), order.shape)
            case orders.Merge(each):
                request = requests.Merge(
                    epoch=self.epoch,
                    peers=peers,
                    schema=CheckpointSchema.of(self.layouts[each.operator]),
                    parts=order.parts,
                    groups=order.groups,
                    version=order.version,
                    under=under,
                    holders=holders,
                    needed=order.shape.needed,
                    row=order.shape.row,
                    parity=order.shape.parity,
                )
                return _promised(self._ask(each.node, request, order), order.shape)
            case orders.Mend(part, host):
                request = requests.Mend(epoch=self.epoch, peers=peers, part=part, holders=holders)
                return self._ask(host, request, order)

    def prepare(self, host: Host) -> Inspected:
        """Prepare a node, which then refuses earlier drivers."""
        self.nodes.prepare(host)
        self.nodes.ask(host, requests.Drop(epoch=self.epoch), self._within(_SHORT))
        return self.inspect(host)

    def inspect(self, host: Host, slices: Sequence[Slice] = ()) -> Inspected:
        """The tables and parts on a node, and the versions of some slices."""
        layouts = {table_of(each): self.layouts[each.operator] for each in slices}
        request = requests.Inspect(layouts=layouts)
        tables = self.nodes.ask(host, request, self._within(_SHORT))
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
        self.nodes.ask(order.host, request, self._within(_SHORT))

    def tables_at(self, query: Query) -> dict[Host, list[TableName]]:
        """The tables of a query's slices, by host."""
        found: dict[Host, list[TableName]] = {}
        for each in query.slices.values():
            found.setdefault(each.node, []).append(table_of(each))
        return found

    def drop_tables(self, host: Host, tables: Sequence[TableName]) -> None:
        """Delete tables on a node."""
        request = requests.Drop(epoch=self.epoch, tables=tuple(tables))
        self.nodes.ask(host, request, self._within(_SHORT))

    def fetch(self, captured: Captured) -> pa.Buffer:
        """Read a captured file."""
        request = requests.Fetch(file=CaptureFile(captured.file))
        return self.nodes.ask(captured.node, request, self._within(_LONG))

    def request_nodes(self, total: int) -> None:
        """Ask the cluster manager for so many nodes; DidNotHappen if it does not support that."""
        if not self.nodes.request(total):
            raise DidNotHappen(
                "the cluster manager does not start executors on request; start them by hand"
            )

    def _ask(self, host: Host, request: Request[A], order: orders.Answered) -> A:
        return self.nodes.ask(host, request, self._within(patience(order) / SECOND))

    def _within(self, seconds: float) -> Deadline:
        return Deadline(seconds, self.stopped)


def _promised(stored: requests.Stored, shape: Shape) -> requests.Stored:
    """With what the policy promises of the part, which its node does not know."""
    if not stored.part.holders:
        return stored  # a store that outlives all nodes sees to that itself
    return replace(stored, part=replace(stored.part, parity=shape.parity))
