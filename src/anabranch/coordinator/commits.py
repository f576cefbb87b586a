"""The log of committed batches in the checkpoint folder."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from anabranch.coordinator.watermarks import Times, Watermarks
from anabranch.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    MayHaveHappened,
    StoreError,
)
from anabranch.stores.sealed import seal, unseal
from anabranch.stores.store import BackupStore
from anabranch.units import NO_VERSION, Version

_log = logging.getLogger("anabranch")
_FOLDER = "commits/"
_NAME = re.compile(rf"{_FOLDER}(\d{{12}})\.json")


@dataclass(frozen=True)
class Commit:
    """A committed batch: its state is final and its results are in every sink."""

    version: Version
    times: Times
    offsets: str | None = None
    """The checksum of the offsets that Spark had logged for the batch."""
    arrangement: int = 0
    """Which slices the batch ran with; see :class:`~anabranch.protocols.query.Query`."""

    def to_bytes(self) -> bytes:
        """The bytes of a commit file."""
        body = {
            "version": self.version,
            "times": self.times,
            "offsets": self.offsets,
            "arrangement": self.arrangement,
        }
        return seal("commit", body)

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str) -> Commit:
        """Read a commit file. CheckpointCorrupt if its bytes are not those that were written."""
        body = unseal("commit", data, name=name)
        try:
            return cls(
                Version(int(body["version"])),
                times_of(body["times"]),
                body["offsets"],
                int(body.get("arrangement", 0)),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorrupt(f"{name}: not a commit as written: {error}") from error

    @property
    def watermarks(self) -> Watermarks:
        """The watermarks after this batch."""
        return Watermarks(self.times)


NOTHING = Commit(NO_VERSION, {})
"""The commit before the first batch."""


class CommitLog:
    """One small file per batch. Only the newest are kept, more than Spark keeps of its own log.

    The files are not flushed. After a power failure the newest manifest replaces them. A manifest
    is flushed, after the results up to its version.
    """

    def __init__(self, store: BackupStore, *, keep: int = 250) -> None:
        self._store = store
        self._keep = keep
        self._old: dict[Version, None] = {}
        """Commits that nobody needs any more, and that are yet to be removed."""

    def latest(self) -> Commit:
        """The last committed batch."""
        for version in reversed(self._versions()):
            name = _name(version)
            try:
                commit = Commit.from_bytes(self._store.get(name).to_pybytes(), name=name)
                if commit.version != version:
                    raise CheckpointCorrupt(f"{name} has the commit of version {commit.version}")
                return commit
            except CheckpointCorrupt as error:
                # What it said is computed again from a checkpoint.
                _log.warning("A commit file is damaged; using the commit before it: %s", error)
        return NOTHING

    def offsets(self, version: Version) -> str | None:
        """The checksum of the offsets that a batch was committed with, if known."""
        commit = self.get(version)
        return None if commit is None else commit.offsets

    def get(self, version: Version) -> Commit | None:
        """The commit of a version, if its file exists and is undamaged."""
        try:
            name = _name(version)
            commit = Commit.from_bytes(self._store.get(name).to_pybytes(), name=name)
        except CheckpointError:
            return None
        return commit if commit.version == version else None

    def append(self, commit: Commit) -> None:
        """Commit a batch. The commit survives the death of any process once this returns."""
        name, data = _name(commit.version), commit.to_bytes()
        try:
            self._store.put(name, data)
        except MayHaveHappened:
            if not self._has(name, data):
                raise  # to put it again is safe, it is the same commit
        if commit.version >= self._keep:
            self._old[Version(commit.version - self._keep)] = None
        self._tidy()

    def _has(self, name: str, data: bytes) -> bool:
        try:
            return bool(self._store.get(name).to_pybytes() == data)
        except (CheckpointNotFound, StoreError) as error:
            _log.info("Commit %s was not found after an attempt to write it: %s", name, error)
            return False

    def _tidy(self) -> None:
        """Remove old commits; what cannot be removed goes with the next commit."""
        for version in list(self._old):
            try:
                self._store.delete(_name(version))
            except StoreError as error:
                _log.info("The old commit of batch %s was not removed yet: %s", version, error)
                return
            del self._old[version]

    def forget_after(self, version: Version) -> None:
        """Delete the commits of all later batches."""
        for later in reversed(self._versions()):
            if later > version:
                self._store.delete(_name(later))

    def _versions(self) -> list[Version]:
        found = (_NAME.fullmatch(name) for name in self._store.list(_FOLDER))
        return sorted(Version(int(match[1])) for match in found if match)


def times_of(value: dict[str, list[int | None]]) -> Times:
    """The event times in the JSON of a commit or a manifest."""
    return {operator: tuple(seen) for operator, seen in value.items()}


def _name(version: Version) -> str:
    return f"{_FOLDER}{version:012d}.json"
