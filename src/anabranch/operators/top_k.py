"""The k rows of every key that are the greatest, or the smallest, by some column."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import PlanError
from anabranch.kernels.grouping import number, spread
from anabranch.kernels.topk import greatest
from anabranch.operators import ranking
from anabranch.operators.context import Context
from anabranch.operators.operator import Operator
from anabranch.operators.payload import Payload
from anabranch.operators.rows import Rows
from anabranch.operators.siblings import owners
from anabranch.state import schema
from anabranch.state.schema import Column, StateSchema
from anabranch.state.view import State

Array = npt.NDArray[Any]

RANK = "rank"


class TopK(Operator):
    """Keeps for every key the k rows that are greatest by a column.

    Whenever the top k of a key change, all of them are emitted again at the end of the batch, with
    their ``rank`` from 1 to k (update mode). Of rows with equal values the earliest one ranks
    first, and stays. Rows without a value are ignored. With ``largest=False`` the k smallest rows
    are kept, the smallest at rank 1.

    >>> TopK(3, by="score")
    TopK(3, by='score')

    The state has one row for each key and rank.

    Output columns: the key, all other columns of the input, ``rank`` (int32).
    """

    sub_keys = (RANK,)

    _payload: Payload
    _output: pa.Schema

    def __init__(self, k: int, by: str, *, largest: bool = True) -> None:
        if k < 1:
            raise PlanError(f"top_k: k is {k}; it must be at least 1")
        self.k = k
        self.by = by
        self.largest = largest

    def __repr__(self) -> str:
        return f"TopK({self.k}, by={self.by!r}{'' if self.largest else ', largest=False'})"

    def bind(self, schema: pa.Schema, keys: Sequence[str]) -> TopK:
        """Lay the state out for the columns of the input."""
        others = [name for name in schema.names if name not in keys]
        if self.by in keys:
            raise PlanError(
                f"top_k: by={self.by!r} is one of the keys {list(keys)}, so all rows of a key "
                f"would be equal; rank by another column, of {others}"
            )
        if self.by not in schema.names:
            raise PlanError(f"top_k: there is no column by={self.by!r}; there are {others}")
        if RANK in schema.names:
            raise PlanError(f"top_k: the rows already have a column {RANK!r}; rename it before")
        ranking.check(self.by, schema.field(self.by).type)
        bound = copy.copy(self)
        others = [field for field in schema if field.name not in keys]
        bound._payload = Payload(others, taken=[*keys, *self.sub_keys, *_HEAD])
        bound._output = self.output(schema, keys)
        bound.state = StateSchema((*_HEAD.values(), *bound._payload.columns))
        return bound

    def output(self, schema: pa.Schema, keys: Sequence[str]) -> pa.Schema:
        """The key, the other columns, the rank."""
        others = [field for field in schema if field.name not in keys]
        return pa.schema([*(schema.field(k) for k in keys), *others, pa.field(RANK, pa.int32())])

    def process(self, rows: Rows, state: State, context: Context) -> None:
        """Rank the rows among those that are kept."""
        rows = rows.filter(rows.valid(self.by))
        codes = self._codes(rows.arrow(self.by))
        head = state.rows(rows, rank=np.ones(len(rows), np.int64))
        enter = (state["_count"][head] < self.k) | (codes > state["_floor"][head])
        if enter.any():
            at = np.flatnonzero(enter)
            self._enter(rows.take(at), codes[at], head[at], state, context)

    def _enter(self, rows: Rows, codes: Array, head: Array, state: State, context: Context) -> None:
        group, first = number(head)
        heads = head[first]
        keys = rows.select(*context.keys).take(first)
        had = state["_count"][heads].astype(np.int64)
        owner, place = spread(had)
        kept_at = self._find(state, keys, heads, owner, place)
        # What is kept stands before what comes, so that it wins where values are equal.
        codes = np.concatenate(
            [self._codes(self._payload.read_one(state, self.by, kept_at)), codes]
        )
        room = np.minimum(had + np.bincount(group, minlength=len(first)), self.k)
        best, starts = greatest(np.concatenate([owner, group]), codes, room, self.k)

        owner, place = spread(room)
        stays = place < had[owner]
        was = np.where(stays, (np.cumsum(had) - had)[owner] + place, -1)
        moved = np.flatnonzero(best != was)
        target = np.empty(len(moved), np.int64)
        known = stays[moved]
        target[known] = kept_at[was[moved[known]]]
        fresh = moved[~known]
        target[~known] = state.rows(keys.take(owner[fresh]), rank=place[fresh] + 1)

        self._payload.write(state, target, self._payload.pick(state, kept_at, rows, best[moved]))
        state.set("_count", heads, room.astype(np.int32))
        state.set("_floor", heads, codes[best[starts[1:] - 1]])

    def finish(self, state: State, context: Context) -> Rows | None:
        """Emit the top k of every key where they changed."""
        changed = state.changed()
        heads = changed[state["_count"][changed] > 0]
        if not len(heads):
            return None
        keys, _ = owners(state, heads, context.keys)
        assert keys.hashes is not None
        # Rows are touched in another order if they come in other portions.
        order = np.argsort(keys.hashes, kind="stable")
        keys, heads = keys.take(order), heads[order]
        owner, place = spread(state["_count"][heads].astype(np.int64))
        at = self._find(state, keys, heads, owner, place)
        columns = [keys.arrow(name).take(pa.array(owner)) for name in context.keys]
        columns += self._payload.read(state, at)
        columns.append(pa.array((place + 1).astype(np.int32)))
        return Rows(pa.RecordBatch.from_arrays(columns, schema=self._output))

    def _find(self, state: State, keys: Rows, heads: Array, owner: Array, place: Array) -> Array:
        """The state rows at some places of some keys; a head is the row at place 0."""
        found = heads[owner]
        lower = np.flatnonzero(place > 0)
        found[lower] = state.find(keys.take(owner[lower]), rank=place[lower] + 1)
        return found

    def _codes(self, values: pa.Array) -> Array:
        found = ranking.codes(values)
        return found if self.largest else ~found


_HEAD = {
    "_count": Column("_count", schema.int32),
    "_floor": Column("_floor", schema.int64),
}
"""Kept in the row of rank 1: how many ranks are taken, and the code of the last of them."""
