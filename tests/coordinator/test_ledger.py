"""What lasts of a query, and that only the driver which has the query writes it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anabranch.boot import boot_id
from anabranch.coordinator import identity
from anabranch.coordinator.commits import Commit
from anabranch.coordinator.epochs import Reign
from anabranch.coordinator.folder import CheckpointFolder
from anabranch.coordinator.identity import Identity
from anabranch.coordinator.ledger import Ledger
from anabranch.errors import Deposed
from anabranch.protocols.model import Published, Role, Routed, Slice, SliceId
from anabranch.protocols.orders import Note, Withdraw
from anabranch.spark.logs import SparkLogs, digest
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import KeyGroups, Routing
from anabranch.state.part import Part
from anabranch.units import NO_VERSION, Version
from coordinator.mini import GROUPS, LAYOUT, QUERY

ROUTING = Routing.even(GROUPS, 2)


def ledger(folder: Path) -> Ledger:
    """The ledger of a driver that takes the query over now."""
    at = CheckpointFolder.of(folder)
    before = identity.load(at.store) or Identity(
        QUERY, 0, {"op": {}}, {"op": ROUTING}, asked={"op": 2}, boot="another boot"
    )
    reign = Reign.begin(at.store, "test", above=before.run)
    logs = SparkLogs(at.spark)
    return Ledger(
        at.store,
        at.log,
        at.store,
        reign,
        before,
        {"op": CheckpointSchema.of(LAYOUT)},
        logs,
        logs.newest_offsets,
    )


def planned(folder: Path, *versions: int) -> None:
    """Spark has planned these batches."""
    offsets = folder / "spark" / "offsets"
    offsets.mkdir(parents=True, exist_ok=True)
    for version in versions:
        (offsets / str(version)).write_text(offsets_of(version))


def offsets_of(version: int) -> str:
    return f'v1\n{{"batchTimestampMs": {version}}}\n{{"at": {version}}}'


def commit(version: int) -> Commit:
    return Commit(Version(version), {}, digest(offsets_of(version)), arrangement=7)


def part(version: int) -> Part:
    name = f"{QUERY}/parts/op-{version}"
    return Part(name, "op", Version(version), None, KeyGroups.all(GROUPS), bytes=1, checksum="x")


def published(version: int) -> Published:
    return Published(Version(version), {"op": (part(version),)})


def note(arrangement: int, *hosts: str) -> Note:
    slices = tuple(
        Slice(SliceId(f"1-{i}"), "op", i, host, ROUTING.owners[i], Role.SERVING)
        for i, host in enumerate(hosts)
    )
    return Note(arrangement, {"op": Routed(ROUTING, hosts)}, slices)


def no_damage(version: Version, reason: str) -> None:
    raise AssertionError(f"version {version}: {reason}")


def everything(folder: Path) -> dict[str, bytes]:
    """All files but the marks of drivers."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(f.relative_to(folder)): f.read_bytes() for f in files if f.parent.name != "epochs"}


def test_the_next_driver_finds_what_the_one_before_has_written(tmp_path: Path) -> None:
    planned(tmp_path, 0, 1, 2)
    first = ledger(tmp_path)
    for version in range(3):
        first.commit(commit(version))
    first.publish(published(1))
    first.note(note(7, "a", "b"))
    first.note_boot()
    second = ledger(tmp_path)
    found = second.facts({"op": Routed(ROUTING, ("a", "b"))}, no_damage, trusted=True)
    assert (found.committed, found.delivered, found.oldest_offsets) == (2, 2, 0)
    assert (found.noted, found.arrangement) == (7, 7)
    assert {(each.node, each.groups) for each in found.slices.values()} == {
        ("a", ROUTING.owners[0]),
        ("b", ROUTING.owners[1]),
    }
    assert found.published == (published(1),)
    assert second.known.boot == boot_id()
    assert second.commit_of(Version(2)) == commit(2)


def test_a_new_query_has_nothing(tmp_path: Path) -> None:
    found = ledger(tmp_path).facts({}, no_damage, trusted=True)
    assert (found.committed, found.delivered) == (NO_VERSION, NO_VERSION)
    assert found.published == ()
    assert found.slices == {}


WRITES: dict[str, Callable[[Ledger], None]] = {
    "commit": lambda of: of.commit(commit(2)),
    "publish": lambda of: of.publish(published(0)),
    "withdraw": lambda of: of.withdraw(Withdraw((Version(1),), (part(1),))),
    "note": lambda of: of.note(note(9, "c", "d")),
    "note_boot": lambda of: of.note_boot(),
    "forget_after": lambda of: of.forget_after(Version(0)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_driver_that_was_deposed_changes_nothing(tmp_path: Path, write: str) -> None:
    planned(tmp_path, 0, 1, 2)
    old = ledger(tmp_path)
    old.commit(commit(0))
    old.commit(commit(1))
    old.publish(published(1))
    ledger(tmp_path)
    before = everything(tmp_path)
    with pytest.raises(Deposed):
        WRITES[write](old)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("write", WRITES)
def test_the_driver_that_has_the_query_changes_it(tmp_path: Path, write: str) -> None:
    planned(tmp_path, 0, 1, 2)
    now = ledger(tmp_path)
    now.commit(commit(0))
    now.commit(commit(1))
    now.publish(published(1))
    before = everything(tmp_path)
    WRITES[write](now)
    assert everything(tmp_path) != before


def test_a_manifest_goes_before_its_parts(tmp_path: Path) -> None:
    planned(tmp_path, 0, 1)
    of = ledger(tmp_path)
    for version in (0, 1):
        of.commit(commit(version))
        of.parts.put(part(version).name, b"rows")
        of.publish(published(version))
    of.withdraw(Withdraw((Version(0),), (part(0),)))
    assert list(of.parts.list(f"{QUERY}/parts/")) == [part(1).name]
    assert [each.version for each in of._published(no_damage)] == [1]
    of.withdraw(Withdraw((Version(5),), (part(5),)))  # of what is not there
    of.sweep()
    assert list(of.parts.list(f"{QUERY}/parts/")) == [part(1).name]


def test_notes_of_the_boot_and_of_slices_do_not_overwrite_each_other(tmp_path: Path) -> None:
    of = ledger(tmp_path)
    of.note(note(3, "a", "b"))
    of.note_boot()
    of.note(note(4, "a", "c"))
    known = identity.load(of.store)
    assert known is not None
    assert (known.boot, known.arrangement, [s.node for s in known.slices]) == (
        boot_id(), 4, ["a", "c"],
    )  # fmt: skip


def test_one_thread_notes_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would overwrite each other's notes, or one would wait for the other with a lock."""
    of = ledger(tmp_path)
    threads: set[str] = set()
    save = identity.save

    def noted(store: Any, known: Any) -> None:
        threads.add(threading.current_thread().name)
        save(store, known)

    monkeypatch.setattr(identity, "save", noted)
    of.writer.submit(of.note, note(3, "a", "b")).result()
    of.note_boot()
    of.note_asked("op", 7)
    assert len(threads) == 1
    of.writer.shutdown()
