"""The rows of both sides of a join that may still find a partner.

For every key the state has one *header* row (``_side`` -1) with the number of buffered rows of each
side. Those have the slots 0, 1, ... without gaps, so that hash look-ups find all of them from the
header. When a row is removed, the last one of its side moves into its slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels.grouping import number, spread
from anabranch.kernels.joins import arrange, close_gaps, next_slots
from anabranch.operators.payload import Payload
from anabranch.operators.rows import Rows
from anabranch.state import schema
from anabranch.state.schema import Column
from anabranch.state.view import State

Array = npt.NDArray[Any]

LEFT, RIGHT = 0, 1
SIDES = (LEFT, RIGHT)
SUB_KEYS = ("_side", "_slot")
BOOKKEEPING = (Column("_counts", schema.vector(schema.int64, 2)), Column("_matched", schema.bool_))


@dataclass(frozen=True)
class Touched:
    """The keys of some rows, and what is buffered for them on the sides that matter."""

    group: Array
    """For each row the number of its key."""
    keys: Rows
    """The keys, by number."""
    heads: Array
    """Their header rows."""
    counts: Array
    """int64[keys, 2]: how many rows are buffered on each side."""
    bucket: Array
    """For each buffered row twice the number of its key, plus its side."""
    at: Array
    """Its state row."""


@dataclass(frozen=True)
class JoinBuffer:
    """How buffered rows are kept: their columns, time and last useful moment, by side."""

    payloads: tuple[Payload, Payload]
    times: tuple[str, str]
    """The time columns."""
    reach: tuple[int, int]
    """How long after its own time a row of each side may find partners, in microseconds."""

    def touch(self, state: State, keys: Rows, side: Array) -> Touched:
        """Find the keys of new rows, new ones included, and all rows that these may match."""
        head = _header(state.rows, keys)
        group, first = number(head)
        heads, keys = head[first], keys.take(first)
        counts = state["_counts"][heads]
        wanted = np.zeros_like(counts)
        wanted[group, 1 - side] = 1
        bucket, slot = spread((counts * wanted).reshape(-1))
        at = state.find(keys.take(bucket >> 1), _side=bucket & 1, _slot=slot)
        return Touched(group, keys, heads, counts, bucket, at)

    def times_of(self, state: State, at: Array, side: Array) -> Array:
        """The times of buffered rows, in microseconds."""
        left, right = (
            state[payload.stored_as(time)][at]
            for payload, time in zip(self.payloads, self.times, strict=True)
        )
        times: Array = np.where(side == LEFT, left, right)
        return times

    def add(
        self, state: State, rows: Rows, keys: Rows, side: Array, times: Array, touched: Touched
    ) -> Array:
        """Buffer new rows; returns their state rows."""
        counts = touched.counts.reshape(-1).copy()
        slot = next_slots(2 * touched.group + side, counts)
        at = state.rows(keys, _side=side, _slot=slot)
        for which, payload in zip(SIDES, self.payloads, strict=True):
            mine = np.flatnonzero(side == which)
            arrays = [rows.arrow(field.name) for field in payload.fields]
            payload.write(state, at[mine], [array.take(mine) for array in arrays])
        state.set_timer(at, times + self._reach(side))
        state.set("_counts", touched.heads, counts.reshape(-1, 2))
        return at

    def remove(self, state: State, at: Array, keys: Rows, side: Array, slot: Array) -> None:
        """Remove buffered rows, with the keys, sides and slots of these state rows."""
        head = _header(state.find, keys)
        group, first = number(head)
        heads = head[first]
        bucket = 2 * group + side
        order, starts = arrange(bucket, slot, 2 * len(heads))
        counts = state["_counts"][heads].reshape(-1).copy()
        moves, source, gap = close_gaps(slot[order], starts, counts)

        source_at = state.find(keys.take(first[moves >> 1]), _side=moves & 1, _slot=source)
        target = order[gap]
        self._move(state, source_at, at[target], moves & 1)
        gone = np.ones(len(at), bool)
        gone[target] = False
        counts = counts.reshape(-1, 2)
        empty = counts.sum(axis=1) == 0
        state.set("_counts", heads[~empty], counts[~empty])
        state.delete(np.concatenate([at[gone], source_at, heads[empty]]))

    def _move(self, state: State, source: Array, target: Array, side: Array) -> None:
        for which, payload in zip(SIDES, self.payloads, strict=True):
            payload.copy(state, source[side == which], target[side == which])
        state.set("_matched", target, state["_matched"][source])
        state.set_timer(target, self.times_of(state, target, side) + self._reach(side))

    def _reach(self, side: Array) -> Array:
        return np.array(self.reach, np.int64)[side]


def _header(look_up: Any, keys: Rows) -> Array:
    nothing = np.zeros(len(keys), np.int64)
    found: Array = look_up(keys, _side=nothing - 1, _slot=nothing)
    return found
