"""Batches of one small operator, run as a query runs them, without a query."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from pyspark import TaskContext, cloudpickle
from pyspark.sql import DataFrame, SparkSession

from anabranch.nodes.folders import StateRoot
from anabranch.nodes.local import TABLES
from anabranch.nodes.requests import TableName
from anabranch.operators.context import Context
from anabranch.operators.operator import Operator
from anabranch.operators.rows import Rows
from anabranch.spark.hashing import KeyHash
from anabranch.spark.shuffle import Router
from anabranch.state import schema
from anabranch.state.groups import KeyGroups, Routing
from anabranch.state.keys import KeyLayout
from anabranch.state.table import StateTable, TableLayout
from anabranch.state.view import State
from anabranch.units import Version
from anabranch.worker.reports import InstanceReport, Reports
from anabranch.worker.slices import CaptureOrder, SliceOrder
from anabranch.worker.task import OperatorTask

# Workers do not have this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Counting(Operator):
    """How often each id came."""

    state = schema.schema(n=schema.int64, text=schema.string)

    def process(self, rows: Rows, state: State, context: Context) -> Rows | None:
        at = state.rows(rows)
        state.add("n", at, 1)
        state.set("text", at, ["some text"] * len(at))
        return rows


class Ending(Operator):
    """Gives out each id once, when its time has come."""

    state = schema.schema(n=schema.int64)
    timers = True

    def process(self, rows: Rows, state: State, context: Context) -> None:
        state.set_timer(state.rows(rows), 1)

    def finish(self, state: State, context: Context) -> Rows | None:
        if context.watermark is None:
            return None
        due = state.due(context.watermark)
        ids = state.keys(due)[0]
        state.delete(due)
        return Rows(pa.record_batch({"id": ids}))


@dataclass(frozen=True)
class Captured:
    """That all slices are to be captured."""

    base: Version | None


class Mailbox:
    """Reports that stay in this process."""

    def __init__(self) -> None:
        self.sent: list[InstanceReport] = []

    def send(self, report: InstanceReport) -> None:
        self.sent.append(report)


class Running:
    """An operator with so many instances, and its tables below a folder."""

    def __init__(
        self,
        spark: SparkSession | None,
        folder: Path,
        instances: int,
        groups: int = 16,
        name: str = "op",
        slices: int = 1,
        operator: Operator | None = None,
    ) -> None:
        self.operator = operator or Counting()
        self.spark, self.name, self.slices = spark, name, slices
        self.routing = Routing.even(groups, instances)
        self.root = StateRoot("0123456789ab", str(folder))
        key = pa.field("id", pa.int64(), nullable=False)
        self.layout = TableLayout(
            KeyLayout([key], (), groups), self.operator.state, self.operator.timers
        )
        self.reports: Any = Mailbox() if spark is None else Reports(spark.sparkContext)
        for order in chain(*self.orders()):
            StateTable.create(self.folder(order), self.layout).close()

    def orders(
        self, capture: Captured | None = None, owners: tuple[KeyGroups, ...] = ()
    ) -> tuple[tuple[SliceOrder, ...], ...]:
        """What each instance is told of its slices: ``self.slices`` equal parts of its groups."""
        found = []
        for instance, owned in enumerate(owners or self.routing.owners):
            groups = list(owned)
            cuts = [len(groups) * i // self.slices for i in range(self.slices + 1)]
            orders = []
            for number, (start, stop) in enumerate(pairwise(cuts)):
                name = f"{self.name}/1-{instance * self.slices + number}"
                part = KeyGroups.of(groups[start:stop])
                wanted = None if capture is None else CaptureOrder(part, capture.base)
                orders.append(SliceOrder(TableName(name), part, capture=wanted))
            found.append(tuple(orders))
        return tuple(found)

    def folder(self, order: SliceOrder) -> Path:
        return self.root.path() / TABLES / order.table

    def batch(
        self,
        ids: Sequence[int],
        version: int,
        fence: int,
        capture: Captured | None = None,
        owners: tuple[KeyGroups, ...] = (),
    ) -> DataFrame:
        """The operator's result of a batch, not computed yet.

        ``owners`` are the groups that the instances take for theirs, if not those that are sent.
        """
        task = self.task(version, fence, capture, owners)
        assert self.spark is not None
        frame = self.spark.createDataFrame([(i,) for i in ids], "id long")
        router = Router(KeyHash(frame.schema, ["id"]), self.routing, ordered=False)
        return router.routed(frame).mapInArrow(partial(task.run, self.reports), "id long")

    def task(
        self,
        version: int,
        fence: int,
        capture: Captured | None = None,
        owners: tuple[KeyGroups, ...] = (),
    ) -> OperatorTask:
        return OperatorTask(
            name=self.name,
            operator=self.operator,
            keys=("id",),
            layout=self.layout,
            output=pa.schema([pa.field("id", pa.int64())]),
            late=None,
            root=self.root,
            version=Version(version),
            fence=fence,
            watermark=None,
            batch_time=0,
            track_changes=True,
            slices=self.orders(capture, owners),
            instances=tuple(range(self.routing.instances)),
            hosts=(),
        )

    def run_here(self, task: OperatorTask, ids: Sequence[int], attempt: int) -> InstanceReport:
        """Run a batch of the only instance in this process, as if it were a task."""
        context = mock.Mock(partitionId=lambda: 0, taskAttemptId=lambda: attempt)
        rows = pa.record_batch({"id": pa.array(ids, pa.int64())})
        with mock.patch.object(TaskContext, "get", return_value=context):
            for _ in task.run(self.reports, iter([rows])):
                pass
        report: InstanceReport = self.reports.sent[-1]
        return report

    def taken(self, version: int) -> list[InstanceReport]:
        return list(self.reports.take(Version(version)).values())

    def counts(self) -> dict[int, int]:
        """What is in the tables."""
        found: dict[int, int] = {}
        for order in chain(*self.orders()):
            table = StateTable.open(self.folder(order), self.layout)
            rows = table.live()
            keys: list[Any] = table.keys(rows)[0].to_pylist()
            found |= dict(zip(keys, table.get("n", rows).tolist(), strict=True))
            table.close()
        return found
