"""Orders as a node of this machine carries them out."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from anabranch.backup.files import Files
from anabranch.coordinator.asking import Asking
from anabranch.coordinator.nodes import OneNode
from anabranch.errors import CheckpointError, Fenced, StateMissing
from anabranch.nodes.local import TABLES, LocalNode
from anabranch.nodes.node import Deadline
from anabranch.nodes.requests import Epoch
from anabranch.protocols import orders as o
from anabranch.protocols.model import Role, Slice, SliceId
from anabranch.state.checkpoint import read
from anabranch.state.groups import KeyGroups, group_of
from anabranch.state.hashing import hash_keys
from anabranch.state.table import StateTable
from anabranch.stores.parts import state_rows
from anabranch.stores.store import BackupStore
from anabranch.units import NO_VERSION, Version
from coordinator.mini import GROUPS, LAYOUT, QUERY

HERE = ""
EVERYTHING = KeyGroups.all(GROUPS)
KEYS = range(20)


class Place:
    """A node, and what is in its tables."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store: BackupStore = Files(str(root / "store")).open()
        self.node = LocalNode(root, lambda request, deadline: self.store)
        self.asking = self.driver(1)

    def driver(self, epoch: int) -> Asking:
        return Asking(OneNode(self.node, HERE), Epoch(epoch), QUERY, {"op": LAYOUT})

    def path(self, each: Slice) -> Path:
        return self.root / TABLES / f"{each.operator}/{each.id}"

    def batch(self, each: Slice, version: int, fence: int = 0) -> None:
        """A batch that gives every key of a slice the number of the version."""
        table = StateTable.open(self.path(each), LAYOUT)
        try:
            with table.lock(10):
                table.begin(Version(version), fence, 0, track_dirty=True)
                keys = pa.array([k for k, g in GROUP_OF.items() if g in each.groups], pa.int64())
                hashes = hash_keys([keys], len(keys))
                rows = table.rows(LAYOUT.key.encode([keys], hashes, []))
                table.set("n", rows, np.full(len(keys), version))
                table.finish()
        finally:
            table.close()

    def rows(self, captured: o.Captured) -> dict[int, int]:
        rows = state_rows([read(self.asking.fetch(captured), name=captured.file)])
        return dict(zip(rows["key"].to_pylist(), rows["n"].to_pylist(), strict=True))

    def capture(self, each: Slice, version: int, base: int | None = None) -> o.Captured:
        since = None if base is None else Version(base)
        wanted = o.CaptureWanted(each.id, each.groups, since, clean=False)
        return self.asking.capture(o.Capture(wanted, each, Version(version), fence=1 << 40))


_HASHES = hash_keys([pa.array(KEYS, pa.int64())], len(KEYS))
GROUP_OF: dict[int, int] = dict(zip(KEYS, group_of(_HASHES, GROUPS).tolist(), strict=True))


def a_slice(number: int, groups: KeyGroups = EVERYTHING) -> Slice:
    return Slice(SliceId(f"1-{number}"), "op", 0, HERE, groups, Role.ARRIVING)


def keys_of(groups: KeyGroups) -> set[int]:
    return {key for key, group in GROUP_OF.items() if group in groups}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_slice_is_made_empty_and_seen(place: Place) -> None:
    each = a_slice(2)
    place.asking.make(o.Make(each, (), NO_VERSION))
    assert place.asking.inspect(HERE, [each]).tables == {each.id: frozenset([NO_VERSION])}
    place.batch(each, 0)
    assert place.asking.inspect(HERE, [each]).tables == {each.id: frozenset([0, NO_VERSION])}
    assert place.asking.inspect(HERE).tables == {each.id: frozenset()}, "it is not looked into"


def test_what_is_captured_and_stored_makes_another_slice(place: Place) -> None:
    source, target = a_slice(2), a_slice(3, KeyGroups.parse("2-5"))
    place.asking.make(o.Make(source, (), NO_VERSION))
    place.batch(source, 0)
    captured = place.capture(source, 0)
    assert (captured.slice, captured.version, captured.base) == (source.id, 0, None)
    part = place.asking.store(o.Store(captured, ())).part
    assert part.name.startswith(f"{QUERY}/")
    assert not Path(captured.file).exists()
    place.asking.make(o.Make(target, (part,), Version(0)))
    assert place.rows(place.capture(target, 0)) == dict.fromkeys(keys_of(target.groups), 0)


def test_changes_bring_a_slice_on(place: Place) -> None:
    source, target = a_slice(2), a_slice(3)
    place.asking.make(o.Make(source, (), NO_VERSION))
    place.batch(source, 0)
    full = place.asking.store(o.Store(place.capture(source, 0), ())).part
    place.asking.make(o.Make(source, (full,), Version(0)))
    place.batch(source, 1)
    change = place.asking.store(o.Store(place.capture(source, 1, base=0), ())).part
    assert (change.base, change.version) == (0, 1)
    place.asking.make(o.Make(target, (full,), Version(0)))
    order = o.Advance(target, (change,), Version(0), Version(1), fence=2 << 40)
    place.asking.advance(order)
    place.asking.advance(order)  # whose answer was lost
    assert place.rows(place.capture(source, 1)) == dict.fromkeys(KEYS, 1)
    table = StateTable.open(place.path(target), LAYOUT)
    assert table.version == 1
    table.close()


