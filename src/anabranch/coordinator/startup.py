"""From a checkpoint folder to a query that is ready for its next batch."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from anabranch.backup.files import Files, FileStore
from anabranch.backup.manifests import Manifest
from anabranch.backup.parts import retrieve
from anabranch.backup.store import Backup, BackupStore
from anabranch.checkpointing.policy import Checkpointing
from anabranch.coordinator import identity, rewind
from anabranch.coordinator.checkpoints import Checkpoints
from anabranch.coordinator.commits import NOTHING, Commit, CommitLog
from anabranch.coordinator.coordinator import Running
from anabranch.coordinator.identity import DriverLock, Identity
from anabranch.coordinator.rewind import Rewind
from anabranch.coordinator.tables import Tables
from anabranch.places import absolute, is_local, resolve
from anabranch.plan.bind import Bound
from anabranch.plan.graph import Plan, Stateful
from anabranch.spark.logs import SparkLogs
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import Routing
from anabranch.state.partition import partition
from anabranch.units import Version

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Place:
    """The folders of a query: what lasts, and what only this machine has."""

    folder: str
    store: BackupStore
    log: BackupStore
    """The same folder, for what may be lost with the machine's power: it can be done again."""
    backup: BackupStore
    state: Path

    @classmethod
    def of(cls, folder: str | Path, backup: Backup | None, state: str | Path | None) -> Place:
        """Open a checkpoint folder, with the backups in it unless a store is given."""
        place = absolute(folder)
        store = Files(place).open()
        log = FileStore(*resolve(place), flush=False)
        if state is None:
            memory = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
            state = memory / "anabranch"
        return cls(
            place, store, log, store if backup is None else backup.open(), Path(state).absolute()
        )

    @property
    def spark(self) -> str:
        """Where Spark keeps its own logs of the query."""
        return f"{self.folder}/spark"


def identify(
    place: Place, bounds: Mapping[Stateful, Bound], instances: int
) -> tuple[Identity, dict[str, Routing]]:
    """The query as it was, or a new one, and how its operators are to be divided now."""
    operators = {bound.name: identity.describe(bound) for bound in bounds.values()}
    before = identity.load(place.store)
    if before is None:
        routing = {
            bound.name: Routing.even(node.key_groups, _instances(node, instances))
            for node, bound in bounds.items()
        }
        return Identity(identity.new_query(), 0, operators, routing), routing
    identity.compare(before, operators)
    wanted = {
        bound.name: before.routing[bound.name].rescale(_instances(node, instances))
        for node, bound in bounds.items()
    }
    return before, wanted


def _instances(node: Stateful, default: int) -> int:
    return min(node.key_groups, default if node.instances is None else node.instances)


def assemble(
    place: Place,
    plan: Plan,
    bounds: Mapping[Stateful, Bound],
    policy: Checkpointing,
    before: Identity,
    routing: Mapping[str, Routing],
) -> tuple[Running, DriverLock]:
    """Take the query over from whoever ran it last, and note that a new run has begun."""
    root = place.state / before.query
    lock = DriverLock(root)
    now = Identity(before.query, before.run + 1, before.operators, before.routing)
    identity.save(place.store, now)
    schemas = {bound.name: CheckpointSchema.of(bound.layout) for bound in bounds.values()}
    running = Running(
        query=before.query,
        plan=plan,
        bounds=bounds,
        routing=routing,
        tables=Tables(root, bounds.values()),
        checkpoints=Checkpoints(policy, place.backup, schemas, root / "captures"),
        commits=CommitLog(place.log),
        logs=SparkLogs(place.spark),
        local=is_local(place.folder),
        fence=now.fence,
    )
    return running, lock


def recover(place: Place, running: Running, before: Mapping[str, Routing]) -> Rewind | None:
    """Bring the tables to the last committed version, or as near as the newest checkpoint is.

    Returns what then has to be run again, if anything.
    """
    committed = running.commits.latest()
    begun = rewind.pending(place.store)
    target = max(committed.version, running.logs.committed())
    if begun is not None:
        target = max(target, begun.target)
    manifest = running.checkpoints.manifests.latest(upto=target)
    stored = NOTHING.version if manifest is None else manifest.version
    in_place = begun is None and committed.version == target
    if in_place and target >= 0 and running.tables.usable(before, target):
        for name, routing in running.routing.items():
            if routing != before[name]:
                running.tables.rescale(name, before[name], routing)
        running.committed = committed
        running.checkpoints.reset(stored, None)
        return None
    if manifest is None:
        for name, routing in running.routing.items():
            running.tables.create(name, routing)
        running.committed = NOTHING
    else:
        _restore(place.backup, running, manifest)
        times = {name: tuple(seen) for name, seen in manifest.info["times"].items()}
        running.committed = Commit(manifest.version, times)
    running.checkpoints.reset(stored, _base(running, manifest, before))
    running.replay_until = target
    if stored == target and begun is None:
        return None
    return rewind.plan(stored, target, running.logs, begun)


def settle(place: Place, running: Running) -> None:
    """Note how operators are divided now that their tables are; drop the old ones."""
    now = identity.load(place.store)
    if now is not None and dict(now.routing) != dict(running.routing):
        identity.save(
            place.store, Identity(now.query, now.run, now.operators, dict(running.routing))
        )
    running.tables.keep_only(running.routing)


def _base(
    running: Running, manifest: Manifest | None, before: Mapping[str, Routing]
) -> Version | None:
    """Restored tables are clean, so changes build on the checkpoint, if it is divided alike."""
    if manifest is None or dict(running.routing) != dict(before):
        return None
    return manifest.version


def _restore(backup: BackupStore, running: Running, manifest: Manifest) -> None:
    for name, routing in running.routing.items():
        captures = retrieve(backup, manifest.operators[name])
        parts = partition(captures, dict(enumerate(routing.owners)))
        running.tables.restore(name, routing, parts)
