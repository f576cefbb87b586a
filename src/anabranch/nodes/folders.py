"""The folders of state and backups of a user's queries on a machine."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from anabranch.private import private_folder

VARIABLE = "ANABRANCH_STATE_FOLDER"
"""The environment of a node may name the folder for state; a query that names one itself wins."""

BACKUPS = "ANABRANCH_BACKUP_FOLDER"
"""The environment of a node may name the folder, on a disk, for the backups of other nodes."""

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class StateRoot:
    """The folder of one query's state, which every node resolves for itself."""

    query: str
    folder: str | None = None
    """What the user gave. None: what the node's environment says, or shared memory."""

    def path(self, host: str | None = None) -> Path:
        """The folder on this machine; nodes that are on one machine have one each."""
        return state_folder(self.folder).joinpath(*([host] if host else []), self.query)

    def backups(self, host: str) -> Path:
        """The folder for backups that a node keeps for others, on a disk. It survives the query."""
        return backup_folder() / host / self.query


def state_folder(given: str | None = None) -> Path:
    """The folder of the state of all queries: as given, from the environment, or the default."""
    named = given or os.environ.get(VARIABLE)
    return _default_state() if named is None else Path(named).absolute()


def backup_folder(given: str | None = None) -> Path:
    """The folder of the backups of all queries, on a disk."""
    named = given or os.environ.get(BACKUPS)
    return _default_backups() if named is None else Path(named).absolute()


def make_own(folder: Path) -> None:
    """Make a missing folder. A default one is refused if it belongs to another user. A folder that
    the user named keeps its permissions."""
    if folder in (_default_state(), _default_backups()) or not folder.exists():
        private_folder(folder)


def _default_state() -> Path:
    memory = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return memory.absolute() / f"anabranch-{os.geteuid()}"


def _default_backups() -> Path:
    return Path(tempfile.gettempdir()).absolute() / f"anabranch-backups-{os.geteuid()}"
