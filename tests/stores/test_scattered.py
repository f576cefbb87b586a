"""Parts in fragments: any sufficient holders give them, and what is lost is made again."""

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    DidNotHappen,
    StoreError,
)
from anabranch.state.capture import Capture, CheckpointSchema
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.stores import BackupStore, OperatorManifest, retrieve
from anabranch.stores.parts import Destination, back_up
from anabranch.stores.peers import PeerStore
from anabranch.stores.scattered import gathered, mended
from anabranch.testing import MemoryStore
from anabranch.units import Version

HOSTS = tuple("abcdef")
SCHEMA = CheckpointSchema(
    (pa.field("id", pa.int64(), nullable=False),), (), (pa.field("text", pa.string()),), False, 16
)


def capture(rows: int) -> Capture:
    ids = np.arange(rows)
    columns = [
        pa.array(ids),
        pa.array(ids.astype(np.uint64)),
        pa.array((ids % 16).astype(np.uint16)),
        pa.array(np.zeros(rows, bool)),
        pa.array([f"text {each}" for each in ids.tolist()]),
    ]
    table = pa.Table.from_arrays(columns, schema=SCHEMA.arrow())
    return Capture("op", 0, Version(7), None, KeyGroups.all(16), SCHEMA, table)


class Peers:
    """The nodes, each with a store; some may be silent."""

    def __init__(self, hosts: Sequence[str] = HOSTS) -> None:
        self.stores: dict[str, MemoryStore] = {host: MemoryStore() for host in hosts}
        self.silent: set[str] = set()

    def store(self) -> PeerStore:
        return PeerStore(lambda: {h: s for h, s in self.stores.items() if h not in self.silent})

    def lose(self, hosts: Collection[str], part: Part) -> None:
        for host in hosts:
            self.stores[host].delete(part.name)

    def back_up(self, rows: int = 1000, needed: int = 4) -> Part:
        return back_up(self.store(), capture(rows), Destination(holders=HOSTS, needed=needed))

    def ids(self, part: Part, groups: KeyGroups | None = None) -> list[int]:
        operator = OperatorManifest(SCHEMA, (part,))
        found = retrieve(self.store(), operator, groups=groups)
        return sorted(each for some in found for each in some.rows.column("id").to_pylist())


def test_each_holder_has_a_fragment_and_any_four_of_six_suffice() -> None:
    peers = Peers()
    part = peers.back_up(20_000)
    assert part.holders == HOSTS
    sizes = [peers.stores[host].size(part.name) for host in HOSTS]
    assert sum(sizes) < 1.6 * part.bytes
    for gone in combinations(HOSTS, 2):
        peers.silent = set(gone)
        assert peers.ids(part) == list(range(20_000))


