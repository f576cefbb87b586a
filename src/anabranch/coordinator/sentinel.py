"""The sentinel: ends the jobs of a batch as soon as a node that the batch needs is gone.

Without it Spark tries the tasks of that node elsewhere, where their state is not, several times
over, and only then gives the batch up.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

_log = logging.getLogger("anabranch")
_LOOK_SECONDS = 0.05


class Sentinel:
    """Watches the nodes while jobs run. ``alive`` gives those there are."""

    def __init__(
        self, spark: SparkSession, query: str, alive: Callable[[], Collection[str]]
    ) -> None:
        self._context = spark.sparkContext
        self._alive = alive
        self._tag = f"anabranch-{query}"
        self._needed: frozenset[str] = frozenset()
        self._look = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sentinel", daemon=True)
        self._ended = False
        self._thread.start()

    @contextmanager
    def watching(self, hosts: Collection[str]) -> Iterator[None]:
        """End all jobs that are started in this block when one of the hosts is gone."""
        self._context.addJobTag(self._tag)
        self._needed = frozenset(hosts)
        self._look.set()
        try:
            yield
        finally:
            self._look.clear()
            self._needed = frozenset()
            self._context.removeJobTag(self._tag)

    def close(self) -> None:
        """Stop watching for good."""
        self._ended = True
        self._look.set()
        self._thread.join()

    def _watch(self) -> None:
        pause = threading.Event()
        while self._look.wait() and not self._ended:
            needed = self._needed
            gone = needed - frozenset(self._alive()) if needed else ()
            if gone and self._look.is_set() and self._needed is needed:
                _log.warning("%s: gone, and the batch with it", ", ".join(sorted(gone)))
                self._context.cancelJobsWithTag(self._tag)
            pause.wait(_LOOK_SECONDS)
