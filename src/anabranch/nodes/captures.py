"""Capture files: the copy of a table's rows that waits on its node until it is stored."""

from __future__ import annotations

from pathlib import Path

from anabranch.errors import PlanError, StateFull
from anabranch.nodes.folders import backup_folder, make_own, spilled
from anabranch.private import private_folder
from anabranch.state.capture import Capture
from anabranch.state.checkpoint import save

CAPTURES = "captures"
OF = ".of"
"""A file beside captures on a disk: the folder of the state that they are of."""


def capture_folders(root: Path) -> tuple[Path, Path]:
    """Where the captures of a query's state are: beside the tables, or on a disk."""
    return root / CAPTURES, spilled(root)


def write_capture(taken: Capture, root: Path, name: str) -> Path:
    """Write a capture to a file beside the tables, or on a disk if there is no room for it.

    StateFull, with nothing left behind, if there is no room there either.
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
        f"version {taken.version} ({'; '.join(failures)}): make the state folder larger, or name "
        "one on a larger disk for backups with ANABRANCH_BACKUP_FOLDER"
    )


def _made(folder: Path, root: Path) -> Path:
    if not folder.is_relative_to(root):
        make_own(backup_folder())
        (private_folder(folder) / OF).write_text(str(root))
    return private_folder(folder)
