"""A folder on a disk whose power can fail: what was not flushed may be lost, cut, or out of order.

``os.fsync`` is watched. After a failure a file has the bytes of its last flush, or those written
since, or a part of them; a folder has the names of its last flush, and of each later change either
the old or the new one.
"""

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


class PowerDisk:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._contents: dict[int, bytes] = {}
        self._names: dict[str, dict[str, int]] = {}
        self._held: dict[int, int] = {}
        self._lock = threading.Lock()
        self.flushes = 0
        self.before_flush: Callable[[], None] | None = None
        """Called before something is flushed, which does not happen if this raises."""

    @contextmanager
    def watched(self) -> Iterator["PowerDisk"]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", self._fsync)
            try:
                yield self
            finally:
                self._let_go()

    def _fsync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not path.is_relative_to(self.root):
            return
        if self.before_flush is not None:
            self.before_flush()
        with self._lock:
            self.flushes += 1
            if path.is_dir():
                self._names[str(path)] = dict(self._present(path))
            else:
                self._contents[self._hold(path)] = path.read_bytes()

    def _present(self, folder: Path) -> Iterator[tuple[str, int]]:
        """The names in a folder, and the files; another thread may just be removing one."""
        for entry in folder.iterdir():
            with suppress(FileNotFoundError):
                yield entry.name, self._hold(entry)

    def _hold(self, path: Path) -> int:
        """Keep a file's number from being given to another file."""
        number = path.stat().st_ino
        if number not in self._held:
            self._held[number] = os.open(path, os.O_RDONLY)
        return number

    def _let_go(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def fail(self, chance: random.Random) -> None:
        """Cut the power, and put in place what the disk has then."""
        left = self.root.with_name(f"{self.root.name}.left")
        left.mkdir()
        self._copy(self.root, left, chance)
        shutil.rmtree(self.root)
        left.rename(self.root)
        self._let_go()
        self._contents.clear()
        self._names.clear()
        self._flushed(self.root)

    def _flushed(self, folder: Path) -> None:
        """What is there after a failure is on the disk."""
        self._names[str(folder)] = {entry.name: self._hold(entry) for entry in folder.iterdir()}
        for entry in folder.iterdir():
            if entry.is_dir():
                self._flushed(entry)
            else:
                self._contents[self._hold(entry)] = entry.read_bytes()

    def _copy(self, folder: Path, to: Path, chance: random.Random) -> None:
        now = {entry.name: self._hold(entry) for entry in folder.iterdir()}
        flushed = self._names.get(str(folder), {})
        for name in sorted(now.keys() | flushed.keys()):
            number = chance.choice([now.get(name), flushed.get(name)])
            if number is None:
                continue
            source = Path(f"/proc/self/fd/{self._held[number]}")
            if (folder / name).is_dir():
                (to / name).mkdir()
                self._copy(folder / name, to / name, chance)
            else:
                (to / name).write_bytes(self._bytes(number, source, chance))

    def _bytes(self, number: int, source: Path, chance: random.Random) -> bytes:
        written, flushed = source.read_bytes(), self._contents.get(number, b"")
        if written == flushed:
            return written
        cut = written[: chance.randrange(len(written) + 1)]
        return chance.choice([written, flushed, cut])
