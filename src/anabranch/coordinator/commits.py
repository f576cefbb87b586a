"""The log of committed batches in the checkpoint folder."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from anabranch.backup.store import BackupStore
from anabranch.coordinator.watermarks import Times, Watermarks
from anabranch.errors import CheckpointCorrupt
from anabranch.units import NO_VERSION, Version

_log = logging.getLogger("anabranch")
_FOLDER = "commits/"


@dataclass(frozen=True)
class Commit:
    """That a batch is done: its state is final and its results are in every sink."""

    version: Version
    times: Times

    def to_json(self) -> str:
        """The text of a commit file."""
        return json.dumps({"version": self.version, "times": self.times})

    @classmethod
    def from_json(cls, text: str, name: str) -> Commit:
        """Read a commit file."""
        try:
            value = json.loads(text)
            times = {operator: tuple(seen) for operator, seen in value["times"].items()}
            return cls(Version(int(value["version"])), times)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorrupt(
                f"{name}: not a commit, going back to the one before: {error}"
            ) from error

    @property
    def watermarks(self) -> Watermarks:
        """The watermarks after this batch."""
        return Watermarks(self.times)


NOTHING = Commit(NO_VERSION, {})
"""The commit before the first batch."""


class CommitLog:
    """One small file per batch. Only the newest are kept."""

    def __init__(self, store: BackupStore, *, keep: int = 10) -> None:
        self._store = store
        self._keep = keep

    def latest(self) -> Commit:
        """The last committed batch."""
        for name in reversed(self._store.list(_FOLDER)):
            text = self._store.get(name).to_pybytes().decode("utf-8", "replace")
            try:
                return Commit.from_json(text, name)
            except CheckpointCorrupt as error:
                # Commits are not flushed one by one; a power failure can spoil the last ones. What
                # they said is computed again from a checkpoint.
                _log.warning("%s", error)
        return NOTHING

    def append(self, commit: Commit) -> None:
        """Commit a batch. When this returns, the batch is done for good."""
        self._store.put(_name(commit.version), commit.to_json().encode())
        if commit.version >= self._keep:
            self._store.delete(_name(Version(commit.version - self._keep)))


def _name(version: Version) -> str:
    return f"{_FOLDER}{version:012d}.json"
