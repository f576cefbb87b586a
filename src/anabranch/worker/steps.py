"""The functions that Spark calls in a task: an operator's batch, and the step before or after it.

A task can run several batches of an operator. A Spark job has a fixed cost, so a replay runs many
old batches in one job: each row has the version of its batch, and the task runs them in turn.
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
    """Run a batch of an operator, and pass its rows to the function that divides or writes them."""
    yield from after(task.run(reports, batches))


def read(column: str, schema: pa.Schema, form: pa.Schema, batches: Batches) -> Batches:
    """The rows in the values of a column, with this schema, in Spark's types."""
    for rows in read_values(column, schema, batches):
        yield conform(rows, form, "unpack")


def read_and_divide(column: str, schema: pa.Schema, divide: Step, batches: Batches) -> Batches:
    """The rows in the values of a column, divided by instance."""
    yield from divide(read_values(column, schema, batches))


def run_all(tasks: tuple[OperatorTask, ...], reports: Reports, batches: Batches) -> Batches:
    """Run every batch of one instance in turn. Results have the version of their batch."""
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
