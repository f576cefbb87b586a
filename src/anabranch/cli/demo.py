"""``anabranch demo``: a live word count over a generated stream."""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.live import Live

from anabranch.cli.quiet import quiet_start
from anabranch.cli.view import Snapshot, line, panel
from anabranch.coordinator.progress import Latency

if TYPE_CHECKING:  # so that the other commands start without loading Spark
    from pyspark.sql import DataFrame

    from anabranch.queries.running_query import RunningQuery

_OPERATOR = "counter"
SHOWN = 12
"""How many of the most frequent words are shown."""
_CONF = {"spark.log.level": "ERROR", "spark.ui.enabled": "false"}


@click.command()
@click.option("--seconds", default=30.0, show_default=True, help="Duration from the first result.")
@click.option(
    "--sentences", default=20_000, show_default=True, help="Per micro-batch; each has 8 words."
)
@click.option("--folder", help="The checkpoint folder, which is kept and resumed.")
@click.option("--nodes", default=0, help="Run on a cluster, scale, and kill a node.")
def demo(seconds: float, sentences: int, folder: str | None, nodes: int) -> None:
    """Count words in a generated stream and show them live. Ctrl-C ends it."""
    if nodes:
        from anabranch.cli.cluster_demo import tell

        raise SystemExit(0 if tell(nodes, Console(highlight=False)) else 1)
    from pyspark.sql import functions as F

    import anabranch as ab
    from anabranch.cli.sentences import generate

    console = Console()
    top = TopWords()
    with _checkpoints(folder) as checkpoints:
        with console.status("starting Spark"), quiet_start():
            spark = ab.session(**_CONF)
        try:
            query = (
                ab.stream(generate(spark, sentences))
                .transform(lambda df: df.select(F.explode(F.split("text", " ")).alias("word")))
                .key_by("word")
                .aggregate(name=_OPERATOR, n=ab.count())
                .for_each_batch(top.take)
                .start(checkpoints)
            )
            try:
                _watch(query, top, seconds, console)
            except KeyboardInterrupt:
                console.print("stopping")
            finally:
                query.stop()
        finally:
            spark.stop()
    if folder is not None:
        console.print(f"the state is in {folder}: anabranch state show {folder}")


class TopWords:
    """The most frequent words so far.

    Counts only grow, so a word among the first of all was among the first of the batch that
    changed it last: looking at the first of each batch misses none.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def take(self, updates: DataFrame, version: int) -> None:
        """The sink of the query: new counts of the words that came in a batch."""
        from pyspark.sql import functions as F

        first = updates.orderBy(F.desc("n"), "word").limit(SHOWN).collect()
        self.add({row["word"]: row["n"] for row in first})

    def add(self, counts: Mapping[str, int]) -> None:
        """Take in the counts of the first words of a batch."""
        self._counts.update(counts)
        self._counts = dict(self.first())

    def first(self) -> list[tuple[str, int]]:
        """Words and counts, the most frequent first."""
        ranked = sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        return ranked[:SHOWN]


class Meter:
    """Turns the progress of the query into snapshots."""

    def __init__(self, query: RunningQuery, top: TopWords) -> None:
        self._query = query
        self._top = top
        self._seen = -1
        self._words = 0
        self._rates: deque[float] = deque(maxlen=40)
        self.started: float | None = None
        """When the first result was there."""

    def read(self) -> Snapshot | None:
        """The demo now; None if no batch has been finished since the last time."""
        recent = self._query.recent_progress
        new = [progress for progress in recent if progress.version > self._seen]
        if not new:
            return None
        self.started = self.started or time.monotonic()
        for progress in new:
            self._words += progress.rows
            self._rates.append(progress.rows / progress.seconds)
        last = new[-1]
        self._seen = last.version
        warm = recent[1:] or recent  # the first batch starts the workers, once
        window = warm[-5:]
        latency = Latency.over(warm)
        return Snapshot(
            seconds=time.monotonic() - self.started,
            version=last.version,
            words=self._words,
            words_per_second=sum(p.rows for p in window) / sum(p.seconds for p in window),
            history=list(self._rates),
            latency=(latency.p50, latency.p95, latency.p99),
            state_rows=last[_OPERATOR].state_rows,
            state_bytes=last[_OPERATOR].state_bytes,
            checkpoint=last.checkpoint,
            top=self._top.first(),
        )


@contextmanager
def _checkpoints(folder: str | None) -> Iterator[str]:
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="anabranch-demo-") as made:
        yield made


@contextmanager
def _output(console: Console) -> Iterator[Callable[[Snapshot], None]]:
    if not console.is_terminal:
        yield lambda now: click.echo(line(now))
        return
    with Live("waiting for the first batch", console=console, refresh_per_second=4) as live:
        yield lambda now: live.update(panel(now))


def _watch(query: RunningQuery, top: TopWords, seconds: float, console: Console) -> None:
    meter = Meter(query, top)
    refresh = 0.25 if console.is_terminal else 1.0
    with _output(console) as show:
        while meter.started is None or time.monotonic() - meter.started < seconds:
            if query.await_termination(refresh):
                return  # only an error ends it, and that has been raised
            now = meter.read()
            if now is not None:
                show(now)
