"""Which files there are in a folder of results, and what is in them, after a power failure."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from anabranch import durable
from anabranch.errors import SinkFailed
from anabranch.spark.sinks.parquet import ParquetSink
from anabranch.spark.sinks.sink import Delivery
from anabranch.units import NO_VERSION, Version
from coordinator.power import PowerDisk


class Written:
    """The frame of a batch whose tasks have written their files."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    def collect(self) -> list[dict[str, str]]:
        return [{"final": final, "temporary": made} for final, made in self.files.items()]


def deliver(sink: ParquetSink, version: int, *, parts: int = 1, first: bool = False) -> None:
    out = Path(sink.path)
    delivery = Delivery("q", Version(version), first)
    files = {}
    for part in range(parts):
        final = f"part-q-{version:010d}-{part:05d}.parquet"
        files[final] = f"_anabranch-0-{final}"
        (out / files[final]).write_bytes(b"rows of %d" % version)
    frame: Any = Written(files)
    sink.accept(frame, delivery)
    sink.commit(delivery)


def versions(out: Path) -> list[int]:
    """The versions of the files that a reader finds, all of which must be whole."""
    found = sorted(out.glob("part-*"))
    assert all(f.read_bytes() == b"rows of %d" % int(f.name.split("-")[2]) for f in found)
    return [int(file.name.split("-")[2]) for file in found]


@contextmanager
def machine(root: Path) -> Iterator[tuple[PowerDisk, Path]]:
    """A disk that has the folder of results."""
    out = root / "disk" / "out"
    out.mkdir(parents=True)
    with PowerDisk(root / "disk").watched() as power:
        durable.flush(str(root / "disk"))
        yield power, out


@pytest.mark.parametrize("failing", ["0-00000.parquet", "1-00000.parquet", "out"])
def test_what_could_not_be_flushed_is_flushed_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    flushed: list[str] = []
    fails = True

    def flush(path: str) -> None:
        if fails and path.endswith(failing):
            raise OSError(5, "Input/output error")
        flushed.append(Path(path).name)

    (tmp_path / "out").mkdir()
    sink = ParquetSink(str(tmp_path / "out"))
    monkeypatch.setattr(durable, "flush", flush)
    deliver(sink, 0)
    deliver(sink, 1)
    with pytest.raises(OSError, match="Input/output error"):
        sink.flush()
    fails = False
    sink.flush()
    files = {f"part-q-000000000{version}-00000.parquet" for version in (0, 1)}
    assert {*files, "out"} <= set(flushed)
    deliver(sink, 2)
    flushed.clear()
    sink.flush()
    assert files.isdisjoint(flushed), "they were flushed before"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dies", [False, True])
def test_what_was_taken_back_does_not_come_again(tmp_path: Path, seed: int, dies: bool) -> None:
    """Power is lost after the flush for a checkpoint that then does not exist, and once more."""
    chance = random.Random(seed)
    with machine(tmp_path) as (power, out):
        sink = ParquetSink(str(out))
        deliver(sink, 0)
        sink.flush()  # checkpoint 0
        deliver(sink, 1)
        sink.flush()
        power.fail(chance)
        sink = ParquetSink(str(out))
        if dies:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sink, "flush", killed)
                with pytest.raises(KeyboardInterrupt):
                    sink.take_back("q", Version(0))
            sink = ParquetSink(str(out))
        sink.take_back("q", Version(0))
        sink = ParquetSink(str(out))
        sink.resume("q", Version(0))
        sink.flush()  # checkpoint 2, after batches without results
        power.fail(chance)
        sink = ParquetSink(str(out))
        sink.take_back("q", Version(2))
        assert versions(out) == [0]


def killed() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("restarted", [False, True])
def test_files_of_an_earlier_attempt_do_not_come_again(
    tmp_path: Path, seed: int, restarted: bool
) -> None:
    """The attempt before wrote more files, and they were flushed; this one has no rows."""
    chance = random.Random(seed)
    with machine(tmp_path) as (power, out):
        sink = ParquetSink(str(out))
        deliver(sink, 0, parts=3)
        sink.flush()
        sink = ParquetSink(str(out))
        deliver(sink, 0, parts=0, first=True)
        if restarted:
            sink = ParquetSink(str(out))
            sink.resume("q", NO_VERSION)
        sink.flush()  # checkpoint 0
        power.fail(chance)
        ParquetSink(str(out)).take_back("q", Version(0))
        assert versions(out) == []


def test_taking_back_fails_if_it_cannot_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flush(path: str) -> None:
        raise OSError(5, "Input/output error")

    (tmp_path / "out").mkdir()
    sink = ParquetSink(str(tmp_path / "out"))
    monkeypatch.setattr(durable, "flush", flush)
    with pytest.raises(SinkFailed, match="Input/output error"):
        sink.take_back("q", Version(0))
