"""The backups that a node keeps for others, in a local folder with a limit."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
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
from anabranch.state.part import OWN
from anabranch.stores.files import PARTIAL, FileStore
from anabranch.stores.store import check_name

_log = logging.getLogger(__name__)

_FLUSHES = 8
"""How many files are flushed at the same time."""
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
        own = [name for name in self._sizes if name.startswith(OWN)]
        # The oldest first: they are the first to go.
        self._own = dict.fromkeys(sorted(own, key=lambda name: (folder / name).stat().st_mtime_ns))
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
        self.put_all({name: data})

    def put_all(self, blocks: Mapping[str, pa.Buffer | bytes]) -> None:
        """See :meth:`anabranch.stores.BackupStore.put_all`."""
        views = {check_name(name): flat(data) for name, data in blocks.items()}
        with self.receiving_all([(name, len(view)) for name, view in views.items()]) as coming:
            for each, view in zip(coming, views.values(), strict=True):
                each.write(view)
        keep_all(coming)

    @contextmanager
    def receiving_all(self, sizes: Collection[tuple[str, int]]) -> Iterator[list[Incoming]]:
        """Reserve room for several backups. They are dropped if the body fails."""
        with ExitStack() as dropped:
            coming = []
            for name, size in sizes:
                coming.append(self.receiving(name, size))
                dropped.enter_context(coming[-1].dropped_on_error())
            yield coming

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

    def adopt(self, name: str, path: Path) -> bool:
        """Take a file of this disk over, for this node alone. False if there is no room.

        It is not flushed: whoever reads it verifies it. It is deleted when others need its room.
        """
        check_name(name)
        if not name.startswith(OWN):
            raise ValueError(f"{name!r}: what a node keeps for itself begins with {OWN}")
        target = self._folder / name
        with self._lock:
            try:
                size = path.stat().st_size
                # It takes up room already, unless there is a limit.
                self._check_room(name, size if self._limit is not None else 0)
                _make_folder(target.parent)
                path.rename(target)
            except (DidNotHappen, OSError) as error:
                _log.info("Not keeping %s here: %s", name, error)
                return False
            self._used += size - self._sizes.get(name, 0)
            self._sizes[name] = size
            self._own[name] = None
        return True

    def get(self, name: str, offset: int = 0, length: int | None = None) -> pa.Buffer:
        """See :meth:`anabranch.stores.BackupStore.get`."""
        return self._store.get(name, offset, length)

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

    def delete_all(self, names: Collection[str]) -> None:
        """See :meth:`anabranch.stores.BackupStore.delete_all`."""
        for name in names:
            check_name(name)
        failed: StoreError | None = None
        for name in names:
            try:
                self.delete(name)
            except StoreError as error:
                failed = failed or error
        if failed is not None:
            raise failed

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
        while size > free + replaced and self._own:
            self._evict(next(iter(self._own)))
            free = self._free()
        if size > free + replaced:
            raise DidNotHappen(
                f"no room for {size} bytes of {name} in {self._folder}: {self._used} bytes are "
                f"used, {self._coming} are reserved, of {self._used + self._coming + free}; "
                "delete old backups, raise the capacity of the backup policy, or give its nodes "
                "larger disks"
            )

    def _evict(self, name: str) -> None:
        """Delete a file that this node keeps for itself, to make room."""
        del self._own[name]  # it is not tried again, and still counts if it cannot be deleted
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("Cannot delete %s to make room: %s", name, error)
        else:
            self._used -= self._sizes.pop(name, 0)

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
                self._own.pop(name, None)
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
        keep_all([self])

    def _flushed(self) -> set[Path]:
        """Flush the bytes to the disk. Returns the folders to flush when the file has its name."""
        with self._failing(DidNotHappen):
            os.fsync(self._descriptor)
            return {self._path.parent, *_make_folder(self._path.parent)}

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


def keep_all(coming: Sequence[Incoming]) -> None:
    """Store complete backups durably under their names.

    Files that are flushed at the same time take one write of the disk, and not one each.
    """
    with ExitStack() as dropped:
        for each in coming:
            dropped.enter_context(each.dropped_on_error())
        if len(coming) == 1:
            made = coming[0]._flushed()
        else:
            with ThreadPoolExecutor(min(_FLUSHES, len(coming)), "anabranch-flush") as pool:
                made = {folder for some in pool.map(Incoming._flushed, coming) for folder in some}
        for each in coming:
            with each._failing(MayHaveHappened):
                each._partial.rename(each._path)
        with coming[0]._failing(MayHaveHappened):
            for folder in made:
                _flush(folder)
    with ExitStack() as ended:
        for each in coming:
            ended.callback(each._end)


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
