"""Whether stages still have tasks: what Spark's scheduler says of jobs that are over."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from pyspark import TaskContext, cloudpickle
from pyspark.sql import SparkSession

from anabranch.spark import jobs
from anabranch.spark.jobs import Stages

pytestmark = pytest.mark.spark
# Workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SECONDS = 120


def until_told(folder: Path, numbers: Iterator[int]) -> Iterator[int]:
    """Run until there is a file that says so."""
    context = TaskContext.get()
    assert context is not None
    (folder / "stage").write_text(str(context.stageId()))
    (folder / "started").touch()
    wait_for(folder / "end")
    (folder / "ended").touch()
    yield from numbers


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not file.exists():
        assert time.monotonic() < deadline, f"there is no {file}"
        time.sleep(0.01)


@pytest.fixture
def stage(spark: SparkSession, tmp_path: Path) -> Iterator[int]:
    """A stage with a task that runs until it is told to end."""
    numbers = spark.sparkContext.parallelize([1], 1).mapPartitions(partial(until_told, tmp_path))
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(numbers.collect)
        wait_for(tmp_path / "started")
        yield int((tmp_path / "stage").read_text())
        (tmp_path / "end").touch()
        assert job.result() == [1]


def test_a_stage_has_ended_when_its_last_task_has(
    spark: SparkSession, tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = Stages(spark.sparkContext)
    looks = 0

    class Clock:
        """Time passes as it does; the task is told to end at the third look."""

        monotonic = staticmethod(time.monotonic)

        @staticmethod
        def sleep(seconds: float) -> None:
            nonlocal looks
            looks += 1
            if looks == 3:
                assert not (tmp_path / "ended").exists()
                (tmp_path / "end").touch()
            time.sleep(seconds)

    monkeypatch.setattr(jobs, "time", Clock)
    assert stages.ended({stage})
    assert looks >= 3
    assert (tmp_path / "ended").exists()


def test_it_is_not_waited_for_longer_than_that(
    spark: SparkSession, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_PATIENCE", 0.05)
    assert not Stages(spark.sparkContext).ended({stage, 10**6})


def test_other_stages_are_not_waited_for(
    spark: SparkSession, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_PATIENCE", 0.0)
    assert Stages(spark.sparkContext).ended({stage - 1, stage + 1})


def test_jobs_that_ran_leave_nothing(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_PATIENCE", 5.0)
    stages = Stages(spark.sparkContext)
    for _ in range(10):
        spark.sparkContext.parallelize([1, 2], 2).count()
        assert stages.ended(range(10**6))


class Queue:
    """As that of Spark's fair scheduler: with pools, which are there though they are empty."""

    def __init__(self, *inside: object) -> None:
        self.inside = list(inside)

    def isEmpty(self) -> bool:  # noqa: N802
        return not self.inside

    def toArray(self) -> list[object]:  # noqa: N802
        return self.inside


class Schedulable:
    def __init__(self, stage: int, queue: Queue | None = None) -> None:
        self.stage, self.queue = stage, queue

    def stageId(self) -> int:  # noqa: N802
        return self.stage

    def schedulableQueue(self) -> Queue | None:  # noqa: N802
        return self.queue


def test_pools_are_looked_into() -> None:
    inner = Queue(Schedulable(7), Schedulable(9))
    queue = Queue(Schedulable(-1, Queue()), Schedulable(-1, inner), Schedulable(8))
    assert jobs._has_one_of(queue, {8})
    assert jobs._has_one_of(queue, {9})
    assert not jobs._has_one_of(queue, {-1, 6})
