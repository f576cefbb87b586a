"""What a task refuses: partitions that a plan merged or shifted, and attempts that come late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession
from task_runs import Running

from anabranch.units import Version
from anabranch.worker.reports import InstanceReport, Reports

pytestmark = pytest.mark.spark
IDS = list(range(200)) * 2


@pytest.fixture
def running(spark: SparkSession, tmp_path: Path) -> Running:
    return Running(spark, tmp_path, instances=4)


def test_every_instance_reports_once_with_its_task(running: Running) -> None:
    running.batch(IDS, version=0, fence=1).collect()
    reports = running.taken(0)
    assert sorted(report.instance for report in reports) == [0, 1, 2, 3]
    assert len({report.attempt for report in reports}) == 4
    assert running.counts() == dict.fromkeys(range(200), 2)


def test_a_result_that_is_computed_again_counts_once(running: Running) -> None:
    result = running.batch(IDS, version=0, fence=1)
    result.collect()
    result.collect()
    assert running.counts() == dict.fromkeys(range(200), 2)
    running.batch(IDS, version=1, fence=2).collect()
    assert running.counts() == dict.fromkeys(range(200), 4)


@pytest.mark.parametrize(
    ("reshape", "message"),
    [
        (lambda result: result.coalesce(1), "twice"),
        (lambda result: result.coalesce(3), "twice|rows of group"),
        (
            lambda result: result.sparkSession.range(0, 9, 1, 2).union(result),
            "ran partition|of group",
        ),
    ],
    ids=["merged", "partly merged", "shifted"],
)
def test_reshaped_partitions_are_refused(
    running: Running, reshape: Callable[[DataFrame], DataFrame], message: str
) -> None:
    running.batch(IDS, version=0, fence=1).collect()
    with pytest.raises(PythonException, match=rf"errors.Reshaped: .*({message})"):
        reshape(running.batch(IDS, version=1, fence=2)).collect()
    running.batch(IDS, version=1, fence=3).collect()
    assert running.counts() == dict.fromkeys(range(200), 4)


def test_rows_of_another_instance_are_refused(running: Running) -> None:
    shifted = (*running.routing.owners[1:], running.routing.owners[0])
    with pytest.raises(PythonException, match=r"errors.Reshaped: op, instance \d, has the key gr"):
        running.batch(IDS, version=0, fence=1, owners=shifted).collect()
    assert running.counts() == {}


def test_a_late_batch_attempt_is_refused(running: Running) -> None:
    running.batch(IDS, version=0, fence=2).collect()
    with pytest.raises(PythonException, match=r"errors\.Fenced: .* taken over by attempt 2 \(task"):
        running.batch([1, 2, 3, 4, 5, 6], version=0, fence=1).collect()
    assert running.counts() == dict.fromkeys(range(200), 2)


def test_the_report_of_the_newest_attempt_counts(spark: SparkSession) -> None:
    def report(fence: int, attempt: int) -> InstanceReport:
        return InstanceReport("op", 0, Version(3), fence, (), 0.0, 0.0, 0.0, (), attempt=attempt)

    reports = Reports(spark.sparkContext)
    for pair in [(1, 9), (2, 4), (2, 7), (2, 5), (1, 8)]:
        reports.send(report(*pair))
    assert reports.take(Version(3)) == {("op", 0): report(2, 7)}
