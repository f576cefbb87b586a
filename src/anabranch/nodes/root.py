"""Where a query's state is on a node."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "ANABRANCH_STATE_FOLDER"
"""The environment of a node may name the folder for state; a query that names one itself wins."""

BACKUPS = "ANABRANCH_BACKUP_FOLDER"
"""The environment of a node may name the folder, on a disk, for the backups of other nodes."""

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class StateRoot:
    """The folder of one query's state, which every node finds for itself."""

    query: str
    folder: str | None = None
    """What the user gave. None: what the node's environment says, or shared memory."""

    def path(self, host: str | None = None) -> Path:
        """The folder on this machine; nodes that are on one machine have one each."""
        given = self.folder or os.environ.get(VARIABLE)
        if given is None:
            memory = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
            given = str(memory / "anabranch")
        return Path(given).absolute().joinpath(*([host] if host else []), self.query)

    def backups(self, host: str) -> Path:
        """The folder for what a node keeps for others. On a disk: it outlives the query."""
        given = os.environ.get(BACKUPS) or Path(tempfile.gettempdir()) / "anabranch-backups"
        return Path(given).absolute() / host / self.query
