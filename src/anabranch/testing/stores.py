"""Backup stores for tests: one in memory, and one that fails as stores do."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import pyarrow as pa

from anabranch.errors import CheckpointNotFound, DidNotHappen, MayHaveHappened
from anabranch.stores.store import BackupStore, check_name

T = TypeVar("T")


class MemoryStore:
    """A store in the memory of this process."""

    def __init__(self) -> None:
        self._blocks: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        """See :meth:`anabranch.stores.BackupStore.put`."""
        with self._lock:
            self._blocks[check_name(name)] = bytes(data)

    def put_all(self, blocks: Mapping[str, pa.Buffer | bytes]) -> None:
        """See :meth:`anabranch.stores.BackupStore.put_all`."""
        found = {check_name(name): bytes(data) for name, data in blocks.items()}
        with self._lock:
            self._blocks.update(found)

    def get(self, name: str, offset: int = 0, length: int | None = None) -> pa.Buffer:
        """See :meth:`anabranch.stores.BackupStore.get`."""
        with self._lock:
            found = self._found(name)
            return pa.py_buffer(found[offset : len(found) if length is None else offset + length])

    def list(self, prefix: str = "") -> Sequence[str]:
        """See :meth:`anabranch.stores.BackupStore.list`."""
        with self._lock:
            return sorted(name for name in self._blocks if name.startswith(prefix))

    def delete(self, name: str) -> None:
        """See :meth:`anabranch.stores.BackupStore.delete`."""
        with self._lock:
            self._blocks.pop(check_name(name), None)

    def delete_all(self, names: Collection[str]) -> None:
        """See :meth:`anabranch.stores.BackupStore.delete_all`."""
        checked = [check_name(name) for name in names]
        with self._lock:
            for name in checked:
                self._blocks.pop(name, None)

    def size(self, name: str) -> int:
        """See :meth:`anabranch.stores.BackupStore.size`."""
        with self._lock:
            return len(self._found(name))

    def _found(self, name: str) -> bytes:
        if check_name(name) not in self._blocks:
            raise CheckpointNotFound(f"there is no backup {name} (memory)")
        return self._blocks[name]


class FaultyStore:
    """A store that fails at random, as its seed decides.

    A failed change raises DidNotHappen; or it raises MayHaveHappened, and did or did not happen, as
    when an answer is lost. A failed read raises DidNotHappen. ``rate`` is the share of operations
    that fail, and ``faults`` counts them.

    >>> store = FaultyStore(MemoryStore(), seed=1, rate=1.0)
    >>> store.put("a", b"x")
    Traceback (most recent call last):
    anabranch.errors.DidNotHappen: put a: refused by the faulty store
    """

    def __init__(self, store: BackupStore, *, seed: int, rate: float = 0.3) -> None:
        self.store = store
        self.rate = rate
        self.faults = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        """Put, or fail."""
        self._change(f"put {name}", lambda: self.store.put(name, data))

    def put_all(self, blocks: Mapping[str, pa.Buffer | bytes]) -> None:
        """Put all or some of them, or fail."""
        self._change(
            f"put {', '.join(blocks)}",
            lambda: self.store.put_all(blocks),
            lambda: self.store.put_all({name: blocks[name] for name in self._some(blocks)}),
        )

    def get(self, name: str, offset: int = 0, length: int | None = None) -> pa.Buffer:
        """Get, or fail."""
        return self._read(f"get {name}", lambda: self.store.get(name, offset, length))

    def list(self, prefix: str = "") -> Sequence[str]:
        """List, or fail."""
        return self._read(f"list {prefix}", lambda: self.store.list(prefix))

    def delete(self, name: str) -> None:
        """Delete, or fail."""
        self._change(f"delete {name}", lambda: self.store.delete(name))

    def delete_all(self, names: Collection[str]) -> None:
        """Delete all or some of them, or fail."""
        self._change(
            f"delete {', '.join(names)}",
            lambda: self.store.delete_all(names),
            lambda: self.store.delete_all(self._some(names)),
        )

    def size(self, name: str) -> int:
        """Look the size up, or fail."""
        return self._read(f"size {name}", lambda: self.store.size(name))

    def _fails(self) -> bool:
        with self._lock:
            fails = self._random.random() < self.rate
            self.faults += fails
            return fails

    def _read(self, what: str, operation: Callable[[], T]) -> T:
        if self._fails():
            raise DidNotHappen(f"{what}: refused by the faulty store")
        return operation()

    def _some(self, names: Collection[str]) -> tuple[str, ...]:
        with self._lock:
            return tuple(names)[: self._random.randint(0, len(names))]

    def _change(
        self,
        what: str,
        operation: Callable[[], None],
        partly: Callable[[], None] | None = None,
    ) -> None:
        if not self._fails():
            return operation()
        with self._lock:
            happens, answers = self._random.choice([(0, 1), (0, 0), (1, 0)])
        if happens:
            (partly or operation)()
        if answers:
            raise DidNotHappen(f"{what}: refused by the faulty store")
        raise MayHaveHappened(f"{what}: the answer of the faulty store was lost")
