"""From a checkpoint folder to a query that is ready for its next batch."""

from __future__ import annotations

import logging
import posixpath
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pyarrow import fs
from pyspark.sql import SparkSession

from anabranch.backup.checkpoints import QUERY
from anabranch.backup.files import Files, FileStore
from anabranch.backup.manifests import Manifest, Manifests
from anabranch.backup.peers import PeerStore
from anabranch.backup.store import Backup, BackupStore
from anabranch.backup.upstream import Upstream, holder
from anabranch.boot import boot_id
from anabranch.checkpointing.policy import Checkpointing, Never
from anabranch.coordinator import identity, rewind
from anabranch.coordinator.checkpoints import Checkpoints
from anabranch.coordinator.cluster import Cluster
from anabranch.coordinator.commits import NOTHING, Commit, CommitLog, times_of
from anabranch.coordinator.coordinator import Running
from anabranch.coordinator.events import Events
from anabranch.coordinator.identity import DriverLock, Identity
from anabranch.coordinator.replay import stateful_before
from anabranch.coordinator.rewind import Rewind
from anabranch.coordinator.tables import HERE, Tables
from anabranch.errors import (
    CheckpointError,
    CheckpointNotFound,
    DidNotHappen,
    PlanError,
    StoreError,
)
from anabranch.movement.policy import FromCheckpoint
from anabranch.nodes.claims import Claim
from anabranch.nodes.folders import StateRoot, state_folder
from anabranch.nodes.local import LocalNode
from anabranch.nodes.sweep import sweep
from anabranch.nodes.tickets import Secret
from anabranch.nodes.tls import Tls
from anabranch.placement.even import Even
from anabranch.places import absolute, resolve
from anabranch.places import is_local as is_on_disk
from anabranch.plan.graph import Plan, Stateful
from anabranch.spark.bind import Bound
from anabranch.spark.logs import SparkLogs, digest
from anabranch.spark.nodes import is_local
from anabranch.spark.sinks.sink import Replaceable
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import Routing
from anabranch.units import NO_VERSION, Version

_log = logging.getLogger("anabranch")
_NODES_SECONDS = 60.0
_HOLDERS_SECONDS = 30.0
_RECOVER_SECONDS = 180.0
_LOOK_SECONDS = 0.5
_OWN = frozenset({"commits", "events", "manifests", "parts", "spark"})
"""The folders that a query has in its checkpoint folder."""


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
        log = FileStore(*resolve(place), flushed=False)
        given = None if state is None else str(Path(state).absolute())
        return cls(place, files.open(), log, files if backup is None else backup, given, tls)

    @property
    def spark(self) -> str:
        """Where Spark keeps its own logs of the query."""
        return f"{self.folder}/spark"

    @property
    def lock(self) -> Path | None:
        """The folder whose lock keeps other drivers away, if the folder is one of this machine."""
        return Path(resolve(self.folder)[1]) if is_on_disk(self.folder) else None

    def check(self) -> None:
        """Refuse a folder among the files of another query, or with another query among its own.

        Any other folder below the one of a query is safe: no query looks beyond its own files.
        """
        filesystem, folder = resolve(self.folder)

        def is_query(path: str) -> bool:
            found = filesystem.get_file_info(posixpath.join(path, QUERY))
            return bool(found.type == fs.FileType.File)

        for own in sorted(_OWN):
            if is_query(posixpath.join(folder, own)):
                raise PlanError(
                    f"{self.folder} cannot be a checkpoint folder: {own}/ in it is the one of "
                    "another query; use another folder"
                )
        below = folder
        while (above := posixpath.dirname(below)) not in ("", below):
            if posixpath.basename(below) in _OWN and is_query(above):
                raise PlanError(
                    f"{self.folder} cannot be a checkpoint folder: it is among the files of the "
                    f"query in {above}; use another folder"
                )
            below = above


