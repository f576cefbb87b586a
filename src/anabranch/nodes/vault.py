"""What a node keeps for others: backups in a local folder, up to a number of bytes."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from anabranch.backup.files import PARTIAL, FileStore
from anabranch.backup.store import check_name
from anabranch.errors import CheckpointNotFound, DidNotHappen, MayHaveHappened, PlanError


class Vault:
    """A store over the files in a folder that no other process writes to.

    What is in the folder already counts. Buffers from :meth:`get` are maps of the files: nothing is
    copied, and they stay as they are when the name is replaced or deleted.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        if limit_bytes < 0:
            raise PlanError(f"a vault of {limit_bytes} bytes: the limit must not be negative")
        # Whoever wrote these is gone: the folder has one user.
        shutil.rmtree(folder / PARTIAL, ignore_errors=True)
        self.limit = limit_bytes
        self._folder = folder
        self._store = FileStore(fs.LocalFileSystem(use_mmap=True), str(folder))
        self._lock = threading.Lock()
        self._sizes = {name: self._store.size(name) for name in self._store.list()}
        self._used = sum(self._sizes.values())
        self._coming = 0

    def __repr__(self) -> str:
        return f"Vault({str(self._folder)!r}, {self.used} of {self.limit} bytes)"

    @property
    def used(self) -> int:
        """The bytes of all backups here."""
        with self._lock:
            return self._used

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        """See :meth:`anabranch.backup.BackupStore.put`; DidNotHappen if there is no room."""
        check_name(name)
        with self._room(name, len(data)):
            try:
                self._store.put(name, data)
            finally:
                self._recount(name)

    def get(self, name: str) -> pa.Buffer:
        """See :meth:`anabranch.backup.BackupStore.get`."""
        return self._store.get(name)

    def list(self, prefix: str = "") -> Sequence[str]:
        """See :meth:`anabranch.backup.BackupStore.list`."""
        with self._lock:
            return sorted(name for name in self._sizes if name.startswith(prefix))

    def delete(self, name: str) -> None:
        """See :meth:`anabranch.backup.BackupStore.delete`."""
        check_name(name)
        try:
            self._store.delete(name)
        finally:
            self._recount(name)

    def size(self, name: str) -> int:
        """See :meth:`anabranch.backup.BackupStore.size`."""
        check_name(name)
        with self._lock:
            if name not in self._sizes:
                raise CheckpointNotFound(f"there is no backup {name} in {self._folder}")
            return self._sizes[name]

    def check_room(self, name: str, size: int) -> None:
        """DidNotHappen if so many bytes under this name would go beyond the limit now."""
        with self._lock:
            self._check_room(name, size)

    def _check_room(self, name: str, size: int) -> None:
        others = self._used - self._sizes.get(name, 0)
        if others + self._coming + size > self.limit:
            raise DidNotHappen(
                f"no room for {size} bytes of {name} in {self._folder}: {self._used} bytes are "
                f"used and {self._coming} on their way, of {self.limit}; delete old backups or "
                "raise the limit"
            )

    @contextmanager
    def _room(self, name: str, size: int) -> Iterator[None]:
        with self._lock:
            self._check_room(name, size)
            self._coming += size
        try:
            yield
        finally:
            with self._lock:
                self._coming -= size

    def _recount(self, name: str) -> None:
        """Look at the file under the lock: right in the end, in whatever order writers come."""
        with self._lock:
            try:
                size = self._store.size(name)
            except CheckpointNotFound:
                self._used -= self._sizes.pop(name, 0)
            except DidNotHappen as error:
                raise MayHaveHappened(f"{name} was changed, or not: {error}") from error
            else:
                self._used += size - self._sizes.get(name, 0)
                self._sizes[name] = size
