"""What is measured of a store by one request: bytes, and seconds that count once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from test_scattered import HOSTS, SCHEMA, Peers, capture

from anabranch.errors import DidNotHappen
from anabranch.stores.manifests import OperatorManifest
from anabranch.stores.meter import Meter, Metered
from anabranch.stores.parts import Destination, back_up
from anabranch.stores.retrieval import retrieve
from anabranch.stores.store import BackupStore
from anabranch.testing import MemoryStore


def test_fragments_that_are_stored_are_measured() -> None:
    store = Metered(Peers().store(), Meter())
    part = back_up(store, capture(20_000), Destination(holders=HOSTS, needed=4))
    cost = store.meter.cost
    assert cost.sent.bytes > part.bytes * 6 / 4, "labels come with the rows"
    assert cost.sent.seconds > 0
    (coded,) = cost.encoded
    assert (coded.data, coded.parity, coded.bytes) == (4, 2, part.bytes)
    assert coded.seconds > 0
    assert (cost.received.bytes, cost.recomputed) == (0, ())


def test_fragments_that_are_read_are_measured() -> None:
    peers = Peers()
    part = back_up(peers.store(), capture(20_000), Destination(holders=HOSTS, needed=4))
    peers.lose(part.holders[:2], part)
    store = Metered(peers.store(), Meter())
    retrieve(store, OperatorManifest(SCHEMA, (part,)))
    cost = store.meter.cost
    assert cost.received.bytes >= part.bytes
    assert {(one.data, one.parity) for one in cost.recomputed} == {(4, 2)}
    assert sum(one.bytes for one in cost.recomputed) >= part.bytes
    assert cost.sent.bytes == 0


def test_rows_have_the_length_that_was_asked_for() -> None:
    sizes = []
    for row in (4096, None):
        peers = Peers()
        part = back_up(
            peers.store(), capture(20_000), Destination(holders=HOSTS, needed=4, row=row)
        )
        assert peers.ids(part) == list(range(20_000))
        sizes.append(peers.stores["a"].size(part.name))
    assert sizes[0] > sizes[1], "more stripes have more checksums"


class Meeting(MemoryStore):
    """Two transfers are under way at the same time before either ends."""

    def __init__(self) -> None:
        super().__init__()
        self.both = threading.Barrier(2, timeout=60)

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        self.both.wait()
        super().put(name, data)
        self.both.wait()


def test_seconds_of_transfers_at_once_count_once() -> None:
    store = Metered(Meeting(), Meter())
    with ThreadPoolExecutor(2) as pool:
        spans = list(pool.map(lambda name: _alone(store, name), "ab"))
    total = store.meter.cost.sent
    assert total.bytes == 20
    assert total.seconds <= max(end for _, end in spans) - min(start for start, _ in spans)


def _alone(store: BackupStore, name: str) -> tuple[float, float]:
    begun = time.perf_counter()
    store.put(name, b"0123456789")
    return begun, time.perf_counter()


class Refusing(MemoryStore):
    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        raise DidNotHappen("no room")


def test_what_fails_does_not_count() -> None:
    store = Metered(Refusing(), Meter())
    with pytest.raises(DidNotHappen):
        store.put("a", b"x")
    assert store.meter.cost.sent.bytes == 0
    assert store.meter.cost.sent.seconds == 0.0
