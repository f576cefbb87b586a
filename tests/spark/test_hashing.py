import datetime
import decimal
from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from anabranch.errors import PlanError
from anabranch.spark.hashing import KeyHash
from anabranch.state.hashing import hash_keys
from anabranch.state.keys import KeyLayout

pytestmark = pytest.mark.spark

NAN = float("nan")
FLOATS = [0.0, -0.0, NAN, None, 1.5, float("inf"), float("-inf"), NAN, -0.0]
TIME = datetime.datetime(1969, 12, 31, 23, 59, 59, 999999)

NASTY: dict[str, list[Any]] = {
    "double": FLOATS,
    "float": FLOATS,
    "array<double>": [[x] for x in FLOATS] + [[], None, [0.0, -0.0], [-0.0, 0.0], [None, None]],
    "struct<x:double,y:string>": [(x, "a") for x in FLOATS]
    + [None, (None, None), (0.0, None), (-0.0, None)],
    "array<struct<`a.b`:float>>": [[(x,)] for x in FLOATS] + [[None], [(None,)], []],
    "map<string,double>": [
        {"a": 0.0, "b": 1.0},
        {"b": 1.0, "a": -0.0},
        {"a": None},
        {},
        None,
        {"a": NAN},
        {"a": NAN},
    ],
    "map<double,int>": [{0.0: 1, NAN: 2}, {NAN: 2, 0.0: 1}, {0.0: 1}, {}],
    "map<int,map<string,float>>": [
        {1: {"x": 0.0, "y": None}, 2: None},
        {2: None, 1: {"y": None, "x": -0.0}},
        {1: {"x": 0.0}, 2: {"y": None}},
    ],
    "array<map<string,int>>": [[{"a": 1, "b": 2}, None], [{"b": 2, "a": 1}, None], [None, {}]],
    "struct<m:map<string,array<int>>>": [
        ({"a": [1], "b": []},),
        ({"b": [], "a": [1]},),
        ({"a": [], "b": [1]},),
        (None,),
        None,
    ],
    "string": ["", None, "a", "A", "a ", "\x00", "a\x00", "e\u0301", "\u00e9", "", None],
    "binary": [b"", None, b"\x00", b"\x00\x00", b""],
    "boolean": [True, False, None, True],
    "tinyint": [-128, 127, 0, None, 0],
    "bigint": [-(2**63), 2**63 - 1, 0, None, 0],
    "decimal(38,2)": [decimal.Decimal(x) for x in ("0.00", "-0.01", "1", "1.00")] + [None],
    "date": [datetime.date(1, 1, 1), datetime.date(9999, 12, 31), None],
    "timestamp": [TIME, datetime.datetime(2024, 3, 10, 2, 30), None, TIME],
    "timestamp_ntz": [TIME, datetime.datetime(2024, 3, 10, 2, 30), None, TIME],
    "interval day to second": [datetime.timedelta(0), datetime.timedelta(-1, 1), None],
    "array<array<string>>": [[["a"], []], [[], ["a"]], [["a", None]], [["a"]], [[]], [None], []],
}


def groups_by_spark(frame: DataFrame, keys: list[str]) -> set[tuple[int, ...]]:
    rows = frame.groupBy(*keys).agg(F.collect_list("id").alias("ids")).select("ids").collect()
    return {tuple(sorted(row.ids)) for row in rows}


def groups_by_us(frame: DataFrame, keys: list[str]) -> set[tuple[int, ...]]:
    """Row ids by stored key; rows of one key must also have one hash."""
    frame = KeyHash(frame.schema, keys).normalised(frame)
    table = frame.select("id", *keys, KeyHash(frame.schema, keys).column.alias("hash")).toArrow()
    assert not isinstance(table, pa.RecordBatch)
    (batch,) = table.combine_chunks().to_batches()
    layout = KeyLayout([batch.schema.field(name) for name in keys])
    hashes = np.asarray(batch["hash"])
    if not KeyHash(frame.schema, keys).travels:
        ours = hash_keys([batch[name] for name in keys], batch.num_rows)
        assert ours.view(np.int64).tolist() == hashes.tolist()
    encoded = layout.encode([batch[name] for name in keys], hashes)
    back = layout.decode(encoded.words, encoded.starts, encoded.lens, encoded.data)
    assert [repr(a.to_pylist()) for a in back] == [repr(batch[name].to_pylist()) for name in keys]
    ids, hash_of = defaultdict(list), {}
    for i, row in enumerate(batch["id"].to_pylist()):
        parts = zip(encoded.starts[i], encoded.lens[i], strict=True)
        key = (
            encoded.words[i].tobytes(),
            *(encoded.data[s : s + n].tobytes() if n >= 0 else None for s, n in parts),
        )
        ids[key].append(row)
        assert hash_of.setdefault(key, hashes[i]) == hashes[i]
    return {tuple(sorted(each)) for each in ids.values()}


