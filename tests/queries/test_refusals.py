"""What is wrong with a query is said before anything starts, in words that help."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import anabranch as ab
from anabranch.testing.feeds import Feed

ROWS = pa.schema([("at", pa.timestamp("us", tz="UTC")), ("word", pa.string()), ("n", pa.int64())])


@pytest.fixture
def rides(spark: SparkSession, tmp_path: Path) -> ab.Stream:
    feed = Feed(tmp_path / "input", ROWS)
    feed.add([{"at": 0, "word": "a", "n": 1}])
    return ab.stream(feed.frame(spark))


def counted(stream: ab.Stream, name: str = "counter") -> ab.Stream:
    return stream.key_by("word").aggregate(name=name, n=ab.count())


REFUSED: dict[str, tuple[Callable[[ab.Stream], ab.Stream], str]] = {
    "unknown key": (
        lambda s: s.key_by("wrod").aggregate(n=ab.count()),
        r"no key column 'wrod'; the columns are \['at', 'word', 'n'\]",
    ),
    "unknown column of an aggregate": (
        lambda s: s.key_by("word").aggregate(n=ab.sum("m")),
        "'m'",
    ),
    "unknown column in a transform": (
        lambda s: s.transform(lambda df: df.select("nothing")).key_by("nothing").deduplicate(),
        "nothing",
    ),
    "not a DataFrame": (
        lambda s: s.transform(lambda df: df.columns).key_by("word").deduplicate(),  # type: ignore[arg-type,return-value]
        "must return a DataFrame",
    ),
    "zero key groups": (
        lambda s: s.key_by("word").deduplicate(key_groups=0),
        "key_groups=0",
    ),
    "more instances than key groups": (
        lambda s: s.key_by("word").deduplicate(key_groups=2, instances=3),
        "instances=3",
    ),
    "the same name twice": (
        lambda s: counted(counted(s)),
        "two operators are named 'counter'",
    ),
    "a name that is no file name": (
        lambda s: counted(s, name="a/b"),
        "operator name 'a/b'",
    ),
    "a type that has no Arrow form": (
        lambda s: (
            s.transform(lambda df: df.withColumn("v", F.expr("parse_json('1')")))
            .key_by("v")
            .deduplicate()
        ),
        "'v'",
    ),
    "a window on something else than a time": (
        lambda s: s.key_by("word").window(ab.tumbling("1 minute", on="n")).aggregate(c=ab.count()),
        "'n'.*timestamp",
    ),
    "reserved names": (
        lambda s: (
            s.transform(lambda df: df.withColumn("__x", F.lit(1))).key_by("word").deduplicate()
        ),
        "'__x' starts with '__'",
    ),
    "names that differ in case only": (
        lambda s: (
            s.transform(lambda df: df.select("word", F.col("n").alias("N"), F.col("at").alias("n")))
            .key_by("word")
            .deduplicate()
        ),
        "column 'N' is there twice, in upper and lower case",
    ),
    "results whose names differ in case only": (
        lambda s: s.key_by("word").aggregate(WORD=ab.count()),
        "the output has the column 'word' twice, ignoring case",
    ),
    "sides whose names differ in case only": (
        lambda s: s.key_by("word").join(
            s.transform(
                lambda df: df.select("word", F.col("at").alias("then"), F.col("n").alias("N"))
            ).key_by("word"),
            within="1 minute",
            on=("at", "then"),
        ),
        r"both sides have columns \['N'\]",
    ),
    "no late rows": (lambda s: counted(s).late, "has no late rows"),
    "sides with columns of the same name": (
        lambda s: s.key_by("word").join(s.key_by("word"), within="1 minute", on=("at", "at")),
        r"both sides have columns \['at', 'n'\]",
    ),
    "a join in time on its key": (
        lambda s: s.key_by("word", "at").join(
            s.transform(lambda df: df.select("word", "at", F.col("at").alias("then"))).key_by(
                "word", "at"
            ),
            within="1 minute",
            on=("at", "then"),
        ),
        r"on='at' is one of the keys \['word', 'at'\] of the left side, and a key column cannot be",
    ),
    "a join in something else than a time": (
        lambda s: s.key_by("word").join(
            s.transform(lambda df: df.select("word", F.col("at").alias("then"))).key_by("word"),
            within="1 minute",
            on=("n", "then"),
        ),
        r"on='n' of the left side is int64, not a timestamp",
    ),
    "a join on the time of the right key": (
        lambda s: (
            s.transform(lambda df: df.withColumn("then", F.col("at")))
            .key_by("at")
            .join(
                s.transform(lambda df: df.select(F.col("at").alias("p_start"))).key_by("p_start"),
                within="1 minute",
                on=("then", "p_start"),
            )
        ),
        r"on='p_start' is one of the keys .*'p_start_at'",
    ),
    "ranked by the key": (
        lambda s: s.key_by("n").top_k(3, by="n"),
        r"by='n' is one of the keys \['n'\].*of \['at', 'word'\]",
    ),
    "ranked by nothing": (lambda s: s.key_by("word").top_k(3, by="m"), "no column by='m'"),
    "deduplicated in something else than a time": (
        lambda s: s.key_by("word").deduplicate(ttl="1 hour", on="n"),
        "on='n' is int64, not a timestamp",
    ),
    "deduplicated in nothing": (
        lambda s: s.key_by("word").deduplicate(ttl="1 hour", on="when"),
        "no column on='when'",
    ),
    "an operator that fails on nothing": (
        lambda s: s.key_by("word").process(Fails(), name="fails"),
        "process\\(\\) failed on an empty batch with ZeroDivisionError",
    ),
    "an operator that does not say what it makes": (
        lambda s: s.key_by("word").process(Silent(), name="silent"),
        "declare output\\(\\)",
    ),
}


class Fails(ab.Operator):
    state = ab.schema(n=ab.int64)

    def process(self, rows: ab.Rows, state: ab.State, context: ab.Context) -> ab.Rows:
        return rows.take(rows["n"][: 1 // len(rows)])


class Silent(ab.Operator):
    state = ab.schema(n=ab.int64)

    def process(self, rows: ab.Rows, state: ab.State, context: ab.Context) -> None:
        return None


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused(rides: ab.Stream, tmp_path: Path, case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises(ab.PlanError, match=message):
        build(rides).to_memory("out").start(tmp_path / "ck")
    assert not (tmp_path / "ck").exists(), "nothing is made before everything is checked"


def test_a_batch_frame_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ab.PlanError, match=r"spark\.readStream"):
        ab.stream(spark.range(3))


def test_a_changed_query_is_refused(rides: ab.Stream, tmp_path: Path) -> None:
    counted(rides).to_memory("out").start(tmp_path / "ck", available_now=True).await_termination()
    other = rides.key_by("word").aggregate(name="counter", n=ab.count(), most=ab.max("n"))
    with pytest.raises(ab.SchemaChanged, match=r"operator 'counter': columns was .* and is .* now"):
        other.to_memory("out").start(tmp_path / "ck")
    with pytest.raises(ab.SchemaChanged, match=r"key_groups was 128 .* is 64"):
        rides.key_by("word").aggregate(name="counter", n=ab.count(), key_groups=64).to_memory(
            "out"
        ).start(tmp_path / "ck")
    with pytest.raises(ab.PlanError, match=r"operators \['counter'\], this one has \['tally'\]"):
        counted(rides, name="tally").to_memory("out").start(tmp_path / "ck")


def test_one_driver_at_a_time(rides: ab.Stream, tmp_path: Path) -> None:
    query = counted(rides).to_memory("out").start(tmp_path / "ck")
    try:
        with pytest.raises(ab.PlanError, match="running already, in process"):
            counted(rides).to_memory("out").start(tmp_path / "ck")
    finally:
        query.stop()


def test_the_plan_is_a_tree(rides: ab.Stream) -> None:
    first = counted(rides)
    tree = ab.query(
        first.to_console(), first.key_by("n").deduplicate(name="new").to_memory("new")
    ).explain()
    assert tree.splitlines() == [
        "sink console",
        "└─ #1 operator 'counter': aggregate(n=count()) by [word], 128 key groups",
        "   └─ source [at, word, n]",
        "sink memory 'new'",
        "└─ operator 'new': Deduplicate() by [n], 128 key groups",
        "   └─ (see #1)",
    ]
