"""Flushing files to disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def flush(path: str) -> None:
    """Flush a local file, or the names in a local folder, so that a power failure cannot lose it.

    A file that was made or renamed also needs a flush of its folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_ancestors(path: str) -> None:
    """Flush the folders above a path, as far as this user has access."""
    for folder in Path(path).parents:
        try:
            flush(str(folder))
        except PermissionError:
            return  # whoever may not read a folder has not made one in it


class Unflushed:
    """Local files and folders that have changed and may not be on their disk yet.

    Each stays here until it has been flushed: one that could not be is tried again with the next
    :meth:`flush`. May be used from several threads.
    """

    def __init__(self) -> None:
        self._changed: dict[str, None] = {}
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    def add(self, paths: Iterable[str]) -> None:
        """These have changed."""
        with self._lock:
            self._changed |= dict.fromkeys(paths)

    def flush(self) -> None:
        """Have all of them on disk. OSError if one cannot be flushed."""
        # Whoever comes second waits: all is on disk when this returns, whoever has seen to it.
        with self._flushing:
            with self._lock:
                left, self._changed = self._changed, {}
            try:
                while left:
                    path = next(iter(left))
                    with suppress(FileNotFoundError):  # removed since, as when files are compacted
                        flush(path)
                    del left[path]
            finally:
                self.add(left)
