"""The DataFrames of one batch, built from the plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from anabranch.plan.graph import (
    Late,
    Node,
    Output,
    Plan,
    Source,
    Stateful,
    Transform,
    Unpack,
    inputs,
)
from anabranch.spark.bind import Bound
from anabranch.spark.buffers import Buffer
from anabranch.spark.columns import map_in_arrow
from anabranch.spark.computed import Computed
from anabranch.spark.packed_shuffle import PackedRouter
from anabranch.spark.shuffle import Router, both_sides
from anabranch.spark.sinks.simple import ConsoleSink, MemorySink
from anabranch.spark.sinks.sink import Delivery, PartSink, Sink
from anabranch.spark.sources import separate
from anabranch.spark.types import spark_form, spark_schema
from anabranch.state.groups import Routing
from anabranch.worker import steps
from anabranch.worker.packing import PACKED, Packing
from anabranch.worker.reports import Reports
from anabranch.worker.task import LATE, OperatorTask


@dataclass
class Step:
    """One operator in one batch: its task, its router, and the buffer of its input."""

    bound: Bound
    task: OperatorTask
    router: Router | PackedRouter
    buffer: Buffer | None = None
    """What the batch has sent to the operator, on a cluster: kept, to be sent again."""
    time: int | None = None
    """The latest event time that the operator had seen after the batch."""

    def trim(self) -> None:
        """Drop the rows that were sent to the operator in this batch."""
        if self.buffer is not None:
            self.buffer.trim()


class Frames:
    """Builds the DataFrames of a batch, each at most once.

    A frame with several consumers is cached until :meth:`release`, so that its operator runs once
    instead of once per consumer. If a cached block is lost, Spark runs the operator again; its
    table rolls back first, and the result is the same.

    The partition number of a task tells it which instance it runs. A function of the user, or a
    union, can merge or shift the partitions of an operator before they are computed. The operators
    in ``computed_first`` are therefore computed first, by a Spark job of their own.
    """

    def __init__(
        self,
        plan: Plan,
        batch: DataFrame,
        steps: Mapping[Stateful, Step],
        reports: Reports,
        computed_first: Collection[Stateful] = (),
    ) -> None:
        self._plan = plan
        self._steps = steps
        self._reports = reports
        self._computed_first = computed_first
        self._frames: dict[Node, DataFrame] = {}
        self._whole_frames: dict[Stateful, DataFrame] = {}
        self._inputs: dict[Stateful, DataFrame] = {}
        self._kept: list[DataFrame] = []
        self._computed: list[Computed] = []
        sources = plan.sources()
        for source, frame in zip(sources, separate(batch, len(sources)), strict=True):
            self._frames[source] = self._keep_if_shared(source, frame)

    def deliver(self, output: Output, delivery: Callable[[], Delivery]) -> None:
        """Run the Spark job that writes a batch to a sink.

        ``delivery`` may wait for the disk. It is called when the frames are built.
        """
        sink: Sink = output.sink
        node = output.input
        fusible = isinstance(node, Stateful) and len(self._plan.consumers(node)) == 1
        if isinstance(sink, PartSink) and fusible and isinstance(node, Stateful):
            step = self._steps[node]
            sent = self._input(step)
            writer = sink.part_writer(delivery())
            run = partial(steps.run_and, step.task, self._reports, writer)
            sink.accept(map_in_arrow(sent, run, sink.written), delivery())
        else:
            frame = self._frame(node)
            sink.write(frame, delivery())

    def discard(self, output: Output) -> None:
        """Run the operators before a sink, and drop their results."""
        _run_all(self._frame(output.input))

    @property
    def reshapable(self) -> set[Stateful]:
        """The operators whose rows a function of the user reads, which may change partitions."""
        return {node for node in self._whole_frames if _read_by_user(self._plan, node)}

    def finish(self, nodes: Collection[Stateful]) -> None:
        """Run operators on all of their input, where only a part of their rows was read."""
        # Those behind others first: they may themselves read only a part of what those make.
        again: set[Stateful] = set(nodes)
        for node in reversed(self._plan.operators()):
            if any(after in again for after in self._plan.operators_after(node)):
                again |= {node} & self._whole_frames.keys()
            if node in again and not _is_packed(self._plan, node, self._steps):
                _run_all(self._whole(node))

    def release(self) -> None:
        """Release all cached frames."""
        for frame in self._kept:
            frame.unpersist()
        for computed in self._computed:
            computed.release()

    def _frame(self, node: Node) -> DataFrame:
        if node not in self._frames:
            self._frames[node] = self._keep_if_shared(node, self._build(node))
        return self._frames[node]

    def _build(self, node: Node) -> DataFrame:
        match node:
            case Transform(before, function):
                transformed: DataFrame = function(self._frame(before))
                return transformed
            case Unpack(before, column, schema):
                read = partial(steps.read, column, schema, spark_form(schema))
                return map_in_arrow(self._frame(before), read, spark_schema(schema))
            case Stateful():
                return without_late(self._steps[node], self._whole(node))
            case Late(of):
                return self._whole(of).where(F.col(LATE).isNotNull()).select(f"{LATE}.*")
            case Source():
                raise LookupError("the frames of sources are given")

    def _whole(self, node: Stateful) -> DataFrame:
        """The rows of an operator, late rows included."""
        if node not in self._whole_frames:
            step = self._steps[node]
            frame = self._run(step)
            if node in self._computed_first:
                self._computed.append(Computed(frame))
                frame = self._computed[-1].frame
            elif step.bound.late:
                frame = self._keep(frame)
            self._whole_frames[node] = frame
        return self._whole_frames[node]

    def _run(self, step: Step) -> DataFrame:
        run = partial(step.task.run, self._reports)
        return map_in_arrow(self._input(step), run, result_schema(step.bound))

    def _input(self, step: Step) -> DataFrame:
        node = step.bound.node
        if node not in self._inputs:
            self._inputs[node] = self._routed(node, step)
        return self._inputs[node]

    def _routed(self, node: Stateful, step: Step) -> DataFrame:
        if isinstance(step.router, PackedRouter):
            frame = self._packed(node.inputs[0], step.router)
        elif len(node.inputs) == 1:
            frame = self._frame(node.inputs[0])
        else:
            frame = both_sides([self._frame(before) for before in node.inputs], node.keys)
        if not step.task.hosts:
            return step.router.routed(frame)
        step.buffer = Buffer(frame.sparkSession, step.router.sent(frame))
        return step.router.in_order(step.buffer.pinned(step.task.hosts))

    def _packed(self, before: Node, router: PackedRouter) -> DataFrame:
        """The input of an operator, packed for its instances by the tasks that make it."""
        match before:
            case Unpack(source, column, schema):
                read = partial(steps.read_and_divide, column, schema, router.divide)
                return map_in_arrow(self._frame(source), read, PACKED)
            case Stateful():
                up = self._steps[before]
                run = partial(steps.run_and, up.task, self._reports, router.divide)
                return map_in_arrow(self._input(up), run, PACKED)
            case _:
                raise TypeError(f"the rows of {before} are not packed")

    def _keep_if_shared(self, node: Node, frame: DataFrame) -> DataFrame:
        if node in self._computed_first:
            return frame
        consumers = [c for c in self._plan.consumers(node) if not isinstance(c, Late)]
        return self._keep(frame) if len(consumers) > 1 else frame

    def _keep(self, frame: DataFrame) -> DataFrame:
        kept = frame.persist(StorageLevel.MEMORY_AND_DISK)
        self._kept.append(kept)
        return kept


def read_in_part(plan: Plan) -> set[Stateful]:
    """The operators that the plan itself requires to be computed first.

    Their partitions are not the first in a union, as on the right of a join, or only their first
    rows are read.
    """
    found: set[Stateful] = set()
    for node in plan.operators():
        for before in node.inputs[1:]:
            found |= _operators_at(before)
    for output in plan.outputs:
        if isinstance(output.sink, ConsoleSink):
            found |= _operators_at(output.input)
    return found


def _operators_at(node: Node) -> set[Stateful]:
    """The operators whose rows reach a node without passing through another operator."""
    if isinstance(node, Stateful):
        return {node}
    return {up for before in inputs(node) for up in _operators_at(before)}


def _run_all(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def router_of(bound: Bound, routing: Routing) -> Router | PackedRouter:
    """The router that sends rows to the instances of an operator."""
    if bound.packed:
        return PackedRouter(packing_of(bound), routing, ordered=bound.ordered)
    return Router(bound.hash, routing, ordered=bound.ordered)


def packing_of(bound: Bound) -> Packing:
    """How rows for an operator are packed."""
    return Packing(bound.input, bound.keys)


def result_schema(bound: Bound) -> StructType:
    """The columns that the tasks of an operator return, including those of its late rows."""
    schema = spark_schema(bound.output)
    if not bound.late:
        return schema
    return StructType([*schema.fields, StructField(LATE, spark_schema(bound.input))])


def without_late(step: Step, whole: DataFrame) -> DataFrame:
    """The results of an operator without its late rows."""
    return whole.where(F.col(LATE).isNull()).drop(LATE) if step.bound.late else whole


def _read_by_user(plan: Plan, node: Stateful | Late) -> bool:
    """Whether a function of the user reads the rows of an operator."""
    for after in plan.consumers(node):
        match after:
            case Transform():
                return True
            case Output(_, sink):
                if not isinstance(sink, PartSink | MemorySink):
                    return True
            case Late():
                if _read_by_user(plan, after):
                    return True
    return False


def _is_packed(plan: Plan, node: Stateful, steps: Mapping[Stateful, Step]) -> bool:
    """Whether an operator processes all of its input whenever the operator after it runs."""
    after = plan.consumers(node)
    return any(isinstance(each, Stateful) and steps[each].bound.packed for each in after)
