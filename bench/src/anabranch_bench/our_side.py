"""Our side: the same queries on Anabranch, with the session that users get."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc
from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.backup import Files
from anabranch.stores import Manifests, read_state
from anabranch_bench.plan import Checkpoints, Run, Totals, Workload
from anabranch_bench.queries import (
    CONF,
    CORES,
    DELAY,
    MASTER,
    WINDOW,
    Started,
    discard,
    source,
    words,
)

OPERATOR = "counter"
"""The name of the operator in every workload."""


def session() -> SparkSession:
    """The session that users get, with the configuration of the benchmarks."""
    return ab.session(master=MASTER, **CONF)


def start(spark: SparkSession, run: Run, folder: Path, memory: Path) -> Started:
    """Start the query of a run, its state in ``memory``. It ends once all input is read."""
    stream = ab.stream(source(spark, run))
    if run.workload is Workload.KEYED:
        counted = stream.key_by("key").aggregate(name=OPERATOR, n=ab.count(), total=ab.sum("x"))
    else:
        by_word = stream.transform(words).key_by("word")
        windows = by_word.window(ab.tumbling(WINDOW, on="at"), watermark=DELAY)
        counted = windows.aggregate(name=OPERATOR, mode="update", n=ab.count())
    query = counted.for_each_batch(discard).start(
        folder,
        checkpointing=policy(run.checkpoints),
        instances=CORES,
        available_now=True,
        state_folder=memory,
    )
    return Started(query.spark_query, query.await_termination, lambda: _totals(folder))


def _totals(folder: Path) -> Totals:
    store = Files(str(folder)).open()
    manifest = Manifests(store).latest()
    assert manifest is not None, "a query with checkpoints stores its last version when it ends"
    rows = read_state(store, manifest, OPERATOR)
    n, total = (pc.sum(rows[name]).as_py() for name in ("n_count", "total_sum"))
    return Totals(rows.num_rows, n, total)


def policy(checkpoints: Checkpoints) -> ab.Never | ab.Periodic:
    """The checkpointing policy of that name."""
    if checkpoints is Checkpoints.NEVER:
        return ab.Never()
    return ab.Periodic("5 seconds", incremental=checkpoints is Checkpoints.INCREMENTAL)
