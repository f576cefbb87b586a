"""Claims to a state folder: it belongs to one machine, and each query in it to living processes.

A claim is a file lock, which the system releases when its process dies::

    <state folder>/.hosts-<user>/<boot id>    shared, by all processes of this machine
    <state folder>/[<host>/]<query>/alive     shared, by the processes that run the query there
    <state folder>/<query>/alone              exclusive, by a driver that runs the tasks itself
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType

from anabranch import boot
from anabranch.errors import PlanError
from anabranch.mounts import file_system, is_shared
from anabranch.nodes.folders import StateRoot, backup_folder, make_own, state_folder
from anabranch.private import private_folder

ALIVE = "alive"
ALONE = "alone"
KEEP = "keep"
"""A file in the folder of a query whose state is nowhere else: it is not swept."""
HOSTS = ".hosts"


class Claim:
    """A claim to the folder of a query's state, held until it is closed."""

    def __init__(self, base: Path, root: Path) -> None:
        kind = file_system(base)
        if is_shared(kind):
            raise PlanError(
                f"the state folder {base} is on a file system that other machines can have too "
                f"({kind}); state is shared memory of one machine: name a folder on a disk of its "
                "own, or in memory, with state_folder= or ANABRANCH_STATE_FOLDER"
            )
        self.root = root
        self._held: list[int] = []
        try:
            make_own(base)
            make_own(backup_folder())
            self._held.append(_claim_machine(base))
            for above in reversed(root.relative_to(base).parents[:-1]):
                _open_to_all(base / above)
            self._held.append(_hold(root / ALIVE))
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, root: StateRoot, host: str | None = None) -> Claim:
        """Make the folder, for this user alone, and claim it.

        PlanError if the folder is another user's, on a network file system, or used by another
        machine too.
        """
        return cls(state_folder(root.folder), root.path(host))

    def mark_kept(self, kept: bool) -> None:
        """Record whether the state has no backup, and so must stay when the query has ended."""
        if kept:
            (self.root / KEEP).touch(mode=0o600)
        else:
            (self.root / KEEP).unlink(missing_ok=True)

    def hold_alone(self, checkpoints: str) -> None:
        """Hold the folder as its only driver, whose checkpoint folder is this one.

        PlanError if another driver holds it: copies of a checkpoint folder have the same query id
        if neither is visible from the other one.
        """
        fd = try_alone(self.root / ALONE)
        if fd is None:
            holder = (self.root / ALONE).read_text(errors="replace") or "another process"
            raise PlanError(
                f"the state of this query is in use by {holder}, and this one is for "
                f"{checkpoints}: stop that one first, or start in a new checkpoint folder"
            )
        self._held.append(fd)
        os.truncate(fd, 0)
        os.write(fd, f"process {os.getpid()} for the checkpoint folder {checkpoints}".encode())

    def close(self) -> None:
        """Release the claim. The folder stays, and may be swept from now on."""
        while self._held:
            os.close(self._held.pop())

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def try_alone(path: Path) -> int | None:
    """Lock a file exclusively and return its descriptor, or None if a process has locked it.

    The caller closes it. FileNotFoundError if the folder does not exist.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _still_there(path, fd):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _still_there(path: Path, fd: int) -> bool:
    """Whether a name still leads to a file that was opened under it.

    Between the opening and the lock another process can remove the folder, and a third one can
    make it again. A lock on the removed file protects nothing.
    """
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _hold(path: Path) -> int:
    """Lock a file, shared with other processes, in a folder that is made if it is missing."""
    while True:
        try:
            private_folder(path.parent)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue  # swept meanwhile
        try:
            # Whoever holds it alone is about to remove it, and that does not take long.
            fcntl.flock(fd, fcntl.LOCK_SH)
            if _still_there(path, fd):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _claim_machine(base: Path) -> int:
    """Record that this machine uses a folder. PlanError if another machine does."""
    hosts = base / f"{HOSTS}-{os.geteuid()}"
    mine = _hold(hosts / boot.boot_id())
    try:
        for other in sorted(hosts.iterdir()):
            if other.name == boot.boot_id():
                continue
            stale = try_alone(other)
            if stale is None:
                raise PlanError(
                    f"the state folder {base} is used by another machine as well; state is shared "
                    "memory of one machine: give each a folder of its own, with state_folder= or "
                    "ANABRANCH_STATE_FOLDER"
                )
            other.unlink(missing_ok=True)
            os.close(stale)
    except BaseException:
        os.close(mine)
        raise
    return mine


def _open_to_all(folder: Path) -> None:
    """Make a folder in which every user may have folders, with the sticky bit."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != 0o1777:
        folder.chmod(0o1777)
