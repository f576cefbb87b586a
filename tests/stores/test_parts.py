"""From tables into a store and back out of it, as captures and as rows."""

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    DidNotHappen,
    MayHaveHappened,
    SchemaChanged,
    StoreError,
)
from anabranch.state import schema as types
from anabranch.state.capture import Capture, CheckpointSchema, capture
from anabranch.state.groups import KeyGroups, assign
from anabranch.state.keys import KeyLayout
from anabranch.state.part import Part
from anabranch.state.partition import partition
from anabranch.state.restore import restore
from anabranch.state.table import StateTable, TableLayout
from anabranch.stores import (
    BackupStore,
    Manifest,
    Manifests,
    OperatorManifest,
    back_up,
    read_state,
    retrieve,
    state_rows,
    state_schema,
)
from anabranch.stores.manifests import open_checkpoints
from anabranch.stores.parts import Destination
from anabranch.stores.peers import PeerStore
from anabranch.stores.retrieval import retrieve_in_pieces
from anabranch.testing import FaultyStore, MemoryStore
from anabranch.units import Version

GROUPS = 8
LAYOUT = TableLayout(
    KeyLayout([pa.field("word", pa.string())], ["slot"], GROUPS),
    types.schema(word=types.int64, key_group=types.string),
)
WORDS = [f"w{i}" for i in range(100)]


def changed(table: StateTable, version: int, base: int | None, first: int, last: int) -> Capture:
    """A version that sets some words to the version and deletes the word after them."""
    with table.lock(0):
        table.begin(Version(version), 0)
        positions = np.arange(first, last + 1)
        keys = LAYOUT.key.encode(
            [pa.array(WORDS).take(pa.array(positions))],
            positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15),
            [positions % 2],
        )
        rows = table.rows(keys)
        table.set("word", rows, np.full(len(rows), version))
        table.set("key_group", rows, [str(version)] * len(rows))
        table.delete(rows[-1:])
        of = None if base is None else Version(base)
        taken = capture(table, "counter", 0, groups=KeyGroups.all(GROUPS), base=of)
        table.mark_clean()
        table.finish()
    return taken


@pytest.fixture(scope="module")
def captures() -> list[Capture]:
    folder = Path(tempfile.mkdtemp())
    table = StateTable.create(folder, LAYOUT)
    taken = [
        changed(table, 0, None, 0, 60),
        changed(table, 1, 0, 40, 80),
        changed(table, 2, 1, 5, 9),
    ]
    table.destroy()
    shutil.rmtree(folder, ignore_errors=True)
    return taken


EXPECTED = {
    **{f"w{i}": 0 for i in range(60)}, **{f"w{i}": 1 for i in range(40, 80)},
    **{f"w{i}": 2 for i in range(5, 9)},
}  # fmt: skip
del EXPECTED["w9"]


def stored(store: MemoryStore, captures: list[Capture]) -> Manifest:
    """The captures in a store, the first of them as two instances had taken it."""
    halves = partition(captures[:1], dict(enumerate(assign(GROUPS, 2))))
    first = [back_up(store, part) for parts in halves.values() for part in parts]
    rest = [back_up(store, taken) for taken in captures[1:]]
    schema = CheckpointSchema.of(LAYOUT)
    operator = OperatorManifest(schema, tuple(first)).extended(rest, {})
    Manifests(store).put(Manifest(captures[-1].version, {"counter": operator}))
    latest = Manifests(store).latest()
    assert latest is not None
    return latest


def words(table: pa.Table) -> dict[str, int]:
    found = dict(zip(table["word"].to_pylist(), table["state_word"].to_pylist(), strict=True))
    assert len(found) == table.num_rows
    return found


def test_state_is_read_as_rows(captures: list[Capture]) -> None:
    store = MemoryStore()
    manifest = stored(store, captures)
    table = read_state(store, manifest, "counter")
    assert table.schema == state_schema(manifest.operators["counter"].schema)
    assert table.column_names == ["word", "slot", "key_group", "state_word", "state_key_group"]
    assert words(table) == EXPECTED
    assert table["slot"].to_pylist() == [int(w[1:]) % 2 for w in table["word"].to_pylist()]
    assert table["state_key_group"].to_pylist() == [str(v) for v in table["state_word"].to_pylist()]
    assert words(state_rows(captures)) == EXPECTED
    assert set(table["key_group"].to_pylist()) == set(range(GROUPS))


@given(st.frozensets(st.integers(0, GROUPS)).map(KeyGroups.of))
def test_state_of_some_groups(captures: list[Capture], groups: KeyGroups) -> None:
    store = MemoryStore()
    manifest = stored(store, captures)
    every = read_state(store, manifest, "counter")
    some = read_state(store, manifest, "counter", groups)
    wanted = pa.array(groups.mask(every["key_group"].to_numpy()))
    assert words(some) == words(every.filter(wanted))
    assert some.schema == every.schema


