"""What slices cost a task: batches of one instance with one slice and with several, in turns.

    python bench/slices_micro.py --rows 100000 --slices 32
    python bench/slices_micro.py --spark     # the same through jobs of Spark, on local[2]

CPU time counts, not wall time: other processes may run beside it. Of Spark's jobs it is that of
the JVM and of all Python workers.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pyarrow as pa
from pyspark import TaskContext

from anabranch.nodes.folders import StateRoot
from anabranch.nodes.local import TABLES
from anabranch.nodes.requests import TableName
from anabranch.operators.aggregates import count, sum
from anabranch.operators.operator import Operator
from anabranch.operators.running_aggregate import RunningAggregate
from anabranch.operators.windowed import windowed
from anabranch.operators.windows import tumbling
from anabranch.state.groups import KeyGroups, assign
from anabranch.state.keys import KeyLayout
from anabranch.state.table import StateTable, TableLayout
from anabranch.units import Version
from anabranch.worker.slices import SliceOrder
from anabranch.worker.task import OperatorTask

GROUPS = 128
SCHEMA = pa.schema(
    [
        pa.field("key", pa.int64(), nullable=False),
        pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("x", pa.int64(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
    ]
)


class Mailbox:
    """Reports that nobody reads."""

    def send(self, report: Any) -> None:
        self.last = report


def operators(keys: int) -> dict[str, Operator]:
    aggregates = {"n": count(), "total": sum("x")}
    window = tumbling(10_000_000, on="at")
    return {
        "keyed": RunningAggregate(aggregates),
        "windowed": windowed(window, aggregates, mode="append", delay=0, lateness=0),
    }


def rows_of(version: int, rows: int, keys: int) -> pa.RecordBatch:
    rng = np.random.default_rng(version)
    number = rng.integers(0, keys, rows)
    at = version * 1_000_000 + np.sort(rng.integers(0, 1_000_000, rows))
    text = pa.array(number % 1000).cast(pa.string())
    columns = [pa.array(number), pa.array(at, SCHEMA.field("at").type), pa.array(number % 7), text]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


class Side:
    """An operator with tables of its own, divided into so many slices in each instance."""

    def __init__(self, operator: Operator, folder: Path, slices: int, instances: int = 1) -> None:
        self.operator = operator.bind(SCHEMA, ["key"])
        key = KeyLayout([SCHEMA.field("key")], self.operator.sub_keys, GROUPS)
        self.layout = TableLayout(key, self.operator.state, self.operator.timers)
        self.root = StateRoot(f"{slices:012d}", str(folder))
        parts = assign(GROUPS, instances * slices)
        orders = [SliceOrder(TableName(f"op/{n}"), part) for n, part in enumerate(parts)]
        for order in orders:
            StateTable.create(self.root.path() / TABLES / order.table, self.layout).close()
        self.orders = tuple(
            tuple(orders[first : first + slices]) for first in range(0, len(orders), slices)
        )
        self.groups = tuple(
            KeyGroups(tuple(r for order in mine for r in order.groups.ranges))
            for mine in self.orders
        )
        self.seconds: list[float] = []

    def task(self, version: int) -> OperatorTask:
        output = self.operator.output(SCHEMA, ["key"])
        assert output is not None
        return OperatorTask(
            name="op",
            operator=self.operator,
            keys=("key",),
            layout=self.layout,
            output=output,
            late=None,
            root=self.root,
            version=Version(version),
            fence=version,
            watermark=max(0, (version - 1) * 1_000_000),
            batch_time=0,
            track_changes=True,
            slices=self.orders,
            instances=tuple(range(len(self.orders))),
            hosts=(),
        )

    def run(self, version: int, batch: pa.RecordBatch) -> int:
        """Run a batch in this process; how many rows came out."""
        context = mock.Mock(partitionId=lambda: 0, taskAttemptId=lambda: version)
        rows = (batch.slice(first, 131_072) for first in range(0, batch.num_rows, 131_072))
        with mock.patch.object(TaskContext, "get", return_value=context):
            started = time.process_time()
            out = 0
            for made in self.task(version).run(Mailbox(), rows):  # type: ignore[arg-type]
                out += made.num_rows
            self.seconds.append(time.process_time() - started)
        return out


def in_process(args: argparse.Namespace, scratch: ExitStack) -> None:
    for name, operator in operators(args.keys).items():
        sides = {n: Side(operator, folder(scratch), n) for n in (1, args.slices)}
        profile = cProfile.Profile(time.process_time)
        for version in range(args.batches):
            batch = rows_of(version, args.rows, args.keys)
            turns = list(sides.items())
            outs = set()
            for n, side in turns if version % 2 else turns[::-1]:
                if args.profile and n != 1 and version >= args.batches // 2:
                    outs.add(profile.runcall(side.run, version, batch))
                else:
                    outs.add(side.run(version, batch))
            assert len(outs) == 1, outs
        show(f"{name}, {args.rows} rows", {n: side.seconds for n, side in sides.items()})
        if args.profile:
            pstats.Stats(profile).sort_stats(args.profile).print_stats(45)


def through_spark(args: argparse.Namespace, scratch: ExitStack) -> None:
    import anabranch as ab
    from anabranch.spark.hashing import KeyHash
    from anabranch.spark.session import tune
    from anabranch.spark.shuffle import Router
    from anabranch.spark.types import spark_schema
    from anabranch.state.groups import Routing
    from anabranch.worker.reports import Reports

    spark = ab.session("local[2]", **{"spark.ui.enabled": False, "spark.log.level": "ERROR"})
    tune(spark, narrow=True, local=True, partitions=2)
    schema = spark_schema(SCHEMA)
    for name, operator in operators(args.keys).items():
        sides = {n: Side(operator, folder(scratch), n, instances=2) for n in (1, args.slices)}
        seconds: dict[int, list[float]] = {n: [] for n in sides}
        source = folder(scratch)
        for version in range(args.batches):
            path = source / str(version)
            spark.createDataFrame(
                pa.Table.from_batches([rows_of(version, args.rows, args.keys)])
            ).repartition(2).write.parquet(str(path))
            frame = spark.read.schema(schema).parquet(str(path))
            turns = list(sides.items())
            for n, side in turns if version % 2 else turns[::-1]:
                routing = Routing(side.groups)
                router = Router(KeyHash(frame.schema, ["key"]), routing, ordered=True)
                task = side.task(version)
                run = partial(task.run, Reports(spark.sparkContext))
                made = router.routed(frame).mapInArrow(run, spark_schema(task.output))
                before = cpu_seconds()
                made.write.format("noop").mode("overwrite").save()
                seconds[n].append(cpu_seconds() - before)
        show(f"{name}, {args.rows} rows through Spark", seconds)
    spark.stop()


def cpu_seconds() -> float:
    """Of this process, of those below it, and of those that have ended."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def show(what: str, seconds: dict[int, list[float]]) -> None:
    few, many = seconds
    kept = {n: some[len(some) // 3 :] for n, some in seconds.items()}
    middle = {n: statistics.median(some) for n, some in kept.items()}
    least = {n: min(some) for n, some in kept.items()}
    ratio = statistics.median(b / a for a, b in zip(kept[few], kept[many], strict=True))
    print(
        f"{what}: {few} slice {1000 * middle[few]:.1f} ms (least {1000 * least[few]:.1f}), "
        f"{many} slices {1000 * middle[many]:.1f} ms (least {1000 * least[many]:.1f}), "
        f"{1000 * (middle[many] - middle[few]):+.1f} ms, median of ratios {ratio:.3f}",
        flush=True,
    )


def folder(scratch: ExitStack) -> Path:
    shared = Path("/dev/shm")
    place = shared if shared.is_dir() else None
    return Path(scratch.enter_context(tempfile.TemporaryDirectory(dir=place)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--slices", type=int, default=32)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--spark", action="store_true")
    parser.add_argument("--profile", help="tottime or cumtime")
    args = parser.parse_args()
    measure: Callable[[argparse.Namespace, ExitStack], None]
    measure = through_spark if args.spark else in_process
    with ExitStack() as scratch:
        measure(args, scratch)


if __name__ == "__main__":
    main()