@settings(max_examples=30, deadline=None)
@given(
    st.sets(st.sampled_from(HOSTS)),
    st.sets(st.sampled_from(HOSTS)),
    st.dictionaries(st.sampled_from(HOSTS), st.integers(0, 10**6), max_size=3),
)
def test_a_part_is_read_or_it_is_said_why_not(
    silent: set[str], lost: set[str], damaged: dict[str, int]
) -> None:
    """The rows are right, or the error is that of the store if a silent holder may have them."""
    peers = Peers()
    part = peers.back_up()
    peers.lose(lost, part)
    for host, bit in damaged.items():
        if host not in lost:
            data = bytearray(peers.stores[host].get(part.name).to_pybytes())
            data[bit // 8 % len(data)] ^= 1 << bit % 8
            peers.stores[host].put(part.name, bytes(data))
    peers.silent = silent
    whole = set(HOSTS) - lost - silent - damaged.keys()
    failed: CheckpointError | StoreError | None = None
    found: list[int] = []
    try:
        found = peers.ids(part)
    except (CheckpointError, StoreError) as error:
        failed = error
    if failed is None:
        assert found == list(range(1000))
        return
    assert len(whole) < part.needed
    if isinstance(failed, StoreError):
        assert silent
        assert set(failed.without) <= lost | damaged.keys()
        # Otherwise the query would forget the part, and nothing is known to be lost of it.
        assert failed.part == (part.name if failed.without else None)
    else:
        assert not silent
        assert failed.part == part.name


def test_a_few_groups_are_read_from_the_fragments_that_have_them() -> None:
    peers = Peers()
    part = peers.back_up(100_000)
    read: dict[str, int] = {}

    class Counting(MemoryStore):
        def __init__(self, host: str, of: BackupStore) -> None:
            super().__init__()
            self.host = host
            self.put(part.name, of.get(part.name))

        def get(self, name: str, offset: int = 0, length: int | None = None) -> pa.Buffer:
            found = super().get(name, offset, length)
            read[self.host] = read.get(self.host, 0) + found.size
            return found

    peers.stores = {host: Counting(host, store) for host, store in peers.stores.items()}
    assert peers.ids(part, KeyGroups.parse("3")) == list(range(3, 100_000, 16))
    assert sum(read.values()) < 1.5 * part.bytes


class Refusing(MemoryStore):
    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        raise DidNotHappen(f"no room for {name}")


def test_a_holder_that_is_full_is_done_without() -> None:
    peers = Peers()
    peers.stores["c"] = Refusing()
    part = peers.back_up()
    assert part.holders == ("a", "b", "d", "e", "f")
    peers.silent = {"a"}
    assert peers.ids(part) == list(range(1000))


def test_a_part_counts_if_one_more_holder_has_a_fragment_than_are_needed() -> None:
    peers = Peers()
    peers.stores |= {"c": Refusing(), "d": Refusing()}
    with pytest.raises(DidNotHappen, match="no room"):
        peers.back_up()


def test_lost_fragments_are_made_again_at_other_nodes() -> None:
    peers = Peers([*HOSTS, "x", "y"])
    part = peers.back_up(50_000)
    before = {host: peers.stores[host].get(part.name).to_pybytes() for host in HOSTS}
    peers.lose("bf", part)
    fresh = mended(peers.store(), replace(part, holders=tuple("acdef")), ("x", "y"))
    assert fresh.holders == ("a", "c", "d", "e", "x", "y")
    again = {peers.stores[host].get(part.name).to_pybytes() for host in "xy"}
    assert again == {before["b"], before["f"]}
    peers.silent = {"a", "c"}
    assert peers.ids(fresh) == list(range(50_000))


def test_copies_are_made_again_where_one_is_enough() -> None:
    peers = Peers([*HOSTS, "x", "y"])
    part = back_up(peers.store(), capture(1000), Destination(holders=tuple("abc")))
    peers.lose("a", part)
    peers.stores["b"].put(part.name, b"damaged")
    fresh = mended(peers.store(), part, ("x", "y"))
    assert fresh.holders == ("c", "x", "y")
    peers.silent = {"c", "x"}
    assert peers.ids(fresh) == list(range(1000))
    peers.lose("cxy", part)
    peers.silent = set()
    with pytest.raises(CheckpointError):
        mended(peers.store(), fresh, ("d",))


def test_what_cannot_be_read_cannot_be_mended() -> None:
    peers = Peers([*HOSTS, "x", "y", "z"])
    part = peers.back_up()
    peers.lose("bcf", part)
    with pytest.raises(CheckpointNotFound, match=f"{part.name}: 3 of its holders"):
        mended(peers.store(), part, ("x", "y", "z"))
    assert not peers.stores["x"].list()


def test_fragments_of_another_part_do_not_count() -> None:
    peers = Peers()
    part, other = peers.back_up(1000), peers.back_up(2000)
    for host in "abc":
        peers.stores[host].put(part.name, peers.stores[host].get(other.name))
    with pytest.raises(CheckpointError) as failed:
        peers.ids(part)
    assert failed.value.part == part.name


def test_a_fragment_that_is_not_the_one_in_the_manifest() -> None:
    peers = Peers()
    part = peers.back_up()
    with pytest.raises(CheckpointCorrupt, match="not the one in the manifest"):
        peers.ids(replace(part, checksum="0" * 16))


def test_a_slow_holder_is_not_waited_for() -> None:
    peers = Peers()
    part = peers.back_up()
    go_on = threading.Event()

    class Slow(MemoryStore):
        def get(self, name: str, offset: int = 0, length: int | None = None) -> pa.Buffer:
            assert go_on.wait(60)
            return super().get(name, offset, length)

    slow = Slow()
    slow.put(part.name, peers.stores["a"].get(part.name))
    peers.stores["a"] = slow
    threading.Timer(10, go_on.set).start()
    began = time.monotonic()
    store = peers.store()
    operator = OperatorManifest(SCHEMA, (part,))
    with gathered(store, part) as source:
        assert source.read(0, source.size).size == part.bytes
        took = time.monotonic() - began
    go_on.set()
    assert took < 9
    assert retrieve(store, operator)
