"""Fragments are read in turn from all holders, around those that are slow, silent or corrupt."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anabranch.errors import CheckpointCorrupt, CheckpointError, DidNotHappen, StoreError
from anabranch.fragments.layout import ROW
from anabranch.state.capture import Capture, CheckpointSchema
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.stores import OperatorManifest, gathering, retrieve
from anabranch.stores.gathering import Gathered, Held, Holders, Wanted
from anabranch.stores.parts import Destination, back_up
from anabranch.stores.peers import PeerStore
from anabranch.stores.retrieval import retrieve_in_pieces
from anabranch.stores.scattered import held, mended, scatter
from anabranch.testing import MemoryStore
from anabranch.units import Version

MB = 1 << 20
HOSTS = tuple("abcdef")
SIZE = 24 * MB + 12_345
DATA = np.random.default_rng(1).bytes(SIZE)


class Counting(MemoryStore):
    """A holder of which it is known what it has sent, and which may be made slow or silent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = self.requests = 0
        self.delay = 0.0
        self.silent_after: int | None = None
        self.go_on = threading.Event()

    def get(self, name: str, offset: int = 0, length: int | None = None) -> pa.Buffer:
        self.requests += 1
        if self.silent_after is not None and self.requests > self.silent_after:
            raise DidNotHappen("it does not answer", host="it")
        if self.delay and self.requests > 1:
            self.go_on.wait(self.delay)
        found = super().get(name, offset, length)
        self.sent += found.size
        return found


@dataclass
class Peers:
    """Holders of fragments of a part: nodes of its query, or standing nodes."""

    stores: dict[str, Counting]
    part: Part
    standing: bool

    @property
    def store(self) -> PeerStore:
        return PeerStore(lambda: self.stores)

    @property
    def wanted(self) -> Wanted:
        if not self.standing:
            return held(self.store, self.part)
        # Each is reached for itself, and how long the state is was not noted.
        each = (Held(host, store, "p") for host, store in self.stores.items())
        return Wanted("p", self.part.needed, tuple(each))

    @property
    def sent(self) -> dict[str, int]:
        return {host: store.sent for host, store in self.stores.items()}


FRAGMENTS: dict[str, bytes] = {}


def scattered(standing: bool) -> Peers:
    """Bytes in fragments, any four of which give them."""
    part = Part("p", "op", Version(1), None, KeyGroups.all(8), HOSTS, 4, bytes=SIZE)
    stores = {host: Counting() for host in HOSTS}
    peers = Peers(stores, part, standing)
    if not FRAGMENTS:
        scatter(peers.store, part, pa.py_buffer(DATA))
        FRAGMENTS.update({host: bytes(store.get("p")) for host, store in stores.items()})
    for host, store in stores.items():
        store.put("p", FRAGMENTS[host])
        store.sent = store.requests = 0
    return peers


@pytest.fixture(params=["peers", "standing"])
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    made = scattered(request.param == "standing")
    yield made
    for store in made.stores.values():
        store.go_on.set()


def read(peers: Peers, start: int = 0, end: int = SIZE, near: str = "") -> bytes:
    pool = gathering.threads()
    try:
        found = Gathered(peers.wanted, Holders(pool, near))
        return found.read(start, end - start).to_pybytes()
    finally:
        pool.shutdown(wait=False)


def test_all_holders_send_equally_much(peers: Peers) -> None:
    """With the first m of them, as before, each of these would send a quarter."""
    assert read(peers) == DATA
    assert sum(peers.sent.values()) < 1.02 * SIZE
    assert max(peers.sent.values()) < 1.1 * SIZE / len(HOSTS)
    assert max(store.requests for store in peers.stores.values()) < 10


def test_a_few_bytes_are_read_from_the_rows_that_have_them(peers: Peers) -> None:
    assert read(peers, 0, 0) == b""
    labels = sum(peers.sent.values())
    start = ROW - 500
    assert read(peers, start, start + 1000) == DATA[start : start + 1000]
    assert sum(peers.sent.values()) == 2 * labels + 2 * ROW


