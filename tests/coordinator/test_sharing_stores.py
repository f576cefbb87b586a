"""Queries that share a store, or have folders in each other's: none loses a file to another one.

What is kept and what goes the real protocols say, and the real ledger carries it out.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.backup import Files
from anabranch.checkpointing.policy import Periodic
from anabranch.coordinator import identity
from anabranch.coordinator.commits import Commit
from anabranch.coordinator.epochs import Reign
from anabranch.coordinator.folder import CheckpointFolder
from anabranch.coordinator.identity import Identity
from anabranch.coordinator.ledger import Ledger
from anabranch.errors import StoreError
from anabranch.protocols import orders as o
from anabranch.protocols.events import Started
from anabranch.protocols.model import Routed
from anabranch.spark.logs import SparkLogs, digest
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import Routing
from anabranch.state.part import Part
from anabranch.stores import Manifests
from anabranch.stores.store import BackupStore
from anabranch.testing import FaultyStore
from coordinator.mini import GROUPS, LAYOUT
from coordinator.test_ledger import no_damage, offsets_of, planned
from protocols.played import Play

RETAIN = 2
ROUTING = Routing.even(GROUPS, 2)


@dataclass
class Storing(Play):
    """What is stored is in a store, under the id of its query."""

    store: BackupStore | None = None
    prefix: str = ""

    def part(self, *given: Any, **more: Any) -> Part:
        made = super().part(*given, **more)
        named = f"{self.prefix}/parts/{made.version:012d}-{self.query.epoch}-{made.name}.arrow"
        part = replace(made, name=named)
        assert self.store is not None
        self.store.put(part.name, part.name.encode())
        return part


class Sharing:
    """A query in a folder, whose checkpoint files are there or in a store that others use too."""

    def __init__(self, folder: Path, shared: BackupStore | None, query: str) -> None:
        self.folder, self.shared, self.query = folder, shared, query
        self.take_over()

    def take_over(self) -> None:
        at = CheckpointFolder.of(self.folder)
        before = identity.load(at.store) or Identity(
            self.query, 0, {"op": {}}, {"op": ROUTING}, asked={"op": 2}
        )
        reign = Reign.begin(at.store, "test", above=before.run)
        logs, parts = SparkLogs(at.spark), self.shared or at.store
        schemas = {"op": CheckpointSchema.of(LAYOUT)}
        self.ledger = Ledger(
            at.store, at.log, parts, reign, before, schemas, logs, logs.newest_offsets
        )
        policy = Periodic("1 hour", at_most=1, retain=RETAIN)
        self.play = Storing.of(checkpointing=policy, longest_chain=3)
        self.play.query = replace(self.play.query, epoch=reign.epoch)
        self.play.store, self.play.prefix, self.carried_out = parts, self.query, 0
        routed = {"op": Routed(ROUTING, ("a", "b"))}
        facts = self.ledger.facts(routed, no_damage, trusted=True)
        self.ledger.sweep()
        self.play.happen(Started(facts))
        for host in "ab":
            self.play.come(host)
        assert self.play.query.settled
        self.carry_out()

    def batch(self) -> None:
        order = self.play.ask()
        assert order is not None
        planned(self.folder, order.version)
        offsets = digest(offsets_of(order.version))
        self.ledger.commit(Commit(order.version, {}, offsets, order.arrangement))
        self.play.commit(order)

    def checkpoint(self) -> None:
        self.play.checkpoint()
        self.play.wait(1)

    def capture_all(self) -> None:
        """What is stored next is a full capture."""
        slices = {i: replace(s, base=None) for i, s in self.play.query.slices.items()}
        self.play.query = replace(self.play.query, slices=slices)

    def carry_out(self) -> None:
        for order in self.play.sent[self.carried_out :]:
            match order:
                case o.Publish(published):
                    self.ledger.publish(published)
                case o.Withdraw():
                    self.ledger.withdraw(order)
                case o.Note():
                    self.ledger.note(order)
        self.carried_out = len(self.play.sent)

    def check(self) -> None:
        manifests = Manifests(self.ledger.store, self.ledger.parts)
        versions = manifests.versions()
        assert versions == self.play.published
        assert len(versions) <= RETAIN
        for version in versions:
            for name in manifests.get(version).files:
                assert self.ledger.parts.get(name).to_pybytes() == name.encode()
        for part in self.play.query.inventory["op"].parts:
            assert self.ledger.parts.get(part.name).to_pybytes() == part.name.encode()


@pytest.fixture
def root() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


ACTIONS = {
    "batch": Sharing.batch,
    "checkpoint": Sharing.checkpoint,
    "full": Sharing.capture_all,
    "restart": Sharing.take_over,
}
STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["batch"] * 5 + list(ACTIONS))), max_size=40
)


@settings(max_examples=60)
@given(STEPS, st.sampled_from(["one uri", "nested folders"]))
def test_queries_that_share_a_store_never_take_each_others_files(
    steps: list[tuple[int, str]], sharing: str
) -> None:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        root = Path(folder)
        shared = Files(str(root / "uri")).open() if sharing == "one uri" else None
        folders = [root / "ck", root / "ck" / "b", root / "ck" / "b" / "c"]
        queries = [Sharing(each, shared, f"{i:012x}") for i, each in enumerate(folders)]
        for which, action in steps:
            ACTIONS[action](queries[which])
            queries[which].carry_out()
            for each in queries:
                each.check()


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_whatever_of_a_withdrawal_fails_every_manifest_that_is_there_can_be_used(seed: int) -> None:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        query = Sharing(Path(folder) / "ck", None, "a" * 12)
        whole = query.ledger.store
        faulty = FaultyStore(whole, seed=seed, rate=0.2)
        failing = replace(query.ledger, store=faulty, parts=faulty)
        for _ in range(12):
            query.batch()
            query.checkpoint()
            new = query.play.sent[query.carried_out :]
            query.carried_out = len(query.play.sent)
            for order in new:
                if isinstance(order, o.Publish):
                    query.ledger.publish(order.published)
                elif isinstance(order, o.Withdraw):
                    with suppress(StoreError):
                        failing.withdraw(order)
            manifests = Manifests(whole)
            there = set(whole.list(f"{query.query}/parts/"))
            for version in manifests.versions():
                assert manifests.get(version).files <= there
        query.take_over()
        query.batch()
        query.checkpoint()
        query.carry_out()
        query.take_over()
        query.check()


@pytest.mark.parametrize("sharing", ["one uri", "nested folders"])
def test_what_no_version_needs_goes(root: Path, sharing: str) -> None:
    shared = Files(str(root / "uri")).open() if sharing == "one uri" else None
    queries = [Sharing(root / "ck", shared, "a" * 12), Sharing(root / "ck" / "b", shared, "b" * 12)]
    for _ in range(20):
        for each in queries:
            each.batch()
            each.carry_out()
    for each in queries:
        each.check()
        named = {part.name for of in each.play.query.inventory.values() for part in of.parts}
        for manifest in each.play.query.published:
            named |= {part.name for part in manifest.parts["op"]}
        assert set(each.ledger.parts.list(f"{each.query}/parts/")) == named
