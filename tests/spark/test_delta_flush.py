"""What a Delta table on a local disk has after a power failure."""

import random
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from anabranch.coordinator import assembly
from anabranch.errors import SinkFailed
from anabranch.spark.sinks.delta import DeltaSink
from anabranch.spark.sinks.sink import Delivery, Replaceable
from anabranch.units import Version
from coordinator.power import PowerDisk

deltalake = pytest.importorskip("deltalake")


@pytest.fixture
def power() -> Iterator[PowerDisk]:
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    (root / "disk").mkdir()
    with PowerDisk(root / "disk").watched() as disk:
        yield disk
    shutil.rmtree(root)


@pytest.fixture
def nothing_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flush beside the next batch does not get its turn."""
    monkeypatch.setattr(DeltaSink, "_flush_beside", lambda self: None)


def deliver(sink: DeltaSink, version: int) -> None:
    delivery = Delivery("q", Version(version), False)
    rows = pa.table({"id": [2 * version, 2 * version + 1], "part": ["a b", f"{version % 2}"]})
    frame: Any = SimpleNamespace(toArrow=lambda: rows)
    sink.write(frame, delivery)
    sink.commit(delivery)


def ids(uri: Path) -> list[int]:
    return sorted(deltalake.DeltaTable(str(uri)).to_pyarrow_table()["id"].to_pylist())


@pytest.mark.usefixtures("nothing_beside")
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("another_run", [False, True])
def test_what_was_flushed_is_there(
    power: PowerDisk, seed: int, partitioned: bool, another_run: bool
) -> None:
    uri = power.root / "out" / "table"
    if partitioned:
        schema = pa.schema([("id", pa.int64()), ("part", pa.string())])
        deltalake.DeltaTable.create(str(uri), schema, partition_by=["part"])
    sink = DeltaSink(str(uri))
    for version in range(4):
        deliver(sink, version)
        if version == 1:
            sink.flush()
    if another_run:
        sink = DeltaSink(str(uri))
    sink.flush()
    power.fail(random.Random(seed))
    assert ids(uri) == list(range(8))
    deliver(DeltaSink(str(uri)), 4)
    assert ids(uri) == list(range(10))


@pytest.mark.usefixtures("nothing_beside")
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("again", [False, True])
def test_no_commit_is_there_without_those_before(power: PowerDisk, seed: int, again: bool) -> None:
    uri = power.root / "table"
    sink = DeltaSink(str(uri))
    for version in range(3):
        deliver(sink, version)
        if again:  # by the next driver, which is told that the table has it
            sink = DeltaSink(str(uri))
            deliver(sink, version)
    power.fail(random.Random(seed))
    log = uri / "_delta_log"
    (log / f"{2:020d}.json").unlink(missing_ok=True)  # of the last one anything may be there
    assert ids(uri) == list(range(4))


def test_checkpoints_of_the_table_are_flushed_as_well(power: PowerDisk) -> None:
    uri = power.root / "table"
    sink = DeltaSink(str(uri))
    deliver(sink, 0)
    sink.flush()
    for version in range(1, 5):
        deliver(sink, version)
        deltalake.DeltaTable(str(uri)).create_checkpoint()
    sink.flush()
    deliver(sink, 5)
    sink.flush()
    power.fail(random.Random(0))
    assert ids(uri) == list(range(12))
    assert (uri / "_delta_log" / "_last_checkpoint").read_text()


@pytest.mark.usefixtures("nothing_beside")
def test_a_table_that_cannot_be_flushed_costs_an_attempt_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> None:
        raise OSError(5, "Input/output error")

    sink = DeltaSink(str(tmp_path / "table"))
    deliver(sink, 0)
    with monkeypatch.context() as patch:
        patch.setattr("anabranch.spark.sinks.delta.flush", fail)
        with pytest.raises(OSError, match="Input/output error"):
            sink.flush()
        with pytest.raises(SinkFailed, match="table cannot be flushed"):
            deliver(sink, 1)
    flushed: list[str] = []
    monkeypatch.setattr("anabranch.spark.sinks.delta.flush", flushed.append)
    deliver(sink, 1)
    assert {Path(path).suffix for path in flushed} >= {".parquet", ".json"}
    flushed.clear()
    sink.flush()
    assert len(flushed) == 5, "a file, two commits, and two folders"
    sink.flush()
    assert len(flushed) == 5
    assert ids(tmp_path / "table") == [0, 1, 2, 3]


def test_commits_are_flushed_beside_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = threading.Event()
    flush = DeltaSink.flush

    def told(sink: DeltaSink) -> None:
        flush(sink)
        if threading.current_thread() is not threading.main_thread():
            flushed.set()

    monkeypatch.setattr(DeltaSink, "flush", told)
    sink = DeltaSink(str(tmp_path / "table"))
    deliver(sink, 0)
    assert flushed.wait(60)
    assert sink._flushed == 0


def test_a_checkpoint_counts_on_a_local_table_once_it_is_flushed(power: PowerDisk) -> None:
    sink = DeltaSink(str(power.root / "table"))
    plan: Any = SimpleNamespace(outputs=[SimpleNamespace(sink=sink)])
    elsewhere: Any = SimpleNamespace(is_local=False)
    assert not isinstance(sink, Replaceable)
    assert assembly._volatile(elsewhere, plan), "a power failure is of interest"
    deliver(sink, 0)
    logs: Any = SimpleNamespace(flush=lambda version: None, newest_offsets=lambda version: {})
    assert assembly._secure(plan, logs, Version(0)) == {}
    power.fail(random.Random(1))
    assert ids(power.root / "table") == [0, 1]
    remote: Any = SimpleNamespace(outputs=[SimpleNamespace(sink=DeltaSink("s3://bucket/table"))])
    assert not assembly._volatile(elsewhere, remote)
