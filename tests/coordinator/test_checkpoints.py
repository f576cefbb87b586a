"""Checkpoints of a query as they are stored one after the other, and merged meanwhile."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pytest
from anabranch.coordinator.checkpoints import Checkpoints, Taken
from anabranch.coordinator.tables import HERE, Tables
from pyarrow import fs

from anabranch.backup import Manifests, read_state
from anabranch.backup.files import Files, FileStore
from anabranch.checkpointing import Periodic
from anabranch.coordinator.commits import Commit
from anabranch.coordinator.events import Events
from anabranch.nodes.captures import CAPTURES
from anabranch.nodes.local import LocalNode
from anabranch.nodes.node import Deadline
from anabranch.nodes.requests import Merge, Request
from anabranch.state import schema as types
from anabranch.state.capture import CheckpointSchema, capture
from anabranch.state.checkpoint import write
from anabranch.state.groups import KeyGroups
from anabranch.state.keys import KeyLayout
from anabranch.state.part import Part
from anabranch.state.table import StateTable, TableLayout
from anabranch.units import Version

A = TypeVar("A")

GROUPS = 8
LAYOUT = TableLayout(
    KeyLayout([pa.field("key", pa.int64())], [], GROUPS), types.schema(n=types.int64)
)
KEYS = 50
DEADLINE = 120.0


class Gate:
    """A node whose merges wait until they may go on."""

    def __init__(self, node: LocalNode) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.deadline = Deadline(DEADLINE)
        self._node = node

    def ask(self, request: Request[A], deadline: Deadline) -> A:
        if isinstance(request, Merge):
            self.deadline = deadline
            self.entered.set()
            assert self.open.wait(DEADLINE)
        return self._node.ask(request, deadline)


class Query:
    """One table, a model of it, and checkpoints after every batch."""

    def __init__(self, folder: Path, seed: int, *, apart: bool) -> None:
        self.folder = folder
        self.store = FileStore(fs.LocalFileSystem(), str(folder / "store"), flushed=False)
        files = Files(str(folder / "store")) if apart else None
        self.gate = Gate(LocalNode(folder, lambda request, deadline: self.store, files))
        self.gate.open.set()
        self.manifests = Manifests(self.store)
        self.checkpoints = Checkpoints(
            Periodic("0 seconds"),
            self.manifests,
            {"op": CheckpointSchema.of(LAYOUT)},
            Tables("query", 1, [], lambda host: self.gate, {"op": (HERE,)}),
            Events(self.store, 0),
        )
        self.table = StateTable.create(folder / "table", LAYOUT)
        (folder / CAPTURES).mkdir()
        self.model: dict[int, int] = {}
        self.version = -1
        self._numbers = np.random.default_rng(seed)

    def batch(self) -> bool:
        """Change some keys and take a checkpoint; whether it was a full one."""
        order = self.checkpoints.order()
        assert order is not None
        self.version += 1
        with self.table.lock(0):
            self.table.begin(Version(self.version), 0)
            keys = self._numbers.choice(KEYS, 5, replace=False).astype(np.int64)
            hashes = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            rows = self.table.rows(LAYOUT.key.encode([pa.array(keys)], hashes, []))
            self.table.set("n", rows, np.full(5, self.version))
            self.table.delete(rows[3:])
            taken = capture(self.table, "op", 0, groups=KeyGroups.all(GROUPS), base=order.base)
            self.table.mark_clean()
            self.table.finish()
        self.model |= dict.fromkeys(keys[:3].tolist(), self.version)
        for key in keys[3:].tolist():
            self.model.pop(key, None)
        file = self.folder / CAPTURES / f"{self.version}.arrow"
        file.write_bytes(write(taken))
        commit = Commit(Version(self.version), {})
        self.checkpoints.committed(Taken(commit, {"op": {0: str(file)}}))
        assert self.checkpoints.wait(DEADLINE)
        return order.base is None

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not reached():
            assert time.monotonic() < deadline
            self.batch()
            time.sleep(0.02)  # or a merge, which gives way to this, would hardly get on

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.manifests.get(Version(self.version)).operators["op"].parts

    def stored(self, version: int) -> dict[int, int]:
        rows = read_state(self.store, self.manifests.get(Version(version)), "op")
        return dict(zip(rows["key"].to_pylist(), rows["n"].to_pylist(), strict=True))


@pytest.fixture
def query(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Query]:
    made = Query(tmp_path, seed=5, apart=getattr(request, "param", False))
    yield made
    made.gate.open.set()
    made.checkpoints.close()
    made.table.close()


def test_every_version_is_what_the_table_was_however_often_chains_are_merged(query: Query) -> None:
    merges = 0

    def merged_often() -> bool:
        nonlocal merges
        before = len(query.parts) if query.version >= 0 else 0
        query.batch()
        merges += len(query.parts) <= before
        assert query.stored(query.version) == query.model
        return merges >= 2

    query.until(merged_often)
    assert query.checkpoints.failure is None


@pytest.mark.parametrize("query", [False, True], ids=["here", "apart"], indirect=True)
def test_checkpoints_go_on_while_a_chain_is_merged(query: Query) -> None:
    query.gate.open.clear()
    query.until(query.gate.entered.is_set)
    for _ in range(5):
        query.batch()
        assert query.stored(query.version) == query.model
    assert query.parts[0].version == 0
    query.gate.open.set()
    query.until(lambda: query.parts[0].version > 0)
    assert query.parts[0].base is None
    assert query.stored(query.version) == query.model


def test_files_that_no_version_needs_go_after_a_merge(query: Query) -> None:
    def needed() -> set[str]:
        manifests = [query.manifests.get(version) for version in query.manifests.versions()]
        return {part.name for of in manifests for part in of.operators["op"].parts}

    query.batch()
    query.until(lambda: query.parts[0].version > 0)
    query.until(lambda: set(query.store.list("query/parts/")) == needed())


@pytest.mark.parametrize("query", [False, True], ids=["here", "apart"], indirect=True)
def test_after_a_chain_that_cannot_be_merged_everything_is_saved_again(query: Query) -> None:
    query.gate.open.clear()
    query.until(query.gate.entered.is_set)
    damaged = query.parts[1]
    query.store.put(damaged.name, b"something else")
    query.gate.open.set()
    query.until(lambda: query.parts[0].version > damaged.version)
    assert query.stored(query.version) == query.model


def test_what_is_merged_is_dropped_once_everything_is_saved_anew(query: Query) -> None:
    query.gate.open.clear()
    query.until(query.gate.entered.is_set)
    assert query.gate.deadline.left() > 0
    query.checkpoints.start_anew(soon=False)
    assert query.gate.deadline.left() == 0
    assert query.batch()
    since = query.version
    query.gate.open.set()
    for _ in range(8):
        query.batch()
        assert query.parts[0].version >= since
        assert query.stored(query.version) == query.model
