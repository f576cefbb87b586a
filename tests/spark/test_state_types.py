"""State of every operator and type as a DataFrame: of a running query, and from its folder."""

import sys
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql import types as spark_types

import anabranch as ab
from anabranch.errors import PlanError
from anabranch.spark.types import spark_form, spark_rows, spark_schema
from anabranch.testing.feeds import Feed

# Workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SECOND = 1_000_000
ROWS = pa.schema(
    [
        ("k", pa.string()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("b", pa.int8()),
        ("n", pa.int64()),
        ("x", pa.float64()),
        ("s", pa.string()),
        ("raw", pa.binary()),
        ("yes", pa.bool_()),
        ("day", pa.date32()),
        ("local", pa.timestamp("us")),
        ("money", pa.decimal128(10, 2)),
        ("many", pa.list_(pa.int32())),
    ]
)
FIXED = [
    ab.int8,
    ab.int16,
    ab.int32,
    ab.int64,
    ab.uint8,
    ab.uint16,
    ab.uint32,
    ab.uint64,
    ab.float32,
    ab.float64,
    ab.bool_,
    ab.timestamp,
]
EVERY = ab.schema(
    **{f"c_{kind.name}": kind for kind in FIXED},
    **{f"v_{kind.name}": ab.vector(kind, 2) for kind in FIXED},
    c_string=ab.string,
    c_binary=ab.binary,
)


def rows(batch: int) -> list[dict[str, Any]]:
    """Times jump back and forth, so that keys have several open sessions at once."""
    return [
        {
            "k": None if i % 7 == 3 else f"k{i % 5}",
            "at": (100 * batch + 37 * i % 211) * SECOND,
            "b": i % 100 - 50,
            "n": (-1) ** i * 2**62 // (i + 1),
            "x": float("nan") if i == 4 else i / 3,
            "s": None if i % 4 == 0 else "s" * i,
            "raw": bytes(range(i)),
            "yes": i % 3 == 0,
            "day": 19_000 + i,
            "local": i * SECOND,
            "money": Decimal(i) / 4,
            "many": [i, None],
        }
        for i in range(20)
    ]


class Everything(ab.Operator):
    """Puts the extreme values of every type into its state."""

    state = EVERY
    ordered = False

    def output(self, schema: pa.Schema, keys: Any) -> pa.Schema:
        return pa.schema(
            [
                ("k", pa.string()),
                ("small", pa.uint8()),
                ("large", pa.uint64()),
                ("pair", pa.list_(pa.uint32(), 2)),
                ("ms", pa.timestamp("ms", tz="UTC")),
            ]
        )

    def process(self, rows: ab.Rows, state: ab.State, context: ab.Context) -> ab.Rows:
        at = state.rows(rows)
        for column in self.state:
            if column.type.variable:
                continue
            dtype = column.type.dtype
            assert dtype is not None
            most = {"f": lambda d: np.finfo(d).max, "b": lambda d: True}.get(
                dtype.kind, lambda d: np.iinfo(d).max
            )(dtype)
            if column.type.name == "timestamp":
                most = 1_700_000_000 * SECOND + 123_456
            shape = (len(at),) if column.type.width == 1 else (len(at), column.type.width)
            state.set(column.name, at, np.full(shape, most, dtype))
        state.set("c_string", at, rows.arrow("s"))
        state.set("c_binary", at, rows.arrow("raw"))
        count = len(rows)
        return ab.Rows(
            pa.RecordBatch.from_arrays(
                [
                    rows.arrow("k"),
                    pa.array([255] * count, pa.uint8()),
                    pa.array([2**64 - 1] * count, pa.uint64()),
                    pa.array([[1, 2**32 - 1]] * count, pa.list_(pa.uint32(), 2)),
                    pa.array([1500] * count, pa.timestamp("ms", tz="UTC")),
                ],
                schema=self.output(rows.batch.schema, context.keys),
            )
        )


def per_key(key: Any, rows: ab.Rows, state: Any) -> dict[str, Any]:
    state.c_uint8 = 255
    state.c_uint64 = 2**64 - 1
    state.v_uint8[:] = 200
    state.c_string = key[0]
    return {"k": key[0], "n": len(rows)}


def aggregates(column: str) -> dict[str, Any]:
    numbers = [ab.sum, ab.mean, ab.variance] if column in ("b", "n", "x") else []
    every = [ab.count, ab.approx_count_distinct, ab.min, ab.max, ab.first, ab.last, *numbers]
    if column in ("many",):
        every = [ab.count]
    if column == "money":
        every = [ab.count, ab.first, ab.last]
    return {f"{column}_{each.__name__}": each(column) for each in every}


ALL: dict[str, Any] = {"rows": ab.count()}
for name in ("at", "b", "n", "x", "s", "raw", "yes", "day", "local"):
    ALL |= aggregates(name)

Build = Callable[[ab.Stream], ab.Stream]
OPERATORS: dict[str, Build] = {
    "running": lambda s: s.key_by("k").aggregate(name="op", **ALL),
    "two keys": lambda s: s.key_by("k", "day").aggregate(name="op", n=ab.count()),
    "local time as key": lambda s: s.key_by("local").aggregate(name="op", n=ab.count()),
    "tumbling": lambda s: (
        s.key_by("k")
        .window(ab.tumbling("30 seconds", on="at"), watermark="1 hour")
        .aggregate(name="op", **ALL)
    ),
    "sliding": lambda s: (
        s.key_by("k")
        .window(ab.sliding("60 seconds", "20 seconds", on="at"), watermark="1 hour")
        .aggregate(name="op", **ALL)
    ),
    "session": lambda s: (
        s.key_by("k")
        .window(ab.session_window("10 seconds", on="at"), watermark="1 hour")
        .aggregate(name="op", **ALL)
    ),
    "count": lambda s: (
        s.key_by("k")
        .window(ab.count_window(7))
        .aggregate(name="op", n=ab.sum("n"), last=ab.last("s"))
    ),
    "top k": lambda s: s.key_by("k").top_k(3, by="n", name="op"),
    "deduplicate": lambda s: s.key_by("k").deduplicate(name="op"),
    "deduplicate for a time": lambda s: s.key_by("k").deduplicate(
        name="op", ttl="1 minute", on="at", watermark="1 hour"
    ),
    "per key": lambda s: s.key_by("k").per_key(
        per_key, state=EVERY, output=ab.schema(k=ab.string, n=ab.int64), name="op"
    ),
    "everything": lambda s: s.key_by("k").process(Everything(), name="op"),
}
for how in ("inner", "left"):
    OPERATORS[f"{how} join"] = lambda s, how=how: s.key_by("k").join(
        s.transform(lambda df: df.selectExpr("k", "at as other_at", "s as other")).key_by("k"),
        within="20 seconds",
        on=("at", "other_at"),
        how=how,  # type: ignore[arg-type]
        watermark="1 hour",
        name="op",
    )


def unordered(table: pa.Table) -> list[str]:
    return sorted(str(row) for row in table.to_pylist())


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_state_of_every_operator(spark: SparkSession, tmp_path: Path, operator: str) -> None:
    feed = Feed(tmp_path / "input", ROWS)
    feed.add(rows(0), rows(1))
    query = (
        OPERATORS[operator](ab.stream(feed.frame(spark)))
        .to_memory("out")
        .start(tmp_path / "ck", instances=3)
    )
    query.process_all_available()
    live = query.state("op")
    table = query.state_table("op")
    assert live.schema == spark_schema(table.schema)
    assert live.count() == table.num_rows > 0
    assert len(live.collect()) == table.num_rows, "every value has a Python form"
    assert query.memory("out").count() == query.memory_table("out").num_rows
    query.stop()
    assert query.status == "stopped"
    stored = spark.read.format("anabranch.state").load(str(tmp_path / "ck"))
    assert stored.schema == live.schema
    assert unordered(stored.toArrow()) == unordered(live.toArrow())


def test_extreme_values_arrive(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "input", ROWS)
    feed.add(rows(0))
    stream = OPERATORS["everything"](ab.stream(feed.frame(spark)))
    query = stream.to_memory("out").start(tmp_path / "ck")
    query.process_all_available()
    state = query.state("op").collect()[0]
    made = query.memory("out").collect()[0]
    query.stop()
    for bits in (8, 16, 32, 64):
        assert state[f"c_uint{bits}"] == 2**bits - 1
        assert state[f"v_uint{bits}"] == [2**bits - 1] * 2
        assert state[f"c_int{bits}"] == 2 ** (bits - 1) - 1
    assert state["c_timestamp"] == datetime.fromtimestamp(1_700_000_000.123456)
    assert (made["small"], made["large"], made["pair"]) == (255, 2**64 - 1, [1, 2**32 - 1])
    assert made["ms"] == datetime.fromtimestamp(1.5)


def test_types_that_spark_does_not_have() -> None:
    kinds = {
        pa.uint8(): spark_types.ShortType(),
        pa.uint16(): spark_types.IntegerType(),
        pa.uint32(): spark_types.LongType(),
        pa.uint64(): spark_types.DecimalType(20, 0),
        pa.list_(pa.uint8(), 4): spark_types.ArrayType(spark_types.ShortType()),
        pa.list_(pa.list_(pa.uint64())): spark_types.ArrayType(
            spark_types.ArrayType(spark_types.DecimalType(20, 0))
        ),
        pa.timestamp("ns", tz="UTC"): spark_types.TimestampType(),
        pa.dictionary(pa.int8(), pa.string()): spark_types.StringType(),
        pa.binary(16): spark_types.BinaryType(),
        pa.float16(): spark_types.FloatType(),
        pa.date64(): spark_types.DateType(),
    }
    for kind, expected in kinds.items():
        assert spark_schema(pa.schema([("c", kind)]))["c"].dataType == expected
        assert spark_rows(pa.table({"c": pa.array([None], kind)}))["c"].to_pylist() == [None]
    with pytest.raises(PlanError, match=r"column 'c' has the Arrow type .*which Spark does not"):
        spark_schema(pa.schema([("c", pa.month_day_nano_interval())]))


def test_never_is_null_and_other_times_are_not() -> None:
    limits = np.iinfo(np.int64)
    times = pa.array([limits.min, limits.max, 0, None], pa.int64()).cast(pa.timestamp("us"))
    found = spark_rows(pa.table({"t": times}))["t"]
    assert found.to_pylist() == [None, None, datetime(1970, 1, 1), None]
    assert spark_form(pa.schema([pa.field("t", pa.uint8(), False)])).field(0) == pa.field(
        "t", pa.int16(), False
    )
