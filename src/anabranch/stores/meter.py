"""A store that measures what goes to it and comes from it, and what coding takes in between."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar, runtime_checkable

import pyarrow as pa

from anabranch.fragments.cost import Coded, Cost, Standing, Transferred, covered
from anabranch.stores.store import BackupStore

T = TypeVar("T")
Shape = tuple[int, int]
"""m and k."""


class Meter:
    """Adds up what one request did with a store. Several threads may report to it.

    Transfers at the same time share a link, so seconds count once for all of them.
    """

    def __init__(self) -> None:
        self._sent, self._received = _Flow(), _Flow()
        self._lock = threading.Lock()
        self._encoded: dict[Shape, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        self._recomputed: dict[Shape, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        self._standing: Standing | None = None

    @property
    def cost(self) -> Cost:
        """What was done so far."""
        with self._lock:
            return Cost(
                self._sent.total,
                self._received.total,
                tuple(Coded(*shape, *took) for shape, took in self._encoded.items()),
                tuple(Coded(*shape, *took) for shape, took in self._recomputed.items()),
                self._standing,
            )

    def sent(self, size: int, begun: float) -> None:
        """So many bytes, on the way since then, have just arrived elsewhere."""
        self._sent.add(size, begun)

    def received(self, size: int, begun: float) -> None:
        """So many bytes, on the way since then, have just arrived here."""
        self._received.add(size, begun)

    def encoded(self, shape: Shape, size: int, seconds: float) -> None:
        """Bytes of a state were coded into fragments."""
        self._add(self._encoded, shape, size, seconds)

    def recomputed(self, shape: Shape, size: int, seconds: float) -> None:
        """Bytes of a state were computed from fragments."""
        self._add(self._recomputed, shape, size, seconds)

    def found(self, standing: Standing) -> None:
        """A save found these nodes."""
        with self._lock:
            self._standing = standing

    def _add(
        self, to: dict[Shape, tuple[int, float]], shape: Shape, size: int, seconds: float
    ) -> None:
        with self._lock:
            bytes_before, seconds_before = to[shape]
            to[shape] = bytes_before + size, seconds_before + max(0.0, seconds)


class Metered:
    """A store whose transfers are reported to a meter. What fails does not count."""

    def __init__(self, store: BackupStore, meter: Meter) -> None:
        self._store = store
        self.meter = meter

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        """See :meth:`BackupStore.put`."""
        begun = time.perf_counter()
        self._store.put(name, data)
        self.meter.sent(memoryview(data).nbytes, begun)

    def put_all(self, blocks: Mapping[str, pa.Buffer | bytes]) -> None:
        """See :meth:`BackupStore.put_all`."""
        begun = time.perf_counter()
        self._store.put_all(blocks)
        self.meter.sent(sum(memoryview(data).nbytes for data in blocks.values()), begun)

    def get(self, name: str, offset: int = 0, length: int | None = None) -> pa.Buffer:
        """See :meth:`BackupStore.get`."""
        begun = time.perf_counter()
        found = self._store.get(name, offset, length)
        self.meter.received(found.size, begun)
        return found

    def list(self, prefix: str = "") -> Sequence[str]:
        """See :meth:`BackupStore.list`."""
        return self._store.list(prefix)

    def delete(self, name: str) -> None:
        """See :meth:`BackupStore.delete`."""
        self._store.delete(name)

    def delete_all(self, names: Collection[str]) -> None:
        """See :meth:`BackupStore.delete_all`."""
        self._store.delete_all(names)

    def size(self, name: str) -> int:
        """See :meth:`BackupStore.size`."""
        return self._store.size(name)

    @property
    def unmetered(self) -> BackupStore:
        """The store itself, for what does not come over the network."""
        return self._store


@runtime_checkable
class CodingStore(BackupStore, Protocol):
    """A store that codes what it is given, for holders of its own."""

    def coded(self, data: int, parity: int, row: int | None) -> CodingStore:
        """The same store, which codes with this m and k from now on.

        ``row`` bytes of each fragment are coded at a time; None: as many as suit most states.
        """

    def metered(self, meter: Meter) -> CodingStore:
        """The same store, which reports its transfers with the holders, and what it codes."""


def metered(store: BackupStore, meter: Meter) -> BackupStore:
    """A store that reports to a meter what goes over the network."""
    return store.metered(meter) if isinstance(store, CodingStore) else Metered(store, meter)


class Stopwatch:
    """Adds up the seconds of some steps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the seconds of a block."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begun

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The items, with the seconds counted that each takes to be made."""
        iterator = iter(items)
        while True:
            with self.running():
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item


class _Flow:
    """Bytes in one direction, and when they were on the way."""

    def __init__(self) -> None:
        self._bytes = 0
        self._spans: list[tuple[float, float]] = []
        self._lock = threading.Lock()

    def add(self, size: int, begun: float) -> None:
        """So many bytes have just arrived."""
        with self._lock:
            self._bytes += size
            self._spans.append((begun, time.perf_counter()))

    @property
    def total(self) -> Transferred:
        with self._lock:
            return Transferred(self._bytes, covered(self._spans))
