"""Waiting until a file is on its disk."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: str) -> None:
    """Wait until a local file, or the names in a local folder, would outlast a power failure.

    A file that was renamed, or made, needs this and its folder too: a name alone is no promise.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_ancestors(path: str) -> None:
    """Have the names of the folders that lead to a path on disk, as far as this user may look."""
    for folder in Path(path).parents:
        try:
            flush(str(folder))
        except PermissionError:
            return  # whoever may not read a folder has not made one in it
