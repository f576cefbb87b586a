"""A query without Spark: its own folder, commits, checkpoints and tables are real, Spark is played.

One operator counts rows by key. The source has the numbers from 0 on; like Spark's file source it
notes in a log of its own which of them it gave out, and a batch's offsets name an entry there.
Every result row is a number with the count of its key, so any loss or repetition shows.
"""

import json
import shutil
import struct
import zlib
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from anabranch.coordinator.checkpoints import Checkpoints, Taken
from anabranch.coordinator.coordinator import Running
from anabranch.coordinator.startup import Place
from anabranch.coordinator.tables import HERE, Tables

from anabranch.backup import Manifests
from anabranch.boot import boot_id
from anabranch.checkpointing import Periodic
from anabranch.coordinator import identity, startup
from anabranch.coordinator.commits import Commit, CommitLog
from anabranch.coordinator.events import Events
from anabranch.coordinator.identity import Identity
from anabranch.nodes.captures import CAPTURES
from anabranch.nodes.folders import StateRoot
from anabranch.nodes.local import LocalNode
from anabranch.spark.logs import SparkLogs, digest
from anabranch.spark.sinks.parquet import ParquetSink
from anabranch.spark.sinks.sink import Delivery
from anabranch.state import schema as types
from anabranch.state.capture import CheckpointSchema, capture
from anabranch.state.checkpoint import save
from anabranch.state.groups import KeyGroups, Routing
from anabranch.state.keys import KeyLayout
from anabranch.state.table import StateTable, TableLayout
from anabranch.units import Version

GROUPS, KEYS = 8, 7
LAYOUT = TableLayout(
    KeyLayout([pa.field("key", pa.int64())], [], GROUPS), types.schema(n=types.int64)
)
QUERY = "0123456789ab"


@dataclass
class Ledger:
    """A sink outside: it takes what it is given under a version once, and for good."""

    given: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def write(self, version: int, rows: list[tuple[int, int]]) -> None:
        assert self.given.setdefault(version, rows) == rows, "a version is always the same rows"


class Killed(Exception):
    """The process of the query is killed here."""