def identify(
    place: Place, bounds: Mapping[Stateful, Bound], instances: int
) -> tuple[Identity, dict[str, Routing]]:
    """The query as it was, or a new one, and how its operators are to be divided now."""
    operators = {bound.name: identity.describe(bound) for bound in bounds.values()}
    asked = {bound.name: _instances(node, instances) for node, bound in bounds.items()}
    place.check()
    before = identity.load(place.store)
    if before is None:
        routing = {
            bound.name: Routing.even(node.key_groups, asked[bound.name])
            for node, bound in bounds.items()
        }
        new = Identity(identity.new_query(), 0, operators, routing, asked=asked, boot=boot_id())
        return new, routing
    identity.compare(before, operators)
    # What was scaled while the query ran stays so, until the program asks for something else.
    wanted = {
        name: before.routing[name]
        if before.asked[name] == asked[name]
        else before.routing[name].rescale(asked[name])
        for name in asked
    }
    return replace(before, asked=asked), wanted


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
    now = replace(before, run=before.run + 1, backup=_elsewhere(place))
    keeps = isinstance(policy, Never)
    # Before anything else: a sweep of another query must know that this one lives.
    claim = Claim.of(root) if is_local(spark) else None
    try:
        lock = DriverLock(place.lock or root.path(), claim)
    except BaseException:
        if claim is not None:
            claim.close()
        raise
    cluster: Cluster | None = None
    try:
        if claim is not None:
            tables, parts = _on_one_machine(place, bounds, root, now, routing)
            claim.mark_kept(keeps)
            sweep(state_folder(place.state), spare=[before.query])
        else:
            upstream = place.backup if isinstance(place.backup, Upstream) else Upstream()
            secret = Secret.new()
            cluster = Cluster(
                spark, root, now.run, _files(place), secret, place.tls, upstream, keep=keeps
            )
            tables, parts = _on_nodes(place, plan, bounds, cluster, placing, now, routing)
    except BaseException:
        lock.release()
        raise
    identity.save(place.store, now)
    schemas = {bound.name: CheckpointSchema.of(bound.layout) for bound in bounds.values()}
    events = Events(place.log, now.run)
    logs = SparkLogs(place.spark)
    manifests = Manifests(place.store, parts)
    running = Running(
        query=before.query,
        plan=plan,
        bounds=bounds,
        routing=dict(routing),
        root=root,
        tables=tables,
        checkpoints=Checkpoints(
            policy, manifests, schemas, tables, events, partial(_secure, plan, logs)
        ),
        commits=CommitLog(place.log),
        logs=logs,
        events=events,
        local=is_on_disk(place.folder),
        fence=now.fence,
        cluster=cluster,
        placement=placing,
        movement=movement,
        trusted=before.boot == boot_id() or not _volatile(place, plan),
    )
    running.remember = partial(remember, place, running, now.asked)
    return running, lock


def _volatile(place: Place, plan: Plan) -> bool:
    """Whether something of the query is on disks of this machine, and not flushed at once."""
    sinks = [output.sink for output in plan.outputs]
    return is_on_disk(place.folder) or any(isinstance(s, Replaceable) and s.local for s in sinks)


def _secure(plan: Plan, logs: SparkLogs, version: Version) -> Mapping[str, Any]:
    """Have results and Spark's logs up to a version on disk; what a manifest notes of them."""
    try:
        for output in plan.outputs:
            if isinstance(output.sink, Replaceable):
                output.sink.flush()
        logs.flush(version)
        return {"offsets": logs.newest_offsets(version)}
    except OSError as error:
        raise DidNotHappen(f"the results up to version {version} are not flushed: {error}") from (
            error
        )


def _elsewhere(place: Place) -> str | None:
    """Where the checkpoint files are, if not in the checkpoint folder."""
    uri = place.backup.uri if isinstance(place.backup, Files) else None
    return None if uri == place.folder else uri


