"""The functions that Spark calls in a task: an operator's batch, and the step before or after it.

Several batches of an operator can be run in one task. A batch costs a job, whatever its size: old
batches that are run again come together in one, each row with the version of its batch, and the
task takes them one after the other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from anabranch.worker.packing import VERSION, Batches, read_values
from anabranch.worker.reports import Reports
from anabranch.worker.task import OperatorTask, conform

Step = Callable[[Batches], Batches]


def run_and(task: OperatorTask, reports: Reports, after: Step, batches: Batches) -> Batches:
    """Run a batch of an operator, and hand its rows to what divides or writes them."""
    yield from after(task.run(reports, batches))


def read(column: str, schema: pa.Schema, form: pa.Schema, batches: Batches) -> Batches:
    """The rows in the values of a column, which have this schema, in the form that Spark takes."""
    for rows in read_values(column, schema, batches):
        yield conform(rows, form, "unpack")


def read_and_divide(column: str, schema: pa.Schema, divide: Step, batches: Batches) -> Batches:
    """The rows in the values of a column, divided."""
    yield from divide(read_values(column, schema, batches))


def run_all(tasks: tuple[OperatorTask, ...], reports: Reports, batches: Batches) -> Batches:
    """Run every batch of one instance in turn; rows come out with their version."""
    rows = _by_version(batches)
    for task in tasks:
        for batch in task.run(reports, iter(rows.pop(task.version, []))):
            version = pa.array(np.full(batch.num_rows, task.version, np.int64))
            yield batch.append_column(VERSION, version)


def _by_version(batches: Batches) -> dict[int, list[pa.RecordBatch]]:
    found: dict[int, list[pa.RecordBatch]] = {}
    for batch in batches:
        versions = batch.column(VERSION).to_numpy()
        rows = batch.drop_columns([VERSION])
        for version in np.unique(versions).tolist():
            mask = versions == version
            part = rows if mask.all() else rows.filter(pa.array(mask))
            found.setdefault(version, []).append(part)
    return found
