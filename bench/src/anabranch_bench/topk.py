"""Which languages are read most: ``anabranch bench topk``.

Paper 1's open loop: 18 sources send page views at a rate of their own, whatever the query makes of
them. A stateless step leaves only what is needed, one operator counts the views of each language in
windows of 30 seconds, another ranks them. Languages are as unequal as Zipf's law has it.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console
from rich.progress import Progress

import anabranch as ab
from anabranch_bench.harness import Bar, Measure, Result, Timing
from anabranch_bench.queries import CONF, MASTER

SOURCES = 18
LANGUAGES = 300
WINDOW_SECONDS = 30
TAKEN, LATENCY, RANKING = "taken", "latency", "ranking"
TITLES = {
    TAKEN: "Seconds per second of input",
    LATENCY: "From one commit to the next",
    RANKING: "From the end of a window to its ranking",
}
_BEST = 10
_DELAY = "1 second"
_WARM = 20.0
_LOOK = 0.02
_SLICES = 1_000_003


@dataclass
class Seen:
    """What a run has shown, with the time of each commit."""

    commits: list[tuple[float, int]] = field(default_factory=list)
    """When, and rows of the batch."""
    rankings: dict[int, float] = field(default_factory=dict)
    """The end of each window, and when its ranking was there, in seconds since the epoch."""


def views(spark: SparkSession, rate: int) -> DataFrame:
    """Page views from all sources, so many a second in all."""
    sources = []
    for number in range(SOURCES):
        share = rate // SOURCES + (number < rate % SOURCES)
        rows = spark.readStream.format("rate").option("rowsPerSecond", share)
        sources.append(of_source(rows.option("numPartitions", 1).load(), number))
    return reduce(DataFrame.unionAll, sources)


def of_source(rows: DataFrame, number: int) -> DataFrame:
    """Numbered rows as page views: a time, the path of the page, and fields that nobody needs."""
    view = F.xxhash64("value", F.lit(number))
    return rows.select(
        F.col("timestamp").alias("at"),
        F.concat(_language(view), F.lit("/wiki/"), F.pmod(view, F.lit(1000))).alias("path"),
        F.lit("200").alias("status"),
        F.pmod(view, F.lit(100_000)).alias("bytes"),
    )


def _language(view: Column) -> Column:
    """A language by Zipf's law: the logarithm of its rank is spread evenly."""
    evenly = F.pmod(view, F.lit(_SLICES)) / _SLICES
    rank = F.floor(F.pow(F.lit(LANGUAGES + 1), evenly))
    return F.concat(F.lit("l"), F.lpad(rank.cast("string"), 3, "0"))


def build(frame: DataFrame) -> ab.Stream:
    """The query: map, count, rank."""
    return (
        ab.stream(frame)
        .transform(lambda df: df.select("at", F.substring("path", 1, 4).alias("language")))
        .key_by("language")
        .window(ab.tumbling(f"{WINDOW_SECONDS} seconds", on="at"), watermark=_DELAY)
        .aggregate(name="views", mode="append", n=ab.count())
        .key_by("window_end")
        .top_k(_BEST, by="n", name="ranking")
    )


def measure(
    *, quick: bool = False, seed: int = 7, rates: Sequence[int] = (), console: Console | None = None
) -> Result:
    """Offer each rate for a while. The sources have no seed: a view is made of its number."""
    console = console or Console()
    result = Result("topk", seed, quick)
    chosen = list(rates) or ([50_000] if quick else [50_000, 100_000, 200_000, 400_000])
    seconds = 70.0 if quick else 110.0
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("topk", total=len(chosen) * seconds)
        spark = ab.session(MASTER, **CONF)
        for rate in chosen:
            _note(result, rate, _run(spark, rate, seconds, partial(progress.advance, task)))
        spark.stop()
    return result


def _run(spark: SparkSession, rate: int, seconds: float, tick: Callable[[float], None]) -> Seen:
    seen = Seen()

    def ranked(rows: DataFrame, version: int) -> None:
        for row in rows.where("rank = 1").collect():
            seen.rankings.setdefault(int(row["window_end"].timestamp()), time.time())

    with tempfile.TemporaryDirectory(prefix="anabranch-topk-") as folder:
        query = build(views(spark, rate)).for_each_batch(ranked).start(Path(folder) / "checkpoint")
        began, last = time.monotonic(), -1
        while time.monotonic() - began < seconds:
            query.await_termination(_LOOK)
            tick(_LOOK)
            if (now := query.progress) is not None and now.version > last:
                last = now.version
                seen.commits.append((time.monotonic() - began, now.rows))
        query.stop()
    return seen


def _note(result: Result, rate: int, seen: Seen) -> None:
    case = f"{rate:,} views/s"
    warm = [(at, rows) for at, rows in seen.commits if at > _WARM]
    gaps = tuple(later - earlier for (earlier, _), (later, _) in itertools.pairwise(warm))
    rows = sum(rows for _, rows in warm[1:])
    taken = rows / max(1e-9, sum(gaps))
    delays = tuple(at - end for end, at in sorted(seen.rankings.items())[1:])
    result.measures.append(Measure(TAKEN, case, "anabranch", Timing(rate, (rate / taken,))))
    result.measures.append(Measure(LATENCY, case, "anabranch", Timing(rate, gaps)))
    if delays:
        result.measures.append(Measure(RANKING, case, "anabranch", Timing(rate, delays)))
    result.bars.append(Bar(f"{case}: share that is taken", taken / rate, 0.98, at_least=True))
