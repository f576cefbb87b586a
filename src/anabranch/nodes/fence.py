"""Fencing off deposed drivers.

Every driver of a query has an epoch, a number greater than those of earlier drivers. A node checks
every change for a driver against its fence, which keeps the greatest epoch that it has seen in a
file.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from anabranch.durable import flush
from anabranch.errors import Deposed, DidNotHappen
from anabranch.nodes.node import Deadline
from anabranch.nodes.requests import Epoch
from anabranch.stores.store import BackupStore

EPOCH = "epoch"
"""The name of a fence's file."""

_RECORD = re.compile(rb"^[0-9]{19}$", re.MULTILINE)


class Fence:
    """Admits changes of the newest driver only. May be used from several threads.

    Every epoch that was the greatest is a line of the file at ``path``. Lines are only appended, so
    a line that a power failure cuts short does not damage the others.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._condition = threading.Condition()
        self._under_way: Counter[Epoch] = Counter()

    def check(self, epoch: Epoch) -> None:
        """Raise Deposed if a driver of a later epoch has been seen."""
        greatest = self.greatest()
        if epoch < greatest:
            raise Deposed(
                f"driver {greatest} has taken the query over; driver {epoch} changes nothing "
                "any more"
            )

    def greatest(self) -> Epoch:
        """The greatest epoch that has been seen; 0 if none has."""
        try:
            written = self._path.read_bytes()
        except FileNotFoundError:
            return Epoch(0)
        return Epoch(max(map(int, _RECORD.findall(written)), default=0))

    @contextmanager
    def admit(self, epoch: Epoch, deadline: Deadline) -> Iterator[None]:
        """Admit a change, in the body, for the driver of an epoch.

        No change of an earlier epoch runs at the same time: no more are admitted, and this waits
        for those in progress, or raises DidNotHappen. Deposed if the epoch is an earlier one.
        """
        with self._condition:
            self.check(epoch)
            if epoch > self.greatest():
                self._note(epoch)
            if not self._condition.wait_for(lambda: not self._before(epoch), deadline.left()):
                raise DidNotHappen(f"changes of driver {min(self._under_way)} are still under way")
            self.check(epoch)
            self._under_way[epoch] += 1
        try:
            yield
        finally:
            with self._condition:
                self._under_way[epoch] -= 1
                self._under_way += Counter()  # only those that are left
                self._condition.notify_all()

    def _before(self, epoch: Epoch) -> bool:
        return any(other < epoch for other in self._under_way)

    def _note(self, epoch: Epoch) -> None:
        """Write an epoch to disk."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._path, flags, 0o600)
            try:
                # The first end of line is for a line before it that was cut short.
                line = b"\n%019d\n" % epoch
                if os.write(descriptor, line) < len(line):
                    raise OSError("the disk has no room for the whole line")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            flush(str(self._path.parent))
        except OSError as error:
            raise DidNotHappen(
                f"epoch {epoch} cannot be written to {self._path}: {error}; make room there"
            ) from error


class FencedStore:
    """A store that only the driver of an epoch can change, until there is a later one."""

    def __init__(self, store: BackupStore, fence: Fence, epoch: Epoch, deadline: Deadline) -> None:
        self._store = store
        self._fence = fence
        self._epoch = epoch
        self._deadline = deadline

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        """See :meth:`anabranch.stores.BackupStore.put`."""
        with self._fence.admit(self._epoch, self._deadline):
            self._store.put(name, data)

    def put_all(self, blocks: Mapping[str, pa.Buffer | bytes]) -> None:
        """See :meth:`anabranch.stores.BackupStore.put_all`."""
        with self._fence.admit(self._epoch, self._deadline):
            self._store.put_all(blocks)

    def get(self, name: str, offset: int = 0, length: int | None = None) -> pa.Buffer:
        """See :meth:`anabranch.stores.BackupStore.get`."""
        return self._store.get(name, offset, length)

    def list(self, prefix: str = "") -> Sequence[str]:
        """See :meth:`anabranch.stores.BackupStore.list`."""
        return self._store.list(prefix)

    def delete(self, name: str) -> None:
        """See :meth:`anabranch.stores.BackupStore.delete`."""
        with self._fence.admit(self._epoch, self._deadline):
            self._store.delete(name)

    def delete_all(self, names: Collection[str]) -> None:
        """See :meth:`anabranch.stores.BackupStore.delete_all`."""
        with self._fence.admit(self._epoch, self._deadline):
            self._store.delete_all(names)

    def size(self, name: str) -> int:
        """See :meth:`anabranch.stores.BackupStore.size`."""
        return self._store.size(name)