def frame_of(spark: SparkSession, kinds: list[str], rows: list[tuple[Any, ...]]) -> DataFrame:
    columns = ", ".join(f"k{i} {kind}" for i, kind in enumerate(kinds))
    data = [(i, *row) for i, row in enumerate(rows)]
    return spark.createDataFrame(data, f"id bigint, {columns}").coalesce(1)


@pytest.mark.parametrize("kind", NASTY)
def test_the_same_rows_are_one_key_as_in_spark(spark: SparkSession, kind: str) -> None:
    frame = frame_of(spark, [kind], [(value,) for value in NASTY[kind]])
    assert groups_by_us(frame, ["k0"]) == groups_by_spark(frame, ["k0"])
    assert KeyHash(frame.schema, ["k0"]).normalised(frame).dtypes == frame.dtypes


def test_keys_of_several_columns(spark: SparkSession) -> None:
    pairs = [
        (None, "a", 0.0),
        ("a", None, 0.0),
        ("", "a", -0.0),
        ("a", "", None),
        (None, None, None),
        (None, "a", -0.0),
        ("ab", "", NAN),
        ("a", "b", NAN),
        ("a", "b", NAN),
    ]
    frame = frame_of(spark, ["string", "string", "double"], pairs)
    keys = ["k0", "k1", "k2"]
    assert groups_by_us(frame, keys) == groups_by_spark(frame, keys)


def test_hashes_are_those_of_spark(spark: SparkSession) -> None:
    random = np.random.default_rng(1)
    rows = [
        (
            random.bytes(length),
            None if length % 7 == 0 else "\u00e9" * length,
            None if length % 5 == 0 else int(random.integers(-(2**31), 2**31)),
            decimal.Decimal(int(random.integers(-(10**15), 10**15))) / 100,
            float(random.normal()),
        )
        for length in range(150)
    ]
    kinds = ["binary", "string", "int", "decimal(18,2)", "float"]
    frame = frame_of(spark, kinds, rows)
    keys = frame.columns[1:]
    assert not KeyHash(frame.schema, keys).travels
    assert len(groups_by_us(frame, keys)) == len(rows)
    for start in (0, 3):
        # A slice of a batch has its values somewhere inside the buffers.
        batch = frame.toArrow().combine_chunks().slice(start).to_batches()[0]
        spark_hashes = frame.select(F.xxhash64(*keys)).collect()[start:]
        ours = hash_keys([batch[name] for name in keys], batch.num_rows)
        assert ours.view(np.int64).tolist() == [hash for (hash,) in spark_hashes]


@pytest.mark.parametrize("kind", NASTY)
def test_a_hash_travels_only_with_types_that_are_not_hashed_here(
    spark: SparkSession, kind: str
) -> None:
    frame = frame_of(spark, [kind], [])
    nested = any(word in kind for word in ("array", "struct", "map", "38"))
    assert KeyHash(frame.schema, ["k0"]).travels == nested


