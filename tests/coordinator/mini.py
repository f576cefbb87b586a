"""A query without Spark: folder, loop, commits, checkpoints and tables are real, Spark is played.

One operator counts rows by key. The source has the numbers from 0 on; like Spark's file source it
notes in a log of its own which of them it gave out, and a batch's offsets name an entry there.
Every result row is a number with the count of its key, so any loss or repetition shows.
"""

import json
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.boot import boot_id
from anabranch.checkpointing import Periodic
from anabranch.coordinator import assembly, identity
from anabranch.coordinator.asking import Asking
from anabranch.coordinator.assembly import Assembly
from anabranch.coordinator.batches import HERE, Program, _cause, slice_order, slices_told
from anabranch.coordinator.completion import Completion
from anabranch.coordinator.epochs import Lookout, Reign
from anabranch.coordinator.events import Events
from anabranch.coordinator.failures import translated
from anabranch.coordinator.folder import CheckpointFolder
from anabranch.coordinator.handover import HandOver
from anabranch.coordinator.identity import DriverLock, Identity
from anabranch.coordinator.ledger import Ledger
from anabranch.coordinator.loop import Loop
from anabranch.coordinator.nodes import OneNode, Watcher
from anabranch.coordinator.shell import Shell
from anabranch.coordinator.stream import Stream, Take
from anabranch.errors import AnabranchError, QueryFailed
from anabranch.nodes.folders import StateRoot
from anabranch.nodes.local import LocalNode
from anabranch.operators.context import Context
from anabranch.placement.even import Even
from anabranch.protocols.events import (
    BatchCommitted,
    BatchFailed,
    NodeCame,
    NodeLost,
    Scale,
    TakeCheckpoint,
)
from anabranch.protocols.model import OperatorPlan
from anabranch.protocols.orders import Replay, RunBatch
from anabranch.protocols.query import Policies, Query
from anabranch.spark.logs import SparkLogs
from anabranch.spark.sinks import parquet
from anabranch.spark.sinks.parquet import ParquetSink
from anabranch.spark.sinks.sink import Delivery
from anabranch.state import schema as types
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import Routing, group_of
from anabranch.state.hashing import hash_keys
from anabranch.state.keys import KeyLayout
from anabranch.state.table import StateTable, TableLayout
from anabranch.state.view import State
from anabranch.stores import Manifests, read_state
from anabranch.units import NO_VERSION, Version
from anabranch.worker import slices as worker
from anabranch.worker.reports import InstanceReport

GROUPS, KEYS = 8, 23
LAYOUT = TableLayout(
    KeyLayout([pa.field("key", pa.int64())], [], GROUPS), types.schema(n=types.int64)
)
QUERY = "0123456789ab"
PATIENCE = 60.0


Rows = list[tuple[int, int]]
"""Numbers, each with the count of its key."""


@dataclass
class Outside:
    """A sink outside: it takes what it is given under a version once, and for good."""

    given: dict[int, Rows] = field(default_factory=dict)
    pending: Rows = field(default_factory=list)

    def check(self, schema: Any) -> None:
        """Anything goes."""

    def write(self, frame: Any, delivery: Delivery) -> None:
        self.pending = sorted(row for rows in frame for row in rows)

    def commit(self, delivery: Delivery) -> None:
        known = self.given.setdefault(delivery.version, self.pending)
        assert known == self.pending, "a version is always the same rows"


class Folder(ParquetSink):
    """The folder of results. Its files are written without tasks."""

    mini: "Mini"

    def write(self, frame: Any, delivery: Delivery) -> None:
        out = Path(self.path)
        out.mkdir(exist_ok=True)
        files = []
        for part, rows in enumerate(frame):
            if rows:
                final = f"{parquet._prefix(delivery)}{part:05d}.parquet"
                files.append({"final": final, "temporary": f"{parquet._mark(delivery)}{final}"})
                numbers, counts = zip(*rows, strict=True)
                table = pa.table({"number": numbers, "n": counts})
                pq.write_table(table, out / files[-1]["temporary"])
        written: Any = SimpleNamespace(collect=lambda: files)
        self.accept(written, delivery)

    def commit(self, delivery: Delivery) -> None:
        super().commit(delivery)
        self.mini.may_die("delivered")


