"""Checking a plan against real schemas before anything starts.

Binding runs every transform on an empty DataFrame and every operator on no rows, so that mistakes
are found and named before the first batch.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType

from anabranch.errors import AnabranchError, PlanError
from anabranch.operators.context import Context
from anabranch.operators.operator import Operator
from anabranch.operators.rows import Rows
from anabranch.plan.graph import Late, Node, Plan, Source, Stateful, Transform, Unpack
from anabranch.spark.hashing import KeyHash
from anabranch.spark.shuffle import both_sides
from anabranch.spark.sinks.sink import Sink
from anabranch.spark.types import arrow_schema, spark_form, spark_schema
from anabranch.state.groups import MAX_KEY_GROUPS
from anabranch.state.keys import KeyLayout
from anabranch.state.schema import RESERVED
from anabranch.state.table import StateTable, TableLayout
from anabranch.state.view import State
from anabranch.units import Version

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, eq=False)
class Bound:
    """A stateful operator of a plan, with its input and output schemas."""

    node: Stateful
    operator: Operator
    keys: tuple[str, ...]
    hash: KeyHash
    input: pa.Schema
    output: pa.Schema
    layout: TableLayout
    late: bool
    packed: bool
    """Whether rows come packed; see :mod:`anabranch.worker.packing`."""
    ordered: bool = False
    """Whether rows must come in source order, for this operator's result or for one after it."""

    @property
    def name(self) -> str:
        """The operator's name, unique in the query."""
        return self.node.name


def bind(plan: Plan, spark: SparkSession) -> dict[Stateful, Bound]:
    """Check a whole plan. Raises :class:`PlanError` for the first mistake."""
    _check_shape(plan)
    empties: dict[Node, DataFrame] = {}
    bounds: dict[Stateful, Bound] = {}
    for node in plan.nodes():
        match node:
            case Source(frame):
                empties[node] = spark.createDataFrame([], frame.schema)
            case Transform(before, _):
                empties[node] = _transformed(empties[before], node)
            case Unpack(before, column, schema):
                _check_packed(empties[before], column)
                empties[node] = spark.createDataFrame([], spark_schema(schema))
            case Stateful():
                bound = _bind_operator(plan, node, empties)
                bounds[node] = bound
                empties[node] = spark.createDataFrame([], spark_schema(bound.output))
            case Late(of):
                empties[node] = spark.createDataFrame([], spark_schema(bounds[of].input))
    for output in plan.outputs:
        sink: Sink = output.sink
        sink.check(empties[output.input].schema)
    return _with_order(plan, bounds)


def _with_order(plan: Plan, bounds: dict[Stateful, Bound]) -> dict[Stateful, Bound]:
    """Require a fixed order of rows from operators before one that depends on order."""
    ordered = {
        node
        for node, bound in bounds.items()
        if bound.operator.ordered
        or any(bounds[after].operator.ordered for after in plan.operators_after(node))
    }
    return {node: replace(bound, ordered=node in ordered) for node, bound in bounds.items()}


def _check_shape(plan: Plan) -> None:
    names: set[str] = set()
    for source in plan.sources():
        if not source.frame.isStreaming:
            raise PlanError(
                "the source is not a streaming DataFrame; make one with spark.readStream"
            )
    for node in plan.operators():
        if not _NAME.fullmatch(node.name):
            raise PlanError(
                f"operator name {node.name!r}: use letters, digits, '_' and '-', "
                "starting with a letter or digit"
            )
        if node.name in names:
            raise PlanError(
                f"two operators are named {node.name!r}; give each its own name=..., by which a "
                "restart finds its state"
            )
        names.add(node.name)
        if not 1 <= node.key_groups <= MAX_KEY_GROUPS:
            raise PlanError(
                f"operator {node.name!r}: key_groups={node.key_groups}, "
                f"but it must be between 1 and {MAX_KEY_GROUPS}"
            )
        if node.instances is not None and not 1 <= node.instances <= node.key_groups:
            raise PlanError(
                f"operator {node.name!r}: instances={node.instances}, but it must be at least 1 "
                f"and at most its {node.key_groups} key groups"
            )


def _transformed(frame: DataFrame, node: Transform) -> DataFrame:
    try:
        result = node.function(frame)
    except PySparkException as error:
        raise PlanError(f"{node}: {error}") from error
    if not isinstance(result, DataFrame):
        raise PlanError(f"{node} returned {type(result).__name__}; it must return a DataFrame")
    return result


def _check_packed(frame: DataFrame, column: str) -> None:
    if column not in frame.columns:
        raise PlanError(f"unpack: no column {column!r}; the columns are {frame.columns}")
    kind = frame.schema[column].dataType
    if not isinstance(kind, BinaryType):
        raise PlanError(f"unpack: column {column!r} is {kind.simpleString()}, not binary")


