"""Flushing files to disk."""

from __future__ import annotations

import os
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