class Killed(BaseException):
    """The process of the query is killed here."""


class Counting(HandOver):
    """What runs in a batch: rows are counted, delivered and committed."""

    def __init__(self, mini: "Mini", loop: Loop, ledger: Ledger, program: Program) -> None:
        super().__init__(loop)
        self.program = program
        self.mini = mini
        self.sinks = [output.sink for output in program.plan.outputs]
        self.completion = Completion(program.query, self.sinks, ledger)

    def trim(self, operator: str, upto: Version) -> None:
        pass

    def attempt(
        self, frame: Any, order: RunBatch, began: float, attempts: int
    ) -> BatchCommitted | BatchFailed:
        try:
            return self._committed(frame, order)
        except Exception as error:
            self.failure = translated(error)
            cause = _cause(error, self.failure, cancelled=False)
            return BatchFailed(order.version, order.fence, cause, str(self.failure))

    def _committed(self, numbers: list[int], order: RunBatch) -> BatchCommitted:
        delivery = self.completion.begin(order)
        rows, reports = self._count(numbers, order)
        if order.deliver:
            frame: Any = rows
            for sink in self.sinks:
                sink.write(frame, delivery)
        self.mini.may_die("counted")
        self._commit = self.completion.end(order, delivery, {})
        return BatchCommitted(order.version, order.fence, slices_told(order, reports))

    def _count(
        self, numbers: list[int], order: RunBatch
    ) -> tuple[list[Rows], list[InstanceReport]]:
        """The rows of each instance."""
        root = self.program.root.path()
        wanted = {each.slice: each for each in order.captures}
        rows: list[Rows] = []
        reports = []
        for instance in range(order.routed["op"].routing.instances):
            mine = [each for each in order.slices if each.instance == instance]
            orders = worker.by_lowest_group([slice_order(s, wanted.get(s.id)) for s in mine])
            by = worker.Attempt(order.version, order.fence, 0, True)
            found: Rows = []
            with worker.begun(orders, root, LAYOUT, by) as tables:
                context = Context(order.version, instance, ("key",))
                slices = []
                for each, table in zip(orders, tables, strict=True):
                    slices.append(worker.Slice(each, table, State(table, ("key",)), context))
                    found += counted(table, [n for n in numbers if group(n) in each.groups])
                ended = worker.end(slices, "op", root)
                for table in tables:
                    table.finish()
            rows.append(sorted(found))
            reports.append(
                InstanceReport("op", instance, order.version, order.fence, ended, 0.0, 0.0, 0.0, ())
            )
        return rows, reports


def group(number: int) -> int:
    """The key group of a number."""
    return GROUP_OF[number % KEYS]


_HASHES = hash_keys([pa.array(range(KEYS), pa.int64())], KEYS)
GROUP_OF: list[int] = group_of(_HASHES, GROUPS).tolist()


def counted(table: StateTable, numbers: list[int]) -> Rows:
    """Count numbers in a table; each with the count of its key."""
    keys = pa.array([number % KEYS for number in numbers], pa.int64())
    at = table.rows(LAYOUT.key.encode([keys], hash_keys([keys], len(keys)), []))
    found = []
    for row, number in zip(at.tolist(), numbers, strict=True):
        one = np.array([row])
        table.set("n", one, table.get("n", one) + 1)
        found.append((number, int(table.get("n", one)[0])))
    return found


class PlayedSpark:
    """Spark's side: a log of offsets and commits, and a thread that hands batches over."""

    def __init__(self, mini: "Mini") -> None:
        self.mini = mini

    def start(self, take: Take, *, once: bool) -> Any:
        return PlayedQuery(self.mini, take, once=once)

    def stop(self, query: Any) -> None:
        query.stop()


