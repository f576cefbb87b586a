"""Several batches of an operator in one Spark task: the code that runs inside it in a replay.

A batch costs a job, whatever its size. Old batches that are run again come together in one, each
row with the version of its batch, and the task takes them one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from anabranch.spark.packing import VERSION
from anabranch.spark.reports import Reports
from anabranch.spark.task import OperatorTask


def run_all(
    tasks: tuple[OperatorTask, ...], reports: Reports, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Run every batch of one instance in turn; rows come out with their version."""
    rows = _by_version(batches)
    for task in tasks:
        for batch in task.run(reports, iter(rows.pop(task.version, []))):
            version = pa.array(np.full(batch.num_rows, task.version, np.int64))
            yield batch.append_column(VERSION, version)


def _by_version(batches: Iterator[pa.RecordBatch]) -> dict[int, list[pa.RecordBatch]]:
    found: dict[int, list[pa.RecordBatch]] = {}
    for batch in batches:
        versions = batch.column(VERSION).to_numpy()
        rows = batch.drop_columns([VERSION])
        for version in np.unique(versions).tolist():
            mask = versions == version
            part = rows if mask.all() else rows.filter(pa.array(mask))
            found.setdefault(version, []).append(part)
    return found
