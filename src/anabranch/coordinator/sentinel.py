"""The sentinel: ends jobs as soon as a node that they need is gone.

Without it Spark tries the tasks of that node elsewhere, where their state is not, several times
over, and only then gives the jobs up.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from pyspark import SparkContext

_log = logging.getLogger("anabranch")
_LOOK_SECONDS = 0.05
_numbers = itertools.count()


@contextmanager
def watching(
    context: SparkContext, alive: Callable[[], Collection[str]], hosts: Collection[str]
) -> Iterator[None]:
    """End the jobs that this thread starts in the block when one of the hosts is gone.

    ``alive`` gives the hosts that there are.
    """
    tag = f"anabranch-{next(_numbers)}"
    over = threading.Event()
    needed = frozenset(hosts)

    def watch() -> None:
        told = False
        while not over.wait(_LOOK_SECONDS):
            gone = needed - frozenset(alive())
            if gone and not over.is_set():
                if not told:
                    _log.warning("%s: gone, and what needs it", ", ".join(sorted(gone)))
                told = True
                # Again and again: a job may have been about to start.
                context.cancelJobsWithTag(tag)

    context.addJobTag(tag)
    thread = threading.Thread(target=watch, name="sentinel", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        context.removeJobTag(tag)
