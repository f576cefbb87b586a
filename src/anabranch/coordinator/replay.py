"""Replay: lost instances are brought from a checkpoint to the present, from what was sent to them.

Only the lost instances run, over rows that the buffers still have; all batches of an operator in
one job. Rows from an instance that was lost as well are made again by its own replay, before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from anabranch.coordinator.frames import Step, result_schema, without_late
from anabranch.coordinator.tables import Tables
from anabranch.errors import StateMissing
from anabranch.plan.graph import Node, Plan, Source, Stateful, Transform, Unpack
from anabranch.spark.buffers import Buffer
from anabranch.spark.columns import map_in_arrow
from anabranch.spark.packed_shuffle import PackedRouter
from anabranch.spark.shuffle import Router, sent_to
from anabranch.state.groups import KeyGroups
from anabranch.units import Version
from anabranch.worker.packing import VERSION, versioned
from anabranch.worker.reports import Reports
from anabranch.worker.slices import SliceOrder
from anabranch.worker.steps import run_all

_AT_ONCE = 32
"""Batches in one job: every one makes the job's plan longer."""

Buffers = dict[str, dict[Version, Step]]
"""What was sent to each operator in each batch since the last checkpoint."""


@dataclass(frozen=True)
class Replay:
    """Some instances of some operators, to be run over old batches again."""

    plan: Plan
    buffers: Buffers
    routers: Mapping[Stateful, Router | PackedRouter]
    """How rows are routed now; they may have been sent under another routing."""
    tables: Tables
    instances: Mapping[str, Sequence[int]]
    """The instances to run, for each operator that has any."""
    fence: int
    reports: Reports
    from_source: bool = False
    """Compute everything from the sources on, and use no buffers: for comparison."""

    def run(self, after: Version, upto: Version) -> None:
        """Run the batches after a version again, all outputs dropped."""
        for first in range(after + 1, upto + 1, _AT_ONCE):
            self._run([Version(v) for v in range(first, min(first + _AT_ONCE, upto + 1))])

    def _run(self, versions: Sequence[Version]) -> None:
        outputs: dict[Stateful, DataFrame] = {}
        sent: list[Buffer] = []
        again = [n for n in self.plan.operators() if n.name in self.instances]
        try:
            for node in again:
                outputs[node] = self._rerun(node, versions, outputs, sent)
                if any(after in again for after in self.plan.operators_after(node)):
                    outputs[node].persist()
                outputs[node].write.format("noop").mode("overwrite").save()
        finally:
            for frame in outputs.values():
                frame.unpersist()
            for buffer in sent:
                buffer.trim()

    def _rerun(
        self,
        node: Stateful,
        versions: Sequence[Version],
        outputs: Mapping[Stateful, DataFrame],
        sent: list[Buffer],
    ) -> DataFrame:
        """The rows that an operator makes of these batches, each with its version."""
        router, chosen = self.routers[node], self.instances[node.name]
        hosts = tuple(self.tables.placement[node.name][i] for i in chosen)
        slices = tuple(
            (SliceOrder(self.tables.name(node.name, router.routing, i), router.routing.owners[i]),)
            for i in chosen
        )
        frames, tasks = [], []
        for version in versions:
            step = self._step(node, version)
            rows = self._rows(node, step, version, outputs)
            frames.append(rows.withColumn(VERSION, F.lit(int(version)).cast("long")))
            tasks.append(
                replace(
                    step.task,
                    slices=slices,
                    fence=self.fence,
                    instances=tuple(chosen),
                    hosts=hosts,
                )
            )
        rows = router.addressed(reduce(DataFrame.unionByName, frames), chosen)
        again = Buffer(rows.sparkSession, sent_to(rows, len(chosen)))
        sent.append(again)
        ordered = router.in_order(again.pinned(hosts))
        run = partial(run_all, tuple(tasks), self.reports)
        return map_in_arrow(ordered, run, versioned(result_schema(step.bound)))

    def _rows(
        self,
        node: Stateful,
        step: Step,
        version: Version,
        outputs: Mapping[Stateful, DataFrame],
    ) -> DataFrame:
        """What was sent to the chosen instances, from buffers or made again."""
        assert step.buffer is not None
        router = self.routers[node]
        wanted = _union([router.routing.owners[i] for i in self.instances[node.name]])
        sent_to = [i for i, owned in enumerate(step.task.groups) if owned & wanted]
        before = [up for way in node.inputs for up in stateful_before(way)]
        if not before and self.from_source:
            return step.buffer.computed_again()
        if not before:
            return step.buffer.part(sent_to)
        gone = self._gone(node, before, step, version)
        if not gone:
            return step.buffer.part(sent_to)
        fresh = self._made_again(node, before[0], gone, version, outputs)
        if len(gone) == step.buffer.senders:
            return fresh
        return step.buffer.part(sent_to, without=gone).unionByName(fresh)

    def _gone(
        self, node: Stateful, before: Sequence[Stateful], step: Step, version: Version
    ) -> list[int]:
        """The senders whose rows were lost with their node."""
        assert step.buffer is not None
        gone = step.buffer.lost()
        sent = sum(len(self._step(up, version).task.hosts) for up in before)
        if gone and (len(before) > 1 or step.buffer.senders != sent):
            raise StateMissing(
                f"operator {node.name!r}: what was sent to it in batch {version} is lost with a "
                "node, and it cannot be told apart from the rest"
            )
        return gone

    def _made_again(
        self,
        node: Stateful,
        up: Stateful,
        gone: Sequence[int],
        version: Version,
        outputs: Mapping[Stateful, DataFrame],
    ) -> DataFrame:
        old = self._step(up, version).task.groups
        now = self.routers[up].routing.owners
        again = self.instances.get(up.name, ())
        if self.routers[node].ordered:
            same = tuple(gone) == tuple(again) and all(old[i] == now[i] for i in gone)
        else:
            same = _union([old[i] for i in gone]) == _union([now[i] for i in again])
        if up not in outputs or not same:
            raise StateMissing(
                f"operator {node.name!r}: what {up.name!r} sent to it in batch {version} is lost, "
                "and cannot be made again as it was"
            )
        made = outputs[up].where(F.col(VERSION) == int(version)).drop(VERSION)
        frame = _through(node.inputs[0], up, without_late(self._step(up, version), made))
        return self.routers[node].as_from(frame, gone)

    def _step(self, node: Stateful, version: Version) -> Step:
        step = self.buffers.get(node.name, {}).get(version)
        if step is None:
            raise StateMissing(f"what was sent to {node.name!r} in batch {version} is not kept")
        return step


def stateful_before(node: Node) -> list[Stateful]:
    """The operators whose rows reach a node without passing another one."""
    match node:
        case Stateful():
            return [node]
        case Transform(before, _) | Unpack(before, _, _):
            return stateful_before(before)
        case Source():
            return []
        case _:
            return [node.of]


def _through(node: Node, start: Stateful, frame: DataFrame) -> DataFrame:
    """Rows of an operator after the transforms that lead from it to a node."""
    match node:
        case Stateful() if node is start:
            return frame
        case Transform(before, function):
            transformed: DataFrame = function(_through(before, start, frame))
            return transformed
        case _:
            raise StateMissing(f"the rows between {start.name!r} and the next operator are lost")


def _union(groups: Sequence[KeyGroups]) -> KeyGroups:
    union = KeyGroups()
    for each in groups:
        union = union | each
    return union
