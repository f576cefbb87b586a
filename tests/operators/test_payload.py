from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pytest
from arrow_values import any_types, identities, values_of
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import folder

from anabranch.errors import PlanError
from anabranch.operators.payload import Payload
from anabranch.operators.rows import Rows
from anabranch.operators.siblings import owners
from anabranch.state.keys import KeyLayout
from anabranch.state.schema import StateSchema
from anabranch.state.table import StateTable, TableLayout
from anabranch.state.view import State
from anabranch.units import Version

KEY = pa.field("k", pa.string())


@contextmanager
def open_state(values: StateSchema, sub: tuple[str, ...] = ()) -> Iterator[State]:
    with folder() as place:
        table = StateTable.create(place / "t", TableLayout(KeyLayout([KEY], sub), values))
        with table.lock(5.0):
            table.begin(Version(0), 0)
            yield State(table, ("k",))
        table.close()


def keyed(count: int) -> Rows:
    keys = pa.array([None, *map(str, range(1, count))][:count], pa.string())
    hashes = np.random.default_rng(count).integers(0, 2**64, count, dtype=np.uint64)
    return Rows(pa.record_batch({"k": keys}), hashes)


@st.composite
def tables(draw: st.DrawFn) -> pa.RecordBatch:
    """Some columns of any type, some of them cut out of longer ones."""
    length = draw(st.integers(0, 6))
    fields, columns = [], []
    for name in ("a", "a_null", "b"):
        kind = draw(any_types.filter(lambda kind: not pa.types.is_null(kind)))
        nullable = draw(st.booleans())
        values = draw(st.lists(values_of(kind, nullable), min_size=length + 1, max_size=length + 1))
        fields.append(pa.field(name, kind, nullable))
        columns.append(pa.array(values, kind)[1:])
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


@settings(max_examples=80, deadline=None)
@given(batch=tables(), data=st.data())
def test_what_is_written_is_read(batch: pa.RecordBatch, data: st.DataObject) -> None:
    payload = Payload(list(batch.schema), taken=["k", "b"])
    names = [column.name for column in payload.columns]
    assert len(set(names)) == len(names)
    assert not {"k", "b"} & set(names)
    with open_state(StateSchema(tuple(payload.columns))) as state:
        at = state.rows(keyed(batch.num_rows))
        payload.write(state, at, batch.columns)
        _equal(payload.read(state, at), batch.columns)
        some = np.array(data.draw(_positions(batch.num_rows)), np.int64)
        _equal(payload.read(state, at[some]), [c.take(pa.array(some)) for c in batch.columns])

        for name in batch.schema.names:
            _equal([payload.read_one(state, name, at)], [batch.column(name)])
        kept = at[: len(at) // 2]
        entries = np.array(data.draw(_positions(len(kept) + batch.num_rows, -1)), np.int64)
        twice = pa.concat_tables([pa.table(batch.slice(0, len(kept))), pa.table(batch)])
        index = pa.array(entries, mask=entries < 0)
        expected = [column.combine_chunks().take(index) for column in twice.columns]
        _equal(payload.pick(state, kept, Rows(batch), entries), expected)


@settings(max_examples=20, deadline=None)
@given(batch=tables().filter(lambda batch: batch.num_rows > 1))
def test_copied_rows_are_equal(batch: pa.RecordBatch) -> None:
    payload = Payload(list(batch.schema), taken=[])
    with open_state(StateSchema(tuple(payload.columns))) as state:
        at = state.rows(keyed(batch.num_rows))
        payload.write(state, at, batch.columns)
        payload.copy(state, at[:1], at[-1:])
        _equal(payload.read(state, at[-1:]), [column[:1] for column in batch.columns])
        _equal(payload.read(state, at[:-1]), [column[:-1] for column in batch.columns])


@pytest.mark.parametrize("kind", [pa.null(), pa.dense_union([pa.field("x", pa.int8())])])
def test_types_that_cannot_be_kept_are_refused(kind: pa.DataType) -> None:
    with pytest.raises(PlanError, match="'odd'"):
        Payload([pa.field("odd", kind)], taken=[])


def test_reserved_names_are_refused() -> None:
    with pytest.raises(PlanError, match="__x"):
        Payload([pa.field("__x", pa.int8())], taken=[])


@settings(max_examples=20, deadline=None)
@given(
    sub=st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-2, 2)), min_size=1, max_size=9
    )
)
def test_a_state_row_leads_back_to_the_key_it_was_made_for(sub: list[tuple[int, int]]) -> None:
    rows = keyed(len(sub))
    slot, side = (np.array(column, np.int64) for column in zip(*sub, strict=True))
    with open_state(StateSchema(()), ("slot", "side")) as state:
        keys, found = owners(state, state.rows(rows, slot=slot, side=side), ("k",))
        assert keys.batch.equals(rows.batch)
        assert np.array_equal(keys.hashes, rows.hashes)
        assert np.array_equal(found, [slot, side])


def _positions(count: int, least: int = 0) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(least, count - 1), max_size=8) if count > least else st.just([])


def _equal(left: list[pa.Array], right: list[pa.Array]) -> None:
    assert [a.type for a in left] == [b.type for b in right]
    assert list(map(identities, left)) == list(map(identities, right))