def _on_one_machine(
    place: Place,
    bounds: Mapping[Stateful, Bound],
    root: StateRoot,
    now: Identity,
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
    node = LocalNode(root.path(), lambda request, deadline: store, files)
    hosts = {
        name: (HERE,) * max(of.instances, now.routing[name].instances)
        for name, of in routing.items()
    }
    return Tables(now.query, now.run, bounds.values(), lambda host: node, hosts), store


def _on_nodes(
    place: Place,
    plan: Plan,
    bounds: Mapping[Stateful, Bound],
    cluster: Cluster,
    placing: Even,
    now: Identity,
    routing: Mapping[str, Routing],
) -> tuple[Tables, BackupStore]:
    instances = {name: of.instances for name, of in routing.items()}
    alive = _wait_for_nodes(cluster)
    placed = placing.place(instances, alive, now.placement)
    if not isinstance(place.backup, Upstream):
        tables = Tables(now.query, now.run, bounds.values(), cluster.node, placed)
        return tables, place.backup.open()

    def keeper(operator: str, instance: int) -> str:
        own = tables.placement[operator][instance]
        return holder(operator, instance, own, upstream_hosts(plan, operator, tables, cluster))

    tables = Tables(
        now.query,
        now.run,
        bounds.values(),
        cluster.node,
        placed,
        keeper,
        cluster.addresses,
    )
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

    Returns what then has to be run again, if anything. Where a node goes meanwhile it is begun
    again, on those that are left.
    """
    deadline = time.monotonic() + _RECOVER_SECONDS
    while True:
        try:
            return _recover(place, running, before)
        except StoreError as error:
            if running.cluster is None or time.monotonic() > deadline:
                raise
            _log.warning("A node was lost while the query started; beginning again: %s", error)
            time.sleep(_LOOK_SECONDS)


def _recover(place: Place, running: Running, before: Mapping[str, Routing]) -> Rewind | None:
    begun = rewind.pending(place.store)
    if not running.trusted:
        return _recover_after_power_failure(place, running, before, begun)
    manifests = running.checkpoints.manifests
    committed = running.commits.latest()
    saved = manifests.latest()
    if saved is not None and saved.version > committed.version:
        # Only what is committed is ever saved: the file of that commit is damaged.
        committed = _commit_of(saved)
    target = max(committed.version, running.logs.committed())
    if begun is not None:
        target = max(target, begun.target)
    elif target >= 0:
        running.logs.check(target, committed.offsets if target == committed.version else None)
    in_place = begun is None and committed.version == target
    if running.cluster is not None:
        in_place = in_place and dict(before) == running.routing
        _place(running, _wait_for_nodes(running.cluster))
    if in_place and target >= 0 and running.tables.usable(before, target):
        for name, routing in running.routing.items():
            if routing != before[name]:
                fence = running.next_fence()
                running.tables.rescale(name, before[name], routing, target, fence)
        running.committed = committed
        newest = manifests.latest(upto=target)
        running.checkpoints.reset(NOTHING.version if newest is None else newest.version, None)
        return None
    manifest = _restored(running, target)
    _start_from(running, manifest, before)
    stored = running.committed.version
    running.replay_until = target
    if stored == target and begun is None:
        return None
    return rewind.plan(stored, target, running.logs, running.commits, begun)


def _recover_after_power_failure(
    place: Place, running: Running, before: Mapping[str, Routing], begun: Rewind | None
) -> Rewind:
    """Go back to the newest whole checkpoint: up to it, and no further, everything was flushed.

    Results after it are taken back, and are made and delivered once more.
    """
    if running.cluster is not None:
        _place(running, _wait_for_nodes(running.cluster))
    manifest = _restored(running, None)
    _start_from(running, manifest, before)
    start = running.committed.version
    sinks = [output.sink for output in running.plan.outputs]
    replaceable = [sink for sink in sinks if isinstance(sink, Replaceable)]
    known = {} if manifest is None else _offsets_of(manifest)
    again = rewind.plan_after_power_failure(
        start, known, running.logs, begun, replaceable=len(replaceable) == len(sinks)
    )
    running.replay_until = start
    running.events.add("power failure", restored=start, again=again.target - start)
    _log.warning(
        "The machine was started anew since the query ran: what was written after the checkpoint "
        "of version %s may be incomplete. It is removed, and batches up to %s are run again.",
        start,
        again.target,
    )
    again.note(place.store)
    running.commits.forget_after(start)
    running.checkpoints.manifests.forget_after(start)
    for sink in replaceable:
        sink.take_back(running.query, start)
    running.logs.forget_after(start)
    running.logs.repair(start, known)
    return again


def _commit_of(manifest: Manifest) -> Commit:
    times = times_of(manifest.info["times"])
    return Commit(manifest.version, times, digest(_offsets_of(manifest)[manifest.version]))


def _offsets_of(manifest: Manifest) -> dict[Version, str]:
    return {Version(int(v)): str(text) for v, text in manifest.info["offsets"].items()}


def _start_from(running: Running, manifest: Manifest | None, before: Mapping[str, Routing]) -> None:
    """Count what was restored as committed and stored."""
    running.committed = NOTHING if manifest is None else _commit_of(manifest)
    running.checkpoints.reset(running.committed.version, _base(running, manifest, before))


def _restored(running: Running, target: Version | None) -> Manifest | None:
    """Make all tables from the newest checkpoint that is whole; None: they are empty.

    A damaged checkpoint is passed over, and an event says so. Nodes that keep backups may be gone
    with them, some only for a moment. Then older checkpoints are taken, and in the end none:
    everything is run again, as far as Spark's log reaches.
    """
    manifests = running.checkpoints.manifests
    deadline = time.monotonic() + _HOLDERS_SECONDS
    for version in reversed(manifests.versions()):
        if target is not None and version > target:
            continue
        try:
            manifest = manifests.get(version)
            _restore(running, manifest, deadline)
            return manifest
        except CheckpointError as error:
            _log.warning("The checkpoint of version %s is not whole: %s", version, error)
            running.events.add("checkpoint damaged", version=version, reason=str(error)[:500])
    for name, routing in running.routing.items():
        running.tables.make(name, routing, NO_VERSION)
    return None


def _restore(running: Running, manifest: Manifest, deadline: float) -> None:
    """Make all tables from a checkpoint; nodes that do not answer are asked for a while."""
    while True:
        try:
            if running.cluster is not None:
                # Only nodes whose agents run can be asked for what they keep.
                running.cluster.prepare(sorted(running.cluster.alive()))
            for name, routing in running.routing.items():
                parts = manifest.operators[name].parts
                running.tables.make(name, routing, manifest.version, parts)
            return
        except (CheckpointNotFound, StoreError) as error:
            if running.cluster is None:
                raise
            if time.monotonic() > deadline:
                raise CheckpointNotFound(str(error)) from error
            time.sleep(_LOOK_SECONDS)


def _place(running: Running, alive: frozenset[str]) -> None:
    instances = {name: of.instances for name, of in running.routing.items()}
    running.tables.placement = running.placement.place(instances, alive, running.tables.placement)


def settle(place: Place, running: Running) -> None:
    """Note how operators are divided now that their tables are; drop what is of no use any more."""
    running.buffers.clear()
    for output in running.plan.outputs:
        if isinstance(output.sink, Replaceable):
            output.sink.resume(running.query, running.checkpoints.stored)
    running.trusted = True
    running.remember()
    alive = () if running.cluster is None else running.cluster.alive()
    running.tables.drop_others(running.routing, alive)
    own = "" if isinstance(place.backup, Upstream) else f"{running.query}/"
    try:
        running.checkpoints.manifests.sweep(own)
    except StoreError as error:
        _log.info("Checkpoint files that nothing needs were not all removed: %s", error)


def remember(place: Place, running: Running, asked: Mapping[str, int]) -> None:
    """Note how operators are divided, where they are, and that all of it is of this boot."""
    now = identity.load(place.store)
    if now is None:
        return
    placed = {} if running.cluster is None else running.tables.placement
    then = replace(
        now,
        routing=dict(running.routing),
        placement=placed,
        asked=asked,
        boot=boot_id() if running.trusted else now.boot,
    )
    if then != now:
        identity.save(place.store, then)


def _base(
    running: Running, manifest: Manifest | None, before: Mapping[str, Routing]
) -> Version | None:
    """Restored tables are clean, so changes build on the checkpoint, if it is divided alike."""
    if manifest is None or dict(running.routing) != dict(before):
        return None
    return manifest.version