def test_a_node_reads_its_own_fragment_first(peers: Peers) -> None:
    assert read(peers, near="d") == DATA
    assert peers.stores["d"].sent > SIZE / 4
    others = [sent for host, sent in peers.sent.items() if host != "d"]
    assert max(others) - min(others) <= gathering._ROUND / 4


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, SIZE),
    st.integers(0, SIZE),
    st.sets(st.sampled_from(HOSTS), max_size=3),
    st.dictionaries(st.sampled_from(HOSTS), st.integers(0, 4 * MB), max_size=3),
    st.dictionaries(st.sampled_from(HOSTS), st.integers(1, 6), max_size=2),
    st.booleans(),
)
def test_any_range_is_read_or_it_is_said_why_not(
    one: int,
    other: int,
    lost: set[str],
    damaged: dict[str, int],
    silent: dict[str, int],
    standing: bool,
) -> None:
    peers = scattered(standing)
    start, end = sorted((one, other))
    for host, at in damaged.items():
        data = bytearray(FRAGMENTS[host])
        data[at] ^= 1
        peers.stores[host].put("p", bytes(data))
    for host in lost:
        peers.stores[host].delete("p")
    for host, after in silent.items():
        peers.stores[host].silent_after = after
    failed: CheckpointError | StoreError | None = None
    try:
        assert read(peers, start, end) == DATA[start:end]
    except (CheckpointError, StoreError) as error:
        failed = error
    if failed is not None:
        assert len(lost | damaged.keys() | silent.keys()) > 2
        known = isinstance(failed, CheckpointError) or failed.without
        assert failed.part == ("p" if known else None)
        assert isinstance(failed, CheckpointError) or silent


def test_damage_that_is_never_in_the_same_stripe_is_read_around(peers: Peers) -> None:
    for number, host in enumerate(HOSTS):
        data = bytearray(FRAGMENTS[host])
        data[number * MB // 2] ^= 1
        peers.stores[host].put("p", bytes(data))
    assert read(peers) == DATA
    for host in "abc":
        data = bytearray(FRAGMENTS[host])
        data[2 * MB] ^= 1
        peers.stores[host].put("p", bytes(data))
    with pytest.raises(CheckpointCorrupt, match=r"p: too few rows of stripe 16 can be read"):
        read(peers)


@pytest.mark.parametrize("trouble", ["slow", "silent", "corrupt"])
def test_a_holder_in_trouble_costs_some_stripes_and_is_left_out(peers: Peers, trouble: str) -> None:
    bad = peers.stores["b"]
    match trouble:
        case "slow":
            bad.delay = 60
        case "silent":
            bad.silent_after = 2
        case "corrupt":
            data = bytearray(FRAGMENTS["b"])
            data[: 3 * MB : 4096] = b"x" * len(data[: 3 * MB : 4096])
            bad.put("p", bytes(data))
    began = time.monotonic()
    assert read(peers) == DATA
    assert time.monotonic() - began < 20
    assert bad.requests <= 1 + gathering._ROUNDS_AHEAD
    assert sum(peers.sent.values()) < 1.3 * SIZE


def test_if_none_answers_others_are_asked_after_a_while(peers: Peers) -> None:
    """There is nobody to compare them with: all holders that were asked first hang."""
    for host in "abcd":
        peers.stores[host].delay = 60
    part = replace(peers.part, needed=2, holders=tuple("abcd"))
    scatter(peers.store, part, pa.py_buffer(DATA))
    peers.part = part
    for host in "abcd":
        peers.stores[host].sent = peers.stores[host].requests = 0
    peers.stores = {host: peers.stores[host] for host in "abcd"}
    for host in "cd":
        peers.stores[host].delay = 0
    began = time.monotonic()
    assert read(peers) == DATA
    assert time.monotonic() - began < 20


def test_of_two_that_have_the_same_fragment_one_is_enough(peers: Peers) -> None:
    peers.stores["f"].put("p", FRAGMENTS["a"])
    for lost in ("b", "e"):
        peers.stores[lost].delete("p")
        if lost == "b":
            assert read(peers) == DATA
    with pytest.raises(CheckpointError, match="p: 3 of its holders"):
        read(peers)


def test_a_fragment_that_is_corrupt_at_one_holder_is_read_at_another(peers: Peers) -> None:
    peers.stores["f"].put("p", FRAGMENTS["a"])
    peers.stores["b"].delete("p")
    data = bytearray(FRAGMENTS["a"])
    data[: 3 * MB : 4096] = b"x" * len(data[: 3 * MB : 4096])
    peers.stores["a"].put("p", bytes(data))
    assert read(peers) == DATA


SCHEMA = CheckpointSchema(
    (pa.field("id", pa.int64(), nullable=False),),
    (),
    (pa.field("raw", pa.binary(64)),),
    False,
    128,
)


def capture(rows: int, version: int = 7, base: int | None = None, seed: int = 0) -> Capture:
    ids = np.arange(rows) * (1 + seed)
    columns = [
        pa.array(ids),
        pa.array(ids.astype(np.uint64)),
        pa.array((ids * 7919 % 128).astype(np.uint16)),
        pa.array(np.full(rows, base is not None) & (ids % 5 == 0)),
        pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(64), rows, [None, pa.py_buffer(np.random.default_rng(seed).bytes(64 * rows))]
        ),
    ]
    table = pa.Table.from_arrays(columns, schema=SCHEMA.arrow())
    since = None if base is None else Version(base)
    return Capture("op", 0, Version(version), since, KeyGroups.all(128), SCHEMA, table)