class PlayedQuery:
    """A life of Spark's query: it runs a batch whenever one is wanted, or the one that is next."""

    def __init__(self, mini: "Mini", take: Take, *, once: bool) -> None:
        self._mini, self._take, self._once = mini, take, once
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="played-spark", daemon=True)
        self._thread.start()

    def awaitTermination(self) -> None:  # noqa: N802
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        with self._mini.changed:
            self._stopped = True
            self._mini.changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._once:
                self._mini.run_batch(self._take)
            while not self._once and self._mini.batch_wanted(lambda: self._stopped):
                self._mini.run_batch(self._take)
                self._mini.batch_done()
        except BaseException as error:
            self._error = error


class NoReplays:
    """On one machine nothing is replayed."""

    def run(self, order: Replay, routed: Any) -> None:
        raise AssertionError(f"nothing is replayed on one machine: {order}")

    def stop(self) -> None:
        pass


class Mini:
    """One run of the query, from its start to its end or its death."""

    def __init__(
        self,
        disk: Path,
        memory: Path,
        outside: Outside | None,
        *,
        every: int,
        chance: Any = None,
        instances: int = 2,
        longest_chain: int = 10,
    ) -> None:
        self.disk, self.outside, self.chance = disk, outside, chance
        self.risk = 0.03
        """How likely it dies at each of the places where it may."""
        self.longest_chain = longest_chain
        self.tolerant = False
        """Whether checkpoints may fail."""
        self.sink = Folder(str(disk / "out"))
        self.sink.mini = self
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self._wanted = 0
        self._sparse = False
        """Whether the batch that is wanted has no rows."""
        self._dead = self._over = False
        folder = CheckpointFolder.of(disk / "ck")
        self.spark = Path(folder.spark)
        before = identity.load(folder.store) or Identity(
            QUERY,
            0,
            {"op": {}},
            {"op": Routing.even(GROUPS, instances)},
            asked={"op": instances},
            boot=boot_id(),
        )
        root = StateRoot(QUERY, str(memory))
        lock = DriverLock(root.path())
        try:
            self.assembly = self._assembled(folder, before, root, lock, every)
        except BaseException:
            lock.release()
            raise
        self._supervisor = threading.Thread(target=self._supervise, name="mini", daemon=True)

    def _assembled(
        self,
        folder: CheckpointFolder,
        before: Identity,
        root: StateRoot,
        lock: DriverLock,
        every: int,
    ) -> Assembly:
        reign = Reign.begin(folder.store, "mini", above=before.run)
        known = replace(before, run=reign.epoch)
        identity.save(folder.store, known)
        sinks: list[Any] = [self.sink] if self.outside is None else [self.sink, self.outside]
        plan: Any = SimpleNamespace(outputs=[SimpleNamespace(sink=sink) for sink in sinks])
        program = Program(QUERY, plan, {}, root, True, reign.epoch, tracks_changes=True)
        events, logs, parts = Events(folder.log, reign.epoch), SparkLogs(folder.spark), folder.store
        ledger = Ledger(
            folder.store,
            folder.log,
            parts,
            reign,
            known,
            {"op": CheckpointSchema.of(LAYOUT)},
            logs,
            partial(assembly._secure, plan, logs),
        )
        policy = Periodic("1 hour", at_most=every, retain=2)
        policies = Policies(
            policy, folder.files, Even(), replays=False, longest_chain=self.longest_chain
        )
        loop = Loop(Query({"op": OperatorPlan("op", GROUPS)}, policies, reign.epoch))
        nodes = OneNode(LocalNode(root.path(), lambda request, deadline: parts), HERE)
        asking = Asking(nodes, reign.epoch, QUERY, {"op": LAYOUT})
        batches: Any = Counting(self, loop, ledger, program)
        stream = Stream(PlayedSpark(self), batches, QUERY, sinks, ledger, events, loop)
        shell = Shell(loop, asking, ledger, events, batches, NoReplays(), stream, self._stopped)
        watcher = Watcher(
            nodes.alive,
            lambda host: loop.tell(NodeCame(host)),
            lambda host: loop.tell(NodeLost(host)),
        )
        return Assembly(
            program=program,
            asked={},
            loop=loop,
            shell=shell,
            asking=asking,
            nodes=nodes,
            watcher=watcher,
            lookout=Lookout(reign, shell.depose, 0.2),
            ledger=ledger,
            events=events,
            batches=batches,
            stream=stream,
            locks=lock,
            trusted=before.boot == boot_id(),
        )

    def start(self) -> None:
        """Recover, and run again what has to be."""
        self.assembly.begin()
        self._supervisor.start()
        assert self.assembly.stream.ready.wait(PATIENCE)
        self._raise()

    def step(self, *, sparse: bool = False) -> None:
        """Run a batch, with the checkpoint that is due. A sparse one is planned without rows."""
        with self.changed:
            self._sparse = sparse
            self._wanted += 1
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self._over or not self._wanted, PATIENCE)
        self._raise()
        version = self.assembly.batches.committed
        with self._living():
            query = self.assembly.loop.wait_for(lambda q: _at_rest(q, version), PATIENCE)
        assert query is not None, self.assembly.loop.query
        assert self.tolerant or query.checkpoints is None or query.checkpoints.failures == 0

    def checkpoint(self) -> Version:
        """Take a checkpoint."""
        with self._living():
            saved = self.assembly.loop.command(TakeCheckpoint)
            return Version(saved.result(PATIENCE))

    def scale(self, instances: int) -> None:
        """Divide the operator over another number of instances."""
        with self._living():
            done = self.assembly.loop.command(lambda number: Scale(number, "op", instances))
            done.result(PATIENCE)

    def stored(self) -> tuple[Version, dict[int, int]]:
        """The newest version that exists, and the count of each key in it."""
        ledger = self.assembly.ledger
        manifests = Manifests(ledger.store, ledger.parts)
        version = manifests.versions()[-1]
        rows = read_state(ledger.parts, manifests.get(version), "op")
        return version, dict(zip(rows["key"].to_pylist(), rows["n"].to_pylist(), strict=True))

    def told(self, kind: str) -> list[dict[str, Any]]:
        """The details of the events of a kind."""
        return [each.details for each in self.assembly.events.recent if each.kind == kind]

    def end(self, *, killed: bool) -> None:
        """Stop: after a last checkpoint, or at once."""
        try:
            if killed:
                with self.changed:
                    self._dead = True
                    self.changed.notify_all()
                if not self._supervisor.is_alive():
                    return
            else:
                self.assembly.stream.stop()
                self._supervisor.join(PATIENCE)
                self._raise()
                if self.assembly.batches.committed > NO_VERSION:
                    self.checkpoint()
                    self.assembly.forget_tables()
        finally:
            if self._supervisor.is_alive():
                self._supervisor.join(PATIENCE)
            self.assembly.close()
            failure = self.failure if isinstance(self.failure, AnabranchError) else None
            self.assembly.tell_end(failure, "it was stopped")

    def _supervise(self) -> None:
        failure: BaseException | None = None
        try:
            failure = self.assembly.stream.run(self._settle)
        except BaseException as error:
            failure = error
        with self.changed:
            self.failure = self.failure or failure
            self._over = True
            self.changed.notify_all()
        self.assembly.stream.ready.set()

    def _settle(self, query: Query) -> None:
        stored = query.published[-1].version if query.published else NO_VERSION
        self.assembly.batches.completion.take_over(stored)

    def _stopped(self, reason: AnabranchError) -> None:
        self.failure = self.failure or reason
        self.assembly.batches.end(reason)
        threading.Thread(target=self.assembly.stream.give_up, daemon=True).start()

    def _raise(self) -> None:
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def _living(self) -> Iterator[None]:
        """Whoever waits for the query when it fails, is told why it did."""
        try:
            yield
        except QueryFailed:
            self._raise()
            raise

    # What Spark does

    def batch_wanted(self, stopped: Any) -> bool:
        """Wait until a batch is to run; whether it is, and not the end."""
        with self.changed:
            self.changed.wait_for(lambda: self._dead or stopped() or self._wanted)
            if self._dead:
                raise Killed("between two batches")
            return not stopped()

    def batch_done(self) -> None:
        """A batch that was wanted has run."""
        with self.changed:
            self._wanted -= 1
            self.changed.notify_all()

    def run_batch(self, take: Take) -> None:
        """Plan a batch, or take up the one that was planned and not done, and run it."""
        planned, done = self._versions("offsets"), self._versions("commits")
        last = max(planned, default=-1)
        if last < 0 or last in done:
            last += 1
            self._plan(last, most=0 if self._sparse and last > 0 else 5)
        self.may_die("planned")
        since = _entry(self.spark / f"offsets/{last - 1}") if last else -1
        rows: list[int] = []
        for entry in range(since + 1, _entry(self.spark / f"offsets/{last}") + 1):
            first, stop = json.loads(
                (self.spark / f"sources/0/{entry}").read_text().splitlines()[1]
            )
            rows += range(first, stop)
        frame: Any = rows
        take(frame, last)
        self.may_die("run")
        self._write("commits", str(last), "v1\n{}")

    def _plan(self, version: int, most: int = 5) -> None:
        """Like the file source: entries that no offsets name yet come first."""
        given = -1
        for entry in sorted(self._versions("sources/0")):
            text = (self.spark / f"sources/0/{entry}").read_text()
            given = max(given, json.loads(text.splitlines()[1])[1] - 1)
        newest = max(self._versions("sources/0"), default=-1)
        before = self.spark / f"offsets/{version - 1}"
        if not most and _entry(before) == newest:
            pass  # nothing is new
        else:
            newest += 1
            size = 1 + (version * 7 + newest) % (most or 5)
            numbers = [given + 1, given + 1 + size]
            self._write("sources/0", str(newest), f"v1\n{json.dumps(numbers)}")
        self.may_die("listed")
        head = json.dumps({"batchTimestampMs": version})
        offset = json.dumps({"logOffset": newest})
        self._write("offsets", str(version), f"v1\n{head}\n{offset}")

    def _versions(self, log: str) -> list[int]:
        folder = self.spark / log
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return [int(name) for name in names if name.isdigit()]

    def _write(self, log: str, name: str, text: str) -> None:
        folder = self.spark / log
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f".{name}.partial").write_text(text)
        (folder / f".{name}.partial").rename(folder / name)
        pieces = [text.encode()[at : at + 512] for at in range(0, len(text), 512)]
        sums = b"".join(struct.pack(">I", zlib.crc32(piece)) for piece in pieces)
        (folder / f".{name}.crc").write_bytes(b"crc\0" + struct.pack(">I", 512) + sums)

    def may_die(self, where: str) -> None:
        """Die here, now and then."""
        if self.chance is not None and self.chance.random() < self.risk:
            raise self.killed(where)

    def killed(self, where: str) -> Killed:
        """Take note that the process is killed here, in whatever thread that is raised."""
        error = Killed(where)
        with self.changed:
            self.failure = self.failure or error
            self._dead = True
            self.changed.notify_all()
        if hasattr(self, "assembly"):
            # Who is in the midst of something may still come to its end.
            self.assembly.batches.end(error)
            self.assembly.loop.close("it was killed")
        return error


def _entry(offsets: Path) -> int:
    """The entry in the log of the source up to which a batch goes."""
    return int(json.loads(offsets.read_text().splitlines()[2])["logOffset"])


def _at_rest(query: Query, version: Version) -> bool:
    """Whether a version is committed, and nothing is under way."""
    idle = query.checkpoints is None or query.checkpoints.current is None
    return query.committed >= version and idle and not query.outstanding


def results(disk: Path) -> Rows:
    """All result rows that a reader of the folder finds."""
    found: Rows = []
    for file in sorted((disk / "out").glob("part-*.parquet")):
        table = pq.read_table(file)
        found += zip(table["number"].to_pylist(), table["n"].to_pylist(), strict=True)
    return sorted(found)


def expected(count: int) -> Rows:
    """The right rows for the first numbers."""
    return [(number, number // KEYS + 1) for number in range(count)]


def lose_memory(memory: Path) -> None:
    shutil.rmtree(memory, ignore_errors=True)
