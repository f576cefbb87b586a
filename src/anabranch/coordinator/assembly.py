"""Assembling a running query: from a checkpoint folder and a plan to a loop that runs."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from anabranch.backup.policy import Backup, NodeLimits
from anabranch.boot import boot_id
from anabranch.checkpointing.policy import Checkpointing
from anabranch.coordinator import copies, identity
from anabranch.coordinator.asking import Asking
from anabranch.coordinator.batches import HERE, Batches, Program
from anabranch.coordinator.epochs import Lookout, Reign
from anabranch.coordinator.events import Events
from anabranch.coordinator.folder import CheckpointFolder
from anabranch.coordinator.identity import DriverLock, Identity
from anabranch.coordinator.ledger import Ledger
from anabranch.coordinator.loop import Loop
from anabranch.coordinator.nodes import Agents, Nodes, OneNode, Watcher
from anabranch.coordinator.replays import Replays, stateful_before
from anabranch.coordinator.shell import Shell
from anabranch.coordinator.stream import Launch, Stream
from anabranch.errors import AnabranchError, Deposed, DidNotHappen, PlanError
from anabranch.movement.policy import Movement
from anabranch.nodes.claims import Claim
from anabranch.nodes.folders import StateRoot, state_folder
from anabranch.nodes.local import LocalNode
from anabranch.nodes.requests import Epoch
from anabranch.nodes.standing import store as standing
from anabranch.nodes.standing import succession
from anabranch.nodes.sweep import sweep
from anabranch.nodes.tickets import Secret
from anabranch.nodes.tls import Tls
from anabranch.placement.policy import Placement
from anabranch.plan.graph import Plan, Stateful
from anabranch.protocols.events import NodeCame, NodeLost, Started
from anabranch.protocols.model import OperatorPlan, Routed
from anabranch.protocols.query import Policies, Query
from anabranch.spark.bind import Bound
from anabranch.spark.logs import SparkLogs
from anabranch.spark.nodes import is_local
from anabranch.spark.session import batches_in_log
from anabranch.spark.sinks.sink import Flushed
from anabranch.spark.sources import combine, logs_of
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import Routing
from anabranch.stores.address import StoreAddress
from anabranch.stores.store import BackupStore
from anabranch.units import Version
from anabranch.worker.here import AgentStart

_log = logging.getLogger("anabranch")
LONGEST_CHAIN = 10
"""The parts of a slice are merged once more of them follow on one another."""
MOST_SLICES = 8
"""The smallest slices of an instance are merged once it has more."""


@dataclass(frozen=True)
class Settings:
    """The settings of a run; see :meth:`anabranch.Query.start`."""

    folder: str | Path
    checkpointing: Checkpointing
    backup: Backup | None
    placement: Placement
    movement: Movement
    instances: int | None
    trigger: Mapping[str, Any] | None
    state_folder: str | Path | None
    tls: Tls | None
    name: str | None


@dataclass
class Assembly:
    """The parts of a running query."""

    program: Program
    asked: Mapping[str, int]
    """How many instances the program asks for, where that has changed."""
    loop: Loop
    shell: Shell
    asking: Asking
    nodes: Nodes
    watcher: Watcher
    lookout: Lookout
    ledger: Ledger
    events: Events
    batches: Batches
    stream: Stream
    locks: DriverLock
    trusted: bool

    def begin(self) -> None:
        """Start the loop, which restores the state."""
        routed = {
            name: Routed(of, tuple(self.ledger.known.placement.get(name, ())))
            for name, of in self.ledger.known.routing.items()
        }
        if not self.trusted:
            self.stream.distrust()
        facts = self.ledger.facts(routed, self._damaged, trusted=self.trusted)
        try:
            # Not later: the loop stores parts before it publishes them.
            self.ledger.sweep()
        except AnabranchError as error:
            _log.warning(
                "Checkpoint files without a manifest were not deleted; the next start tries "
                "again: %s",
                error,
            )
        self.loop.begin(self.shell)
        self.loop.tell(Started(facts))
        self.watcher.begin()
        self.lookout.begin()

    def _damaged(self, version: Version, reason: str) -> None:
        self.events.add("checkpoint damaged", version=version, reason=reason[:500])

    def forget_tables(self) -> None:
        """Drop all state tables, once their state is stored."""
        for host, tables in self.asking.tables_at(self.loop.query).items():
            self.asking.drop_tables(host, tables)

    def tell_end(self, failure: AnabranchError | None, reason: str) -> None:
        """Tell that the query has ended: because it failed, or else for a reason."""
        if isinstance(failure, Deposed):
            driver = self.ledger.reign.epoch
            self.events.add("driver deposed", driver=driver, reason=str(failure))
        self.events.add(
            "query stopped",
            version=self.batches.committed,
            reason=reason if failure is None else str(failure),
            failed=failure is not None,
        )

    def closing(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What to close, in this order, and the consequence if closing fails."""
        yield "its watcher of nodes was not stopped", self.watcher.close
        yield "its watcher of epochs was not stopped", self.lookout.close
        yield "its coordinator was not stopped", self.loop.close
        yield "its pending orders were not finished", self.shell.close
        yield "its agents were not stopped", self.nodes.close
        yield "its lock was not released", self.locks.release

    def close(self) -> None:
        """Release all resources."""
        for _, close in self.closing():
            close()


