"""The turn in which one event changes a query: its changed state, and the orders that go out.

A protocol reads ``turn.query``, changes it by the few verbs below, and gives orders. Nobody else
sees the query before the turn is over, so a step happens as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.errors import AnabranchError, QueryFailed
from anabranch.protocols.model import Routed, Slice, SliceId
from anabranch.protocols.orders import (
    SECOND,
    Answered,
    CommandId,
    Drop,
    End,
    Order,
    OrderId,
    Stop,
    Tell,
    Wake,
    node_of,
    patience,
)
from anabranch.protocols.query import Outstanding, Owner, Query

PROBE = 10 * SECOND
"""A node that has not answered an order for this long is probed."""

DESERTED = 120 * SECOND
"""A query that needs a node waits for any so long, and for those that hold the only backups."""

FENCES = 1 << 40
"""A fence is the driver's epoch times this, plus a number that grows."""


class Turn:
    """The change of a query by one event: the changed query, and the orders that go out."""

    def __init__(self, query: Query) -> None:
        self.query = query
        self.orders: list[tuple[OrderId | None, Order]] = []

    def change(self, **fields: Any) -> None:
        """Change fields of the query."""
        # dataclasses.replace asks for every field; a step makes this change a few times.
        if not fields.keys() <= self.query.__dict__.keys():
            raise TypeError(f"a query has no {sorted(fields.keys() - self.query.__dict__.keys())}")
        changed = object.__new__(Query)
        changed.__dict__.update(self.query.__dict__, **fields)
        self.query = changed

    def number(self) -> int:
        """A number that was not used before."""
        self.change(numbers=self.query.numbers + 1)
        return self.query.numbers

    def fence(self) -> int:
        """A fence greater than all before it, those of earlier drivers included."""
        return self.query.epoch * FENCES + self.number()

    def slice_id(self) -> SliceId:
        """A new id of a slice."""
        return SliceId(f"{self.query.epoch}-{self.number()}")

    def order(self, order: Answered, owner: Owner, command: CommandId | None = None) -> OrderId:
        """Give an order whose answer a protocol waits for."""
        number = OrderId(self.number())
        deadline = self.query.now + patience(order)
        waiting = Outstanding(order, owner, command, self.query.now, deadline)
        self.change(outstanding={**self.query.outstanding, number: waiting})
        self.orders.append((number, order))
        self.send(Wake(deadline))
        if node_of(order) is not None:
            self.probe_soon()
        return number

    def probe_soon(self) -> None:
        """Make sure that slow nodes are probed soon."""
        probe = self.query.now + PROBE
        if not self.query.now < self.query.probe_at <= probe:
            self.change(probe_at=probe)
            self.send(Wake(probe))

    def send(self, order: Order) -> None:
        """Give an order that has no answer."""
        self.orders.append((None, order))

    def tell(self, kind: str, **details: object) -> None:
        """Record an event for the user."""
        self.send(Tell(kind, details))

    def stop(self, reason: str, kind: type[AnabranchError] = QueryFailed) -> None:
        """End the query, and every command in progress."""
        query = self.query
        if query.stopped is not None:
            return
        self.change(stopped=reason)
        reads = [each for each in query.reads if not each.handed_out]
        commands = [each.command for each in (*query.waiting, *query.moves.values(), *reads)]
        commands += [each.command for each in query.unnoted]
        if query.checkpoints is not None:
            commands += query.checkpoints.open
        for command in commands:
            self.end(command, f"the query stopped: {reason}")
        self.send(Stop(reason, kind))

    def wait_for_any_node(self) -> None:
        """Wait until a node is ready, or stop."""
        since = self.query.now
        if self.query.deserted_since is not None:
            since = self.query.deserted_since
        if self.query.now >= since + DESERTED:
            self.stop(
                "there has been no node for two minutes; start executors, then start the query "
                "again"
            )
        self.send(Wake(since + DESERTED))

    def end(self, command: CommandId, error: str | None = None, result: object = None) -> None:
        """End a command with a result or an error."""
        if command >= 0:  # the others are the query's own
            self.send(End(command, error, result))

    def forget(self, *owners: Owner, command: CommandId | None = None) -> list[Outstanding]:
        """Give up the outstanding orders of protocols, and return them."""
        mine = {
            number: waiting
            for number, waiting in self.query.outstanding.items()
            if waiting.owner in owners and (command is None or waiting.command == command)
        }
        if mine:
            rest = {n: w for n, w in self.query.outstanding.items() if n not in mine}
            self.change(outstanding=rest)
        return list(mine.values())

    def put(self, *slices: Slice) -> None:
        """Add slices, or replace those with the same ids."""
        self.change(slices={**self.query.slices, **{each.id: each for each in slices}})

    def remove(self, ids: frozenset[SliceId]) -> None:
        """Remove slices, and drop their tables on their nodes."""
        kept = {i: s for i, s in self.query.slices.items() if i not in ids}
        for host in sorted({s.node for i, s in self.query.slices.items() if i in ids}):
            if host in self.query.nodes:
                gone = [s.id for s in self.query.slices.values() if s.id in ids and s.node == host]
                self.send(Drop(host, tuple(gone)))
        self.change(slices=kept, suspects=self.query.suspects - ids)

    def arrange(self, routed: Mapping[str, Routed]) -> None:
        """Record that other slices serve from now on; it is noted with the next step."""
        self.change(routed=routed, arrangement=self.fence())
