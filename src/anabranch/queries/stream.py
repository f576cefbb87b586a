"""Building a query from a streaming DataFrame, step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from anabranch.errors import PlanError
from anabranch.operators.aggregates import Aggregate
from anabranch.operators.dedup import Deduplicate
from anabranch.operators.join import Join
from anabranch.operators.operator import Operator
from anabranch.operators.per_key import OnRows, OnTimer, PerKey
from anabranch.operators.running_aggregate import RunningAggregate
from anabranch.operators.top_k import TopK
from anabranch.operators.windowed import windowed
from anabranch.operators.windows import Window
from anabranch.plan.graph import (
    DEFAULT_KEY_GROUPS,
    Late,
    Node,
    Output,
    Source,
    Stateful,
    Transform,
    Unpack,
)
from anabranch.queries.query import Query
from anabranch.spark.sinks.parquet import ParquetSink
from anabranch.spark.sinks.simple import ConsoleSink, FunctionSink, MemorySink
from anabranch.spark.sinks.sink import Sink
from anabranch.spark.types import arrow_schema
from anabranch.state.schema import StateSchema
from anabranch.units import Duration, microseconds
from anabranch.uris import absolute

OutputMode = Literal["update", "append"]


def stream(frame: DataFrame) -> Stream:
    """Start a query from a streaming DataFrame of any source that Spark can read."""
    if not isinstance(frame, DataFrame) or not frame.isStreaming:
        raise PlanError(
            "stream() needs a streaming DataFrame; make one with spark.readStream, "
            f"got {type(frame).__name__}"
        )
    return Stream(Source(frame))


class Stream:
    """A stream of rows. Every method returns a new object, so a stream may have several uses."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def transform(self, function: Callable[[DataFrame], DataFrame]) -> Stream:
        """Apply a stateless step: any function from DataFrame to DataFrame.

        The function gets one micro-batch at a time. It may select, filter, explode, or join with a
        static table. Anything that spans batches needs an operator.
        """
        return Stream(Transform(self.node, function))

    def unpack(self, column: str, schema: pa.Schema | StructType | str) -> Stream:
        """The rows in the values of a binary column, each of which is an Arrow stream of many rows.

        For sources that carry whole batches, such as messages that a producer wrote with
        ``pyarrow.ipc.new_stream``. The rows reach the next operator as Arrow batches, without
        conversion by Spark, which is several times faster than row by row. ``schema`` is that of
        the rows: an Arrow schema, a Spark type, or text such as ``"car int, speed double"``.
        """
        if isinstance(schema, str):
            schema = StructType.fromDDL(schema)
        if isinstance(schema, StructType):
            schema = arrow_schema(schema, where="unpack")
        return Stream(Unpack(self.node, column, schema))

    def key_by(self, *columns: str) -> KeyedStream:
        """Choose the key columns for the next stateful step."""
        return KeyedStream(self.node, columns)

    @property
    def late(self) -> Stream:
        """The late rows of the windowed operator before this."""
        if not isinstance(self.node, Stateful):
            raise PlanError("only the output of a windowed operator has late rows")
        return Stream(Late(self.node))

    def to_parquet(self, path: str | Path) -> Query:
        """Write to a folder of Parquet files, every batch exactly once."""
        return self.to(ParquetSink(absolute(path)))

    def to_delta(self, uri: str | Path) -> Query:
        """Append to a Delta table, every batch exactly once. Needs ``anabranch[delta]``."""
        from anabranch.spark.sinks.delta import DeltaSink  # the client is an optional dependency

        return self.to(DeltaSink(absolute(uri)))

    def for_each_batch(self, function: Callable[[DataFrame, int], None]) -> Query:
        """Call ``function(frame, version)`` for every batch, like Spark's ``foreachBatch``."""
        return self.to(FunctionSink(function))

    def to_memory(self, name: str) -> Query:
        """Keep all rows in the driver's memory; read them with ``query.memory(name)``."""
        return self.to(MemorySink(name))

    def to_console(self, rows: int = 20) -> Query:
        """Print the first rows of every batch."""
        return self.to(ConsoleSink(rows))

    def to(self, sink: Sink) -> Query:
        """Write to a sink of your own; see :class:`~anabranch.spark.sinks.sink.Sink`."""
        return Query((Output(self.node, sink),))