def test_only_files_of_wanted_groups_are_read(captures: list[Capture]) -> None:
    store = MemoryStore()
    manifest = stored(store, captures[:1])
    half, rest = assign(GROUPS, 2)
    for part in manifest.operators["counter"].parts:
        if part.groups == rest:
            store.delete(part.name)
    (found,) = retrieve(store, manifest.operators["counter"], groups=half)
    assert found.groups == half
    with pytest.raises(CheckpointNotFound, match=r"parts/000000000000-counter-1-full-"):
        retrieve(store, manifest.operators["counter"])


EARLIER = Path(__file__).parent / "earlier"
"""What ``stored`` wrote to a folder before parts had segments: their format is 1."""


def test_a_folder_of_an_earlier_release_is_read_and_written_on(
    captures: list[Capture], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(EARLIER, folder)
    manifests, store = open_checkpoints(str(folder))
    manifest = manifests.get(Version(2))
    operator = manifest.operators["counter"]
    assert words(read_state(store, manifest, "counter")) == EXPECTED
    some = read_state(store, manifest, "counter", KeyGroups.parse("2-4"))
    assert words(some).items() <= EXPECTED.items()
    assert set(some["key_group"].to_pylist()) == {2, 3, 4}
    pieces = list(retrieve_in_pieces(store, operator, piece=100))
    assert len(pieces) == GROUPS
    assert sorted(row for each in pieces for row in state_rows(each)["word"].to_pylist()) == sorted(
        EXPECTED
    )
    before = replace(captures[2], base=Version(2), version=Version(3))
    later = operator.extended([back_up(store, before)], {})
    manifests.put(Manifest(Version(3), {"counter": later}))
    latest = manifests.latest()
    assert latest is not None
    assert latest.version == 3
    assert words(read_state(store, latest, "counter")) == EXPECTED
    part = operator.parts[-1]
    store.put(part.name, store.get(part.name).to_pybytes()[:-1])
    with pytest.raises(CheckpointCorrupt, match=part.name):
        read_state(store, manifest, "counter")


def test_an_unknown_operator(captures: list[Capture]) -> None:
    store = MemoryStore()
    with pytest.raises(CheckpointNotFound, match=r"no operator 'other'; there are \['counter'\]"):
        read_state(store, stored(store, captures), "other")


@given(st.data())
def test_a_damaged_file_is_never_loaded(captures: list[Capture], data: st.DataObject) -> None:
    store = MemoryStore()
    manifest = stored(store, captures)
    part = data.draw(st.sampled_from(manifest.operators["counter"].parts))
    content = bytearray(store.get(part.name))
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[at:]
    else:
        content[at] ^= data.draw(st.integers(1, 255))
    store.put(part.name, bytes(content))
    with pytest.raises(CheckpointCorrupt, match=part.name):
        retrieve(store, manifest.operators["counter"])


def test_a_sound_file_in_place_of_another_is_refused(captures: list[Capture]) -> None:
    store = MemoryStore()
    manifest = stored(store, captures)
    *_, one, other = manifest.operators["counter"].parts
    store.put(other.name, store.get(one.name))
    with pytest.raises(CheckpointCorrupt, match=rf"{other.name}.*not the one in the manifest"):
        retrieve(store, manifest.operators["counter"])


def test_other_columns_are_refused(captures: list[Capture]) -> None:
    store = MemoryStore()
    manifest = stored(store, captures)
    other = TableLayout(LAYOUT.key, types.schema(word=types.int64))
    with pytest.raises(SchemaChanged, match=r"parts/0.* was written with the columns word string"):
        retrieve(store, manifest.operators["counter"], schema=CheckpointSchema.of(other))


@given(st.integers(0, 1000))
def test_a_backup_can_be_repeated_until_it_is_there(captures: list[Capture], seed: int) -> None:
    inner = MemoryStore()
    faulty = FaultyStore(inner, seed=seed, rate=0.6)
    parts = []
    for taken in captures:
        while True:
            try:
                parts.append(back_up(faulty, taken))
                break
            except StoreError:
                continue
    assert sorted(part.name for part in parts) == inner.list()
    operator = OperatorManifest(captures[0].schema, tuple(parts))
    assert words(state_rows(retrieve(inner, operator))) == EXPECTED


def rows_of(capture: Capture) -> list[Any]:
    """Its rows, in some order that does not depend on how they are stored."""
    columns = (column.to_pylist() for column in capture.rows.columns)
    return sorted(zip(*columns, strict=True), key=repr)


def test_a_part_is_at_all_of_its_holders_and_one_of_them_is_enough(
    captures: list[Capture],
) -> None:
    stores: dict[str, BackupStore] = {host: MemoryStore() for host in ("a", "b", "c:1")}
    peers = PeerStore(lambda: stores)
    part = back_up(peers, captures[0], Destination("q/", ("c:1", "a")))
    assert part.holders == ("c:1", "a")
    assert part.name.startswith("q/parts/")
    assert [stores[host].list("q/") for host in stores] == [[part.name], [], [part.name]]
    assert Part.from_json(json.loads(json.dumps(part.to_json()))) == part
    operator = OperatorManifest(captures[0].schema, (part,))
    manifest = Manifest(part.version, {"counter": operator})
    assert manifest.files == {f"a/{part.name}", f"c%3A1/{part.name}"}
    assert Manifest.from_bytes(manifest.to_bytes(), name="m") == manifest

    asked: list[str] = []

    class Noted(MemoryStore):
        def get(self, name: str, offset: int = 0, length: int | None = None) -> pa.Buffer:
            asked.append(name)
            return super().get(name, offset, length)

    for host in ("a", "c:1"):
        whole = stores[host].get(part.name)
        stores[host] = Noted()
        stores[host].put(part.name, whole)
    (there,) = retrieve(peers, operator)
    (near,) = retrieve(peers, operator, near="a")
    assert there == near
    assert rows_of(there) == rows_of(captures[0])
    assert asked == 2 * [part.name]
    stores["c:1"].put(part.name, b"damaged")
    assert retrieve(peers, operator) == [there]
    stores["c:1"].delete(part.name)
    assert retrieve(peers, operator) == [there]
    del stores["c:1"]
    assert retrieve(peers, operator) == [there]
    stores["a"].delete(part.name)
    with pytest.raises(DidNotHappen, match="node c:1 has no agent now") as silent:
        retrieve(peers, operator)
    assert silent.value.host == "c:1", "its agent may be replaced, and have the part all the same"
    assert (silent.value.part, silent.value.without) == (part.name, ("a",))
    stores["c:1"] = FaultyStore(MemoryStore(), seed=1, rate=1)
    with pytest.raises(DidNotHappen, match="refused by the faulty store"):
        retrieve(peers, operator)
    stores["c:1"] = MemoryStore()
    with pytest.raises(CheckpointNotFound) as lost:
        retrieve(peers, operator)
    assert lost.value.part == part.name


def test_a_part_that_not_all_holders_take_is_not_stored(captures: list[Capture]) -> None:
    stores: dict[str, BackupStore] = {"a": MemoryStore()}
    peers = PeerStore(lambda: stores)
    for holders in (("b", "a"), ("a", "b")):
        with pytest.raises(DidNotHappen, match=r"cannot store b/parts/.*: node b has no") as none:
            back_up(peers, captures[0], Destination(holders=holders))
        assert none.value.host == "b"
        assert stores["a"].list() == []
    stores["b"] = Failing(DidNotHappen("b is full", host="b"))
    for holders in (("b", "a"), ("a", "b")):
        with pytest.raises(MayHaveHappened, match=r"others have stored .*: b is full") as some:
            back_up(peers, captures[0], Destination(holders=holders))
        assert some.value.host == "b"
    stores["b"] = MemoryStore()
    part = back_up(peers, captures[0], Destination(holders=("a", "b")))
    assert stores["a"].list() == stores["b"].list() == [part.name]


def test_one_holder_whose_answer_was_lost_may_have_stored_it(captures: list[Capture]) -> None:
    """Whatever the others say."""
    stores: dict[str, BackupStore] = {
        "a": Failing(DidNotHappen("a is full", host="a")),
        "b": Failing(MayHaveHappened("the answer of b was lost", host="b")),
    }
    with pytest.raises(MayHaveHappened, match="the answer of b was lost") as lost:
        back_up(PeerStore(lambda: stores), captures[0], Destination(holders=("a", "b")))
    assert lost.value.host == "b"


def test_all_holders_are_sent_their_copy_at_once(captures: list[Capture]) -> None:
    together = threading.Barrier(3)

    class Waiting(MemoryStore):
        def put(self, name: str, data: pa.Buffer | bytes) -> None:
            self.put_all({name: data})

        def put_all(self, blocks: Mapping[str, pa.Buffer | bytes]) -> None:
            together.wait(20)
            super().put_all(blocks)

    stores: dict[str, BackupStore] = {host: Waiting() for host in "abc"}
    back_up(PeerStore(lambda: stores), captures[0], Destination(holders=tuple("abc")))


class Failing(MemoryStore):
    """A node that always fails in the same way."""

    def __init__(self, error: StoreError) -> None:
        super().__init__()
        self._error = error

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        raise self._error

    def put_all(self, blocks: Mapping[str, pa.Buffer | bytes]) -> None:
        raise self._error


def test_the_way_back_into_tables(captures: list[Capture], tmp_path: Path) -> None:
    store = MemoryStore()
    operator = stored(store, captures).operators["counter"]
    total = 0
    for instance, groups in enumerate(assign(GROUPS, 3)):
        restore(tmp_path / str(instance), LAYOUT, retrieve(store, operator, groups=groups))
        table = StateTable.open(tmp_path / str(instance), LAYOUT)
        table.validate()
        assert KeyGroups.of(table.groups(table.live())) <= groups
        total += table.count
        table.destroy()
    assert total == len(EXPECTED)


@pytest.fixture(autouse=True)
def _no_folders_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.glob(".*"))
