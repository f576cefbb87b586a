"""Replay: slices catch up by running earlier batches again, over the rows sent to their groups.

Only these slices run, over rows that are still in the output buffers. All batches of an operator
run in one Spark job. If a sender's slice was lost too, its own replay makes its rows again first.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce

import numpy as np
from pyspark import SparkContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from anabranch.coordinator.batches import slice_order
from anabranch.coordinator.frames import Step, result_schema, without_late
from anabranch.errors import StateMissing
from anabranch.plan.graph import Node, Plan, Source, Stateful, Transform, Unpack
from anabranch.protocols.model import Routed, Slice
from anabranch.protocols.orders import Replay
from anabranch.spark.buffers import Buffer
from anabranch.spark.columns import map_in_arrow
from anabranch.spark.packed_shuffle import PackedRouter
from anabranch.spark.shuffle import Router, sent_to
from anabranch.state.groups import KeyGroups
from anabranch.units import Version
from anabranch.worker.packing import VERSION, versioned
from anabranch.worker.reports import Reports
from anabranch.worker.steps import run_all

_AT_ONCE = 32
"""Batches in one job: every one makes the job's plan longer."""

Routers = Callable[[str, Routed], Router | PackedRouter]


@dataclass(frozen=True)
class Replays:
    """The environment for running old batches again."""

    context: SparkContext
    plan: Plan
    sent: Callable[[str, Version], Step | None]
    """What was sent to an operator in a batch."""
    routers: Routers
    reports: Reports
    from_source: bool = False
    """Compute everything from the sources on, and use no buffers: for comparison."""
    tag: str = field(default_factory=lambda: f"anabranch-replay-{uuid.uuid4().hex}")
    """That of the jobs."""

    def run(self, order: Replay, routed: Mapping[str, Routed]) -> None:
        """Bring slices to a version, without outputs. ``routed`` is the present routing."""
        self.context.addJobTag(self.tag)
        try:
            self._run(order, routed)
        finally:
            self.context.removeJobTag(self.tag)

    def stop(self) -> None:
        """Cancel the job in progress, if there is one; the call of :meth:`run` then fails."""
        self.context.cancelJobsWithTag(self.tag)

    def _run(self, order: Replay, routed: Mapping[str, Routed]) -> None:
        for slices in _runs_together(order.slices):
            first = min(each.version for each in slices) + 1
            for start in range(first, order.upto + 1, _AT_ONCE):
                stop = min(start + _AT_ONCE, order.upto + 1)
                versions = [Version(v) for v in range(start, stop)]
                _Run(self, slices, routed, order.fence).run(versions)


