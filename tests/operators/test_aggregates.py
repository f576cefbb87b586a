import math
from collections import defaultdict
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import reference
from harness import SCRATCH, every_way, run, same
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import Row, arrow, batches_of

from anabranch.errors import PlanError
from anabranch.operators import aggregates as ab
from anabranch.operators.running_aggregate import RunningAggregate

COLUMNS = {
    "i": pa.int32(),
    "l": pa.int64(),
    "f": pa.float64(),
    "g": pa.float32(),
    "b": pa.bool_(),
    "d": pa.date32(),
    "t": pa.timestamp("us", tz="UTC"),
    "u": pa.timestamp("us"),
    "c": pa.time64("us"),
    "w": pa.duration("us"),
    "s": pa.string(),
    "y": pa.binary(),
}
SCHEMA = pa.schema([("k", pa.string()), *COLUMNS.items()])
NUMBERS = ("i", "l", "f", "g")

# Quarters of small numbers: their sums are exact, so that only the order could matter.
quarters = st.integers(-400, 400).map(lambda n: n / 4)
values: dict[str, st.SearchStrategy[Any]] = {
    "i": st.integers(-(2**31), 2**31 - 1),
    "l": st.integers(-(2**63), 2**63 - 1),
    "f": quarters,
    "g": quarters,
    "b": st.booleans(),
    "d": st.dates(date(1900, 1, 1), date(2100, 1, 1)),
    "t": st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),
    "u": st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1)),
    "c": st.times(),
    "w": st.integers(-(10**15), 10**15).map(lambda n: timedelta(microseconds=n)),
    "s": st.text("aäz\U0001f600", max_size=10),
    "y": st.binary(max_size=10),
}
keys = st.sampled_from(["a", "b", "cc", None])


def rows_of(*columns: str) -> st.SearchStrategy[Row]:
    return st.fixed_dictionaries({"k": keys, **{c: st.none() | values[c] for c in columns}})


def schema_of(*columns: str) -> pa.Schema:
    return pa.schema([("k", pa.string()), *((c, COLUMNS[c]) for c in columns)])


def _byte_order(kind: str, column: str, given: list[Any]) -> Any:
    if column == "s" and kind in ("min", "max"):
        encoded = reference.aggregate(kind, [None if v is None else v.encode() for v in given])
        return None if encoded is None else encoded.decode()
    return reference.aggregate(kind, given)


@pytest.mark.parametrize("c", COLUMNS)
@settings(max_examples=6, deadline=None)
@given(data=st.data(), chunk=st.integers(1, 5))
def test_running_aggregates_are_those_of_all_rows_so_far(
    c: str, data: st.DataObject, chunk: int
) -> None:
    batches = data.draw(batches_of(rows_of(c)))
    kinds = ["count", "min", "max", "first", "last"]
    kinds += ["sum", "mean", "variance"] if c in NUMBERS else []
    operator = RunningAggregate({"n": ab.count()} | {k: getattr(ab, k)(c) for k in kinds})
    result = every_way(operator, ["k"], arrow(batches, schema_of(c)), chunk)
    seen: dict[str | None, list[Any]] = defaultdict(list)
    for batch, came_out in zip(batches, result.batches, strict=True):
        for row in batch:
            seen[row["k"]].append(row[c])
        expected = [
            {"k": key, "n": len(seen[key])} | {k: _byte_order(k, c, seen[key]) for k in kinds}
            for key in {row["k"] for row in batch}
        ]
        assert same(came_out, expected, places=9)
    types = {"count": pa.int64(), "mean": pa.float64(), "variance": pa.float64()}
    types["sum"] = pa.int64() if c in "il" else pa.float64()
    assert result.schema is not None
    for kind in kinds:
        assert result.schema.field(kind).type == types.get(kind, COLUMNS[c])


any_floats = st.one_of(
    st.floats(width=32), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0])
)
float_rows = st.fixed_dictionaries({"k": st.sampled_from("ab"), "f": st.none() | any_floats})
FLOATS = pa.schema([("k", pa.string()), ("f", pa.float64())])


@settings(max_examples=20, deadline=None)
@given(batches=batches_of(float_rows), chunk=st.integers(1, 4))
def test_floats_come_out_to_the_bit_and_extremes_follow_spark(
    batches: list[list[Row]], chunk: int
) -> None:
    kinds = ("sum", "mean", "min", "max", "first", "last")
    operator = RunningAggregate(
        {kind: getattr(ab, kind)("f") for kind in kinds} | {"var": ab.variance("f")}
    )
    result = every_way(operator, ["k"], arrow(batches, FLOATS), chunk)
    seen: dict[str, list[Any]] = defaultdict(list)
    for batch, came_out in zip(batches, result.batches, strict=True):
        for row in batch:
            seen[row["k"]].append(row["f"])
        for row in came_out:
            for kind in kinds:
                expected = reference.aggregate(kind, seen[row["k"]])
                assert repr(row[kind]) == repr(expected), kind


@pytest.mark.parametrize("c", COLUMNS)
@settings(max_examples=6, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99))
def test_what_is_not_ordered_does_not_depend_on_order(
    c: str, data: st.DataObject, seed: int
) -> None:
    batches = arrow(data.draw(batches_of(rows_of(c))), schema_of(c))
    aggregates = {"n": ab.count(c), "least": ab.min(c), "most": ab.max(c)}
    aggregates["many"] = ab.approx_count_distinct(c, 0.2)
    if c in "il":
        aggregates["sum"] = ab.sum(c)
    operator = RunningAggregate(aggregates)
    assert operator.bind(schema_of(c), ["k"]).ordered is False
    with TemporaryDirectory(dir=SCRATCH) as folder:
        one = run(operator, ["k"], batches, Path(folder) / "one")
        other = run(operator, ["k"], batches, Path(folder) / "other", shuffle=seed)
    assert same(one.rows, other.rows)
    assert same(one.state, other.state)