def assemble(
    plan: Plan,
    bounds: Mapping[Stateful, Bound],
    spark: SparkSession,
    settings: Settings,
    stopped: Callable[[AnabranchError], None],
) -> Assembly:
    """Take the query over from its last driver, and assemble its parts.

    ``stopped`` is called when the query cannot continue.
    """
    folder = CheckpointFolder.of(settings.folder)
    instances = settings.instances or spark.sparkContext.defaultParallelism
    known, copied = _identify(folder, bounds, instances)
    asked = _asked_instances(bounds, instances)
    backup = folder.files if settings.backup is None else settings.backup
    local = is_local(spark)
    if local:
        _check_local(backup, settings.tls)
    _check_ring(backup, settings.tls)
    state = None if settings.state_folder is None else str(Path(settings.state_folder).absolute())
    root = StateRoot(known.query, state)
    keep = not settings.checkpointing.backs_up
    # Before anything else: a sweep of another query must know that this one lives.
    claim = Claim.of(root) if local else None
    try:
        lock = DriverLock(folder.path or root.path(), claim)
    except BaseException:
        if claim is not None:
            claim.close()
        raise
    try:
        if claim is not None:
            claim.hold_alone(folder.uri)
            claim.mark_kept(keep)
            sweep(state_folder(state), spare=[known.query])
        if copied is not None:
            copies.settle(folder, copied, known.query)
        return _taken_over(
            folder, plan, bounds, spark, settings, stopped, known, asked, backup, root, lock
        )
    except BaseException:
        lock.release()
        raise


def _taken_over(
    folder: CheckpointFolder,
    plan: Plan,
    bounds: Mapping[Stateful, Bound],
    spark: SparkSession,
    settings: Settings,
    stopped: Callable[[AnabranchError], None],
    before: Identity,
    asked: Mapping[str, int],
    backup: Backup,
    root: StateRoot,
    lock: DriverLock,
) -> Assembly:
    local = is_local(spark)
    policy = settings.checkpointing
    reign = Reign.begin(folder.store, f"{platform.node()} {os.getpid()}", above=before.run)
    where = standing.of_query(backup.where, before.query)
    elsewhere = None if where.at_nodes or where == folder.files.where else where.to_json()
    known = replace(before, run=reign.epoch, backup=elsewhere, folder=folder.uri)
    identity.save(folder.store, known)
    events = Events(folder.log, reign.epoch)
    combined = combine([source.frame for source in plan.sources()])
    logs = SparkLogs(folder.spark, logs_of(combined))
    program = Program(
        before.query,
        plan,
        bounds,
        root,
        local,
        reign.epoch,
        policy.tracks_changes,
        settings.movement.window,
    )
    nodes, parts = _nodes(spark, settings, backup.limits, where, root, reign.epoch)
    ledger = Ledger(
        folder.store,
        folder.log,
        parts,
        reign,
        known,
        {bound.name: CheckpointSchema.of(bound.layout) for bound in bounds.values()},
        logs,
        partial(_secure, plan, logs),
    )
    operators = {
        node.name: OperatorPlan(node.name, node.key_groups, _before(node))
        for node in plan.operators()
    }
    policies = Policies(
        policy,
        backup,
        settings.placement,
        settings.movement.parallelism,
        tolerate=policy.tolerate,
        retained_offsets=batches_in_log(spark),
        replays=not local,
        longest_chain=LONGEST_CHAIN,
        begins_empty=settings.movement.window is not None,
        hold=policy.hold,
        most_slices=MOST_SLICES,
    )
    loop = Loop(Query(operators, policies, reign.epoch))
    batches = Batches(program, loop, ledger, spark)
    replays = Replays(
        spark.sparkContext,
        plan,
        batches.sent.get,
        batches.router,
        batches.reports,
        settings.movement.from_source,
    )
    launch = Launch(
        spark,
        combined,
        folder.spark,
        folder.is_local,
        settings.trigger,
        settings.name,
    )
    sinks = [output.sink for output in plan.outputs]
    stream = Stream(launch, batches, before.query, sinks, ledger, events, loop)
    layouts = {bound.name: bound.layout for bound in bounds.values()}
    asking = Asking(nodes, reign.epoch, before.query, layouts)
    shell = Shell(loop, asking, ledger, events, batches, replays, stream, stopped)
    watcher = Watcher(
        nodes.alive,
        lambda host: loop.tell(NodeCame(host)),
        lambda host: loop.tell(NodeLost(host)),
    )
    trusted = before.boot == boot_id() or not _volatile(folder, plan)
    # What was scaled while the query ran stays so, until the program asks for something else.
    changed = {name: count for name, count in asked.items() if before.asked[name] != count}
    return Assembly(
        program=program,
        asked=changed,
        loop=loop,
        shell=shell,
        asking=asking,
        nodes=nodes,
        watcher=watcher,
        lookout=Lookout(reign, shell.depose),
        ledger=ledger,
        events=events,
        batches=batches,
        stream=stream,
        locks=lock,
        trusted=trusted,
    )


