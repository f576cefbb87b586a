"""Rankings of languages: the views that are made up, and the query over them."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from anabranch.testing.feeds import Feed
from anabranch_bench import topk

VIEWS = pa.schema([("at", pa.timestamp("us", "UTC")), ("path", pa.string())])
START = datetime(2026, 1, 1, tzinfo=UTC)


def language_of(view: str) -> str:
    return view.split("/")[0]


def test_languages_are_as_unequal_as_zipf_has_it(spark: SparkSession) -> None:
    rows = spark.range(60_000).withColumnRenamed("id", "value")
    rows = rows.withColumn("timestamp", F.current_timestamp())
    paths = topk.of_source(rows, 3).select("path").toArrow()["path"].to_pylist()
    seen = Counter(map(language_of, paths))
    assert len(seen) == topk.LANGUAGES
    first, second, tenth = seen["l001"], seen["l002"], seen["l010"]
    # The share of rank r goes with log((r + 1) / r).
    assert 1.5 < first / second < 2.0
    assert 6 < first / tenth < 9
    other = topk.of_source(rows, 4).select("path").toArrow()["path"].to_pylist()
    assert other != paths


def test_every_window_is_ranked_once(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "input", VIEWS)
    expected: dict[datetime, Counter[str]] = {}
    for window in range(4):
        begins = START + timedelta(seconds=topk.WINDOW_SECONDS * window)
        count = expected[begins + timedelta(seconds=topk.WINDOW_SECONDS)] = Counter(
            {f"l{(rank + window) % 15:03}": 60 - rank for rank in range(15)}
        )
        rows = [
            {"at": begins + timedelta(seconds=number % 29), "path": f"{language}/wiki/{number}"}
            for language, times in count.items()
            for number in range(times)
        ]
        half = len(rows) // 2
        feed.add(rows[:half], rows[half:])
    # A watermark counts from the batch after the one that raised it.
    feed.add(*[[{"at": START + timedelta(hours=1), "path": "l001/wiki/1"}]] * 2)
    query = topk.build(feed.frame(spark)).to_memory("rankings").start(tmp_path / "checkpoint")
    query.process_all_available()
    found = query.memory_table("rankings").to_pylist()
    query.stop()
    ranked = sorted((row["window_end"], row["rank"], row["language"], row["n"]) for row in found)
    assert ranked == [
        (end, rank, language, times)
        for end, count in expected.items()
        for rank, (language, times) in enumerate(count.most_common(10), 1)
    ]