@pytest.mark.parametrize(
    "aggregate",
    [ab.sum("f"), ab.sum("g"), ab.mean("i"), ab.variance("i"), ab.first("i"), ab.last("s")],
)
def test_what_depends_on_order_is_ordered(aggregate: ab.Aggregate) -> None:
    assert RunningAggregate({"x": aggregate, "n": ab.count()}).bind(SCHEMA, ["k"]).ordered is True


@pytest.mark.parametrize(
    ("aggregates", "said"),
    [
        ({}, "at least one"),
        ({"x": "sum"}, "not an aggregate"),
        ({"k": ab.count()}, "already has a column 'k'"),
        ({"x": ab.sum("nothing")}, "no column 'nothing'"),
        ({"x": ab.sum("s")}, r"x=sum\('s'\): column 's' has type string"),
        ({"x": ab.mean("b")}, "column 'b' has type bool"),
        ({"x": ab.variance("t")}, "column 't' has type timestamp"),
        ({"x": ab.sum("m")}, "column 'm' has type decimal128"),
        ({"x": ab.max("m")}, "column 'm' has type decimal128"),
        ({"x": ab.first("v")}, "column 'v' has type list"),
        ({"x": ab.approx_count_distinct("v")}, "column 'v' has type list"),
        ({"__x": ab.count()}, "reserved"),
        ({"x": ab.count()}, "state column 'x_count', which is also a key column"),
    ],
)
def test_what_cannot_be_aggregated_is_refused(aggregates: Any, said: str) -> None:
    schema = pa.schema(
        [*SCHEMA, ("m", pa.decimal128(10, 2)), ("v", pa.list_(pa.int32())), ("x_count", pa.int8())]
    )
    with pytest.raises(PlanError, match=said):
        RunningAggregate(aggregates).bind(schema, ["k", "x_count"])


def test_append_mode_is_refused() -> None:
    with pytest.raises(PlanError, match="mode='update'"):
        RunningAggregate({"n": ab.count()}, mode="append")


def test_names_of_state_columns_never_clash(tmp_path: Path) -> None:
    names = ["x", "x_sum", "x_seen", "x_sum_seen"]
    operator = RunningAggregate({name: ab.sum("i") for name in names})
    batch = pa.record_batch({"k": ["a", "a"], "i": pa.array([1, 2], pa.int32())})
    result = run(operator, ["k"], [batch], tmp_path)
    assert result.rows == [{"k": "a"} | dict.fromkeys(names, 3)]


def test_every_type_can_be_counted(tmp_path: Path) -> None:
    batch = pa.record_batch(
        {
            "k": ["a", "a", "a"],
            "m": [Decimal("1.50"), None, Decimal("2.50")],
            "v": [[1], [], None],
        }
    )
    operator = RunningAggregate({"m": ab.count("m"), "v": ab.count("v"), "n": ab.count()})
    assert run(operator, ["k"], [batch], tmp_path).rows == [{"k": "a", "m": 2, "v": 2, "n": 3}]


@pytest.mark.parametrize("kind", ["int", "string", "float"])
def test_the_number_of_different_values_is_about_right(kind: str, tmp_path: Path) -> None:
    sizes = [0, 1, 2, 5, 10, 100, 300, 1000, 3000, 10_000, 30_000]
    keys = np.repeat(np.arange(len(sizes)), sizes)
    numbers = np.concatenate([np.arange(size) * 7919 for size in sizes])
    column = pa.array(numbers)
    if kind == "string":
        column = column.cast(pa.string())
    elif kind == "float":
        column = pa.array(numbers / 4)
    batch = pa.record_batch({"k": keys, "x": column})
    nothing = pa.record_batch({"k": [0], "x": pa.nulls(1, column.type)})
    operator = RunningAggregate(
        {"d": ab.approx_count_distinct("x"), "e": ab.approx_count_distinct("x", 0.02)}
    )
    result = run(operator, ["k"], [batch, batch, nothing], tmp_path)
    assert result.batches[2] == [{"k": 0, "d": 0, "e": 0}]
    assert same(result.batches[0], result.batches[1])
    for row in result.batches[0]:
        true = sizes[row["k"]]
        assert abs(row["d"] - true) <= max(1, 3 * 0.046 * true)
        assert abs(row["e"] - true) <= max(1, 3 * 0.017 * true)


def test_equal_floats_are_one_value(tmp_path: Path) -> None:
    batch = pa.record_batch({"k": [1] * 5, "x": [0.0, -0.0, math.nan, -math.nan, 1.0]})
    operator = RunningAggregate({"d": ab.approx_count_distinct("x")})
    assert run(operator, ["k"], [batch], tmp_path).rows == [{"k": 1, "d": 3}]


def test_the_error_asked_for_must_be_possible() -> None:
    with pytest.raises(PlanError, match=r"0\.005 to 0\.2"):
        ab.approx_count_distinct("x", 0.001)


def test_values_of_times_keep_microseconds(tmp_path: Path) -> None:
    values = [time(23, 59, 59, 999999), time(0, 0, 0, 1)]
    batch = pa.record_batch({"k": [1, 1], "x": pa.array(values, pa.time64("us"))})
    operator = RunningAggregate({"x": ab.min("x")})
    assert run(operator, ["k"], [batch], tmp_path).rows == [{"k": 1, "x": time(0, 0, 0, 1)}]