class KeyedStream:
    """Rows with a key, the start of every stateful step.

    Every stateful step takes ``name``, which identifies its state after a restart; ``instances``,
    the number of its tasks (default: Spark's parallelism); and ``key_groups``, the greatest number
    of instances it can ever have, which is fixed for the life of the query.
    """

    def __init__(self, node: Node, keys: tuple[str, ...]) -> None:
        self.node = node
        self.keys = keys

    def process(
        self,
        operator: Operator,
        *,
        name: str,
        instances: int | None = None,
        key_groups: int = DEFAULT_KEY_GROUPS,
    ) -> Stream:
        """Run an operator of your own."""
        if not isinstance(operator, Operator):
            raise PlanError(f"process() needs an Operator, got {type(operator).__name__}")
        node = Stateful(name, operator, (self.node,), (self.keys,), key_groups, instances)
        return Stream(node)

    def per_key(
        self,
        function: OnRows,
        *,
        state: StateSchema,
        output: StateSchema,
        name: str,
        on_timer: OnTimer | None = None,
        event_time: str | None = None,
        watermark: Duration = "0 seconds",
        instances: int | None = None,
        key_groups: int = DEFAULT_KEY_GROUPS,
    ) -> Stream:
        """Call ``function(key, rows, state)`` once per key and batch.

        The simplest form to write. It costs some microseconds per key and batch. An
        :class:`Operator` handles all keys of a batch at once. See
        :class:`~anabranch.operators.per_key.PerKey`.
        """
        operator = PerKey(
            function,
            state=state,
            output=output,
            on_timer=on_timer,
            event_time=event_time,
            watermark=microseconds(watermark, what="watermark"),
        )
        return self.process(operator, name=name, instances=instances, key_groups=key_groups)

    def aggregate(
        self,
        *,
        name: str = "aggregate",
        instances: int | None = None,
        key_groups: int = DEFAULT_KEY_GROUPS,
        **aggregates: Aggregate,
    ) -> Stream:
        """Keep aggregates for each key over the whole stream.

        Emits the new values of every key that changed in a batch (update mode).
        """
        return self.process(
            RunningAggregate(aggregates), name=name, instances=instances, key_groups=key_groups
        )

    def window(
        self,
        window: Window,
        *,
        watermark: Duration = "0 seconds",
        allowed_lateness: Duration = "0 seconds",
    ) -> WindowedStream:
        """Divide the rows of each key into windows.

        The watermark stays ``watermark`` behind the latest event time. A window is final when the
        watermark reaches its end. It accepts late rows for ``allowed_lateness`` longer.
        """
        return WindowedStream(
            self,
            window,
            microseconds(watermark, what="watermark"),
            microseconds(allowed_lateness, what="allowed_lateness"),
        )

    def top_k(
        self,
        k: int,
        *,
        by: str,
        largest: bool = True,
        name: str = "top_k",
        instances: int | None = None,
        key_groups: int = DEFAULT_KEY_GROUPS,
    ) -> Stream:
        """Keep the ``k`` rows of each key that are greatest (or smallest) by a column.

        Emits the whole new ranking, with ``rank`` from 1, of every key whose ranking changed.
        """
        operator = TopK(k, by, largest=largest)
        return self.process(operator, name=name, instances=instances, key_groups=key_groups)

    def deduplicate(
        self,
        *,
        name: str = "deduplicate",
        ttl: Duration | None = None,
        on: str | None = None,
        watermark: Duration = "0 seconds",
        instances: int | None = None,
        key_groups: int = DEFAULT_KEY_GROUPS,
    ) -> Stream:
        """Keep the first row of each key and drop the others.

        Keys are remembered forever, or with ``ttl`` until the watermark of the event-time column
        ``on`` is ``ttl`` past the key's first row.
        """
        operator = Deduplicate(
            ttl=None if ttl is None else microseconds(ttl, what="ttl"),
            on=on,
            watermark=microseconds(watermark, what="watermark"),
        )
        return self.process(operator, name=name, instances=instances, key_groups=key_groups)

    def join(
        self,
        other: KeyedStream,
        *,
        within: Duration | tuple[Duration, Duration],
        on: tuple[str, str],
        how: Literal["inner", "left"] = "inner",
        watermark: Duration | tuple[Duration, Duration] = "0 seconds",
        name: str = "join",
        instances: int | None = None,
        key_groups: int = DEFAULT_KEY_GROUPS,
    ) -> Stream:
        """Join two keyed streams on their keys, for rows that are close in event time.

        ``on`` names the event-time column of the left and of the right side. A right row matches if
        its time is at most ``within`` before or after the left one; give a pair for different
        bounds before and after. With ``how="left"`` a left row without a match is emitted, with
        nulls, once the watermark rules out a match.
        """
        before, after = within if isinstance(within, tuple) else (within, within)
        left, right = watermark if isinstance(watermark, tuple) else (watermark, watermark)
        operator = Join(
            on=on,
            before=microseconds(before, what="within"),
            after=microseconds(after, what="within"),
            how=how,
            delays=(
                microseconds(left, what="watermark"),
                microseconds(right, what="watermark"),
            ),
        )
        node = Stateful(
            name,
            operator,
            (self.node, other.node),
            (self.keys, other.keys),
            key_groups,
            instances,
        )
        return Stream(node)


class WindowedStream:
    """Rows with a key and a window."""

    def __init__(self, keyed: KeyedStream, window: Window, delay: int, lateness: int) -> None:
        self._keyed = keyed
        self._window = window
        self._delay = delay
        self._lateness = lateness

    def aggregate(
        self,
        *,
        name: str = "window",
        mode: OutputMode = "append",
        instances: int | None = None,
        key_groups: int = DEFAULT_KEY_GROUPS,
        **aggregates: Aggregate,
    ) -> Stream:
        """Keep aggregates for each key and window.

        ``mode="append"`` emits a window once, when it is final; ``"update"`` emits windows as they
        change. Late rows are on the result's ``late``.
        """
        operator = windowed(
            self._window, aggregates, mode=mode, delay=self._delay, lateness=self._lateness
        )
        return self._keyed.process(operator, name=name, instances=instances, key_groups=key_groups)
