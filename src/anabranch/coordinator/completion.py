"""What has to be done around the jobs of a batch, and in which order.

Before: a sink that cannot take results back is given a batch only once its offsets are flushed.
What it is given under a version must be what it would be given again after a power failure. The
driver builds the frames of the batch meanwhile.

After, when all instances have reported: a look whether this driver still has the query, the sinks
show the results, and the batch is committed. A driver that dies between the sinks and the commit
has the batch run again, and sinks replace what they have of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

from anabranch.coordinator.commits import Commit
from anabranch.coordinator.ledger import Ledger
from anabranch.coordinator.watermarks import Times
from anabranch.protocols.orders import RunBatch
from anabranch.spark.logs import digest
from anabranch.spark.sinks.sink import Delivery, Replaceable, Sink
from anabranch.units import Version


class Completion:
    """Brings the batches of a query into its sinks and its log."""

    def __init__(self, query: str, sinks: Sequence[Sink], ledger: Ledger) -> None:
        self._query = query
        self._sinks = sinks
        self._ledger = ledger
        self._for_good = not all(isinstance(sink, Replaceable) for sink in sinks)
        """Whether a sink cannot take back what it was given."""
        self._half_done = True
        """Whether sinks may have results of the next batch already."""
        self._beginning = ThreadPoolExecutor(1, "anabranch-begin")

    def take_over(self, stored: Version) -> None:
        """Take over from an earlier run; what it delivered after a checkpoint may not be flushed.

        ``stored`` is the newest checkpoint.
        """
        for sink in self._sinks:
            if isinstance(sink, Replaceable):
                sink.resume(self._query, stored)

    @contextmanager
    def begun(self, order: RunBatch) -> Iterator[Callable[[], Delivery]]:
        """Run :meth:`begin` while the block builds the frames of the batch.

        What it yields waits for the delivery. No attempt leaves anything behind that still flushes.
        """
        beginning = self._beginning.submit(self.begin, order)
        try:
            yield beginning.result
        finally:
            wait([beginning])

    def begin(self, order: RunBatch) -> Delivery:
        """Get ready for an attempt; what its sinks are to be told."""
        if self._for_good and order.deliver:
            self._ledger.spark.flush(order.version)
        epoch = self._ledger.reign.epoch
        return Delivery(self._query, order.version, self._half_done, epoch)

    def end(self, order: RunBatch, delivery: Delivery, times: Times) -> Commit:
        """Show the results of an attempt that has succeeded, and commit the batch.

        ``times`` are the event times that have been seen up to it.
        """
        if order.deliver:
            self._ledger.reign.check()
            self._half_done = True
            for sink in self._sinks:
                sink.commit(delivery)
        offsets = digest(self._ledger.spark.offsets(order.version))
        commit = Commit(order.version, times, offsets, order.arrangement)
        self._ledger.commit(commit)
        if order.deliver:
            self._half_done = False
        return commit
