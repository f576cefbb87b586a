"""The process of one side: ``python -m anabranch_bench.side < side.json``.

It prints JSON lines: one whenever batches have been finished, one for each run that has ended.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from anabranch_bench import spark_side
from anabranch_bench.plan import Engine, Outcome, Run, Side
from anabranch_bench.queries import Started

_SHARED_MEMORY = Path("/dev/shm")
_POLL = 1  # seconds between two looks at the query: often enough for a progress bar


def main() -> None:
    """Read a side from standard input, carry out its runs, print what they took."""
    side = Side.from_json(sys.stdin.read())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that shared memory is given back
    spark = _session(side.engine)
    with _folder(None) as work, _folder(_SHARED_MEMORY) as memory:
        for number, run in enumerate(side.runs):
            started = _start(spark, side.engine, run, work / str(number), memory)
            _say(run=run.name, outcome=asdict(_carry_out(started, run)))
            shutil.rmtree(memory, ignore_errors=True)  # what only Never leaves there
    spark.stop()


@contextmanager
def _folder(inside: Path | None) -> Iterator[Path]:
    parent = inside if inside is not None and inside.is_dir() else None
    with tempfile.TemporaryDirectory(
        prefix="anabranch-bench-", dir=parent, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def _session(engine: Engine) -> SparkSession:
    if engine is not Engine.ANABRANCH:
        return spark_side.session(engine)
    from anabranch_bench import our_side  # only here: Spark's sides need none of it

    return our_side.session()


def _start(spark: SparkSession, engine: Engine, run: Run, folder: Path, memory: Path) -> Started:
    if engine is not Engine.ANABRANCH:
        return spark_side.start(spark, engine, run, folder)
    from anabranch_bench import our_side

    return our_side.start(spark, run, folder, memory)


def _carry_out(query: Started, run: Run) -> Outcome:
    while not query.ended(_POLL):
        last = query.spark.lastProgress
        _say(run=run.name, done=last["batchId"] + 1 if last else 0)
    seconds = _batch_seconds(query.spark)
    if len(seconds) != run.batches:
        raise RuntimeError(f"{run.name}: {len(seconds)} batches ran, {run.batches} were planned")
    return Outcome(seconds, query.totals() if run.verify else None)


def _batch_seconds(query: StreamingQuery) -> tuple[float, ...]:
    # Batches without input follow when only the watermark has moved; they are not of the plan.
    taken: dict[int, float] = {}
    for progress in query.recentProgress:
        if progress["numInputRows"]:
            taken[progress["batchId"]] = progress["durationMs"]["triggerExecution"] / 1000
    return tuple(taken[batch] for batch in sorted(taken))


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
