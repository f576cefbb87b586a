"""A task that runs several slices: the outcome of one slice, with tables of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark import TaskContext
from pyspark.errors import PythonException
from pyspark.sql import SparkSession
from task_runs import Captured, Counting, Ending, Running

from anabranch.coordinator.failures import translated
from anabranch.coordinator.progress import operator_progress
from anabranch.errors import Reshaped, StateMissing
from anabranch.nodes.requests import TableName
from anabranch.operators.context import Context
from anabranch.operators.rows import Rows
from anabranch.state import capture as captures
from anabranch.state import checkpoint, maintenance
from anabranch.state.groups import KeyGroups, group_of
from anabranch.state.hashing import hash_keys
from anabranch.state.maintenance import NO_UPKEEP, Upkeep
from anabranch.state.table import StateTable
from anabranch.state.view import State
from anabranch.units import Version
from anabranch.worker import slices
from anabranch.worker.open_tables import OpenTables
from anabranch.worker.slices import CaptureOrder, Division, SliceOrder
from anabranch.worker.task import OperatorTask

IDS = list(range(500))


def groups_of_ids(ids: Sequence[int], groups: int = 16) -> list[int]:
    hashes = hash_keys([pa.array(ids, pa.int64())], len(ids))
    return [int(group) for group in group_of(hashes, groups)]


def out_of(running: Running, task: OperatorTask, batches: Sequence[Sequence[int]]) -> list[int]:
    """What comes out of the only instance for rows that come in several Arrow batches."""
    context = mock.Mock(partitionId=lambda: 0, taskAttemptId=lambda: task.fence)
    rows = [pa.record_batch({"id": pa.array(ids, pa.int64())}) for ids in batches]
    with mock.patch.object(TaskContext, "get", return_value=context):
        made = [batch.column("id").to_pylist() for batch in task.run(running.reports, iter(rows))]
    return [each for part in made for each in part]


def last_report(running: Running) -> Any:
    return running.reports.sent[-1]


def read(file: str | None) -> captures.Capture:
    assert file is not None
    return checkpoint.read(pa.py_buffer(Path(file).read_bytes()), name=file)


@pytest.fixture
def four(tmp_path: Path) -> Running:
    return Running(None, tmp_path, instances=1, slices=4)


def test_rows_go_to_the_slice_of_their_group(four: Running) -> None:
    out = out_of(four, four.task(0, 1), [IDS[:300], [], IDS[300:], IDS])
    orders = four.orders()[0]
    group = dict(zip(IDS, groups_of_ids(IDS), strict=True))
    expected = [each for order in orders for each in IDS + IDS if group[each] in order.groups]
    assert out == expected, "by slice, and in their order within each"
    assert four.counts() == dict.fromkeys(IDS, 2)
    report = last_report(four)
    assert [each.table for each in report.slices] == [order.table for order in orders]
    for order, each in zip(orders, report.slices, strict=True):
        table = StateTable.open(four.folder(order), four.layout)
        assert set(table.groups(table.live()).tolist()) <= set(order.groups)
        assert (table.version, table.count) == (0, each.state_rows)
        assert each.rows == 2 * each.state_rows == 2 * each.changed
        assert (each.captured, each.not_captured, each.left_to_shed) == (None, None, 0)
        table.close()
    assert (report.rows, report.state_rows) == (1000, 500)
    assert report.state_bytes == sum(each.state_bytes for each in report.slices) > 0


def test_slices_run_in_the_order_of_their_lowest_group(four: Running) -> None:
    task = four.task(0, 1)
    backwards = replace(task, slices=(task.slices[0][::-1],))
    out = out_of(four, backwards, [IDS])
    assert [each.table for each in last_report(four).slices] == [
        order.table for order in task.slices[0]
    ]
    assert out_of(four, replace(four.task(0, 2), slices=task.slices), [IDS]) == out


@given(
    st.lists(st.integers(0, 10_000), max_size=300),
    st.lists(st.integers(0, 300), max_size=6),
    st.integers(50, 4000),
)
def test_the_order_of_rows_does_not_depend_on_how_they_came(
    ids: list[int], cuts: list[int], window: int
) -> None:
    orders = [
        SliceOrder(TableName(f"op/1-{number}"), KeyGroups(((4 * number, 4 * number + 4),)))
        for number in range(4)
    ]
    division = Division(orders, 16)

    def sent(parts: list[list[int]]) -> list[tuple[int, list[str]]]:
        batches = (pa.record_batch({"text": pa.array([str(i) for i in part])}) for part in parts)
        found: list[tuple[int, list[str]]] = []
        with mock.patch.object(slices, "_WINDOW_BYTES", window):
            for batch in division.windows(batches, whole=False):
                hashes = hash_keys([batch.column(0)], batch.num_rows)
                numbers = division.numbers(group_of(hashes, 16))
                for number, rows in division.divided(Rows(batch, hashes), numbers, whole=False):
                    assert (group_of(rows.hashes, 16) // 4 == number).all()
                    found.append((number, rows["text"].to_pylist()))
        return found

    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    parts = [ids[start:stop] for start, stop in pairwise(edges)]
    assert sent(parts) == sent([ids])
    assert Counter(each for _, some in sent(parts) for each in some) == Counter(map(str, ids))


def test_pieces_are_no_larger_than_is_worth_while(four: Running) -> None:
    sizes: list[tuple[int, int]] = []

    class Sizes(Counting):
        def process(self, rows: Rows, state: State, context: Context) -> Rows | None:
            sizes.append((len(rows), len(set(group_of(rows.hashes, 16).tolist()))))
            return super().process(rows, state, context)

    many = list(range(1000))
    with mock.patch.object(slices, "PIECE_ROWS", 100):
        out_of(four, replace(four.task(0, 1), operator=Sizes()), [many[:10], many[10:]])
    assert max(rows for rows, _ in sizes) == 100
    assert max(groups for _, groups in sizes) <= 4
    assert 10 <= len(sizes) <= 14

    class Whole(Sizes):
        whole_batch = True

    sizes.clear()
    with (
        mock.patch.object(slices, "PIECE_ROWS", 100),
        mock.patch.object(slices, "_WINDOW_BYTES", 9),
    ):
        out_of(four, replace(four.task(1, 2), operator=Whole()), [many[:10], many[10:]])
    assert len(sizes) == 4


def test_no_table_is_closed_for_another_of_the_instance(four: Running) -> None:
    with mock.patch.object(slices, "_open", OpenTables(tables=2)):
        out_of(four, four.task(0, 1), [IDS])
        out_of(four, four.task(1, 2), [IDS])
    assert four.counts() == dict.fromkeys(IDS, 2)


def test_what_is_held_for_the_end_is_held_for_each_slice(four: Running) -> None:
    class Holding(Counting):
        def process(self, rows: Rows, state: State, context: Context) -> Rows | None:
            context.held.append(rows)
            return None

        def finish(self, state: State, context: Context) -> Rows | None:
            assert len(context.held) == 1
            return super().process(context.held[0], state, context)

    out = out_of(four, replace(four.task(0, 1), operator=Holding()), [IDS])
    assert sorted(out) == IDS
    assert four.counts() == dict.fromkeys(IDS, 1)


def test_rows_of_a_group_that_no_slice_serves_are_refused(four: Running) -> None:
    task = four.task(0, 1)
    fewer = replace(task, slices=(task.slices[0][:1] + task.slices[0][2:],))
    with pytest.raises(Reshaped, match="op, instance 0, has the key groups 0-3,8-15, but received"):
        out_of(four, fewer, [IDS])
    twice = replace(task, slices=(task.slices[0] + task.slices[0][:1],))
    with pytest.raises(ValueError, match="two slices serve the same key group"):
        out_of(four, twice, [IDS])


def test_a_missing_table_is_named_and_the_others_are_not_begun(four: Running) -> None:
    out_of(four, four.task(0, 1), [IDS])
    orders = four.orders()[0]
    for order in (orders[1], orders[3]):
        (four.folder(order) / "table").unlink()
    with pytest.raises(StateMissing, match=r"no state table in .*1 more tables") as missing:
        out_of(four, four.task(1, 2), [IDS])
    assert missing.value.tables == ("op/1-1", "op/1-3")
    for order in (orders[0], orders[2]):
        table = StateTable.open(four.folder(order), four.layout)
        assert (table.version, table.unfinished, table.fence) == (0, None, 1)
        table.close()


def test_a_table_at_another_version_is_named(four: Running) -> None:
    out_of(four, four.task(0, 1), [IDS])
    orders = four.orders()[0]
    late = StateTable.open(four.folder(orders[2]), four.layout)
    late.rollback()
    late.close()
    with pytest.raises(StateMissing, match="needs the state of version 0; the table") as missing:
        out_of(four, four.task(1, 2), [IDS])
    assert missing.value.tables == ("op/1-2",)
    for order in orders[:2]:
        table = StateTable.open(four.folder(order), four.layout)
        assert (table.version, table.unfinished, table.fence) == (0, None, 1)
        table.close()


def test_a_batch_is_done_in_all_slices_or_in_none(four: Running) -> None:
    class Failing(Counting):
        def finish(self, state: State, context: Context) -> Rows | None:
            if state.table.folder.name == "1-3":
                raise ZeroDivisionError
            return None

    out_of(four, four.task(0, 1), [IDS])
    with pytest.raises(ZeroDivisionError):
        out_of(four, replace(four.task(1, 2), operator=Failing()), [IDS])
    out_of(four, four.task(1, 3), [IDS])
    assert four.counts() == dict.fromkeys(IDS, 2)
    # Also a batch that is finished is undone when it is repeated.
    out_of(four, four.task(1, 4), [IDS])
    assert four.counts() == dict.fromkeys(IDS, 2)


def test_every_slice_is_captured_by_itself(four: Running) -> None:
    out_of(four, four.task(0, 1, Captured(None)), [IDS])
    full = [read(each.captured) for each in last_report(four).slices]
    assert [each.groups for each in full] == [order.groups for order in four.orders()[0]]
    assert sorted(i for each in full for i in each.rows.column("id").to_pylist()) == IDS
    assert [each.base for each in last_report(four).slices] == [None] * 4

    few = IDS[:20]
    out_of(four, four.task(1, 2, Captured(Version(0))), [few])
    reports = last_report(four).slices
    assert [each.base for each in reports] == [0] * 4
    changes = [read(each.captured) for each in reports]
    assert sorted(i for each in changes for i in each.rows.column("id").to_pylist()) == few
    assert sum(each.changed for each in reports) == 20

    out_of(four, four.task(2, 3, Captured(Version(1))), [IDS])
    reports = last_report(four).slices
    assert [each.base for each in reports] == [None] * 4, "most rows have changed"
    assert sum(read(each.captured).rows.num_rows for each in reports) == 500


def ordered(running: Running, version: int, order: SliceOrder) -> OperatorTask:
    """A task whose first slice has this order."""
    task = running.task(version, version + 1)
    return replace(task, slices=((order, *task.slices[0][1:]),))


def test_a_part_of_a_slice_is_captured(four: Running) -> None:
    out_of(four, four.task(0, 1, Captured(None)), [IDS])
    first = four.orders()[0][0]
    some = KeyGroups(((1, 3),))
    mine = [i for i in IDS if groups_of_ids([i])[0] in first.groups]
    wanted = [i for i in mine if groups_of_ids([i])[0] in some]
    partly = CaptureOrder(some, Version(0), clean=False)
    out_of(four, ordered(four, 1, replace(first, capture=partly)), [mine])
    report = last_report(four).slices[0]
    taken = read(report.captured)
    assert (report.base, taken.base, taken.groups) == (0, 0, some), "though all rows have changed"
    assert sorted(taken.rows.column("id").to_pylist()) == wanted
    assert [each.captured for each in last_report(four).slices[1:]] == [None] * 3

    # The table counts as changed since version 0 still.
    whole = CaptureOrder(first.groups, Version(0), clean=False)
    out_of(four, ordered(four, 2, replace(first, capture=whole)), [[]])
    assert sorted(read(last_report(four).slices[0].captured).rows.column("id").to_pylist()) == mine
    clean = replace(partly, groups=first.groups, base=None, clean=True)
    out_of(four, ordered(four, 3, replace(first, capture=clean)), [[]])
    since = replace(first, capture=replace(whole, base=Version(3)))
    out_of(four, ordered(four, 4, since), [[]])
    assert read(last_report(four).slices[0].captured).rows.num_rows == 0


def test_a_capture_that_cannot_be_is_refused() -> None:
    def order(captured: str, *, clean: bool) -> SliceOrder:
        wanted = CaptureOrder(KeyGroups.parse(captured), None, clean)
        return SliceOrder(TableName("op/1-0"), KeyGroups.parse("0-3"), capture=wanted)

    order("0-3", clean=True)
    order("1", clean=False)
    for captured, clean in [("1", True), ("1-4", True), ("1-4", False)]:
        with pytest.raises(ValueError, match="op/1-0 serves the groups 0-3; groups 1"):
            order(captured, clean=clean)


def test_timers_of_groups_that_have_left_are_not_due(tmp_path: Path) -> None:
    """Their rows are in two tables until they are shed; only where they are served they count."""
    ending = Running(None, tmp_path, instances=1, operator=Ending())
    ((order,),) = ending.orders()
    stays, goes = KeyGroups.parse("0-8"), KeyGroups.parse("9-15")
    left = ((SliceOrder(order.table, stays, shed=goes),),)
    assert out_of(ending, ending.task(0, 1), [IDS]) == []
    after = replace(ending.task(1, 2), slices=left, watermark=1)
    kept = [i for i, group in zip(IDS, groups_of_ids(IDS), strict=True) if group in stays]
    assert sorted(out_of(ending, after, [[]])) == kept


def test_rows_of_groups_that_have_left_are_shed(four: Running) -> None:
    out_of(four, four.task(0, 1), [IDS])
    first = four.orders()[0][0]
    stays, goes = KeyGroups(((0, 2),)), KeyGroups(((2, 4),))
    order = SliceOrder(first.table, stays, shed=goes, capture=CaptureOrder(stays, None))
    kept = [i for i in IDS if groups_of_ids([i])[0] in stays]
    gone = [i for i in IDS if groups_of_ids([i])[0] in goes]
    with mock.patch.multiple(slices, _SHED_ROWS=10, _LEAST_SHED_ROWS=10):
        out_of(four, ordered(four, 1, order), [kept])
    report = last_report(four).slices[0]
    assert report.left_to_shed > 0
    assert len(kept) + len(gone) - 10 <= report.state_rows <= len(kept) + len(gone)
    taken = read(report.captured)
    assert taken.groups == stays
    assert sorted(taken.rows.column("id").to_pylist()) == kept
    with pytest.raises(Reshaped):
        out_of(four, ordered(four, 2, order), [gone])
    out_of(four, replace(ordered(four, 2, order), fence=4), [[]])
    report = last_report(four).slices[0]
    assert (report.left_to_shed, report.state_rows) == (0, len(kept))


def test_a_report_says_what_was_done_to_tables(tmp_path: Path) -> None:
    ending = Running(None, tmp_path, instances=1, operator=Ending())

    def upkeep(version: int, ids: Sequence[int], watermark: int | None) -> Upkeep:
        task = replace(ending.task(version, version + 1), watermark=watermark, track_changes=False)
        out_of(ending, task, [ids])
        return last_report(ending).slices[0].upkeep

    with mock.patch.object(maintenance, "_COMPACT_FROM", 4):
        assert upkeep(0, IDS, None) == NO_UPKEEP
        assert upkeep(1, [], 1) == NO_UPKEEP, "rows are deleted in this batch"
        assert upkeep(2, [], 1) == NO_UPKEEP, "and can be used again after this one"
        assert upkeep(3, [], 1).compacted_rows == len(IDS)
    report = last_report(ending)
    assert (report.compacted_rows, report.cleaned_bytes) == (len(IDS), 0)
    (of_instance,) = operator_progress(report.operator, [report], None).instances
    assert (of_instance.compacted_rows, of_instance.cleaned_bytes) == (len(IDS), 0)
    with mock.patch.object(maintenance, "_COMPACT_FROM", 4):
        assert upkeep(4, [], 1) == NO_UPKEEP


def test_an_instance_without_slices_has_nothing_to_do(four: Running) -> None:
    assert out_of(four, replace(four.task(0, 1), slices=((),)), [[], []]) == []
    assert last_report(four).slices == ()
    with pytest.raises(Reshaped):
        out_of(four, replace(four.task(0, 1), slices=((),)), [IDS])


@pytest.mark.parametrize("kind", ["int64", "strings", "nested"])
def test_a_window_takes_what_fits(kind: str) -> None:
    rng = np.random.default_rng(7)
    texts = ["x" * int(n) for n in rng.integers(0, 40, 400)]
    values = {
        "int64": pa.array(range(400)),
        "strings": pa.array([None if n % 7 == 0 else text for n, text in enumerate(texts)]),
        "nested": pa.array([{"a": [text, None] * (n % 3), "b": n} for n, text in enumerate(texts)]),
    }[kind]
    batch = pa.record_batch({"value": values})
    sizes = [slices._bytes(batch.slice(n, 1)) for n in range(400)]
    assert sum(sizes) == slices._bytes(batch)
    with mock.patch.object(slices, "_WINDOW_BYTES", 500):
        parts = (batch.slice(n, 37) for n in range(0, 400, 37))
        windows = list(slices._windows(parts))
    assert pa.Table.from_batches(windows).combine_chunks().to_batches() == [batch]
    at = 0
    for window in windows:
        size = sum(sizes[at : at + window.num_rows])
        at += window.num_rows
        assert size <= 500
        assert at == 400 or size + sizes[at] > 500


def test_a_row_that_does_not_fit_is_a_window_of_its_own() -> None:
    batch = pa.record_batch({"value": ["a", "b" * 1000, "c"]})
    with mock.patch.object(slices, "_WINDOW_BYTES", 500):
        windows = list(slices._windows(iter([batch])))
    assert [window.num_rows for window in windows] == [1, 1, 1]


@pytest.mark.spark
def test_slices_in_a_job(spark: SparkSession, tmp_path: Path) -> None:
    running = Running(spark, tmp_path, instances=2, slices=5)
    for version in range(2):
        running.batch(IDS, version=version, fence=version).collect()
    assert running.counts() == dict.fromkeys(IDS, 2)
    assert [len(report.slices) for report in running.taken(1)] == [5, 5]
    order = running.orders()[1][3]
    (running.folder(order) / "table").unlink()
    with pytest.raises(PythonException, match="missing tables") as failed:
        running.batch(IDS, version=2, fence=2).collect()
    missing = translated(failed.value)
    assert isinstance(missing, StateMissing)
    assert missing.tables == (order.table,)
