"""The private memory of nodes does not grow with the state that they store, restore and merge.

``STATE`` in the environment is how many MB the state has (make memory: 4,096).
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pytest
from node_tools import Starter, Watching

from anabranch.nodes import AgentAddress, Deadline, RemoteNode, Secret, Signer
from anabranch.nodes.local import TABLES
from anabranch.nodes.requests import (
    Address,
    Capture,
    Drop,
    Epoch,
    Host,
    Instance,
    Make,
    Merge,
    OperatorName,
    Prefix,
    Request,
    Store,
    TableName,
)
from anabranch.state import schema as types
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import KeyGroups
from anabranch.state.keys import KeyLayout
from anabranch.state.part import Part
from anabranch.state.table import StateTable, TableLayout
from anabranch.stores.peers import AT_PEERS
from anabranch.units import Version

A = TypeVar("A")
STATE = int(os.environ.get("STATE", "128"))

ALL = KeyGroups.all(128)
LAYOUT = TableLayout(
    KeyLayout([pa.field("key", pa.int64())], [], 128),
    types.schema(n=types.int64, more=types.vector(types.float64, 10)),
)
ROW = 120
"""About how many bytes of a part a row takes."""
EPOCH = Epoch(1)
OWNER, *HOLDERS = (Host(f"10.0.0.{number}") for number in range(5))
RESTORER = HOLDERS.pop()
MB = 1 << 20


@dataclass
class Agents:
    """Five nodes that keep fragments for each other."""

    addresses: dict[Host, AgentAddress]
    nodes: dict[Host, RemoteNode]
    roots: dict[Host, Path]

    def ask(self, host: Host, request: Request[A]) -> A:
        return self.nodes[host].ask(request, Deadline(3000))

    @property
    def backed(self) -> dict[str, Any]:
        peers = {host: Address(str(address)) for host, address in self.addresses.items()}
        return {"epoch": EPOCH, "peers": peers}

    def fill(self, table: TableName, version: int, first: int, count: int) -> None:
        """A version of the owner's table with these keys."""
        opened = StateTable.open(self.roots[OWNER] / TABLES / table, LAYOUT)
        with opened.lock(10):
            opened.begin(Version(version), 1)
            for at in range(first, first + count, 1 << 17):
                keys = np.arange(at, min(at + (1 << 17), first + count))
                hashes = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
                rows = opened.rows(LAYOUT.key.encode([pa.array(keys)], hashes, []))
                opened.set("n", rows, keys * version)
                opened.set("more", rows, np.multiply.outer(keys, np.arange(10)) / 7)
            if version == 0:
                opened.mark_clean()
            opened.finish()
        opened.close()

    def part(self, table: TableName, version: int, base: int | None) -> Part:
        """A capture of the owner's table, in fragments."""
        file = self.ask(
            OWNER,
            Capture(
                epoch=EPOCH, table=table, layout=LAYOUT, operator=OperatorName("op"),
                instance=Instance(0), groups=ALL, version=Version(version),
                base=None if base is None else Version(base), fence=1 << 40,
            ),
        )  # fmt: skip
        store = Store(
            **self.backed, file=file, under=Prefix("q/"), holders=tuple(HOLDERS), needed=2
        )
        return self.ask(OWNER, store).part

    def make(self, table: TableName, version: int, *parts: Part) -> None:
        request = Make(
            **self.backed, table=table, layout=LAYOUT, version=Version(version), groups=ALL,
            parts=parts,
        )  # fmt: skip
        self.ask(RESTORER, request)

    def merge(self, version: int, *parts: Part) -> Part:
        request = Merge(
            **self.backed, schema=CheckpointSchema.of(LAYOUT), parts=parts, groups=ALL,
            version=Version(version), under=Prefix("q/"), holders=tuple(HOLDERS), needed=2,
        )  # fmt: skip
        return self.ask(OWNER, request).part

    def sums(self, table: TableName) -> tuple[int, int]:
        """How many rows are in the table of the node that has restored it, and their sum."""
        opened = StateTable.open(self.roots[RESTORER] / TABLES / table, LAYOUT)
        opened.validate()
        total = sum(int(opened.get("n", rows).sum()) for rows in opened.live_pieces(1 << 18))
        found = opened.count, total
        opened.close()
        return found

    def there_and_back(self, number: int, count: int) -> None:
        """A table is filled, stored, changed, stored, merged, and made elsewhere of both."""
        table = TableName(f"op/{number}-0")
        empty = Make(
            **self.backed, table=table, layout=LAYOUT, version=Version(-1), groups=ALL, parts=()
        )
        self.ask(OWNER, empty)
        self.fill(table, 0, 0, count)
        full = self.part(table, 0, None)
        self.fill(table, 1, count // 2, count // 4)
        changes = self.part(table, 1, 0)
        assert changes.rows == count // 4
        assert full.owner == changes.owner == OWNER
        merged = self.merge(1, full, changes)
        for name, parts in ((f"op/{number}-1", (full, changes)), (f"op/{number}-2", (merged,))):
            self.make(TableName(name), 1, *parts)
            first, last = count // 2, count // 2 + count // 4
            assert self.sums(TableName(name)) == (count, sum(range(first, last)))
            self.ask(RESTORER, Drop(epoch=EPOCH, tables=(TableName(name),)))


@pytest.fixture
def agents(start: Starter, secret: Secret, tmp_path: Path) -> Iterator[Agents]:
    hosts = (OWNER, *HOLDERS, RESTORER)
    roots = {host: tmp_path / host / "state" / host / "0123456789ab" for host in hosts}
    addresses = {
        host: start(
            folder=tmp_path / host / "agent", log=tmp_path / host / "log", limit=None,
            node="anabranch.nodes.serving:make",
            context={"root": str(roots[host]), "host": host, "secret": secret.to_hex(),
                     "store": AT_PEERS.to_json()},
        )
        for host in hosts
    }  # fmt: skip
    nodes = {host: RemoteNode(str(at), Signer(secret), host=host) for host, at in addresses.items()}
    yield Agents(addresses, nodes, roots)
    for node in nodes.values():
        node.close()


@pytest.mark.timeout(3600)
def test_private_memory_does_not_grow_with_the_state(agents: Agents) -> None:
    size, most = STATE * MB, (96 if STATE <= 128 else 256) * MB
    agents.there_and_back(1, 10_000)  # kernels and libraries are loaded once
    hosts = (OWNER, RESTORER, *HOLDERS)
    began = time.monotonic()
    with Watching(*(agents.addresses[host].pid for host in hosts)) as watching:
        agents.there_and_back(2, size // ROW)
    grown = dict(zip(hosts, (each / MB for each in watching.grown), strict=True))
    print(f"{size / MB:.0f} MB in {time.monotonic() - began:.0f} s; MB grown: {grown}")
    assert max(watching.grown) < most, grown