def _identify(
    folder: CheckpointFolder, bounds: Mapping[Stateful, Bound], instances: int
) -> tuple[Identity, CheckpointFolder | None]:
    """The identity in a folder, or a new one. PlanError if it is the folder of another query.

    With it the folder that this one is a copy of, if it is a copy.
    """
    operators = {bound.name: identity.describe(bound) for bound in bounds.values()}
    folder.check()
    before = identity.load(folder.store)
    if before is None:
        asked = _asked_instances(bounds, instances)
        routing = {n.name: Routing.even(n.key_groups, asked[n.name]) for n in bounds}
        new = Identity(identity.new_query(), 0, operators, routing, asked=asked, boot=boot_id())
        return new, None
    identity.compare(before, operators)
    of = copies.original(folder, before)
    return (before, None) if of is None else (copies.separated(folder, of, before), of)


def _asked_instances(bounds: Mapping[Stateful, Bound], instances: int) -> dict[str, int]:
    """The number of instances of each operator that the program asks for."""
    return {node.name: min(node.key_groups, node.instances or instances) for node in bounds}


def _check_local(backup: Backup, tls: Tls | None) -> None:
    if backup.where.at_nodes:
        raise PlanError(
            f"backup={type(backup).__name__}() needs a cluster: a local master has no other node; "
            "use Files(...), or a Spark master with executors"
        )
    if tls is not None:
        raise PlanError("tls= needs a cluster: a local master sends nothing between nodes")


def _check_ring(backup: Backup, tls: Tls | None) -> None:
    standing.check(backup.where)
    where = backup.where
    if tls is not None and standing.is_in_ring(where) and not standing.encrypts(where):
        raise PlanError(
            f"tls= does not reach the standing nodes of {where.arguments['file']}, which do not "
            "encrypt: state would travel to them in clear text; start them with --tls-certificate, "
            "--tls-key and --tls-root, or use another backup"
        )


def _nodes(
    spark: SparkSession,
    settings: Settings,
    limits: NodeLimits,
    where: StoreAddress,
    root: StateRoot,
    epoch: Epoch,
) -> tuple[Nodes, BackupStore]:
    """Where the tables are, and the store of checkpoint files."""
    where = standing.with_key(where, epoch, limits.silence)
    succession.announce(where)
    if is_local(spark):
        opened = where.open()
        node = LocalNode(root.path(), lambda request, deadline: opened, where)
        return OneNode(node, HERE), opened
    secret, tls = Secret.new(), settings.tls
    context = {
        "secret": secret.to_hex(),
        "store": where.to_json(),
        "timeout": limits.silence,
        "keep": not settings.checkpointing.backs_up,
    }
    start = AgentStart((), root, context, tls, limits.capacity, limits.silence, epoch)
    trusted = None if tls is None else tls.trusted()
    agents = Agents(spark, epoch, secret, start, limits.silence, trusted)
    return agents, where.open(agents.stores)


def _before(node: Stateful) -> tuple[str, ...]:
    return tuple(dict.fromkeys(up.name for way in node.inputs for up in stateful_before(way)))


def _volatile(folder: CheckpointFolder, plan: Plan) -> bool:
    """Whether the query has files on disks of this machine that are not flushed at once."""
    sinks = [output.sink for output in plan.outputs]
    return folder.is_local or any(isinstance(s, Flushed) and s.local for s in sinks)


def _secure(plan: Plan, logs: SparkLogs, version: Version) -> Mapping[Version, str]:
    """Flush results and Spark's logs up to a version, and return what a manifest notes of them."""
    try:
        for output in plan.outputs:
            if isinstance(output.sink, Flushed):
                output.sink.flush()
        logs.flush(version)
        return logs.newest_offsets(version)
    except OSError as error:
        raise DidNotHappen(f"results up to version {version} were not flushed: {error}") from (
            error
        )
