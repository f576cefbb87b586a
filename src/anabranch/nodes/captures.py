"""Capture files: copies of a table's rows, kept on its node until they are stored."""

from __future__ import annotations

from pathlib import Path

from anabranch.errors import PlanError, Refused, StateFull
from anabranch.nodes.folders import backup_folder, make_own
from anabranch.private import private_folder
from anabranch.state.capture import Capture
from anabranch.state.checkpoint import save

CAPTURES = "captures"
SPILLED = "captures"
OF = ".of"
"""A file beside captures on a disk: the folder of the state that they are of."""


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


def write_capture(taken: Capture, root: Path, name: str) -> Path:
    """Write a capture to a file beside the tables, or on a disk if it does not fit there.

    StateFull if neither has room; no file is left then.
    """
    failures: list[str] = []
    for folder in capture_folders(root):
        try:
            path = _made(folder, root) / name
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
