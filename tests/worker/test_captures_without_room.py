"""A checkpoint whose copy of the rows has no room in the folder of the state."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from task_runs import Captured, Running

from anabranch.backup.files import Files
from anabranch.errors import Refused, StateFull
from anabranch.nodes import Deadline, Fence, Node, Secret, Vault
from anabranch.nodes.captures import CAPTURES, OF, capture_folders, spilled
from anabranch.nodes.claims import ALIVE, try_alone
from anabranch.nodes.folders import BACKUPS
from anabranch.nodes.local import TABLES, LocalNode
from anabranch.nodes.requests import (
    Capture,
    CaptureFile,
    Epoch,
    Fetch,
    Inspect,
    Instance,
    Make,
    OperatorName,
    Prefix,
    Store,
    TableName,
)
from anabranch.nodes.serving import make
from anabranch.state import capture as captures
from anabranch.state import checkpoint
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.stores.peers import AT_PEERS
from anabranch.units import Version

EPOCH = Epoch(1)
ROWS = 16_000
ALL = KeyGroups.all(16)


@pytest.fixture
def running(small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    monkeypatch.setenv(BACKUPS, str(tmp_path / "disk"))
    running = Running(None, small_disk, instances=1)
    running.run_here(running.task(0, 1), range(ROWS), 0)
    return running


def fill(folder: Path, leave: int) -> Path:
    """Leave so many bytes of a file system."""
    found = os.statvfs(folder)
    with (folder / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - leave)
    return folder / "filler"


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def read(file: str) -> captures.Capture:
    return checkpoint.read(pa.py_buffer(Path(file).read_bytes()), name=file)


def node_of(running: Running, tmp_path: Path) -> Node:
    store = Files(str(tmp_path / "store")).open()
    return LocalNode(running.root.path(), lambda request, deadline: store)


def capture_of(running: Running) -> Capture:
    return Capture(
        epoch=EPOCH,
        table=TableName("op/1-0"),
        layout=running.layout,
        operator=OperatorName("op"),
        instance=Instance(0),
        groups=ALL,
        version=Version(0),
        base=None,
        fence=1,
    )


def fetch(node: Node, file: Path) -> bytes:
    return node.ask(Fetch(file=CaptureFile(str(file))), Deadline(60)).to_pybytes()


def test_the_copy_is_put_beside_the_tables(running: Running) -> None:
    (report,) = running.run_here(running.task(1, 2, Captured(None)), [1], 1).slices
    assert report.captured is not None
    assert Path(report.captured).parent == running.root.path() / CAPTURES
    assert read(report.captured).rows.num_rows == ROWS
    assert report.not_captured is None


def test_the_copy_is_put_on_a_disk(running: Running, small_disk: Path) -> None:
    fill(small_disk, leave=400_000)
    (report,) = running.run_here(running.task(1, 2, Captured(None)), [1], 1).slices
    assert report.captured is not None
    assert Path(report.captured).parent == spilled(running.root.path())
    assert Path(report.captured).parent.stat().st_mode & 0o777 == 0o700
    assert Path(report.captured).stat().st_mode & 0o777 == 0o600
    taken = read(report.captured)
    assert (taken.rows.num_rows, taken.version) == (ROWS, 1)
    assert files(running.root.path() / CAPTURES) == [], "the half is left"


def test_a_batch_goes_on_without_its_checkpoint(running: Running, small_disk: Path) -> None:
    filler = fill(small_disk, leave=400_000)
    spilled(running.root.path()).parent.mkdir(parents=True)
    spilled(running.root.path()).write_text("in the way")
    (report,) = running.run_here(running.task(1, 2, Captured(None)), [1], 1).slices
    assert report.captured is None
    assert report.not_captured is not None
    assert "no room for a copy of the state of op, instance 0, at version 1" in report.not_captured
    assert BACKUPS in report.not_captured
    assert files(running.root.path() / CAPTURES) == []
    assert running.counts()[1] == 2

    # What changed since the last checkpoint is still known as such.
    filler.unlink()
    (report,) = running.run_here(running.task(2, 3, Captured(None)), [2], 2).slices
    assert report.captured is not None
    (report,) = running.run_here(running.task(3, 4, Captured(Version(2))), [3], 3).slices
    assert report.captured is not None
    assert read(report.captured).base == 2
    filler = fill(small_disk, leave=0)
    (report,) = running.run_here(running.task(4, 5, Captured(Version(3))), [4], 4).slices
    assert report.captured is None
    filler.unlink()
    (report,) = running.run_here(running.task(5, 6, Captured(Version(3))), [5], 5).slices
    assert report.captured is not None
    assert sorted(read(report.captured).rows.column("id").to_pylist()) == [4, 5]


def test_a_capture_between_batches_has_the_same_ways(
    running: Running, small_disk: Path, tmp_path: Path
) -> None:
    node = node_of(running, tmp_path)
    fill(small_disk, leave=400_000)
    file = node.ask(capture_of(running), Deadline(60))
    assert Path(file).parent == spilled(running.root.path())
    part = node.ask(Store(epoch=EPOCH, file=file, under=Prefix("")), Deadline(60)).part
    assert part.groups == ALL
    assert [file.name for file in files(spilled(running.root.path()))] == [OF]
    shutil.rmtree(spilled(running.root.path()))
    spilled(running.root.path()).write_text("in the way")
    with pytest.raises(StateFull, match="no room for a copy"):
        node.ask(capture_of(running), Deadline(60))
    assert files(running.root.path() / CAPTURES) == []


def test_a_table_that_has_no_room_leaves_nothing(
    running: Running, small_disk: Path, tmp_path: Path
) -> None:
    node = node_of(running, tmp_path)
    file = node.ask(capture_of(running), Deadline(60))
    part = node.ask(Store(epoch=EPOCH, file=file, under=Prefix("")), Deadline(60)).part

    def make_table(table: str, *parts: Part) -> None:
        request = Make(
            epoch=EPOCH,
            table=TableName(table),
            layout=running.layout,
            version=Version(0),
            groups=ALL,
            parts=parts,
        )
        node.ask(request, Deadline(60))

    before = sorted(files(small_disk))
    for leave in (0, 40_000, 400_000, 1_000_000):
        filler = fill(small_disk, leave)
        with pytest.raises(StateFull, match="bytes are free"):
            make_table("op/2-0", part)
        if leave < 10_000:
            with pytest.raises(StateFull, match="bytes are free"):
                make_table("op/3-0")
        filler.unlink()
        assert sorted(files(small_disk)) == before
        assert not (running.root.path() / TABLES / "op@2" / ".0.restoring").exists()
    make_table("op/2-0", part)
    table = TableName("op/2-0")
    assert node.ask(Inspect(layouts={table: running.layout}), Deadline(60))[table] == (0,)


def test_an_agent_hands_out_captures_from_both_folders_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BACKUPS, str(tmp_path / "disk"))
    root = tmp_path / "state" / "node-1" / "0123456789ab"
    vault = Vault(tmp_path / "vault", 1 << 20)
    context = {"root": str(root), "secret": Secret.new().to_hex(), "host": "node-1",
               "store": AT_PEERS.to_json()}  # fmt: skip
    node = make(context, vault, Fence(tmp_path / "epoch"))
    assert try_alone(root / ALIVE) is None, "an agent holds the folder of its query"
    for number, folder in enumerate(capture_folders(root)):
        folder.mkdir(parents=True)
        file = folder / f"{number}.arrow"
        file.write_bytes(b"rows")
        assert fetch(node, file) == b"rows"
    (tmp_path / "other").touch()
    with pytest.raises(Refused, match="no capture of this query"):
        fetch(node, spilled(root) / ".." / ".." / ".." / "other")