@dataclass
class _Run:
    """The replay of some slices. All slices of an operator start at the same version."""

    of: Replays
    slices: Sequence[Slice]
    routed: Mapping[str, Routed]
    fence: int

    def run(self, versions: Sequence[Version]) -> None:
        outputs: dict[Stateful, DataFrame] = {}
        sent: list[Buffer] = []
        plan = self.of.plan
        again = [n for n in plan.operators() if self._mine(n)]
        try:
            for node in again:
                since = self._mine(node)[0].version
                behind = [v for v in versions if v > since]
                if not behind:
                    continue
                outputs[node] = self._rerun(node, behind, outputs, sent)
                if any(after in again for after in plan.operators_after(node)):
                    outputs[node].persist()
                outputs[node].write.format("noop").mode("overwrite").save()
        finally:
            for frame in outputs.values():
                frame.unpersist()
            for buffer in sent:
                buffer.trim()

    def _mine(self, node: Stateful) -> list[Slice]:
        return [each for each in self.slices if each.operator == node.name]

    def _rerun(
        self,
        node: Stateful,
        versions: Sequence[Version],
        outputs: Mapping[Stateful, DataFrame],
        sent: list[Buffer],
    ) -> DataFrame:
        """The results of an operator in these batches, each row with its version."""
        mine, router = self._mine(node), self.of.routers(node.name, self.routed[node.name])
        hosts = tuple(each.node for each in mine)
        targets = np.full(node.key_groups, -1, np.int32)
        for partition, each in enumerate(mine):
            targets[list(each.groups)] = partition
        frames, tasks = [], []
        for version in versions:
            step = self._step(node, version)
            rows = self._rows(node, step, version, outputs)
            frames.append(rows.withColumn(VERSION, F.lit(int(version)).cast("long")))
            tasks.append(
                replace(
                    step.task,
                    fence=self.fence,
                    instances=tuple(each.instance for each in mine),
                    slices=tuple((slice_order(each, None),) for each in mine),
                    hosts=hosts,
                )
            )
        rows = router.addressed(reduce(DataFrame.unionByName, frames), targets.tolist())
        again = Buffer(rows.sparkSession, sent_to(rows, len(mine)))
        sent.append(again)
        ordered = router.in_order(again.pinned(hosts))
        run = partial(run_all, tuple(tasks), self.of.reports)
        return map_in_arrow(ordered, run, versioned(result_schema(step.bound)))

    def _rows(
        self,
        node: Stateful,
        step: Step,
        version: Version,
        outputs: Mapping[Stateful, DataFrame],
    ) -> DataFrame:
        """The rows sent to the slices' groups, from buffers or from the senders' replay."""
        assert step.buffer is not None
        wanted = _groups(self._mine(node))
        partitions = [i for i, owned in enumerate(step.task.groups) if owned & wanted]
        before = [up for way in node.inputs for up in stateful_before(way)]
        if not before and self.of.from_source:
            return step.buffer.computed_again()
        if not before:
            return step.buffer.part(partitions)
        gone = self._lost_senders(node, before, step, version)
        if not gone:
            return step.buffer.part(partitions)
        fresh = self._replayed_rows(node, before[0], gone, version, outputs)
        if len(gone) == step.buffer.senders:
            return fresh
        return step.buffer.part(partitions, without=gone).unionByName(fresh)

    def _lost_senders(
        self, node: Stateful, before: Sequence[Stateful], step: Step, version: Version
    ) -> list[int]:
        """The partitions of the sender whose shuffle files were lost with their node."""
        assert step.buffer is not None
        gone = step.buffer.lost()
        sent = sum(len(self._step(up, version).task.hosts) for up in before)
        if gone and (len(before) > 1 or step.buffer.senders != sent):
            raise StateMissing(
                f"operator {node.name!r}: batch {version} cannot be replayed, because shuffle "
                "files of rows sent to it were lost, and their senders are not known"
            )
        return gone

    def _replayed_rows(
        self,
        node: Stateful,
        up: Stateful,
        gone: Sequence[int],
        version: Version,
        outputs: Mapping[Stateful, DataFrame],
    ) -> DataFrame:
        """The rows of lost senders, made by their own replay, by partition: in the same order."""
        old = self._step(up, version).task.groups
        again = self._mine(up)
        router = self.of.routers(node.name, self.routed[node.name])
        senders = [next((i for i in gone if s.groups <= old[i]), -1) for s in again]
        made: dict[int, list[Slice]] = {}
        for each, sender in zip(again, senders, strict=True):
            made.setdefault(sender, []).append(each)
        same = all(_groups(made.get(i, [])) == old[i] for i in gone)
        if router.ordered:
            same = same and len(again) == len(gone)
        if up not in outputs or not same:
            raise StateMissing(
                f"operator {node.name!r}: batch {version} cannot be replayed, because shuffle "
                f"files of rows that {up.name!r} sent to it were lost, and the replay of "
                f"{up.name!r} does not make the same partitions"
            )
        rows = outputs[up].where(F.col(VERSION) == int(version)).drop(VERSION)
        frame = _through(node.inputs[0], up, without_late(self._step(up, version), rows))
        return router.as_from(frame, senders)

    def _step(self, node: Stateful, version: Version) -> Step:
        step = self.of.sent(node.name, version)
        if step is None:
            raise StateMissing(
                f"operator {node.name!r}: the rows sent to it in batch {version} were trimmed"
            )
        return step


def stateful_before(node: Node) -> list[Stateful]:
    """The operators whose rows reach a node without passing through another operator."""
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
    """Rows of an operator after the transforms between it and a node."""
    match node:
        case Stateful() if node is start:
            return frame
        case Transform(before, function):
            made: DataFrame = function(_through(before, start, frame))
            return made
        case _:
            raise StateMissing(f"the rows that {start.name!r} sent to the next operator were lost")


def _runs_together(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Slices in groups that can run together: slices of an operator start at the same version."""
    operators = {each.operator for each in slices}
    versions = {(each.operator, each.version) for each in slices}
    if len(versions) == len(operators):
        return [list(slices)]
    return [[s for s in slices if (s.operator, s.version) == lot] for lot in sorted(versions)]


def _groups(slices: Sequence[Slice]) -> KeyGroups:
    groups = KeyGroups()
    for each in slices:
        groups = groups | each.groups
    return groups
