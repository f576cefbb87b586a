"""One sparse file, mapped once at its greatest size and cut into arrays.

A hole costs nothing, neither in the file nor in the mapping, so every array has its final address
from the start: growing never moves or remaps anything, in this process or another. Space is
allocated ahead of use, because a write into a hole of a full file system kills the process.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.errors import StateFull, StateMissing

Array = npt.NDArray[Any]

PAGE = 4096
HEADER_BYTES = 1 << 16
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM}
_LEAST_STEP = 1 << 15
_LEAST_ITEMS = 1 << 12
_GREATEST_STEP = 1 << 25


@dataclass(frozen=True)
class Region:
    """An array of the file: ``items`` is how many it could ever have, each of ``width`` values."""

    name: str
    dtype: np.dtype[Any]
    items: int
    width: int = 1

    @property
    def item_bytes(self) -> int:
        """Bytes of one item."""
        return self.dtype.itemsize * self.width


def _up(size: int) -> int:
    return -(-size // PAGE) * PAGE


class Arena:
    """The mapped file. The first ``HEADER_BYTES`` are the table's header, the rest arrays.

    The header has two words per array: how far it is allocated, and how far from its beginning it
    was freed. They describe the file and not a version, so a roll-back does not change them.
    """

    def __init__(self, path: Path, regions: Sequence[Region], *, create: bool = False) -> None:
        self.path = path
        self.regions = {region.name: region for region in regions}
        self._offsets: dict[str, int] = {}
        end = HEADER_BYTES
        for region in regions:
            self._offsets[region.name] = end
            end += _up(region.items * region.item_bytes)
        self._at = {name: i for i, name in enumerate(self.regions)}
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        try:
            self._fd = os.open(path, flags, 0o600)
        except FileNotFoundError as error:
            raise StateMissing(f"there is no state table in {path.parent}") from error
        try:
            if create:
                self._allocate(0, HEADER_BYTES, end)
            elif os.fstat(self._fd).st_size != end:
                raise StateMissing(
                    f"{path} does not have the size of a state table with these columns"
                )
            self._map = _mapped(self._fd, end, path)
        except BaseException:
            os.close(self._fd)
            raise
        self.addresses = end
        """How many bytes of this process's addresses the file takes, whatever is in it."""
        self.header = np.frombuffer(self._map, np.int64, HEADER_BYTES // 8)
        words = self.header[1024 : 1024 + 2 * len(regions)].reshape(-1, 2)
        self._allocated, self._released = words[:, 0], words[:, 1]

    def array(self, name: str) -> Array:
        """The whole array, one-dimensional. Only what is allocated may be touched."""
        region = self.regions[name]
        count = region.items * region.width
        return np.frombuffer(self._map, region.dtype, count, self._offsets[name])

    def allocated(self, name: str) -> int:
        """How many items from the beginning may be touched."""
        return int(self._allocated[self._at[name]])

    def least_allocated(self, names: Sequence[str]) -> int:
        """How many items of each of these arrays may be touched."""
        return int(self._allocated[[self._at[name] for name in names]].min())

    def ensure(self, name: str, items: int) -> None:
        """Allocate at least this many items. :class:`StateFull` if there is no room."""
        have = int(self._allocated[self._at[name]])
        if items > have:
            self._allocated[self._at[name]] = self._extend(name, have, items, wrap=False)

    def ensure_ring(self, name: str, end: int) -> None:
        """Allocate an array that is used as a ring up to this position, which only ever grows."""
        have = int(self._allocated[self._at[name]])
        if end > have:
            self._allocated[self._at[name]] = self._extend(name, have, end, wrap=True)

    def shrink(self, name: str, items: int) -> None:
        """Free the memory beyond this many items."""
        size = self.regions[name].item_bytes
        low, high = _up(items * size), _up(self.allocated(name) * size)
        if low < high:
            self._allocated[self._at[name]] = low // size
            self._remove(self._offsets[name] + low, high - low)

    def trim(self, name: str, items: int) -> None:
        """Free memory if much more than this many items is allocated."""
        if self.allocated(name) > 4 * max(items, _LEAST_ITEMS):
            self.shrink(name, 2 * items)

    def clear(self, name: str) -> None:
        """Free a whole array. It reads as zeros when it grows again."""
        region = self.regions[name]
        self._allocated[self._at[name]] = 0
        # All that it could ever have: a process may have died between these two steps before.
        self._remove(self._offsets[name], _up(region.items * region.item_bytes))

    def forget(self, name: str, first: int, last: int) -> None:
        """Free the whole pages between two items."""
        size = self.regions[name].item_bytes
        low, high = _up(first * size), last * size // PAGE * PAGE
        if low < high:
            self._remove(self._offsets[name] + low, high - low)

    def release_ring(self, name: str, head: int) -> None:
        """Free the memory behind the head of a ring."""
        region = self.regions[name]
        low = int(self._released[self._at[name]])
        high = head * region.item_bytes // PAGE * PAGE // region.item_bytes
        if low < high:
            for start, stop in _unwrapped(low, high, region.items):
                self.forget(name, start, stop)
            self._released[self._at[name]] = high

    def allocated_bytes(self) -> int:
        """The allocated bytes of the file."""
        return os.fstat(self._fd).st_blocks * 512

    def is_at(self, path: Path) -> bool:
        """Whether the path still names this file, and not another made in its place."""
        try:
            there, here = path.stat(), os.fstat(self._fd)
        except OSError:
            return False
        return (there.st_ino, there.st_dev) == (here.st_ino, here.st_dev)

    def close(self) -> None:
        """Close the file. Its memory is unmapped when no array of it is in use any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            del self._map, self.header, self._allocated, self._released

    def _extend(self, name: str, have: int, items: int, *, wrap: bool) -> int:
        region = self.regions[name]
        size, offset = region.item_bytes, self._offsets[name]
        released = int(self._released[self._at[name]]) if wrap else 0
        most = released + region.items  # a ring must not run into its own beginning
        if items > most:
            raise StateFull(
                f"the state table in {self.path.parent} cannot have more than "
                f"{region.items} items of {name!r}, for which it was made: use more instances. If "
                "its file system is larger now, scaling or restoring makes a larger table"
            )
        slack = min(max(_LEAST_STEP, (items - released) * size // 8), _GREATEST_STEP)
        for more in (slack, 0):
            goal = min(_up(items * size + more) // size, most)
            try:
                for start, stop in _unwrapped(have, goal, region.items):
                    self._allocate(offset + start * size, offset + stop * size)
            except StateFull:
                if more == 0:
                    raise
            else:
                return goal
        raise AssertionError("the last try returns or raises")

    def _allocate(self, start: int, stop: int, length: int | None = None) -> None:
        try:
            if length is not None:
                os.ftruncate(self._fd, length)
            start = start // PAGE * PAGE
            os.posix_fallocate(self._fd, start, _up(stop) - start)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            free = shutil.disk_usage(self.path.parent).free
            raise StateFull(
                f"no room for {stop - start} more bytes of state in {self.path.parent} "
                f"({free} bytes are free): make its file system larger, or use another state folder"
            ) from error

    def _remove(self, start: int, length: int) -> None:
        self._map.madvise(mmap.MADV_REMOVE, start, length)


def _mapped(fd: int, length: int, path: Path) -> mmap.mmap:
    try:
        return mmap.mmap(fd, length)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise StateFull(
            f"this process cannot map {length} bytes for the state table in {path.parent}: "
            "too many tables are open, or its virtual memory is limited (ulimit -v)"
        ) from error


def _unwrapped(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """The pieces of a ring of this size between two positions that only ever grow."""
    if stop - start >= size:
        return [(0, size)]
    low, high = start % size, stop % size
    pieces = [(low, high)] if low <= high else [(low, size), (0, high)]
    return [(first, last) for first, last in pieces if first < last]
