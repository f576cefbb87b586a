"""Capture files: copies of a table's rows, kept on its node until they are stored."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from anabranch.errors import PlanError, Refused, StateFull
from anabranch.nodes.folders import backup_folder, make_own
from anabranch.private import private_folder
from anabranch.state.capture import TableCapture
from anabranch.state.checkpoint import save

CAPTURES = "captures"
SPILLED = "captures"
OF = ".of"
"""A file beside captures on a disk: the folder of the state that they are of."""

_NAMED = re.compile(r"\.?(?P<fence>\d{1,19})-(?P<what>.*)", re.DOTALL)
"""The name of a capture, or of one that is being written, which begins with a dot."""


def spilled(root: Path) -> Path:
    """The folder on a disk for captures that do not fit into the state folder of a query."""
    return backup_folder() / SPILLED / root.parent.name / root.name


def capture_folders(root: Path) -> tuple[Path, Path]:
    """The folders of a query's captures: beside the tables, and on a disk."""
    return root / CAPTURES, spilled(root)


def own_capture(root: Path, file: str) -> Path:
    """The path of a capture of a query. Refused if it is any other file."""
    folders = capture_folders(root)
    for folder in folders if "\0" not in file else ():
        path = folder / Path(file).name
        # A link may lead anywhere.
        if file == str(path) and path.resolve() == folder.resolve() / path.name:
            return path
    raise Refused(
        f"{file!r:.100} is no capture of this query; its captures are in "
        f"{' or '.join(map(str, folders))}"
    )


def fence_of(file: str) -> int:
    """The fence under which a capture was written.

    >>> fence_of("/dev/shm/anabranch-0/0123456789ab/captures/1099511627779-op-4-1-2.arrow")
    1099511627779
    """
    named = _NAMED.fullmatch(Path(file).name)
    return 0 if named is None else int(named["fence"])


def captures_of(root: Path) -> Iterator[Path]:
    """The captures of a query's state, those that are being written among them."""
    for folder in capture_folders(root):
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name != OF and path.is_file() and not path.is_symlink():
                yield path


def write_capture(taken: TableCapture, root: Path, what: str, fence: int) -> Path:
    """Write a capture to a file beside the tables, or on a disk if it does not fit there.

    ``what`` names the rows. Files of earlier attempts, with lower fences, to capture the same rows
    are deleted. StateFull if neither folder has room; no file is left then.
    """
    leaf = f"{what}.arrow"
    for before in list(captures_of(root)):
        named = _NAMED.fullmatch(before.name)
        if named is not None and named["what"] == leaf and int(named["fence"]) < fence:
            before.unlink(missing_ok=True)
    failures: list[str] = []
    for folder in capture_folders(root):
        try:
            path = _made(folder, root) / f"{fence}-{leaf}"
            save(taken, path)
        except (OSError, PlanError) as error:
            failures.append(f"{folder}: {error}")
        else:
            return path
    raise StateFull(
        f"no room for a copy of the state of {taken.operator}, instance {taken.instance}, at "
        f"version {taken.version} ({'; '.join(failures)}): make the state folder larger, or set "
        "ANABRANCH_BACKUP_FOLDER to a folder on a larger disk"
    )


def _made(folder: Path, root: Path) -> Path:
    if not folder.is_relative_to(root):
        make_own(backup_folder())
        (private_folder(folder) / OF).write_text(str(root))
    return private_folder(folder)
