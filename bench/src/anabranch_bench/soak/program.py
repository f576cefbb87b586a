"""The process of the query: ``python -m anabranch_bench.soak.program SETTINGS``.

Orders come as lines of JSON on standard input, and are carried out each in a thread of its own:
``{"id": 3, "op": "scale", "operator": "top", "instances": 4}``. Answers, and how far the query is,
go to standard output. SIGUSR1 writes the stacks of all threads to the error output.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import anabranch as ab
from anabranch_bench.soak import traffic
from anabranch_bench.soak.traffic import ACCOUNT, ORDER, PAYMENT, PING, READING

OPERATORS = ("counts", "top", "once", "trips", "paid", "totals")
OUTPUTS = OPERATORS
FAILED = 3
"""The exit code if the query has failed."""
_FILES_A_BATCH = 12
_LOOK = 0.5
_DELAY = f"{traffic.DELAY} microseconds"


class Trips(ab.Operator):
    """Adds up the pings of a trip, and lets a timer end it when there were none for a while."""

    state = ab.schema(n=ab.int64, amount=ab.int64, first=ab.int64, last=ab.int64)
    timers = True
    ordered = False
    event_time = "at"
    watermark_delay = traffic.DELAY

    def output(self, schema: pa.Schema, keys: Any) -> pa.Schema:
        """What is known of a trip that is over."""
        numbers = [pa.field(name, pa.int64()) for name in ("n", "amount", "first", "last")]
        return pa.schema([pa.field("note", pa.string()), *numbers])

    def process(self, rows: ab.Rows, state: Any, context: Any) -> None:
        """Take in pings."""
        at = state.rows(rows)
        times = rows.times("at")
        new = np.unique(at[state["n"][at] == 0])
        state.set("first", new, np.full(len(new), np.iinfo(np.int64).max))
        state.add("n", at, 1)
        state.add("amount", at, rows["amount"])
        state.min("first", at, times)
        state.max("last", at, times)
        state.set_timer(at, state["last"][at] + traffic.SILENCE)

    def finish(self, state: Any, context: Any) -> ab.Rows | None:
        """End trips that were silent."""
        if context.watermark is None:
            return None
        due = state.due(context.watermark)
        if not len(due):
            return None
        columns = [state.keys(due)[0]]
        columns += [pa.array(state[name][due]) for name in ("n", "amount", "first", "last")]
        names = ["note", "n", "amount", "first", "last"]
        found = ab.Rows(pa.RecordBatch.from_arrays(columns, names=names))
        state.delete(due)
        return found


def build(spark: SparkSession, work: Path) -> ab.Query:
    """Windows, a ranking behind them, deduplication, timers behind it, a join, and totals."""
    source = (
        spark.readStream.schema(traffic.SCHEMA)
        .option("maxFilesPerTrigger", _FILES_A_BATCH)
        .parquet(str(work / "input"))
    )
    rows = ab.stream(source)

    def of(kind: int, *columns: Any) -> ab.Stream:
        return rows.transform(lambda df: df.where(F.col("kind") == kind).select(*columns))

    counts = (
        of(READING, "at", "device", "amount")
        .key_by("device")
        .window(ab.tumbling(f"{traffic.WINDOW} microseconds", on="at"), watermark=_DELAY)
        .aggregate(name="counts", n=ab.count(), total=ab.sum("amount"), most=ab.max("amount"))
    )
    top = counts.transform(_scored).key_by("region", "slot").top_k(3, by="score", name="top")
    once = (
        of(PING, "id", "at", "amount", "note")
        .key_by("id")
        .deduplicate(name="once", ttl=f"{traffic.TTL} microseconds", on="at", watermark=_DELAY)
    )
    trips = once.key_by("note").process(Trips(), name="trips")
    orders = of(ORDER, "id", F.col("at").alias("ordered"), "amount", "note").key_by("id")
    payments = of(
        PAYMENT, "id", F.col("at").alias("settled"), F.col("amount").alias("paid")
    ).key_by("id")
    paid = orders.join(
        payments,
        on=("ordered", "settled"),
        within=(f"{traffic.BEFORE} microseconds", f"{traffic.AFTER} microseconds"),
        how="left",
        watermark=_DELAY,
        name="paid",
    )
    totals = (
        of(ACCOUNT, "device", "amount")
        .key_by("device")
        .aggregate(name="totals", n=ab.count(), total=ab.sum("amount"))
    )
    streams = dict(zip(OPERATORS, (counts, top, once, trips, paid, totals), strict=True))
    return ab.query(*(each.to_parquet(work / "out" / name) for name, each in streams.items()))


def _scored(windows: DataFrame) -> DataFrame:
    """Later minutes win; no two windows have the same score. Rankings are taken over in turn."""
    second = F.unix_seconds("window_start")
    minute = (second / 60).cast("long") - traffic.START // (60 * traffic.SECOND)
    tenth = ((second % 60) / 10).cast("long")
    score = ((minute * 2**20 + F.col("total")) * 8 + tenth) * 2**20 + F.col("device")
    return windows.select(
        (F.col("device") % traffic.REGIONS).alias("region"),
        (minute % traffic.SLOTS).cast("int").alias("slot"),
        "device",
        score.alias("score"),
    )


class Orders:
    """Carries out what is asked of the query."""

    def __init__(self, query: ab.RunningQuery, spark: SparkSession, work: Path) -> None:
        self._query, self._spark, self._work = query, spark, work
        self._writing = threading.Lock()
        self._ops: dict[str, Callable[..., Any]] = {
            "scale": self._scale,
            "checkpoint": lambda: int(query.checkpoint()),
            "rebalance": query.rebalance,
            "drain": self._drain,
            "dump": self._dump,
            "stop": query.stop,
        }

    def read(self) -> None:
        """Take orders until nobody is there to give any."""
        for line in sys.stdin:
            order = json.loads(line)
            threading.Thread(target=self._carry_out, kwargs=order, daemon=True).start()
        os._exit(0)

    def _carry_out(self, *, id: int, op: str, **fields: Any) -> None:
        try:
            self.say(id=id, ok=self._ops[op](**fields))
        except Exception as error:
            self.say(id=id, error=f"{type(error).__name__}: {error}"[:2000])

    def say(self, **answer: Any) -> None:
        """Write a line."""
        with self._writing:
            print(json.dumps(answer), flush=True)

    def _scale(self, operator: str, instances: int) -> dict[str, Any]:
        """Scale, and say what became of it: the routing, and the event that tells of it."""
        self._query.scale(operator, instances)
        told = [
            event.details["after"]
            for event in self._query.events
            if event.kind == "scale" and event.details["operator"] == operator
        ]
        return {"routed": self._query.routing[operator].instances, "told": told[-1:]}

    def _drain(self) -> int:
        self._query.process_all_available()
        return int(self._query.version)

    def _dump(self, folder: str) -> int:
        """Write the state of all operators; the version that it is of."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for operator in OPERATORS:
            table = self._query.state_table(operator)
            pq.write_table(table, Path(folder) / f"{operator}.parquet")
        return int(self._query.version)

    def status(self) -> dict[str, Any]:
        """How far the query is."""
        query, last = self._query, self._query.progress
        kinds: dict[str, int] = {}
        for event in query.events:
            kinds[event.kind] = kinds.get(event.kind, 0) + 1
        return {
            "version": int(query.version),
            "watermark": None if last is None else last["counts"].watermark,
            "state_rows": 0 if last is None else last.state_rows,
            "state_bytes": 0 if last is None else last.state_bytes,
            "batch_seconds": 0.0 if last is None else last.seconds,
            "instances": {name: of.instances for name, of in query.routing.items()},
            "nodes": len(query.nodes),
            "heap": self._heap(),
            "events": kinds,
        }

    def _heap(self) -> int:
        """What the driver's heap held after its last collection, in bytes."""
        jvm: Any = self._spark.sparkContext._jvm
        pools = jvm.java.lang.management.ManagementFactory.getMemoryPoolMXBeans()
        for pool in pools:
            if "Old" in pool.getName() or "Tenured" in pool.getName():
                usage = pool.getCollectionUsage()
                return 0 if usage is None else int(usage.getUsed())
        return 0


def main() -> None:
    """Run the query until it is told to stop, or fails."""
    settings = json.loads(sys.argv[1])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    work = Path(settings["work"])
    spark = ab.session(settings["master"], **settings["conf"])
    query = build(spark, work).start(
        work / "checkpoint",
        checkpointing=ab.Periodic(settings["checkpoint_seconds"]),
        instances=settings["instances"],
    )
    orders = Orders(query, spark, work)
    threading.Thread(target=orders.read, daemon=True).start()
    try:
        while not query.await_termination(_LOOK):
            orders.say(status=orders.status())
    except ab.AnabranchError as error:
        orders.say(failed=f"{type(error).__name__}: {error}"[:4000])
        os._exit(FAILED)
    orders.say(stopped=True)
    os._exit(0)


if __name__ == "__main__":
    main()
