"""From a checkpoint folder to a query that is ready for its next batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

from anabranch.backup.files import Files, FileStore
from anabranch.backup.manifests import Manifest, Manifests
from anabranch.backup.peers import PeerStore
from anabranch.backup.store import Backup, BackupStore
from anabranch.backup.upstream import Upstream, holder
from anabranch.checkpointing.policy import Checkpointing
from anabranch.coordinator import identity, rewind
from anabranch.coordinator.checkpoints import Checkpoints
from anabranch.coordinator.cluster import Cluster
from anabranch.coordinator.commits import NOTHING, Commit, CommitLog
from anabranch.coordinator.coordinator import Running
from anabranch.coordinator.events import Events
from anabranch.coordinator.identity import DriverLock, Identity
from anabranch.coordinator.replay import stateful_before
from anabranch.coordinator.rewind import Rewind
from anabranch.coordinator.tables import HERE, Tables
from anabranch.errors import CheckpointNotFound, PlanError, StoreError
from anabranch.movement.policy import FromCheckpoint
from anabranch.nodes.root import StateRoot
from anabranch.nodes.tickets import Secret
from anabranch.nodes.tls import Tls
from anabranch.nodes.workbench import Workbench
from anabranch.placement.even import Even
from anabranch.places import absolute, resolve
from anabranch.places import is_local as is_on_disk
from anabranch.plan.bind import Bound
from anabranch.plan.graph import Plan, Stateful
from anabranch.spark.logs import SparkLogs
from anabranch.spark.nodes import is_local
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import Routing
from anabranch.units import Version

_log = logging.getLogger("anabranch")
_NODES_SECONDS = 60.0
_HOLDERS_SECONDS = 30.0
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Place:
    """The folders of a query: what lasts, and what only the nodes have."""

    folder: str
    store: BackupStore
    log: BackupStore
    """The same folder, for what may be lost with the machine's power: it can be done again."""
    backup: Backup | Upstream
    state: str | None
    tls: Tls | None = None

    @classmethod
    def of(
        cls,
        folder: str | Path,
        backup: Backup | Upstream | None,
        state: str | Path | None,
        tls: Tls | None = None,
    ) -> Place:
        """Open a checkpoint folder, with the backups in it unless a store is given."""
        place = absolute(folder)
        files = Files(place)
        log = FileStore(*resolve(place), flush=False)
        given = None if state is None else str(Path(state).absolute())
        return cls(place, files.open(), log, files if backup is None else backup, given, tls)

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
    placing: Even,
    movement: FromCheckpoint,
    before: Identity,
    routing: Mapping[str, Routing],
    spark: SparkSession,
) -> tuple[Running, DriverLock]:
    """Take the query over from whoever ran it last, and note that a new run has begun."""
    root = StateRoot(before.query, place.state)
    lock = DriverLock(root.path())
    now = replace(before, run=before.run + 1)
    identity.save(place.store, now)
    schemas = {bound.name: CheckpointSchema.of(bound.layout) for bound in bounds.values()}
    events = Events(place.log, now.run)
    if is_local(spark):
        cluster, tables, parts = None, *_on_one_machine(place, bounds, root, before, routing)
    else:
        upstream = place.backup if isinstance(place.backup, Upstream) else Upstream()
        cluster = Cluster(spark, root, _files(place), Secret.new(), place.tls, upstream)
        tables, parts = _on_nodes(place, plan, bounds, cluster, placing, before, routing)
    running = Running(
        query=before.query,
        plan=plan,
        bounds=bounds,
        routing=dict(routing),
        root=root,
        tables=tables,
        checkpoints=Checkpoints(policy, Manifests(place.store, parts), schemas, tables, events),
        commits=CommitLog(place.log),
        logs=SparkLogs(place.spark),
        events=events,
        local=is_on_disk(place.folder),
        fence=now.fence,
        cluster=cluster,
        placement=placing,
        movement=movement,
    )
    running.remember = partial(remember, place, running)
    return running, lock


def _on_one_machine(
    place: Place,
    bounds: Mapping[Stateful, Bound],
    root: StateRoot,
    before: Identity,
    routing: Mapping[str, Routing],
) -> tuple[Tables, BackupStore]:
    if isinstance(place.backup, Upstream):
        raise PlanError(
            "backup=Upstream() needs a cluster: here the driver runs all tasks itself, and there "
            "is no other node; use Files(...), or a Spark master with executors"
        )
    if place.tls is not None:
        raise PlanError("tls= needs a cluster: here nothing is sent between nodes")
    store = place.backup.open()
    files = place.backup if isinstance(place.backup, Files) else None
    bench = Workbench(root.path(), store, files)
    hosts = {
        name: (HERE,) * max(of.instances, before.routing[name].instances)
        for name, of in routing.items()
    }
    return Tables(bounds.values(), lambda host: bench, hosts), store


def _on_nodes(
    place: Place,
    plan: Plan,
    bounds: Mapping[Stateful, Bound],
    cluster: Cluster,
    placing: Even,
    before: Identity,
    routing: Mapping[str, Routing],
) -> tuple[Tables, BackupStore]:
    instances = {name: of.instances for name, of in routing.items()}
    alive = _wait_for_nodes(cluster)
    placed = placing.place(instances, alive, before.placement)
    if not isinstance(place.backup, Upstream):
        return Tables(bounds.values(), cluster.bench, placed), place.backup.open()

    def keeper(operator: str, instance: int) -> str:
        own = tables.placement[operator][instance]
        return holder(operator, instance, own, upstream_hosts(plan, operator, tables, cluster))

    tables = Tables(bounds.values(), cluster.bench, placed, keeper)
    return tables, PeerStore(cluster.stores)


