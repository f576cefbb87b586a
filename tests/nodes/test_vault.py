"""The vault: a bound on its bytes that holds whatever happens, and a folder that it finds again."""

import os
import shutil
import stat
import tempfile
import threading
from collections import namedtuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import CheckpointNotFound, DidNotHappen, MayHaveHappened, PlanError
from anabranch.nodes.vault import Incoming, Vault, keep_all
from anabranch.stores.files import PARTIAL

NAMES = st.sampled_from(["a", "b/c", "b/d"])
STEPS = st.lists(
    st.tuples(NAMES, st.integers(0, 60)) | NAMES | st.just("restart"), max_size=25
)  # fmt: skip


@given(STEPS)
def test_the_limit_holds_and_the_count_is_right(steps: list[tuple[str, int] | str]) -> None:
    folder = Path(tempfile.mkdtemp())
    vault, model = Vault(folder, 100), dict[str, bytes]()
    for step in steps:
        match step:
            case "restart":
                vault = Vault(folder, 100)
            case str(name):
                vault.delete(name)
                model.pop(name, None)
            case (name, size):
                others = sum(len(data) for key, data in model.items() if key != name)
                if others + size > 100:
                    with pytest.raises(DidNotHappen, match=f"{vault.used} bytes are used.*of 100"):
                        vault.put(name, b"x" * size)
                else:
                    vault.put(name, b"x" * size)
                    model[name] = b"x" * size
        assert vault.used == sum(map(len, model.values())) <= 100
        assert list(vault.list()) == sorted(model)
        assert {name: vault.get(name).to_pybytes() for name in vault.list()} == model
        assert all(vault.size(name) == len(data) for name, data in model.items())
    shutil.rmtree(folder)


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "adopt"]), st.integers(0, 5), st.integers(0, 60))
        | st.just("restart"),
        max_size=25,
    )
)
def test_what_a_node_keeps_for_itself_is_the_first_to_go(
    steps: list[tuple[str, int, int] | str],
) -> None:
    """It never keeps anything of others from being stored, and nothing of others goes for it."""
    folder = Path(tempfile.mkdtemp())
    vault, others = Vault(folder / "vault", 100), dict[str, int]()
    own: dict[str, int] = {}
    for number, step in enumerate(steps):
        match step:
            case "restart":
                vault = Vault(folder / "vault", 100)
            case ("put", int(name), int(size)):
                rest = sum(each for key, each in others.items() if key != f"{name}")
                if rest + size > 100:
                    with pytest.raises(DidNotHappen, match="no room"):
                        vault.put(f"{name}", b"x" * size)
                else:
                    vault.put(f"{name}", b"x" * size)
                    others[f"{name}"] = size
            case ("adopt", int(name), int(size)):
                file = folder / "file"
                file.write_bytes(b"o" * size)
                taken = vault.adopt(f"own/{number}-{name}", file)
                assert taken is (sum(others.values()) + size <= 100)
                assert file.exists() is not taken
                if taken:
                    own[f"own/{number}-{name}"] = size
        left = [name for name in own if name in vault.list()]
        assert left == list(own)[len(own) - len(left) :], "the oldest go first"
        own = {name: own[name] for name in left}
        assert vault.used == sum(others.values()) + sum(own.values()) <= 100
        assert {name for name in vault.list() if name not in own} == others.keys()
        assert all(vault.get(name).to_pybytes() == b"o" * size for name, size in own.items())
    shutil.rmtree(folder)


def test_what_cannot_be_deleted_to_make_room_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vault = Vault(tmp_path / "vault", 100)
    for name in ("own/a", "own/b"):
        (tmp_path / "file").write_bytes(b"x" * 40)
        assert vault.adopt(name, tmp_path / "file")
    unlink = Path.unlink

    def failing(path: Path, missing_ok: bool = False) -> None:
        if path.name == "a":
            raise OSError("the disk is broken")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", failing)
    vault.put("c", b"x" * 60)
    assert vault.used == 100
    assert list(vault.list()) == ["c", "own/a"]
    with pytest.raises(DidNotHappen, match="no room for 1 bytes"):
        vault.put("d", b"x")