@pytest.mark.parametrize("needed", [1, 4])
def test_an_eighth_of_the_groups_is_at_most_a_sixth_of_the_bytes(needed: int) -> None:
    holders = HOSTS if needed > 1 else HOSTS[:2]
    stores = {host: Counting() for host in holders}
    store = PeerStore(lambda: stores)
    part = back_up(store, capture(350_000), Destination(holders=holders, needed=needed))
    assert part.bytes > 24 * MB
    for first in (0, 40, 112):
        for each in stores.values():
            each.sent = 0
        groups = KeyGroups(((first, first + 16),))
        (found,) = retrieve(store, OperatorManifest(SCHEMA, (part,)), groups=groups)
        assert found.rows.num_rows == pytest.approx(350_000 / 8, rel=0.01)
        assert sum(each.sent for each in stores.values()) <= part.bytes / 6


def rows_of(captures: list[Capture]) -> Counter[tuple[object, ...]]:
    return Counter(
        (each.version, *row.values()) for each in captures for row in each.rows.to_pylist()
    )


@example(4, KeyGroups.all(128), 20_000)
@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([1, 4]),
    st.frozensets(st.integers(0, 127), min_size=1).map(KeyGroups.of),
    st.integers(1, 400_000),
)
def test_pieces_are_the_whole(needed: int, groups: KeyGroups, piece: int) -> None:
    """Whatever the size of a piece, they have all rows of their groups, in the order of these."""
    stores = {host: Counting() for host in HOSTS}
    store = PeerStore(lambda: stores)
    taken = [capture(3000), capture(900, 8, 7, seed=1), capture(700, 9, 8, seed=2)]
    to = Destination(holders=HOSTS, needed=needed)
    chain = OperatorManifest(SCHEMA, tuple(back_up(store, each, to) for each in taken))
    whole = retrieve(store, chain, groups=groups)
    pieces = list(retrieve_in_pieces(store, chain, groups=groups, piece=piece))
    assert rows_of([each for some in pieces for each in some]) == rows_of(whole)
    of = [{group for each in some for group in each.groups} for some in pieces]
    assert sorted(group for each in of for group in each) == list(groups)
    assert all(max(one) < min(following) for one, following in pairwise(of))
    for some in pieces:
        assert [each.version for each in some] == [7, 8, 9]
        assert len({str(each.groups) for each in some}) == 1
        if len(some[0].groups) > 1:
            assert sum(each.rows.nbytes for each in some) < 2 * piece + 40_000


