"""Folders that only their user can read, in places where others may write too."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from anabranch.errors import PlanError


def private_folder(path: Path) -> Path:
    """Make a folder, and those above it that are missing, for this user alone.

    An existing folder is refused if it belongs to another user, who could read or replace its
    files, or if it is a symbolic link, which another user may have made.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        with suppress(FileExistsError):  # another process made it; it may also remove it
            folder.mkdir(mode=0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PlanError(
            f"{path} does not belong to this user ({os.geteuid()}): it belongs to user "
            f"{found.st_uid}; remove it, or give another folder"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path
