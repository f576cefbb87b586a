"""Spark's logs made whole again after a power failure, by a driver that may die on the way."""

import json
import shutil
import struct
import zlib
from pathlib import Path

import pytest

from anabranch.spark import logs as module
from anabranch.spark.logs import SparkLogs
from anabranch.units import Version

BATCHES = 5


def write(file: Path, *lines: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(["v1", *map(json.dumps, lines)])
    file.write_text(text)
    sums = struct.pack(">4sII", b"crc\0", 512, zlib.crc32(text.encode()))
    (file.parent / f".{file.name}.crc").write_bytes(sums)


@pytest.fixture
def spark(tmp_path: Path) -> Path:
    """Batches each of which has read one more entry of a source."""
    folder = tmp_path / "spark"
    for version in range(BATCHES):
        write(folder / "sources" / "0" / str(version), {"path": f"file-{version}"})
        write(folder / "offsets" / str(version), {"batchTimestampMs": 1}, {"logOffset": version})
        write(folder / "commits" / str(version), {})
    return folder


class Dies(BaseException):
    pass


@pytest.mark.parametrize("start", [-1, 1])
def test_what_can_be_run_again_is_the_same_after_a_repair_that_was_cut_short(
    spark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    after = Version(start)
    known = SparkLogs(str(spark)).newest_offsets(after) if start >= 0 else {}
    expected = SparkLogs(str(spark)).surviving(after, known)
    assert list(expected) == list(range(start + 1, BATCHES))
    moment, done = 0, False
    while not done:
        moment += 1
        copy = tmp_path / f"copy-{moment}"
        shutil.copytree(spark, copy)
        left = moment

        def flush(path: str) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise Dies

        first = SparkLogs(str(copy))
        first.forget_after(after)
        with monkeypatch.context() as patch:
            patch.setattr(module, "flush", flush)
            try:
                first.repair(after, known)
                done = True
            except Dies:
                pass
        again = SparkLogs(str(copy))
        # Those that were noted before the logs were cut back.
        assert again.surviving(after, {**expected, **known}) == expected, f"flush {moment}"
        again.repair(after, known)
        assert again.surviving(after, {**expected, **known}) == expected
    assert moment > BATCHES


def test_spoiled_checksums_are_written_anew(spark: Path) -> None:
    spoiled = spark / "sources" / "0" / ".0.crc"
    spoiled.write_bytes(b"crc\0")
    stray = spark / "sources" / "0" / ".77.crc"
    stray.write_bytes(b"crc\0")
    logs = SparkLogs(str(spark))
    known = logs.newest_offsets(Version(2))
    logs.repair(Version(2), known)
    assert not stray.exists()
    logs.check(Version(2), None)


def test_what_is_written_once_is_flushed_once(spark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(spark / "metadata", {"id": "x"})
    flushed: list[str] = []
    monkeypatch.setattr(module, "flush", flushed.append)
    monkeypatch.setattr(module, "flush_ancestors", flushed.append)
    logs = SparkLogs(str(spark))
    logs.flush(Version(0))
    assert {str(spark), str(spark / "metadata"), str(spark / "sources")} < {*flushed}
    flushed.clear()
    logs.flush(Version(1))
    sources, offsets = spark / "sources" / "0", spark / "offsets"
    for folder in (sources, offsets):
        assert {str(folder), str(folder / "1"), str(folder / ".1.crc")} <= {*flushed}
    assert not {str(spark), str(spark / "metadata"), str(spark / "sources")} & {*flushed}
    logs.repair(Version(1), {})  # Spark writes anew what this removes
    flushed.clear()
    logs.flush(Version(1))
    assert {str(spark), str(spark / "metadata"), str(spark / "sources")} < {*flushed}
    assert str(sources / "1") in flushed