@pytest.mark.parametrize("needed", [1, 4])
def test_the_owner_reads_its_own_files_and_nothing_of_others(needed: int) -> None:
    stores = {host: Counting() for host in (*HOSTS, "o")}
    store = PeerStore(lambda: stores)

    def keep(name: str, path: Path) -> bool:
        stores["o"].put(name, path.read_bytes())
        return True

    to = Destination(holders=HOSTS, needed=needed, owner="o", keep=keep)
    taken = [capture(30_000), capture(900, 8, 7, seed=1)]
    chain = OperatorManifest(SCHEMA, tuple(back_up(store, each, to) for each in taken))
    full, _ = chain.parts
    assert full.owner == "o"
    assert Part.from_json(full.to_json()) == full
    assert not full.available(["o"]), "it is no holder"
    for each in stores.values():
        each.sent = 0

    def sent() -> int:
        return sum(each.sent for host, each in stores.items() if host != "o")

    for piece in (100_000, 64 * MB):
        own = [each for some in retrieve_in_pieces(store, chain, near="o", piece=piece)
               for each in some]  # fmt: skip
        assert sent() == 0
        others = [each for some in retrieve_in_pieces(store, chain, piece=piece) for each in some]
        assert rows_of(own) == rows_of(others)
        assert sent() > 0
        stores["o"].sent = 0
        for each in stores.values():
            each.sent = 0
    data = bytearray(stores["o"].get(full.own_name))
    data[len(data) // 2] ^= 1
    stores["o"].put(full.own_name, bytes(data))
    for spoil in (lambda: None, lambda: stores["o"].delete(full.own_name), lambda: stores.pop("o")):
        spoil()
        again = retrieve(store, chain, near="o")
        assert rows_of(again) == rows_of(others)
    stores["o"] = Counting()
    store.delete_all([name for part in chain.parts for name in part.names])
    assert not any(each.list() for each in stores.values())


def test_the_owner_makes_lost_fragments_again_without_reading_the_others() -> None:
    stores = {host: Counting() for host in (*HOSTS, "o", "x", "y")}
    store = PeerStore(lambda: stores)

    def keep(name: str, path: Path) -> bool:
        stores["o"].put(name, path.read_bytes())
        return True

    to = Destination(holders=HOSTS, needed=4, owner="o", keep=keep)
    part = back_up(store, capture(30_000), to)
    before = {host: bytes(stores[host].get(part.name)) for host in HOSTS}
    for damaged in (False, True):
        for host in "bf":
            stores[host].delete(part.name)
        for each in stores.values():
            each.sent = 0
        fresh = mended(store, replace(part, holders=tuple("acde")), ("x", "y"), near="o")
        assert fresh.holders == tuple("acdexy")
        again = {bytes(stores[host].get(part.name)) for host in "xy"}
        assert again == {before["b"], before["f"]}
        read_of_others = sum(stores[host].sent for host in "acde")
        assert (read_of_others > part.bytes) is damaged, "but for the labels"
        stores["o"].put(part.own_name, bytes(stores["o"].get(part.own_name))[:-9] + b"x" * 9)


def test_a_file_that_its_owner_cannot_keep() -> None:
    stores = {host: Counting() for host in HOSTS}
    to = Destination(holders=HOSTS, needed=4, owner="o", keep=lambda name, path: False)
    part = back_up(PeerStore(lambda: stores), capture(1000), to)
    assert (part.owner, part.names) == ("", part.copies)


def test_the_next_piece_is_read_while_one_is_in_use() -> None:
    stores = {host: Counting() for host in HOSTS}
    store = PeerStore(lambda: stores)
    part = back_up(store, capture(100_000), Destination(holders=HOSTS, needed=4))
    pieces = retrieve_in_pieces(store, OperatorManifest(SCHEMA, (part,)), piece=MB)
    next(pieces)  # with the labels it is less than two pieces have
    deadline = time.monotonic() + 20
    while sum(each.sent for each in stores.values()) <= 2 * MB:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pieces.close()


def test_a_chain_that_does_not_lead_there_is_refused_before_anything_is_read() -> None:
    stores = {host: Counting() for host in HOSTS}
    store = PeerStore(lambda: stores)
    part = back_up(store, capture(1000), Destination(holders=HOSTS, needed=4))
    gap = replace(part, base=Version(5))
    with pytest.raises(CheckpointError, match="to no version"):
        retrieve_in_pieces(store, OperatorManifest(SCHEMA, (gap,)))
    assert not any(each.requests for each in stores.values())
