"""One suite that every store has to pass, and what is special about files and faults."""

import ctypes
import errno
import io
import mmap
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from anabranch.backup import Files
from anabranch.errors import CheckpointNotFound, DidNotHappen, MayHaveHappened, PlanError
from anabranch.stores import BackupStore, FileStore, files
from anabranch.stores.files import MAPPED_FROM
from anabranch.testing import FaultyStore, LocalRing, MemoryStore
from anabranch.testing.rings import hosts


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRing]:
    with LocalRing(tmp_path_factory.mktemp("ring"), hosts(4, start=40)) as ring:
        yield ring


@pytest.fixture(params=["memory", "files", "renaming", "objects", "faultless", "ring"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BackupStore:
    subtree = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    match request.param:
        case "memory":
            return MemoryStore()
        case "files":
            return Files(str(tmp_path / "not" / "there" / "yet")).open()
        case "renaming":  # the way of HDFS and fsspec
            return FileStore(subtree, "store")
        case "objects":  # folders come of themselves there, and a put is one request
            request.getfixturevalue("monkeypatch").setattr(files, "OBJECT_STORES", {"subtree"})
            for folder in ("store/a", "store/parts"):
                (tmp_path / folder).mkdir(parents=True)
            return FileStore(subtree, "store")
        case "ring":  # each test is another query
            ring: LocalRing = request.getfixturevalue("ring")
            return ring.store(2, 1, query=uuid.uuid4().hex[:12])
        case _:
            return FaultyStore(MemoryStore(), seed=0, rate=0)


def test_put_get_size(store: BackupStore) -> None:
    data = bytes(range(256)) * 1000
    store.put("a/b.arrow", data)
    store.put("empty", pa.py_buffer(b""))
    assert store.get("a/b.arrow").to_pybytes() == data
    assert store.size("a/b.arrow") == len(data)
    assert store.get("empty").size == store.size("empty") == 0


@pytest.mark.parametrize("size", [0, 1, 1000, MAPPED_FROM + 5000])
def test_ranges(store: BackupStore, size: int) -> None:
    data = os.urandom(size)
    store.put("parts/a", data)
    ends = sorted({0, 1, 7, size // 2, 4096, 5000, size - 1, size, size + 1, 2 * size} - {-1})
    for offset in ends:
        assert store.get("parts/a", offset).to_pybytes() == data[offset:]
        for length in ends:
            found = store.get("parts/a", offset, length).to_pybytes()
            assert found == data[offset : offset + length], (offset, length)
    with pytest.raises(CheckpointNotFound):
        store.get("parts/b", 1, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is in memory")
def test_the_system_does_not_keep_checkpoints_in_memory() -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # on a disk, unlike some /tmp
        opened = Files(folder).open()
        opened.put("a", bytes(1 << 20))
        stored = Path(folder) / "a"
        assert _pages_in_memory(stored) == 0
        stored.read_bytes()
        assert _pages_in_memory(stored) > 0
        assert opened.get("a").size == 1 << 20
        assert _pages_in_memory(stored) == 0


LARGE = os.urandom(1000) * (MAPPED_FROM // 1000 + 1)


def test_a_large_file_is_not_read_into_memory(tmp_path: Path) -> None:
    opened = Files(str(tmp_path)).open()
    opened.put("a", LARGE)
    opened.put("small", LARGE[: MAPPED_FROM - 1])
    before = pa.total_allocated_bytes()
    kept = [opened.get("a") for _ in range(10)]
    assert pa.total_allocated_bytes() - before < MAPPED_FROM
    assert all(data.to_pybytes() == LARGE for data in kept)
    assert opened.get("small").to_pybytes() == LARGE[: MAPPED_FROM - 1]
    opened.put("a", bytes(MAPPED_FROM))
    assert kept[0].to_pybytes() == LARGE, "it is as it was"
    opened.delete("a")
    assert kept[1].slice(1000, 1000).to_pybytes() == LARGE[:1000]


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs"])
def test_a_file_that_others_may_remove_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(files, "file_system", lambda folder: kind)
    opened = Files(str(tmp_path)).open()
    opened.put("a", LARGE)
    before = pa.total_allocated_bytes()
    data = opened.get("a")
    assert pa.total_allocated_bytes() - before >= len(LARGE)
    assert data.to_pybytes() == LARGE


def test_a_disk_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(io.FileIO):
        def readinto(self, piece: Any) -> int:
            raise OSError(errno.EIO, "the disk is broken")

    opened = Files(str(tmp_path)).open()
    opened.put("a", LARGE)
    opened.get("a")
    monkeypatch.setattr(Path, "open", lambda path, *_, **__: Failing(path))
    with pytest.raises(DidNotHappen, match=r"cannot read .*the disk is broken"):
        opened.get("a")


def _pages_in_memory(path: Path) -> int:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        found = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), found
        )
        del start  # or the map could not be closed
    assert failed == 0
    return sum(page & 1 for page in found)


def test_put_replaces(store: BackupStore) -> None:
    store.put("a/b", b"first, and longer")
    before = store.get("a/b")
    store.put("a/b", pa.py_buffer(b"second"))
    assert store.get("a/b").to_pybytes() == b"second"
    assert before.to_pybytes() == b"first, and longer"


def test_list_by_prefix(store: BackupStore) -> None:
    assert list(store.list()) == list(store.list("parts/")) == []
    for name in ("parts/2-x", "parts/1-x", "parts/10-x", "a/1.json", "top"):
        store.put(name, b"x")
    assert list(store.list()) == ["a/1.json", "parts/1-x", "parts/10-x", "parts/2-x", "top"]
    assert list(store.list("parts/")) == ["parts/1-x", "parts/10-x", "parts/2-x"]
    assert list(store.list("parts/1")) == ["parts/1-x", "parts/10-x"]
    assert list(store.list("par")) == ["parts/1-x", "parts/10-x", "parts/2-x"]
    assert list(store.list("zzz/")) == []


def test_delete_is_idempotent(store: BackupStore) -> None:
    store.put("a/b", b"x")
    store.delete("a/b")
    store.delete("a/b")
    store.delete("never/was")
    assert list(store.list()) == []
    with pytest.raises(CheckpointNotFound, match="a/b"):
        store.get("a/b")


@pytest.mark.parametrize("count", [0, 1, 2, 30])
def test_many_names_at_once(store: BackupStore, count: int) -> None:
    blocks = {f"parts/{number}": os.urandom(100 * number) for number in range(count)}
    store.put("parts/0", b"before, and replaced")
    store.put("other", b"x")
    store.put_all(blocks)
    for name, data in blocks.items():
        assert store.get(name).to_pybytes() == data
        assert store.size(name) == len(data)
    gone = [f"parts/{number}" for number in range(0, count, 2)]
    store.delete_all([*gone, "never/was"])
    left = {*blocks, "parts/0", "other"} - {*gone}
    assert list(store.list()) == sorted(left)


def test_one_bad_name_among_many(store: BackupStore) -> None:
    store.put("kept", b"x")
    with pytest.raises(ValueError, match="name of a backup"):
        store.put_all({"a": b"x", "../b": b"x"})
    with pytest.raises(ValueError, match="name of a backup"):
        store.delete_all(["kept", "../b"])
    assert list(store.list()) == ["kept"]


def test_what_is_not_there(store: BackupStore) -> None:
    for ask in (store.get, store.size):
        with pytest.raises(CheckpointNotFound, match="a/missing"):
            ask("a/missing")


@pytest.mark.parametrize("name", ["", "/", "/a", "a/", "a//b", "..", "a/../b", ".partial/x", "a b",
                                  "a\n", "a\\b", "ä", "a/.b"])  # fmt: skip
def test_names_are_checked(store: BackupStore, name: str) -> None:
    with pytest.raises(ValueError, match="name of a backup"):
        store.put(name, b"x")
    for ask in (store.get, store.size, store.delete):
        with pytest.raises(ValueError, match="name of a backup"):
            ask(name)


# --- files ---


def test_files_is_absolute_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    backup = Files("words")
    assert backup.uri == str(tmp_path / "words")
    monkeypatch.chdir("/")
    backup.open().put("a", b"x")
    assert (tmp_path / "words" / "a").read_bytes() == b"x"
    assert Files(f"file://{tmp_path}/words").open().get("a").to_pybytes() == b"x"
    with pytest.raises(PlanError, match="empty"):
        Files("")
    with pytest.raises(PlanError, match="wat://"):
        Files("wat://x").open()


@pytest.mark.parametrize(
    ("step", "error", "after"),
    [
        ("_write", DidNotHappen, b"old"),
        ("_make_folder", DidNotHappen, b"old"),
        ("_flush", DidNotHappen, b"old"),
        ("_flush folder", MayHaveHappened, b"new"),
    ],
)
def test_a_failed_put_says_what_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: type[Exception], after: bytes
) -> None:
    store = Files(str(tmp_path)).open()
    store.put("a/b", b"old")
    method = step.split()[0]
    real: Callable[..., None] = getattr(FileStore, method)

    def failing(self: FileStore, path: str, *rest: object) -> None:
        real(self, path, *rest)
        if step != "_flush folder" or path.endswith("/a"):
            raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(FileStore, method, failing)
    with pytest.raises(error, match=r"cannot write .*/a/b \(local\).*the disk is gone"):
        store.put("a/b", b"new")
    monkeypatch.undo()
    assert store.get("a/b").to_pybytes() == after
    assert list((tmp_path / files.PARTIAL).iterdir()) == []


def test_a_put_into_a_file_did_not_happen(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DidNotHappen, match="file/store"):
        Files(str(tmp_path / "file" / "store")).open().put("a", b"x")


def test_a_killed_put_is_not_seen_and_is_removed_later(tmp_path: Path) -> None:
    program = f"""
import os, signal
from anabranch.backup import Files
from anabranch.stores import FileStore
FileStore._flush = lambda self, path: os.kill(os.getpid(), signal.SIGKILL)
Files({str(tmp_path)!r}).open().put("a", b"x" * 100_000)
"""
    (tmp_path / files.PARTIAL).mkdir()
    killed = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert killed.returncode == -9
    (left,) = (tmp_path / files.PARTIAL).iterdir()
    store = Files(str(tmp_path)).open()
    assert list(store.list()) == []
    store.put("b", b"x")
    assert left.exists(), "it might still be written"
    long_ago = time.time() - 2 * files.ABANDONED.total_seconds()
    os.utime(left, (long_ago, long_ago))
    Files(str(tmp_path)).open().put("b", b"x")
    assert not left.exists()


# --- faults ---


@given(st.integers(0, 1000))
def test_faults_keep_their_word(seed: int) -> None:
    """What a faulty store says is a bound on what it did; the four outcomes all come up."""
    inner = MemoryStore()
    store = FaultyStore(inner, seed=seed, rate=0.5)
    for step in range(40):
        before = inner.get("a").to_pybytes() if inner.list() else None
        wanted = None if step % 3 == 2 else str(step).encode()
        possible = {wanted}
        try:
            match step % 4, wanted:
                case 0, None:
                    store.delete("a")
                case _, None:
                    store.delete_all(["a"])
                case 1, bytes(data):
                    store.put_all({"a": data})
                case _, bytes(data):
                    store.put("a", data)
        except DidNotHappen:
            possible = {before}
        except MayHaveHappened:
            possible = {before, wanted}
        after = inner.get("a").to_pybytes() if inner.list() else None
        assert after in possible
    assert 5 < store.faults < 35


def test_all_outcomes_of_a_fault() -> None:
    seen = set()
    for seed in range(50):
        inner = MemoryStore()
        try:
            FaultyStore(inner, seed=seed, rate=0.7).put("a", b"x")
            error = None
        except (DidNotHappen, MayHaveHappened) as raised:
            error = type(raised)
        seen.add((error, bool(inner.list())))
    assert seen == {
        (None, True), (DidNotHappen, False), (MayHaveHappened, False), (MayHaveHappened, True)
    }  # fmt: skip
    faulty = FaultyStore(MemoryStore(), seed=1, rate=1)
    for read in (lambda: faulty.get("a"), faulty.list, lambda: faulty.size("a")):
        with pytest.raises(DidNotHappen):
            read()