def upstream_hosts(plan: Plan, operator: str, tables: Tables, cluster: Cluster) -> set[str]:
    """The hosts that send rows to an operator: any may read a source."""
    (node,) = [n for n in plan.nodes() if isinstance(n, Stateful) and n.name == operator]
    before = [up for way in node.inputs for up in stateful_before(way)]
    # A node whose agent is still being started cannot keep anything yet.
    if len(alive := cluster.ready()) < 2:
        cluster.prepare(sorted(cluster.alive()))
        alive = cluster.ready()
    hosts = {host for up in before for host in tables.placement[up.name]} & alive
    return hosts if len(hosts) > 1 else set(alive)


def _files(place: Place) -> str | None:
    if isinstance(place.backup, Files):
        return place.backup.uri
    if isinstance(place.backup, Upstream):
        return None
    raise PlanError(f"on a cluster backups go to Files(...) or Upstream(), not to {place.backup!r}")


def _wait_for_nodes(cluster: Cluster) -> frozenset[str]:
    deadline = time.monotonic() + _NODES_SECONDS
    while not (alive := cluster.alive()):
        if time.monotonic() > deadline:
            raise PlanError(
                f"no executor has come up within {_NODES_SECONDS:.0f} seconds: does the cluster "
                "have workers with enough free memory and cores?"
            )
        time.sleep(0.1)
    return alive


def recover(place: Place, running: Running, before: Mapping[str, Routing]) -> Rewind | None:
    """Bring the tables to the last committed version, or as near as the newest checkpoint is.

    Returns what then has to be run again, if anything.
    """
    committed = running.commits.latest()
    begun = rewind.pending(place.store)
    target = max(committed.version, running.logs.committed())
    if begun is not None:
        target = max(target, begun.target)
    in_place = begun is None and committed.version == target
    if running.cluster is not None:
        in_place = in_place and dict(before) == running.routing
        _place(running, _wait_for_nodes(running.cluster))
    if in_place and target >= 0 and running.tables.usable(before, target):
        for name, routing in running.routing.items():
            if routing != before[name]:
                running.tables.rescale(name, before[name], routing, target)
        running.committed = committed
        newest = [v for v in running.checkpoints.manifests.versions() if v <= target]
        running.checkpoints.reset(newest[-1] if newest else NOTHING.version, None)
        return None
    manifest = _restored(running, target)
    stored = NOTHING.version if manifest is None else manifest.version
    if manifest is None:
        running.committed = NOTHING
    else:
        times = {name: tuple(seen) for name, seen in manifest.info["times"].items()}
        running.committed = Commit(manifest.version, times)
    running.checkpoints.reset(stored, _base(running, manifest, before))
    running.replay_until = target
    if stored == target and begun is None:
        return None
    return rewind.plan(stored, target, running.logs, begun)


def _restored(running: Running, target: Version) -> Manifest | None:
    """Make all tables from the newest checkpoint that is whole; None: they are empty.

    Nodes that keep backups may be gone with them, some only for a moment. Then older checkpoints
    are taken, and in the end none: everything is run again, as far as Spark's log reaches.
    """
    manifests = running.checkpoints.manifests
    deadline = time.monotonic() + _HOLDERS_SECONDS
    for version in reversed([v for v in manifests.versions() if v <= target]):
        manifest = manifests.get(version)
        while True:
            try:
                if running.cluster is not None:
                    # Only nodes whose agents run can be asked for what they keep.
                    running.cluster.prepare(sorted(running.cluster.alive()))
                for name, routing in running.routing.items():
                    running.tables.restore(name, routing, manifest.operators[name])
                return manifest
            except (CheckpointNotFound, StoreError) as error:
                if running.cluster is None:
                    raise
                if time.monotonic() > deadline:
                    _log.warning("the checkpoint of version %s is not whole: %s", version, error)
                    break
                time.sleep(_LOOK_SECONDS)
    for name, routing in running.routing.items():
        running.tables.create(name, routing)
    return None


def _place(running: Running, alive: frozenset[str]) -> None:
    instances = {name: of.instances for name, of in running.routing.items()}
    running.tables.placement = running.placement.place(instances, alive, running.tables.placement)


def settle(place: Place, running: Running) -> None:
    """Note how operators are divided now that their tables are; drop the old ones."""
    running.buffers.clear()
    remember(place, running)
    alive = () if running.cluster is None else running.cluster.alive()
    running.tables.keep_only(running.routing, alive)


def remember(place: Place, running: Running) -> None:
    """Note how operators are divided, and where they are."""
    now = identity.load(place.store)
    placed = {} if running.cluster is None else running.tables.placement
    if now is None or (dict(now.routing), dict(now.placement)) == (running.routing, placed):
        return
    identity.save(place.store, replace(now, routing=dict(running.routing), placement=placed))


def _base(
    running: Running, manifest: Manifest | None, before: Mapping[str, Routing]
) -> Version | None:
    """Restored tables are clean, so changes build on the checkpoint, if it is divided alike."""
    if manifest is None or dict(running.routing) != dict(before):
        return None
    return manifest.version
