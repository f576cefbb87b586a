"""The backups that a node keeps for others, in a local folder with a limit."""

from __future__ import annotations

import os
import shutil
import stat
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from anabranch.errors import (
    CheckpointNotFound,
    DidNotHappen,
    MayHaveHappened,
    PlanError,
    StoreError,
)
from anabranch.nodes.chunks import flat
from anabranch.private import private_folder
from anabranch.stores.files import PARTIAL, FileStore
from anabranch.stores.store import check_name

RESERVE = 0.05
"""The share of a disk that is left free where no limit is given."""


class Vault:
    """A store over the files in a folder of this user that no other process writes to.

    ``limit`` is the greatest size of all backups in bytes. None: the free space of the disk, minus
    a reserve. Files that are in the folder already count. Buffers from :meth:`get` are mapped
    files: nothing is copied, and they do not change when the name is replaced or deleted.
    """

    def __init__(self, folder: Path, limit: int | None) -> None:
        if limit is not None and limit < 0:
            raise PlanError(f"a vault of {limit} bytes: the limit must not be negative")
        private_folder(folder)
        # Whoever wrote these is gone: the folder has one user.
        shutil.rmtree(folder / PARTIAL, ignore_errors=True)
        (folder / PARTIAL).mkdir(mode=0o700)
        self._limit = limit
        self._folder = folder
        self._store = FileStore(fs.LocalFileSystem(use_mmap=True), str(folder))
        self._lock = threading.Lock()
        self._sizes = {name: self._store.size(name) for name in self._store.list()}
        self._used = sum(self._sizes.values())
        self._coming = 0
        self._written = 0

    def __repr__(self) -> str:
        return f"Vault({str(self._folder)!r}, {self.used} of {self.limit} bytes)"

    @property
    def used(self) -> int:
        """The bytes of all backups here."""
        with self._lock:
            return self._used

    @property
    def limit(self) -> int:
        """The greatest size of all backups now, in bytes."""
        with self._lock:
            return self._used + self._coming + self._free()

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        """See :meth:`anabranch.stores.BackupStore.put`; DidNotHappen if there is no room."""
        view = flat(data)
        incoming = self.receiving(name, len(view))
        with incoming.dropped_on_error():
            incoming.write(view)
        incoming.keep()

    def receiving(self, name: str, size: int) -> Incoming:
        """Reserve room for a backup that will be written. DidNotHappen if there is none."""
        check_name(name)
        with self._lock:
            self._check_room(name, size)
            self._coming += size
        try:
            return Incoming(self, name, size, self._folder)
        except OSError as error:
            self._release_room(size, 0)
            raise DidNotHappen(f"cannot write {name} in {self._folder}: {error}") from error

    def get(self, name: str) -> pa.Buffer:
        """See :meth:`anabranch.stores.BackupStore.get`."""
        return self._store.get(name)

    @contextmanager
    def opened(self, name: str) -> Iterator[tuple[int, int]]:
        """The descriptor of a backup's file, and its size."""
        try:
            descriptor = os.open(self._folder / check_name(name), os.O_RDONLY | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointNotFound(f"there is no backup {name} in {self._folder}") from error
        except OSError as error:
            raise DidNotHappen(f"cannot read {name} in {self._folder}: {error}") from error
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointNotFound(f"there is no backup {name} in {self._folder}")
            yield descriptor, found.st_size
        finally:
            os.close(descriptor)

    def list(self, prefix: str = "") -> Sequence[str]:
        """See :meth:`anabranch.stores.BackupStore.list`."""
        with self._lock:
            return sorted(name for name in self._sizes if name.startswith(prefix))

    def delete(self, name: str) -> None:
        """See :meth:`anabranch.stores.BackupStore.delete`."""
        check_name(name)
        try:
            self._store.delete(name)
        finally:
            self._recount(name)

    def size(self, name: str) -> int:
        """See :meth:`anabranch.stores.BackupStore.size`."""
        check_name(name)
        with self._lock:
            if name not in self._sizes:
                raise CheckpointNotFound(f"there is no backup {name} in {self._folder}")
            return self._sizes[name]

    def _free(self) -> int:
        """The number of bytes that still fit."""
        if self._limit is not None:
            return self._limit - self._used - self._coming
        disk = shutil.disk_usage(self._folder)
        # What was written already of the files on their way is no longer free.
        return disk.free - int(RESERVE * disk.total) - (self._coming - self._written)

    def _check_room(self, name: str, size: int) -> None:
        # On a disk the file that is replaced takes its room until the new one is whole.
        replaced = 0 if self._limit is None else self._sizes.get(name, 0)
        free = self._free()
        if size > free + replaced:
            raise DidNotHappen(
                f"no room for {size} bytes of {name} in {self._folder}: {self._used} bytes are "
                f"used, {self._coming} are reserved, of {self._used + self._coming + free}; "
                "delete old backups, raise the capacity of Upstream, or give its nodes larger disks"
            )

    def _release_room(self, size: int, written: int) -> None:
        with self._lock:
            self._coming -= size
            self._written -= written

    def _recount(self, name: str) -> None:
        """Read the size of the file under the lock, so that the last count is right."""
        with self._lock:
            try:
                size = self._store.size(name)
            except CheckpointNotFound:
                self._used -= self._sizes.pop(name, 0)
            except DidNotHappen as error:
                raise MayHaveHappened(f"{name} may have been changed: {error}") from error
            else:
                self._used += size - self._sizes.get(name, 0)
                self._sizes[name] = size


class Incoming:
    """A backup that is being received; :meth:`Vault.receiving` makes one.

    Its bytes are in a file of another name until all of them are on the disk. It must end with
    :meth:`keep` or :meth:`drop`.
    """

    def __init__(self, vault: Vault, name: str, size: int, folder: Path) -> None:
        self._vault = vault
        self._name = name
        self._size = size
        self._written = 0
        self._folder = folder
        self._path = folder / name
        self._partial = folder / PARTIAL / uuid.uuid4().hex
        self._descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def write(self, data: memoryview) -> None:
        """Add bytes at the end."""
        with self._failing(DidNotHappen):
            at = 0
            while at < len(data):
                count = os.write(self._descriptor, data[at:])
                at += count
                self._written += count
                with self._vault._lock:
                    self._vault._written += count

    def keep(self) -> None:
        """Store the complete backup durably under its name."""
        with self.dropped_on_error():
            with self._failing(DidNotHappen):
                os.fsync(self._descriptor)
                made = _make_folder(self._path.parent)
            with self._failing(MayHaveHappened):
                self._partial.rename(self._path)
                for folder in {self._path.parent, *made}:
                    _flush(folder)
        self._end()

    def drop(self) -> None:
        """Drop the received bytes."""
        with suppress(FileNotFoundError):
            self._partial.unlink()
        self._end()

    @contextmanager
    def dropped_on_error(self) -> Iterator[None]:
        """Drop the backup if the body fails."""
        try:
            yield
        except BaseException:
            self.drop()
            raise

    def _end(self) -> None:
        os.close(self._descriptor)
        try:
            self._vault._recount(self._name)
        finally:
            self._vault._release_room(self._size, self._written)

    @contextmanager
    def _failing(self, kind: type[StoreError]) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise kind(f"cannot write {self._name} in {self._folder}: {error}") from error


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder. Returns the folders whose entries changed."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return [path.parent for path in missing]


def _flush(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