@pytest.mark.parametrize(
    ("ab", "ba", "other"),
    [
        ("map('a', 1, 'b', 2)", "map('b', 2, 'a', 1)", "map('a', 2, 'b', 1)"),
        ("map(double('nan'), 1, 0d, 2)", "map(-0d, 2, double('nan'), 1)", "map(0d, 1)"),
        (
            "array(map(1, map('a', 1, 'b', 2), 2, null))",
            "array(map(2, null, 1, map('b', 2, 'a', 1)))",
            "array(map(2, map('b', 2, 'a', 1), 1, null))",
        ),
        (
            "named_struct('m', map(struct(1, null), 1, struct(1, 'x'), 2))",
            "named_struct('m', map(struct(1, 'x'), 2, struct(1, null), 1))",
            "named_struct('m', map(struct(1, 'x'), 1, struct(1, null), 2))",
        ),
    ],
)
def test_the_order_of_a_map_does_not_count(
    spark: SparkSession, ab: str, ba: str, other: str
) -> None:
    # Maps that come from Python have lost their order; these arrive as they are written.
    frame = spark.sql(
        f"select id, element_at(array({ab}, {ba}, {other}), int(id) + 1) as k0 "
        "from range(0, 3, 1, 1)"
    )
    entries = frame.select(F.to_json(F.struct("k0"))).collect()
    assert entries[0] != entries[1]
    assert groups_by_us(frame, ["k0"]) == groups_by_spark(frame, ["k0"]) == {(0, 1), (2,)}


def test_nans_of_other_bits_are_one_key(spark: SparkSession) -> None:
    values = np.array([NAN, NAN, 1.0])
    values.view(np.uint64)[1] ^= (1 << 63) | 5
    frame = spark.createDataFrame(pa.table({"id": [0, 1, 2], "k0": values}))
    assert groups_by_us(frame, ["k0"]) == groups_by_spark(frame, ["k0"]) == {(0, 1), (2,)}


def test_a_user_sees_keys_as_spark_shows_them(spark: SparkSession) -> None:
    frame = frame_of(
        spark, ["array<double>", "map<string,double>"], [([-0.0], {"b": 1.0, "a": -0.0})]
    )
    (row,) = KeyHash(frame.schema, ["k0", "k1"]).normalised(frame).collect()
    assert str(row.k0) == "[0.0]"
    assert str(row.k1) == "{'a': 0.0, 'b': 1.0}"


def test_a_frame_with_nothing_to_change_is_left_alone(spark: SparkSession) -> None:
    frame = frame_of(spark, ["string", "double"], [("a", 1.0)])
    assert KeyHash(frame.schema, ["k0"]).normalised(frame) is frame


def test_names_with_dots_and_quotes(spark: SparkSession) -> None:
    frame = spark.range(1).select("id", F.lit(-0.0).alias("a.`b"))
    frame = KeyHash(frame.schema, ["a.`b"]).normalised(frame)
    assert (
        str(frame.select(F.col("`a.``b`"), KeyHash(frame.schema, ["a.`b"]).column).collect()[0][0])
        == "0.0"
    )


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("parse_json('1')", "variant: Spark cannot group by variant"),
        ("array(named_struct('v', parse_json('1')))", "Spark cannot group by variant"),
        ("'a' collate UTF8_LCASE", "equal under the collation UTF8_LCASE"),
        ("map('a' collate UNICODE_CI, 1)", "equal under the collation UNICODE_CI"),
        ("interval '1' month", "cannot hand interval month to Python"),
        ("make_interval(1)", "cannot hand interval to Python"),
        ("st_geomfromwkb(unhex('0101000000000000000000F03F0000000000000040'))", "geometry"),
    ],
)
def test_types_that_cannot_be_keys(spark: SparkSession, expression: str, message: str) -> None:
    frame = spark.sql(f"select {expression} as colour")
    with pytest.raises(PlanError, match=f"cannot key by 'colour' .*{message}"):
        KeyHash(frame.schema, ["colour"]).normalised(frame)


def test_a_user_defined_type_is_refused(spark: SparkSession) -> None:
    from pyspark.testing.objects import ExamplePoint

    frame = spark.createDataFrame([(ExamplePoint(1.0, 2.0),)], ["point"])
    with pytest.raises(PlanError, match="user-defined type"):
        KeyHash(frame.schema, ["point"]).normalised(frame)


def test_an_unknown_column_is_named(spark: SparkSession) -> None:
    with pytest.raises(PlanError, match=r"'nope'.*\['id'\]"):
        KeyHash(spark.range(1).schema, ["nope"])
