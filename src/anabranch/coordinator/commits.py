"""The log of committed batches in the checkpoint folder."""

from __future__ import annotations

import json
from dataclasses import dataclass

from anabranch.backup.store import BackupStore
from anabranch.coordinator.watermarks import Times, Watermarks
from anabranch.errors import CheckpointCorrupt
from anabranch.units import NO_VERSION, Version

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
                f"{name}: not a commit ({error}); delete it to go back one batch"
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
        names = self._store.list(_FOLDER)
        if not names:
            return NOTHING
        text = self._store.get(names[-1]).to_pybytes().decode("utf-8", "replace")
        return Commit.from_json(text, names[-1])

    def append(self, commit: Commit) -> None:
        """Commit a batch. When this returns, the batch is done for good."""
        self._store.put(_name(commit.version), commit.to_json().encode())
        if commit.version >= self._keep:
            self._store.delete(_name(Version(commit.version - self._keep)))


def _name(version: Version) -> str:
    return f"{_FOLDER}{version:012d}.json"
