"""Rewinding Spark to an earlier batch, so that lost state is computed again.

Spark runs a batch again only if it is the last one that it planned. Its logs are therefore cut back
to the version that the state was restored at. The offsets of the later batches are then given to
Spark one by one. They are saved in the checkpoint folder first, so that a driver that dies during
the rewind starts it over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from anabranch.coordinator.commits import CommitLog
from anabranch.errors import CheckpointCorrupt, CheckpointNotFound, StateMissing
from anabranch.spark.logs import SparkLogs
from anabranch.stores.sealed import seal, unseal
from anabranch.stores.store import BackupStore
from anabranch.units import Version

_FILE = "rewind.json"
_RETAINED = 100
"""Spark's default of ``spark.sql.streaming.minBatchesToRetain``."""


@dataclass(frozen=True)
class Rewind:
    """The batches to run again, and the offsets they had."""

    target: Version
    """The last batch to be run again."""
    offsets: dict[Version, str]

    def note(self, store: BackupStore) -> None:
        """Save the offsets to run again, before any log is changed."""
        store.put(_FILE, seal("rewind", {"target": self.target, "offsets": self.offsets}))

    def begin(
        self, start: Version, known: Mapping[Version, str], store: BackupStore, logs: SparkLogs
    ) -> None:
        """Save the offsets, then cut Spark's logs so that ``start`` is their last batch.

        ``known`` are the offsets up to there, which Spark's log may not have any more.
        """
        self.note(store)
        logs.forget_after(start)
        logs.extend(known)

    def finish(
        self, start: Version, store: BackupStore, logs: SparkLogs, run_one: Callable[[], None]
    ) -> None:
        """Run all batches after ``start`` up to the target, with the offsets that they had."""
        for version in sorted(self.offsets):
            if version > start:
                logs.put_offsets(version, self.offsets[version])
                if version <= self.target:
                    run_one()
        store.delete(_FILE)


def pending(store: BackupStore) -> Rewind | None:
    """A rewind that a driver began and did not finish."""
    try:
        data = store.get(_FILE).to_pybytes()
    except CheckpointNotFound:
        return None
    value = unseal("rewind", data, name=_FILE)
    try:
        offsets = {Version(int(version)): str(text) for version, text in value["offsets"].items()}
        return Rewind(Version(int(value["target"])), offsets)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"{_FILE}: not a rewind as written: {error}") from error


def plan(
    start: Version, target: Version, logs: SparkLogs, commits: CommitLog, begun: Rewind | None
) -> Rewind:
    """The batches to run again to get from a restored version to a committed one."""
    offsets = dict(begun.offsets) if begun is not None else {}
    if begun is not None:
        target = max(target, begun.target)  # Spark would skip what is planned and not run
    for version in logs.planned():
        if version > start and version not in offsets:
            logs.check_offsets(version, commits.offsets(version))
            offsets[version] = logs.offsets(version)
    missing = [v for v in range(start + 1, target + 1) if Version(v) not in offsets]
    if missing:
        raise StateMissing(
            f"the state of version {target} is lost; the newest checkpoint is of version {start}, "
            f"and Spark's log no longer has the offsets of batches {missing[0]} to {missing[-1]} "
            "after it. Checkpoint more often, or raise spark.sql.streaming.minBatchesToRetain"
        )
    return Rewind(target, offsets)


def plan_after_power_failure(
    start: Version,
    known: Mapping[Version, str],
    logs: SparkLogs,
    begun: Rewind | None,
    *,
    replaceable: bool,
) -> Rewind:
    """The batches to run again after the newest checkpoint, as far as Spark's log survived.

    No result after the checkpoint counts. Batches whose offsets survived run with these. After
    them Spark plans new batches, from the offsets of the checkpoint on, which are ``known``. A
    sink that is not ``replaceable`` got batches only after their offsets were flushed, so none of
    these offsets may be missing.
    """
    planned = logs.planned()
    offsets = logs.surviving(start, {**({} if begun is None else begun.offsets), **known})
    newest, reached = max(planned, default=start), Version(start + len(offsets))
    purged = start < 0 and bool(planned) and planned[0] > 0 and newest >= _RETAINED
    if purged or (not replaceable and newest > reached + 1):
        raise StateMissing(
            f"the state of version {newest} was lost in a power failure; the newest complete "
            f"checkpoint is of version {start}, and Spark's log does not have the offsets of batch "
            f"{reached + 1} after it. Restore an older copy of the folder, or start in a new one"
        )
    return Rewind(reached, offsets)