def test_a_node_keeps_nothing_for_itself_under_the_names_of_others(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    vault = Vault(tmp_path / "vault", 100)
    with pytest.raises(ValueError, match="begins with own/"):
        vault.adopt("a", tmp_path / "file")
    assert vault.adopt("own/a", tmp_path / "file")
    vault.delete("own/a")
    assert (vault.used, list(vault.list())) == (0, [])
    assert not vault.adopt("own/b", tmp_path / "nothing")


def test_threads_together_stay_below_the_limit(tmp_path: Path) -> None:
    vault = Vault(tmp_path, 1000)
    refused: list[int] = []

    def fill(number: int) -> None:
        for step in range(20):
            try:
                vault.put(f"{(number + step) % 7}", b"x" * (100 + 37 * number))
            except DidNotHappen:
                refused.append(number)
            if step % 5 == 4:
                vault.delete(f"{step % 7}")

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused
    files = [p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()]
    assert vault.used == sum(files) <= 1000
    assert vault._coming == 0
    assert Vault(tmp_path, 1000).used == vault.used


def test_what_is_still_being_written_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vault = Vault(tmp_path, 100)
    writing, go_on = threading.Event(), threading.Event()
    real = Incoming.write

    def slow(self: Incoming, data: memoryview) -> None:
        writing.set()
        assert go_on.wait(20)
        real(self, data)

    monkeypatch.setattr(Incoming, "write", slow)
    first = threading.Thread(target=vault.put, args=("a", b"x" * 60))
    first.start()
    assert writing.wait(20)
    go_on_later = threading.Timer(5, go_on.set)  # so that a wrong vault fails, and does not hang
    go_on_later.start()
    try:
        with pytest.raises(DidNotHappen, match="0 bytes are used, 60 are reserved, of 100"):
            vault.put("b", b"x" * 60)
    finally:
        go_on_later.cancel()
        go_on.set()
        first.join()
    assert vault.used == 60


def test_a_reader_keeps_what_it_has(tmp_path: Path) -> None:
    vault = Vault(tmp_path, 1 << 20)
    vault.put("a", b"first" * 1000)
    before = vault.get("a")
    vault.put("a", b"second")
    vault.delete("a")
    assert before.to_pybytes() == b"first" * 1000


def test_what_a_killed_agent_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / PARTIAL).mkdir()
    (tmp_path / PARTIAL / "x").write_bytes(b"half")
    vault = Vault(tmp_path, 100)
    assert vault.used == 0
    assert not (tmp_path / PARTIAL / "x").exists()


@pytest.mark.parametrize("kind", [DidNotHappen, MayHaveHappened])
def test_a_put_that_fails_leaves_the_count_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    vault = Vault(tmp_path, 100)
    vault.put("a", b"x" * 60)
    real = os.fsync

    def failing(descriptor: int) -> None:
        """The bytes cannot be flushed, or the folder, once the file has its name."""
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) or kind is DidNotHappen:
            raise OSError("the disk is gone")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(kind, match="the disk is gone"):
            vault.put("a", b"x" * 30)
    assert vault.used == (30 if kind is MayHaveHappened else 60)
    assert vault._coming == vault._written == 0
    assert list((tmp_path / PARTIAL).iterdir()) == []
    vault.put("b", b"x" * (100 - vault.used))
    assert vault.used == 100


def test_of_many_that_are_kept_none_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if the size of one cannot be read again."""
    vault = Vault(tmp_path, 1000)
    size = vault._store.size

    def failing(name: str) -> int:
        if name == "b":
            raise DidNotHappen("the disk is gone")
        return size(name)

    monkeypatch.setattr(vault._store, "size", failing)
    with vault.receiving_all([(name, 10) for name in "abc"]) as coming:
        for each in coming:
            each.write(memoryview(b"x" * 10))
    with pytest.raises(MayHaveHappened, match="b may have been changed: the disk is gone"):
        keep_all(coming)
    assert vault._coming == vault._written == 0
    for each in coming:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(each._descriptor)


def test_without_a_limit_a_part_of_the_disk_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = namedtuple("disk", "total used free")
    now = disk(1000, 0, 150)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: now)
    vault = Vault(tmp_path, None)
    assert vault.limit == 100
    with pytest.raises(DidNotHappen, match=r"no room for 101 bytes .* 0 are reserved, of 100"):
        vault.put("a", b"x" * 101)
    first = vault.receiving("a", 60)
    with pytest.raises(DidNotHappen, match=r"no room for 41 bytes .* 60 are reserved, of 100"):
        vault.receiving("b", 41)
    first.write(memoryview(b"x" * 50))
    now = disk(1000, 50, 100)  # the bytes of the first are on it now
    second = vault.receiving("b", 40)
    now = disk(1000, 950, 50)  # somebody else took the rest
    with pytest.raises(DidNotHappen, match="no room for 1 bytes"):
        vault.put("c", b"x")
    first.drop()
    second.drop()
    assert vault._coming == vault._written == 0


def test_what_comes_in_pieces_is_there_when_it_is_whole(tmp_path: Path) -> None:
    vault = Vault(tmp_path, 100)
    incoming = vault.receiving("a/b", 10)
    for _ in range(5):
        incoming.write(memoryview(b"xy"))
        assert list(vault.list()) == []
        assert vault.used == 0
    incoming.keep()
    assert vault.get("a/b").to_pybytes() == b"xy" * 5
    with vault.opened("a/b") as (descriptor, size):
        assert (os.pread(descriptor, 100, 0), size) == (b"xy" * 5, 10)
    with pytest.raises(CheckpointNotFound), vault.opened("a"):
        pass


def test_everything_is_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "vault"
    folder.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        Vault(folder, 100).put("a/b", b"x")
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert modes == {
        folder: 0o700, folder / PARTIAL: 0o700, folder / "a": 0o700, folder / "a" / "b": 0o600
    }  # fmt: skip


def test_a_limit_must_make_sense(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="-1 bytes"):
        Vault(tmp_path, -1)
    vault = Vault(tmp_path, 0)
    vault.put("empty", b"")
    with pytest.raises(DidNotHappen, match="no room for 1 bytes"):
        vault.put("a", b"x")
