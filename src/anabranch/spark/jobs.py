"""The Spark jobs that a thread starts in a block, and whether one of them failed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark import SparkContext

_PATIENCE, _LOOK_SECONDS = 10.0, 0.005
_numbers = itertools.count()


class Jobs:
    """The jobs that a thread starts inside :func:`tagged`."""

    def __init__(self, context: SparkContext, tag: str) -> None:
        self._context = context
        self._tag = tag

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


@contextmanager
def tagged(context: SparkContext) -> Iterator[Jobs]:
    """Record the jobs that this thread starts in the block."""
    tag = f"anabranch-jobs-{next(_numbers)}"
    context.addJobTag(tag)
    try:
        yield Jobs(context, tag)
    finally:
        context.removeJobTag(tag)
