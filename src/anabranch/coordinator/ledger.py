"""The durable state of a query: its driver, its division into slices, commits and manifests.

All of it is small and in the checkpoint folder. Only the driver that has the query writes it, and
it checks its epoch before each write; see :mod:`anabranch.coordinator.epochs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from anabranch.boot import boot_id
from anabranch.coordinator import identity, rewind
from anabranch.coordinator.commits import NOTHING, Commit, CommitLog, times_of
from anabranch.coordinator.epochs import Reign
from anabranch.coordinator.identity import Identity
from anabranch.errors import CheckpointError, MayHaveHappened, StoreError
from anabranch.protocols.model import Facts, Published, Routed
from anabranch.protocols.orders import Note, Withdraw
from anabranch.spark.logs import SparkLogs, digest
from anabranch.state.capture import CheckpointSchema
from anabranch.stores.manifests import Manifest, Manifests, OperatorManifest
from anabranch.stores.store import BackupStore
from anabranch.units import NO_VERSION, Version

Secure = Callable[[Version], Mapping[Version, str]]
"""Has results and Spark's logs up to a version on disk; the offsets that a manifest notes."""


@dataclass
class Ledger:
    """The checkpoint folder of a query, for the driver that has it.

    ``parts`` is the store of checkpoint files. ``log`` is the folder for files that are not
    flushed: what a power failure takes of them can be computed again.
    """

    store: BackupStore
    log: BackupStore
    parts: BackupStore
    reign: Reign
    known: Identity
    schemas: Mapping[str, CheckpointSchema]
    spark: SparkLogs
    secure: Secure

    def __post_init__(self) -> None:
        self.commits = CommitLog(self.log)
        self._manifests = Manifests(self.store, self.parts)
        self._latest = NOTHING
        self._withdrawn: set[Version] = set()
        """Versions that are to be withdrawn, and whose manifests may still be there."""
        self.writer = ThreadPoolExecutor(1, "anabranch-ledger")
        """The one thread that writes notes and manifests, and deletes."""

    # What a driver begins with

    def facts(
        self,
        routed: Mapping[str, Routed],
        damaged: Callable[[Version, str], None],
        *,
        trusted: bool,
    ) -> Facts:
        """What the checkpoint folder has of the query at a start.

        ``trusted``: the machine was not rebooted since. ``damaged`` is called with the versions
        that cannot be used.
        """
        unreadable: list[Version] = []

        def noted(version: Version, reason: str) -> None:
            unreadable.append(version)
            damaged(version, reason)

        published = tuple(self._published(noted))
        committed = self.commits.latest()
        if published and published[-1].version > committed.version:
            # Only what is committed is ever stored: the file of that commit is damaged.
            committed = self.commit_of(published[-1].version)
        begun = rewind.pending(self.store)
        delivered = Version(max(committed.version, self.spark.committed()))
        if begun is not None:
            delivered = Version(max(delivered, begun.target))
        elif trusted and delivered >= 0:
            known = committed.offsets if delivered == committed.version else None
            self.spark.check(delivered, known)
        planned = self.spark.planned()
        oldest = min(planned, default=Version(0))
        if begun is not None:
            oldest = min([oldest, *begun.offsets])
        return Facts(
            routed,
            {each.id: each for each in self.known.slices},
            self.known.arrangement,
            committed.arrangement,
            published,
            NO_VERSION if begun is not None else committed.version,
            delivered,
            oldest,
            trusted,
            tuple(unreadable),
            rewinding=begun is not None,
        )

    def _published(self, damaged: Callable[[Version, str], None]) -> list[Published]:
        found = []
        for version in self._manifests.versions():
            try:
                manifest = self._manifests.get(version)
            except CheckpointError as error:
                damaged(version, str(error))
            else:
                parts = {name: tuple(of.parts) for name, of in manifest.operators.items()}
                found.append(Published(version, parts))
        return found

    def commit_of(self, version: Version) -> Commit:
        """The commit of a version, from its commit file or else from its manifest."""
        if version == NO_VERSION:
            return NOTHING
        if self._latest.version == version:
            return self._latest
        found = self.commits.get(version)
        if found is not None:
            return found
        manifest = self._manifests.get(version)
        offsets = offsets_of(manifest)
        return Commit(version, times_of(manifest.info["times"]), digest(offsets[version]))

    def offsets_of(self, version: Version) -> Mapping[Version, str]:
        """The offsets in the manifest of a version."""
        return {} if version == NO_VERSION else offsets_of(self._manifests.get(version))

    # What it writes

    def commit(self, commit: Commit) -> None:
        """Commit a batch. The commit survives the death of any process once this returns."""
        self.reign.check()
        self.commits.append(commit)
        self._latest = commit

    def publish(self, published: Published) -> None:
        """Write the manifest of a version. All of its parts must be at their holders already."""
        version = published.version
        commit = self.commit_of(version)
        offsets = self.secure(version)
        operators = {
            name: OperatorManifest(self.schemas[name], tuple(parts))
            for name, parts in published.parts.items()
        }
        info = {"times": commit.times, "offsets": offsets}
        self.reign.check()
        self._withdrawn.discard(version)
        self._manifests.put(Manifest(version, operators, info))

    def withdraw(self, order: Withdraw) -> None:
        """Delete manifests, then parts, so that no manifest names a deleted part.

        A part that cannot be deleted does not keep the others; a StoreError names it in the end.
        """
        # Those first whose manifests could not be deleted before: they may name these parts.
        self._withdrawn |= set(order.versions)
        self.reign.check()
        for version in sorted(self._withdrawn, reverse=True):
            self._manifests.drop(version)
            self._withdrawn.discard(version)
        try:
            self.parts.delete_all([name for part in order.parts for name in part.names])
        except StoreError as error:
            raise MayHaveHappened(
                f"not all of {len(order.parts)} checkpoint files were deleted; they are when their "
                f"node is ready again, or at the next start: {error}"
            ) from error

    def note(self, order: Note) -> None:
        """Write the routing of operators and the nodes of their slices."""
        self._save(
            routing={name: of.routing for name, of in order.routed.items()},
            placement={name: of.hosts for name, of in order.routed.items()},
            arrangement=order.arrangement,
            slices=order.slices,
        )

    def note_asked(self, operator: str, instances: int) -> None:
        """Write down that an operator has the number of instances that the program asks for.

        No order does this, so it is passed to the thread that writes.
        """

        def write() -> None:
            self._save(asked={**self.known.asked, operator: instances})

        self.writer.submit(write).result()

    def note_boot(self) -> None:
        """Write the boot id of the machine: everything in the folder is of this boot.

        No order does this, so it is passed to the thread that writes.
        """
        self.writer.submit(self._save, boot=boot_id()).result()

    def _save(self, **fields: Any) -> None:
        now = replace(self.known, **fields)
        if now != self.known:
            self.reign.check()
            identity.save(self.store, now)
            self.known = now

    def withdraw_after(self, version: Version) -> None:
        """Delete the manifests of all later versions, whoever has published them."""
        self.reign.check()
        self._manifests.forget_after(version)

    def forget_after(self, version: Version) -> None:
        """Delete the commits and manifests of all later versions."""
        self.withdraw_after(version)
        self.commits.forget_after(version)
        self._latest = NOTHING

    def sweep(self) -> None:
        """Remove checkpoint files of the query that no manifest names."""
        self._manifests.sweep(f"{self.known.query}/")


def offsets_of(manifest: Manifest) -> dict[Version, str]:
    """The offsets in a manifest."""
    return {Version(int(v)): str(text) for v, text in manifest.info["offsets"].items()}