class Mini:
    """One run of the query, from its start to its end or its death."""

    def __init__(
        self, disk: Path, memory: Path, ledger: Ledger | None, *, every: int, chance: Any = None
    ) -> None:
        self.disk, self.memory, self.ledger = disk, memory, ledger
        self.chance = chance
        self.sink = ParquetSink(str(disk / "out"))
        self.place = Place.of(disk / "ck", None, memory)
        self.spark = Path(self.place.spark)
        found = identity.load(self.place.store)
        routing = {"op": Routing.even(GROUPS, 1)}
        self.before = found or Identity(
            QUERY, 0, {"op": {}}, routing, asked={"op": 1}, boot=boot_id()
        )
        self.before = replace(self.before, run=self.before.run + 1)
        identity.save(self.place.store, self.before)
        root = StateRoot(QUERY, str(memory))
        self.node = LocalNode(root.path(), lambda request, deadline: self.place.store)
        bound: Any = SimpleNamespace(name="op", layout=LAYOUT)
        tables = Tables(QUERY, self.before.run, [bound], lambda host: self.node, {"op": (HERE,)})
        logs = SparkLogs(self.place.spark)
        sinks = [self.sink] if ledger is None else [self.sink, ledger]
        plan: Any = SimpleNamespace(outputs=[SimpleNamespace(sink=sink) for sink in sinks])
        events = Events(self.place.log, 0)
        self.running = Running(
            query=QUERY,
            plan=plan,
            bounds={},
            routing=dict(self.before.routing),
            root=root,
            tables=tables,
            checkpoints=Checkpoints(
                Periodic("1 hour", at_most=every, retain=2),
                Manifests(self.place.store),
                {"op": CheckpointSchema.of(LAYOUT)},
                tables,
                events,
                partial(startup._secure, plan, logs),
            ),
            commits=CommitLog(self.place.log),
            logs=logs,
            events=events,
            local=True,
            fence=self.before.fence,
            trusted=self.before.boot == boot_id(),
        )
        self.running.remember = partial(
            startup.remember, self.place, self.running, self.before.asked
        )

    def start(self) -> None:
        """Recover, and run again what has to be."""
        again = startup.recover(self.place, self.running, self.before.routing)
        if again is not None:
            start = self.running.committed.version
            again.replay(start, self.place.store, self.running.logs, self.step)
        startup.settle(self.place, self.running)

    def end(self, *, killed: bool) -> None:
        """Stop: after a last checkpoint, or at once."""
        if not killed and self.running.committed.version >= 0:
            files = self.running.tables.capture_all(
                self.running.routing,
                self.running.committed.version,
                self.running.next_fence(),
            )
            taken = Taken(self.running.committed, files)
            self.running.checkpoints.store(taken)
            taken.stored.result()
        self.running.checkpoints.close()

    # What Spark does

    def step(self, most: int = 5) -> None:
        """Plan a batch, or take up the one that was planned and not done, and run it."""
        planned, done = self._versions("offsets"), self._versions("commits")
        last = max(planned, default=-1)
        if last < 0 or last in done:
            last += 1
            self._plan(last, most)
        self._may_die("planned")
        entries = [json.loads((self.spark / f"offsets/{v}").read_text().splitlines()[2])
                   for v in (last - 1, last) if v >= 0]  # fmt: skip
        since = entries[0]["logOffset"] if len(entries) == 2 else -1
        rows: list[int] = []
        for entry in range(since + 1, entries[-1]["logOffset"] + 1):
            first, stop = json.loads(
                (self.spark / f"sources/0/{entry}").read_text().splitlines()[1]
            )
            rows += range(first, stop)
        self._run(Version(last), rows)
        self._may_die("run")
        self._write("commits", str(last), "v1\n{}")

    def _plan(self, version: int, most: int) -> None:
        """Like the file source: entries that no offsets name yet come first."""
        given = -1
        for entry in sorted(self._versions("sources/0")):
            text = (self.spark / f"sources/0/{entry}").read_text()
            given = max(given, json.loads(text.splitlines()[1])[1] - 1)
        newest = max(self._versions("sources/0"), default=-1) + 1
        size = 1 + (version * 7 + newest) % most
        self._write("sources/0", str(newest), f"v1\n{json.dumps([given + 1, given + 1 + size])}")
        self._may_die("listed")
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

    # What the coordinator does

    def _run(self, version: Version, rows: list[int]) -> None:
        running = self.running
        if version <= running.committed.version:
            return
        assert version == running.committed.version + 1
        replayed = version <= running.replay_until
        order = None if replayed else running.checkpoints.order()
        if self.ledger is not None and not replayed:
            running.logs.flush(version)
        results, captured = self._count(version, rows, order)
        self._may_die("counted")
        commit = Commit(version, {}, digest(running.logs.offsets(version)))
        if replayed:
            running.committed = commit
            return
        if self.ledger is not None:
            self.ledger.write(version, results)
        self._deliver(version, results)
        self._may_die("delivered")
        running.commits.append(commit)
        running.committed = commit
        taken = None if order is None else Taken(commit, {"op": {0: captured}})
        running.checkpoints.committed(taken)
        if taken is not None:
            assert running.checkpoints.wait(60)
            assert running.checkpoints.failure is None, running.checkpoints.failure

    def _count(
        self, version: Version, rows: list[int], order: Any
    ) -> tuple[list[tuple[int, int]], str]:
        name = self.running.tables.name("op", self.running.routing["op"], 0)
        table = StateTable.open(self.node.path(name), LAYOUT)
        try:
            with table.lock(10):
                table.begin(version, self.running.next_fence())
                keys = np.array(rows, np.int64) % KEYS
                hashes = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
                at = table.rows(LAYOUT.key.encode([pa.array(keys)], hashes, []))
                results = []
                for row, number in zip(at.tolist(), rows, strict=True):
                    one = np.array([row])
                    table.set("n", one, table.get("n", one) + 1)
                    results.append((number, int(table.get("n", one)[0])))
                file = ""
                if order is not None:
                    taken = capture(table, "op", 0, groups=KeyGroups.all(GROUPS), base=order.base)
                    folder = self.running.root.path() / CAPTURES
                    folder.mkdir(parents=True, exist_ok=True)
                    file = str(folder / f"{version}.arrow")
                    save(taken, Path(file))
                    table.mark_clean()
                table.finish()
        finally:
            table.close()
        return results, file

    def _deliver(self, version: Version, results: list[tuple[int, int]]) -> None:
        out = self.disk / "out"
        out.mkdir(exist_ok=True)
        numbers, counts = zip(*results, strict=True)
        pq.write_table(pa.table({"number": numbers, "n": counts}), out / f"_anabranch-{version}")
        final = f"part-{QUERY}-{version:010d}-00000.parquet"
        self.sink._pending = {final: f"_anabranch-{version}"}
        self.sink.commit(Delivery(QUERY, version, False))

    def _may_die(self, where: str) -> None:
        if self.chance is not None and self.chance.random() < 0.03:
            raise Killed(where)


def results(disk: Path) -> list[tuple[int, int]]:
    """All result rows that a reader of the folder finds."""
    found: list[tuple[int, int]] = []
    for file in sorted((disk / "out").glob("part-*.parquet")):
        table = pq.read_table(file)
        found += zip(table["number"].to_pylist(), table["n"].to_pylist(), strict=True)
    return sorted(found)


def expected(count: int) -> list[tuple[int, int]]:
    """The right rows for the first numbers."""
    return [(number, number // KEYS + 1) for number in range(count)]


def lose_memory(memory: Path) -> None:
    shutil.rmtree(memory, ignore_errors=True)