def test_a_node_has_as_long_for_an_order_as_it_is_waited_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    ask = place.node.ask

    def noting(request: Any, deadline: Deadline) -> Any:
        asked.append(deadline.seconds)
        return ask(request, deadline)

    monkeypatch.setattr(place.node, "ask", noting)
    each = a_slice(2)
    place.asking.make(o.Make(each, (), NO_VERSION))
    place.batch(each, 0)
    wanted = o.CaptureWanted(each.id, each.groups, None, clean=False)
    capture = o.Capture(wanted, each, Version(0), 1 << 40, bytes=7_000_000_000)
    store = o.Store(place.asking.capture(capture), (), bytes=8_000_000_000)
    place.asking.store(store)
    assert asked[1:] == [o.patience(each) / o.SECOND for each in (capture, store)]
    assert min(asked[1:]) > 7000


def test_parts_are_merged_into_one(place: Place) -> None:
    source, target = a_slice(2), a_slice(3)
    place.asking.make(o.Make(source, (), NO_VERSION))
    place.batch(source, 0)
    full = place.asking.store(o.Store(place.capture(source, 0), ())).part
    place.asking.make(o.Make(source, (full,), Version(0)))
    place.batch(source, 1)
    change = place.asking.store(o.Store(place.capture(source, 1, base=0), ())).part
    merged = place.asking.store(o.Merge(source, (full, change), EVERYTHING, Version(1), ())).part
    assert (merged.base, merged.version) == (None, 1)
    assert merged.name not in (full.name, change.name)
    place.asking.make(o.Make(target, (merged,), Version(1)))
    assert place.rows(place.capture(target, 1)) == dict.fromkeys(KEYS, 1)


def test_dropped_slices_and_files_are_gone(place: Place) -> None:
    kept, dropped = a_slice(2), a_slice(3)
    for each in (kept, dropped):
        place.asking.make(o.Make(each, (), NO_VERSION))
    captured = place.capture(dropped, -1)
    place.asking.drop(o.Drop(HERE, (dropped.id, SliceId("1-99")), (captured.file,)))
    assert place.asking.inspect(HERE).tables.keys() == {kept.id}
    assert not place.path(dropped).exists()
    assert not Path(captured.file).exists()


def test_a_driver_drops_what_it_found_and_did_not_make(place: Place) -> None:
    each = a_slice(2)
    place.asking.make(o.Make(each, (), NO_VERSION))
    later = place.driver(2)
    assert later.inspect(HERE).tables.keys() == {each.id}
    later.drop(o.Drop(HERE, (each.id,)))
    assert not place.path(each).exists()


def test_a_node_says_under_which_fence_its_captures_were_written(place: Place) -> None:
    each = a_slice(2)
    place.asking.make(o.Make(each, (), NO_VERSION))
    captured = place.capture(each, -1)
    half = Path(captured.file).with_name(".77-op-0-1-2.arrow.half")
    half.touch()
    assert place.asking.inspect(HERE).files == {captured.file: 1 << 40, str(half): 77}


def test_a_prepared_node_refuses_the_driver_before(place: Place) -> None:
    each = a_slice(2)
    place.asking.make(o.Make(each, (), NO_VERSION))
    later = place.driver(2)
    assert later.prepare(HERE).tables.keys() == {each.id}
    with pytest.raises(Fenced):
        place.asking.make(o.Make(each, (), NO_VERSION))
    with pytest.raises(Fenced):
        place.asking.drop(o.Drop(HERE, (each.id,)))
    assert place.path(each).exists()


def test_a_capture_of_another_version_is_refused(place: Place) -> None:
    each = a_slice(2)
    place.asking.make(o.Make(each, (), NO_VERSION))
    with pytest.raises(StateMissing, match="op/1-2"):
        place.capture(each, 4)
    place.batch(each, 0, fence=2 << 40)
    with pytest.raises(Fenced):
        place.capture(each, -1)


def test_parts_that_do_not_lead_there_are_refused(place: Place) -> None:
    source = a_slice(2)
    place.asking.make(o.Make(source, (), NO_VERSION))
    place.batch(source, 0)
    full = place.asking.store(o.Store(place.capture(source, 0), ())).part
    with pytest.raises(CheckpointError):
        place.asking.make(o.Make(a_slice(3), (full,), Version(1)))
    place.store.put(full.name, b"something else")
    with pytest.raises(CheckpointError, match=full.name):
        place.asking.make(o.Make(a_slice(3), (full,), Version(0)))
