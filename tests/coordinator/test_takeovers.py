"""What a driver goes on from, in whatever state the one before has left folder and memory."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.errors import StateFull
from anabranch.nodes import local
from anabranch.protocols import attempts
from anabranch.stores import Manifests
from anabranch.units import Version
from coordinator.mini import QUERY, Mini, expected, results


@contextmanager
def driver(machine: Path, **given: Any) -> Iterator[Mini]:
    """A driver that is killed in the end. A version is published after every second batch."""
    (machine / "disk").mkdir(exist_ok=True)
    mini = Mini(machine / "disk", machine / "memory", None, every=1, **given)
    try:
        yield mini
    finally:
        mini.end(killed=True)


def ran(machine: Path, batches: int) -> None:
    """A driver that is killed after some batches; the memory of its tables is lost."""
    with driver(machine) as mini:
        mini.start()
        for _ in range(batches):
            mini.step()
    shutil.rmtree(machine / "memory")


def goes_on(mini: Mini, batches: int = 4) -> None:
    before = len(results(mini.disk))
    for _ in range(batches):
        mini.step()
    found = results(mini.disk)
    assert found == expected(len(found))
    assert len(found) > before


def manifest(machine: Path, version: int) -> Path:
    return machine / "disk" / "ck" / "manifests" / f"{version:012d}.json"


def parts_of(mini: Mini, version: int) -> set[str]:
    """The files that are of one version alone."""
    store = mini.assembly.ledger.store
    found = Manifests(store).get(Version(version))
    return {p.name for p in found.operators["op"].parts if p.version == version}


@pytest.mark.parametrize("instances", [5, 1])
def test_tables_that_were_moved_are_used_though_no_batch_has_run_since(
    tmp_path: Path, instances: int
) -> None:
    with driver(tmp_path) as first:
        first.start()
        for _ in range(4):
            first.step()
        first.scale(instances)
        slices = first.assembly.loop.query.slices.keys()
    with driver(tmp_path) as second:
        second.start()
        query = second.assembly.loop.query
        assert query.slices.keys() == slices
        assert query.committed == 3
        assert not second.told("restarted")
        goes_on(second)


@pytest.mark.parametrize("batches", [8, 9])
def test_a_version_newer_than_where_spark_was_cut_can_be_gone_on_from(
    tmp_path: Path, batches: int
) -> None:
    """Its files were gone, so Spark was taken back further; then they are there again.

    With 8 batches there is nothing to be run again after it, but Spark's logs are cut all the same.
    """
    disk = tmp_path / "disk"
    ran(tmp_path, batches)
    shutil.copytree(disk, tmp_path / "whole")
    for file in (disk / "ck" / QUERY / "parts").glob(f"{7:012d}-*"):
        file.unlink()
    dies: Any = SimpleNamespace(random=lambda: 0.0)
    with driver(tmp_path, chance=dies) as mini, suppress(BaseException):
        mini.start()
    assert mini.told("checkpoint damaged")
    assert not manifest(tmp_path, 7).exists(), "it is withdrawn before Spark's logs are cut"
    spark = disk / "ck" / "spark"
    assert max(int(each.name) for each in (spark / "commits").glob("[0-9]*")) == 5
    assert (disk / "ck" / "rewind.json").exists()
    shutil.rmtree(tmp_path / "memory")
    # As a publish did that was on its way, or a node that comes back with a store of its own.
    for name in (f"{QUERY}/parts", "manifests"):
        shutil.copytree(tmp_path / "whole" / "ck" / name, disk / "ck" / name, dirs_exist_ok=True)
    with driver(tmp_path) as mini:
        mini.start()
        assert mini.assembly.loop.query.committed == batches - 1
        assert [told["start"] for told in mini.told("restarted")] == [7]
        assert not (disk / "ck" / "rewind.json").exists()
        goes_on(mini)


def test_a_damaged_manifest_is_removed_once_newer_ones_are_whole(tmp_path: Path) -> None:
    ran(tmp_path, 9)
    damaged = manifest(tmp_path, 5)
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 4
    damaged.write_bytes(data)
    stray = tmp_path / "disk" / "ck" / QUERY / "parts" / "stray.arrow"
    stray.write_bytes(b"")
    with driver(tmp_path) as mini:
        mini.start()
        assert [told["version"] for told in mini.told("checkpoint damaged")] == [5]
        assert stray.exists(), "the damaged manifest may name it"
        goes_on(mini)
    assert not damaged.exists()
    with driver(tmp_path) as mini:
        mini.start()
        assert not mini.told("checkpoint damaged")
        assert not stray.exists()
        goes_on(mini)


def test_one_that_is_newer_than_where_it_begins_is_removed_at_once(tmp_path: Path) -> None:
    ran(tmp_path, 9)
    manifest(tmp_path, 7).write_bytes(b"{}")
    with driver(tmp_path) as mini:
        mini.start()
        assert not manifest(tmp_path, 7).exists()
        assert [told["start"] for told in mini.told("restarted")] == [5]
        goes_on(mini)


def test_a_start_without_room_ends_with_the_error_that_users_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(tmp_path, 5)
    tried: list[object] = []

    def no_room(*given: object, **more: object) -> None:
        tried.append(given)
        raise StateFull("no room in /dev/shm")

    monkeypatch.setattr(local, "restore_in_pieces", no_room)
    monkeypatch.setattr(attempts, "_LONGEST_PAUSE", 10_000)
    with driver(tmp_path) as mini:
        with pytest.raises(StateFull, match="no room in /dev/shm"):
            mini.start()
        told = mini.told("restart failed")
    assert len(told) == attempts.ATTEMPTS
    assert told[-1]["pause"] is None
    assert len(tried) <= 2 * attempts.ATTEMPTS
