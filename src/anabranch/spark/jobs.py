"""Jobs that were run on behalf of something: cancelling them, failures, and what still runs."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from pyspark import SparkContext

_PATIENCE, _LOOK_SECONDS = 10.0, 0.005
_CANCEL_SECONDS = 0.05
_numbers = itertools.count()


class Jobs:
    """The jobs that a thread starts inside :func:`tagged`."""

    def __init__(self, context: SparkContext, tag: str) -> None:
        self._context = context
        self._tag = tag
        self._over = threading.Event()
        self._cancelling: threading.Thread | None = None

    def cancel(self) -> None:
        """Cancel these jobs, and those that are started later. Does not wait."""
        if self._cancelling is None:
            self._cancelling = threading.Thread(
                target=self._cancel, name="anabranch-cancel", daemon=True
            )
            self._cancelling.start()

    def _cancel(self) -> None:
        while not self._over.is_set():
            # Again and again: a job may have been about to start.
            self._context.cancelJobsWithTag(self._tag)
            self._over.wait(_CANCEL_SECONDS)

    def end(self) -> None:
        """No job is started any more."""
        self._over.set()
        if self._cancelling is not None:
            self._cancelling.join()

    def any_failed(self) -> bool:
        """Whether one of them failed, even if its error was caught."""
        deadline = time.monotonic() + _PATIENCE
        # Spark notes the end of a job a little after it has told who waits for it.
        while "RUNNING" in (states := self._states()) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return "FAILED" in states

    def _states(self) -> set[str]:
        tracker = self._context._jsc.sc().statusTracker()
        found = [tracker.getJobInfo(job) for job in tracker.getJobIdsForTag(self._tag)]
        return {str(info.get().status()) for info in found if info.isDefined()}


class Stages:
    """Which stages still have tasks.

    A job is over once every partition was computed by some attempt. Where a stage was tried again,
    another attempt at a partition may run on, or have been sent to its executor and begin later.
    """

    def __init__(self, context: SparkContext) -> None:
        # The scheduler's own queue, as it is asked with every batch: that takes a tenth of a
        # millisecond. A set of tasks leaves it with its last task.
        self._queue = context._jsc.sc().taskScheduler().rootPool().schedulableQueue()

    def ended(self, stages: Collection[int]) -> bool:
        """Whether these stages have no task that runs or will; waits ten seconds for it."""
        deadline = time.monotonic() + _PATIENCE
        while _has_one_of(self._queue, stages):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True


def _has_one_of(queue: Any, stages: Collection[int]) -> bool:
    """Whether a queue of the scheduler, or a pool in it, has tasks of these stages."""
    if queue.isEmpty():
        return False
    for each in queue.toArray():
        pool = each.schedulableQueue()
        if each.stageId() in stages if pool is None else _has_one_of(pool, stages):
            return True
    return False


@contextmanager
def tagged(context: SparkContext) -> Iterator[Jobs]:
    """Record the jobs that this thread starts in the block."""
    tag = f"anabranch-jobs-{next(_numbers)}"
    context.addJobTag(tag)
    jobs = Jobs(context, tag)
    try:
        yield jobs
    finally:
        jobs.end()
        context.removeJobTag(tag)
