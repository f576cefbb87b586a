"""Where a query's state is on a node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anabranch.nodes.claims import Claim
from anabranch.nodes.folders import BACKUPS, VARIABLE, backup_folder, state_folder

__all__ = ["BACKUPS", "VARIABLE", "StateRoot"]


@dataclass(frozen=True)
class StateRoot:
    """The folder of one query's state, which every node finds for itself."""

    query: str
    folder: str | None = None
    """What the user gave. None: what the node's environment says, or shared memory."""

    def path(self, host: str | None = None) -> Path:
        """The folder on this machine; nodes that are on one machine have one each."""
        return state_folder(self.folder).joinpath(*([host] if host else []), self.query)

    def backups(self, host: str) -> Path:
        """The folder for what a node keeps for others. On a disk: it outlives the query."""
        return backup_folder() / host / self.query

    def claim(self, host: str | None = None) -> Claim:
        """Make the folder, for this user alone, and hold it for as long as the claim is open.

        PlanError if the folder is another user's, on a file system of a network, or used by
        another machine too.
        """
        return Claim(state_folder(self.folder), self.path(host))
