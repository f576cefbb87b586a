"""Packed rows: what is divided and opened again is what was given, in the order of the source."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.spark.packed_shuffle import PackedRouter
from anabranch.state.groups import Routing, group_of
from anabranch.state.hashing import hash_keys
from anabranch.worker import packing
from anabranch.worker.packing import ROWS, SEQUENCE, TARGET, Packing, read_values

SCHEMA = pa.schema([("user", pa.string()), ("n", pa.int64())])
PACKING = Packing(SCHEMA, ("user",))
GROUPS = 16

batches = st.lists(
    st.lists(st.tuples(st.one_of(st.none(), st.sampled_from("abcdefgh")), st.integers(0, 99))),
    max_size=5,
)


def made(rows: list[tuple[str | None, int]]) -> pa.RecordBatch:
    users, numbers = [user for user, _ in rows], [number for _, number in rows]
    return pa.RecordBatch.from_arrays(
        [pa.array(users, pa.string()), pa.array(numbers, pa.int64())], schema=SCHEMA
    )


@pytest.fixture(autouse=True, scope="module")
def partition() -> Iterator[SimpleNamespace]:
    """The task that the functions believe to be in."""
    task = SimpleNamespace(number=0, partitionId=lambda: task.number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "TaskContext", SimpleNamespace(get=lambda: task))
        yield task


def owners(rows: list[tuple[str | None, int]], routing: Routing) -> list[int]:
    keys = pa.array([user for user, _ in rows], pa.string())
    return routing.table()[group_of(hash_keys([keys], len(rows)), GROUPS)].tolist()


def sent(packed: list[pa.RecordBatch], target: int) -> Iterator[pa.RecordBatch]:
    """What arrives at a target: blocks of a shuffle come in any order."""
    for batch in reversed(packed):
        if batch.column(TARGET)[0].as_py() == target:
            yield batch


def opened(packed: Iterator[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    return [
        tuple(row.values())
        for rows in PACKING.unpacked(packed, ordered=True)
        for row in rows.to_pylist()
    ]


@given(senders=st.lists(batches, min_size=1, max_size=3), instances=st.integers(1, 5))
def test_rows_reach_the_owner_of_their_key_in_order(
    partition: SimpleNamespace, senders: list[Any], instances: int
) -> None:
    routing = Routing.even(GROUPS, instances)
    packed, rows = [], []
    for partition.number, given_ in enumerate(senders):
        packed += list(PACKING.divided(routing.table(), map(made, given_)))
        rows += [row for batch in given_ for row in batch]
    owner = owners(rows, routing)
    for target in range(instances):
        wanted = [row for row, own in zip(rows, owner, strict=True) if own == target]
        assert opened(sent(packed, target)) == wanted


@given(rows=batches, before=st.integers(1, 4), after=st.integers(1, 4))
def test_rows_are_divided_again_for_some_instances(rows: Any, before: int, after: int) -> None:
    old, new = Routing.even(GROUPS, before), Routing.even(GROUPS, after)
    packed = [
        row.append_column(packing.VERSION, pa.array([5]))
        for row in PACKING.divided(old.table(), map(made, rows))
    ]
    targets = np.where(new.table() == after - 1, 0, -1).astype(np.int32)
    again = list(PACKING.divided_again(targets, iter(packed)))
    assert all(row.column(packing.VERSION).to_pylist() == [5] for row in again)
    flat = [row for batch in rows for row in batch]
    wanted = [row for row, own in zip(flat, owners(flat, new), strict=True) if own == after - 1]
    # Rows of one key keep their order; those of several keys may have been apart before.
    assert sorted(opened(iter(again)), key=str) == sorted(wanted, key=str)
    for user in {user for user, _ in wanted}:
        assert [r for r in opened(iter(again)) if r[0] == user] == [
            r for r in wanted if r[0] == user
        ]


def test_rows_made_again_have_the_place_of_their_first_sender(partition: SimpleNamespace) -> None:
    partition.number = 1
    (packed,) = PACKING.as_from([0, 7], iter([made([("a", 1)])]))
    assert packed.column(SEQUENCE)[0].as_py() >> packing.SEQUENCE_BITS == 7


def test_rows_in_no_order_may_be_made_again_by_more_than_sent_them(
    partition: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = PackedRouter(PACKING, Routing.even(GROUPS, 2), ordered=False)
    made_again: list[Any] = []
    monkeypatch.setattr(
        "anabranch.spark.packed_shuffle.map_in_arrow", lambda _, run, __: made_again.append(run)
    )
    frame: Any = None
    router.as_from(frame, [0])
    partition.number = 3
    rows = map(made, [[("a", 1)], [("b", 2)]])
    assert opened(made_again[0](rows)) == [("a", 1), ("b", 2)]


def test_large_batches_are_packed_in_several_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_ROWS_AT_ONCE", 4)
    rows = [("a", n) for n in range(10)]
    packed = list(PACKING.divided(Routing.even(GROUPS, 1).table(), map(made, [[r] for r in rows])))
    assert len(packed) == 3
    assert opened(reversed(packed)) == rows


def test_values_with_other_columns_are_refused() -> None:
    sink = pa.BufferOutputStream()
    other = pa.record_batch({"user": ["a"]})
    with pa.ipc.new_stream(sink, other.schema) as writer:
        writer.write_batch(other)
    batch = pa.record_batch({ROWS: pa.array([sink.getvalue().to_pybytes()], pa.binary())})
    with pytest.raises(ValueError, match=r"(?s)column '__rows'.*was given the schema"):
        list(read_values(ROWS, SCHEMA, iter([batch])))