def _bind_operator(plan: Plan, node: Stateful, empties: Mapping[Node, DataFrame]) -> Bound:
    where = f"operator {node.name!r}"
    for before, keys in zip(node.inputs, node.keys, strict=True):
        _check_columns(empties[before], keys, where)
    keys = node.keys[0]
    frame = empties[node.inputs[0]]
    if len(node.inputs) == 2:
        frame = _both(node, [empties[before] for before in node.inputs])
    schema = arrow_schema(frame.schema, where=where)
    try:
        key_hash = KeyHash(frame.schema, keys)
        operator = _with_sides(node, empties).bind(schema, keys)
        for column in operator.event_times:
            _check_time(schema, column, where)
        fields = [schema.field(name) for name in keys]
        layout = TableLayout(
            KeyLayout(fields, operator.sub_keys, node.key_groups), operator.state, operator.timers
        )
        output = operator.output(schema, keys) or _output_for_no_rows(
            operator, schema, keys, layout, where
        )
        output = _checked(output, frame)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error
    late = any(isinstance(after, Late) for after in plan.consumers(node))
    if late and not operator.late:
        raise PlanError(f"{where} has no late rows: only windowed operators do")
    packed = plan.packs(node) and key_hash.plain
    return Bound(node, operator, keys, key_hash, schema, output, layout, late, packed)


def _with_sides(node: Stateful, empties: Mapping[Node, DataFrame]) -> Operator:
    """An operator of two inputs, bound to the columns of each side."""
    if len(node.inputs) == 1:
        return node.operator
    for side, keys, time in zip(
        ("left", "right"), node.keys, node.operator.event_times, strict=True
    ):
        if time in keys:
            raise PlanError(
                f"join: on={time!r} is one of the keys {list(keys)} of the {side} side, and a key "
                "column cannot be the event time. Copy it to another column in a transform, for "
                f"example with withColumn('{time}_at', F.col('{time}')), and give that column in "
                "on="
            )
    columns = (
        [name for name in empties[before].columns if name not in keys]
        for before, keys in zip(node.inputs, node.keys, strict=True)
    )
    return node.operator.of(*columns)


def _check_columns(frame: DataFrame, keys: tuple[str, ...], where: str) -> None:
    columns = frame.columns
    alike = [_case_folded(name, frame) for name in columns]
    for name, as_ in zip(columns, alike, strict=True):
        if name.startswith(RESERVED) or alike.count(as_) > 1:
            reason = "is there twice" if alike.count(as_) > 1 else "starts with '__'"
            if columns.count(name) < alike.count(as_):
                reason += ", in upper and lower case"
            raise PlanError(f"{where}: column {name!r} {reason}; rename it in a transform")
    for name in keys:
        if name not in columns:
            raise PlanError(f"{where}: no key column {name!r}; the columns are {columns}")
    if not keys or len(set(keys)) < len(keys):
        raise PlanError(f"{where}: key_by({', '.join(keys)}) needs columns, each of them once")


def _case_folded(name: str, frame: DataFrame) -> str:
    """The same text for names that are the same to Spark."""
    exact = frame.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    return name if exact else name.lower()


def _check_time(schema: pa.Schema, column: str, where: str) -> None:
    at = schema.get_field_index(column)
    if at < 0:
        raise PlanError(f"no event-time column {column!r}; the columns are {schema.names}")
    if not pa.types.is_timestamp(schema.field(at).type):
        raise PlanError(
            f"event-time column {column!r} is {schema.field(at).type}, not a timestamp; "
            "cast it in a transform"
        )


def _checked(output: pa.Schema, frame: DataFrame) -> pa.Schema:
    """The output columns of an operator, with types that Spark has."""
    alike = [_case_folded(name, frame) for name in output.names]
    for name, as_ in zip(output.names, alike, strict=True):
        if alike.count(as_) > 1:
            raise PlanError(
                f"the output has the column {name!r} twice, ignoring case: its columns are "
                f"{output.names}; rename one of them"
            )
    spark_schema(output)
    return spark_form(output)


def _both(node: Stateful, frames: list[DataFrame]) -> DataFrame:
    (left, right), (left_keys, right_keys) = frames, node.keys
    where = f"operator {node.name!r}"
    if len(left_keys) != len(right_keys):
        raise PlanError(f"{where}: the two sides have {left_keys} and {right_keys} as their keys")
    for mine, theirs in zip(left_keys, right_keys, strict=True):
        if left.schema[mine].dataType != right.schema[theirs].dataType:
            raise PlanError(
                f"{where}: key {mine!r} is {left.schema[mine].dataType.simpleString()} on the left "
                f"and {theirs!r} is {right.schema[theirs].dataType.simpleString()} on the right; "
                "cast one of them"
            )
    own = {_case_folded(name, left) for name in left.columns}
    clash = [n for n in right.columns if n not in right_keys and _case_folded(n, left) in own]
    if clash:
        raise PlanError(
            f"{where}: both sides have columns {sorted(clash)}; rename them on one side"
        )
    return both_sides(frames, node.keys)


def _output_for_no_rows(
    operator: Operator, schema: pa.Schema, keys: tuple[str, ...], layout: TableLayout, where: str
) -> pa.Schema:
    """The output schema of an operator, from a run on no rows with a temporary table."""
    nothing = Rows(
        pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema),
        np.empty(0, np.uint64),
    )
    with tempfile.TemporaryDirectory() as folder:
        table = StateTable.create(Path(folder) / "trial", layout)
        try:
            table.begin(Version(0), 0)
            state, context = State(table, keys), Context(Version(0), 0, keys)
            result = operator.process(nothing, state, context)
            if result is None:
                result = operator.finish(state, context)
        except AnabranchError:
            raise
        except Exception as error:
            raise PlanError(
                f"process() failed on an empty batch with {type(error).__name__}: {error}. "
                "Make it work for no rows, or declare output()"
            ) from error
        finally:
            table.close()
    if result is None:
        raise PlanError(
            "process() returned nothing for an empty batch, so its output columns are not known; "
            "return rows for an empty batch too, or declare output()"
        )
    return result.schema
