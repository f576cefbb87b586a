"""Aggregates over session windows: rows of a key that follow each other closely.

A key can have several open sessions, because rows come out of order. Each is a state row with the
sub-key ``window_slot``, a small number without relation to time. Slot 0 exists as long as the key
has any session. It has a bound on the slots in use (``window_slots``) and the latest end of any
session of the key (``window_until``), so that the sessions of a key are found, and the row is
removed, without a search. Slot 0 may itself be vacant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import PlanError
from anabranch.kernels import windows as kernels
from anabranch.kernels.grouping import number, spread
from anabranch.kernels.windows import EMITTED, OPEN, VACANT
from anabranch.operators.aggregate import Aggregate, Aggregates, described, key_fields
from anabranch.operators.context import Context
from anabranch.operators.operator import Operator
from anabranch.operators.rows import Rows
from anabranch.operators.values import readonly
from anabranch.operators.windows import (
    SessionWindow,
    check_delays,
    closed_before,
    window_fields,
)
from anabranch.state.schema import Column, StateSchema, int32, timestamp, uint8
from anabranch.state.view import State

Array = npt.NDArray[Any]

EARLIEST = np.iinfo(np.int64).min


class SessionAggregate(Operator):
    """Keeps aggregates per key and session, and merges sessions that a row connects.

    A session is emitted once the watermark has reached its end, and again after each batch that
    brings it rows within the allowed lateness. Rows that come too late to be a session of their own
    are late rows of the result, like rows without a time. ``first`` and ``last`` are in order of
    time.
    """

    sub_keys = ("window_slot",)
    timers = True
    late = True
    _aggregates: Aggregates
    _schema: pa.Schema

    def __init__(
        self,
        window: SessionWindow,
        aggregates: Mapping[str, Aggregate],
        *,
        watermark_delay: int = 0,
        allowed_lateness: int = 0,
        mode: str = "append",
    ) -> None:
        check_delays(watermark_delay, allowed_lateness)
        if mode != "append":
            raise PlanError(
                f"mode={mode!r}: sessions grow and merge, so rows emitted earlier would be wrong; "
                "use mode='append'"
            )
        self._window = window
        self._given = dict(aggregates)
        self._lateness = allowed_lateness
        self.event_time = window.on
        self.watermark_delay = watermark_delay

    def __repr__(self) -> str:
        return f"window({self._window}).aggregate({described(self._given)})"

    def bind(self, schema: pa.Schema, keys: Sequence[str]) -> SessionAggregate:
        """Check the window and the aggregates against the input."""
        bound = copy(self)
        times = window_fields(schema, keys, self._window.on)
        others = [*keys, "window_start", "window_end"]
        bound._aggregates = Aggregates.bind(self._given, schema, others, by_time=True)
        bound._schema = pa.schema([*key_fields(schema, keys), *times, *bound._aggregates.fields()])
        bound.state = StateSchema(
            (
                Column("window_status", uint8),
                Column("window_start", timestamp),
                Column("window_end", timestamp),
                Column("window_until", timestamp, EARLIEST),
                Column("window_slots", int32),
                *bound._aggregates.columns(),
            )
        )
        bound.ordered = bound._aggregates.ordered
        return bound

    def output(self, schema: pa.Schema, keys: Sequence[str]) -> pa.Schema:
        """Key columns, ``window_start``, ``window_end``, then the aggregates."""
        return self.bind(schema, keys)._schema

    def process(self, rows: Rows, state: State, context: Context) -> None:
        """Keep rows for the end of the batch.

        Floating-point results depend on whether sessions are merged before or after rows are added.
        Doing so once per batch makes them independent of how the batch was divided.
        """
        closed = closed_before(context.watermark, self._lateness)
        times = rows.times(self._window.on)
        taken = rows.valid(self._window.on) & (times + self._window.gap > closed)
        if not taken.all():
            context.late(rows.filter(~taken))
            rows = rows.filter(taken)
        if len(rows):
            wanted = [*context.keys, self._window.on, *self._aggregates.inputs]
            context.held.append(rows.select(*dict.fromkeys(wanted)))

    def finish(self, state: State, context: Context) -> Rows | None:
        """Add the rows of the batch to sessions, then emit those that have ended."""
        if context.held:
            self._take(joined(context.held), state)
        return None if context.watermark is None else self._close(state, context.watermark)

    def _take(self, rows: Rows, state: State) -> None:
        table, times = state.table, readonly(rows.times(self._window.on))
        at = state.rows(rows, window_slot=np.zeros(len(rows), np.int64))
        table.touch(at)
        others, new = kernels.extend_first(
            *self._sessions(state),
            table.column("window_slots"),
            table.column("window_status"),
            at,
            times,
            self._window.gap,
        )
        state.set_timer(at[new], table.column("window_end")[at[new]])
        if len(others):
            at[others] = self._place(rows.take(others), times[others], at[others], state)
        self._aggregates.update(table, at, rows, times)

    def _sessions(self, state: State) -> tuple[Array, Array, Array]:
        table = state.table
        return (
            table.column("window_start"),
            table.column("window_end"),
            table.column("window_until"),
        )

    def _place(self, rows: Rows, times: Array, headers: Array, state: State) -> Array:
        """The sessions of rows whose key has several; ``headers`` are their rows of slot 0."""
        table, gap = state.table, self._window.gap
        starts, ends, untils = self._sessions(state)
        status, bounds = table.column("window_status"), table.column("window_slots")
        owners, examples = number(readonly(headers))
        keys = headers[examples]

        # The sessions there are: those in slot 0, and those in further slots.
        further, slots = spread(readonly(bounds[keys].astype(np.int64) - 1))
        found = state.find(rows.take(examples[further]), window_slot=slots + 1)
        first, there = np.flatnonzero(status[keys] != VACANT), found >= 0
        session_rows = np.concatenate([keys[first], found[there]])
        session_owners = np.concatenate([first, further[there]])
        session_slots = np.concatenate([np.zeros_like(first), slots[there] + 1])

        # What overlaps, be it session or row, becomes one session.
        item_owners = np.concatenate([session_owners, owners])
        item_starts = np.concatenate([starts[session_rows], times])
        item_ends = np.concatenate([ends[session_rows], times + gap])
        order = np.lexsort((item_starts, item_owners))
        joint, joint_starts, joint_ends, targets, changed = kernels.sweep(
            order, item_owners, item_starts, item_ends, session_slots
        )
        joint_owners = np.empty(len(joint_starts), np.int64)
        joint_owners[joint] = item_owners

        # A joint session stays in the lowest slot of those it is made of, or gets a free one.
        joint_slots = np.empty(len(joint_starts), np.int64)
        old = targets >= 0
        joint_slots[old] = session_slots[targets[old]]
        joint_slots[~old] = kernels.free_slots(
            joint_owners[~old],
            bounds[keys].astype(np.int64),
            session_owners,
            session_slots,
        )
        joint_rows = keys[joint_owners]
        joint_rows[old] = session_rows[targets[old]]
        apart = np.flatnonzero(~old & (joint_slots > 0))
        joint_rows[apart] = state.rows(
            rows.take(examples[joint_owners[apart]]), window_slot=joint_slots[apart]
        )

        # Rows were added, so the columns may have moved.
        starts, ends, untils = self._sessions(state)
        status, bounds = table.column("window_status"), table.column("window_slots")
        session_joint = joint[: len(session_rows)]
        gone = np.flatnonzero(targets[session_joint] != np.arange(len(session_rows)))
        if len(gone):
            into, source = joint_rows[session_joint[gone]], session_rows[gone]
            self._aggregates.merge(table, into, source)
            state.delete(source)

        rewritten = joint_rows[changed]
        table.touch(rewritten)
        starts[rewritten] = joint_starts[changed]
        ends[rewritten] = joint_ends[changed]
        new = rewritten[kernels.opened(status, rewritten)]
        state.set_timer(new, ends[new])
        kernels.settle(bounds, untils, keys, joint_owners, joint_slots, joint_ends)
        return joint_rows[joint[len(session_rows) :]]

    def _close(self, state: State, watermark: int) -> Rows | None:
        """Emit sessions that have ended, and remove those that accept no more rows."""
        table, lateness = state.table, self._lateness
        due = state.due(watermark)
        if not len(due):
            return None
        _, ends, untils = self._sessions(state)
        status = table.column("window_status")
        # The timer of an open session stays where it was set while the session grows.
        grown = (status[due] == OPEN) & (ends[due] > watermark)
        state.set_timer(due[grown], ends[due[grown]])
        due = due[~grown]
        sent = due[status[due] == OPEN]
        sent = sent[np.lexsort((table.hashes(sent), ends[sent]))]
        output = self._rows(state, sent) if len(sent) else None

        kept = due[(status[due] != VACANT) & (ends[due] + lateness > watermark)]
        state.set("window_status", kept, EMITTED)
        state.set_timer(kept, ends[kept] + lateness)
        closed = due[(status[due] == VACANT) | (ends[due] + lateness <= watermark)]
        needed_on = (table.column("window_slots")[closed] > 0) & (
            untils[closed] + lateness > watermark
        )
        state.delete(closed[~needed_on])
        headers = closed[needed_on]
        if len(headers):
            self._aggregates.reset(table, headers)
            state.set("window_status", headers, VACANT)
            state.set_timer(headers, untils[headers] + lateness)
        return output

    def _rows(self, state: State, at: Array) -> Rows:
        starts, ends, _ = self._sessions(state)
        kind = self._schema.field("window_start").type
        times = [pa.array(column[at]).view(kind) for column in (starts, ends)]
        results = self._aggregates.results(state.table, at)
        columns = [*state.keys(at)[:-1], *times, *results]
        return Rows(pa.RecordBatch.from_arrays(columns, schema=self._schema))


def joined(parts: Sequence[Rows]) -> Rows:
    """Rows with the same columns, combined."""
    hashes = [part.hashes for part in parts if part.hashes is not None]
    return Rows(pa.concat_batches([part.batch for part in parts]), np.concatenate(hashes))
