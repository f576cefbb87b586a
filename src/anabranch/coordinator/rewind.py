"""Taking Spark back to an earlier batch, so that lost state is computed again.

Spark runs a batch again only if it is the last one it planned. So its logs are cut back to the
version that the state was restored at, and the offsets of the batches after that are given to it
one by one. They are noted in the checkpoint folder first: a driver that dies on the way starts
over.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from anabranch.backup.store import BackupStore
from anabranch.errors import CheckpointCorrupt, CheckpointNotFound, StateMissing
from anabranch.spark.logs import SparkLogs
from anabranch.units import Version

_FILE = "rewind.json"


@dataclass(frozen=True)
class Rewind:
    """The batches to run again, and the offsets they had."""

    target: Version
    """The last batch that was committed, and so the last one whose outputs are to be dropped."""
    offsets: dict[Version, str]

    def replay(
        self, start: Version, store: BackupStore, logs: SparkLogs, run_one: Callable[[], None]
    ) -> None:
        """Run all batches after ``start`` up to the target, each exactly as it was."""
        store.put(_FILE, json.dumps({"target": self.target, "offsets": self.offsets}).encode())
        logs.forget_after(start)
        for version in sorted(self.offsets):
            if version > start:
                logs.put_offsets(version, self.offsets[version])
                if version <= self.target:
                    run_one()
        store.delete(_FILE)


def pending(store: BackupStore) -> Rewind | None:
    """A rewind that a driver began and did not live to finish."""
    try:
        value = json.loads(store.get(_FILE).to_pybytes())
    except CheckpointNotFound:
        return None
    except ValueError as error:
        raise CheckpointCorrupt(f"{_FILE}: not a rewind: {error}") from error
    return Rewind(
        Version(value["target"]), {Version(int(v)): text for v, text in value["offsets"].items()}
    )


def plan(start: Version, target: Version, logs: SparkLogs, begun: Rewind | None) -> Rewind:
    """What has to be run again to get from a restored version to a committed one."""
    offsets = dict(begun.offsets) if begun is not None else {}
    for version in logs.planned():
        if version > start:
            offsets.setdefault(version, logs.offsets(version))
    missing = [v for v in range(start + 1, target + 1) if Version(v) not in offsets]
    if missing:
        raise StateMissing(
            f"the state of version {target} is lost; the newest checkpoint is of version {start}, "
            f"and Spark's log no longer has the offsets of batches {missing[0]} to {missing[-1]} "
            "after it. Checkpoint more often, or raise spark.sql.streaming.minBatchesToRetain"
        )
    return Rewind(target, offsets)
