"""The lock of a table, which one task holds at a time."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anabranch.errors import StateLocked

_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.05


@contextmanager
def locked(folder: Path, timeout: float) -> Iterator[None]:
    """Hold the lock of a state folder. The system releases it when the process dies.

    Waits up to ``timeout`` seconds, then raises :class:`StateLocked`. The folder is made if it is
    not there, so that a table can be created under its lock.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "lock"
    deadline = time.monotonic() + timeout
    pause = _FIRST_PAUSE
    while (fd := _try(path)) is None:
        if time.monotonic() >= deadline:
            raise StateLocked(
                f"the state table in {folder} is locked by process {_holder(path)}; waited "
                f"{timeout:g} s. If that is an abandoned task, wait for it to end, or kill it"
            )
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(pause * 2, _LONGEST_PAUSE)
    try:
        yield
    finally:
        os.close(fd)


def holder_of(folder: Path) -> int | None:
    """The live process that has the lock of a folder open and has noted itself as its holder."""
    path = folder / "lock"
    try:
        pid, lock = int(path.read_text()), path.stat()
        opened = list(Path(f"/proc/{pid}/fd").iterdir())
    except (OSError, ValueError):
        return None
    return pid if any(_is_open(each, lock) for each in opened) else None


def _is_open(descriptor: Path, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(descriptor.stat(), file)
    except OSError:
        return False  # closed meanwhile


def _try(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever destroyed the folder took the file away: a lock on that one keeps nobody out.
        if path.stat().st_ino == os.fstat(fd).st_ino:
            with suppress(OSError):  # a folder without room keeps others out all the same
                os.ftruncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _holder(path: Path) -> str:
    try:
        return path.read_text() or "unknown"
    except OSError:
        return "unknown"
