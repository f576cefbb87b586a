"""What nodes measure of their links is what the links have."""

from __future__ import annotations

import os
import time

import pyarrow as pa
import pytest

from anabranch.cluster import LocalAgents
from anabranch.fragments.cost import Cost
from anabranch.nodes import Deadline, NodeStore, RemoteNode, Signer
from anabranch.nodes.requests import Epoch
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.stores.meter import Meter, Metered
from anabranch.stores.peers import PeerStore
from anabranch.stores.scattered import gathered, scatter
from anabranch.units import Version

pytestmark = pytest.mark.chaos
RATE = 5_000_000
"""Bytes per second of every link."""
DATA = pa.py_buffer(os.urandom(8_000_000))


def test_the_rates_of_saving_and_retrieving_are_those_of_the_links_of_the_owner() -> None:
    with LocalAgents(7, f"{RATE * 8 // 1_000_000} Mbit") as agents:
        if not agents.linked:
            pytest.skip("network namespaces cannot be made here")
        owner, *others = agents.hosts
        groups = KeyGroups.all(8)
        part = Part("x", "op", Version(1), None, groups, tuple(others), 4, bytes=DATA.size)

        def store() -> Metered:
            signer = Signer(agents.secret)
            nodes = {
                host: NodeStore(RemoteNode(str(address), signer), Epoch(1), lambda: Deadline(120))
                for host, address in agents.addresses.items()
            }
            return Metered(PeerStore(lambda: nodes), Meter())

        def save() -> tuple[Cost, float]:
            metered, begun = store(), time.perf_counter()
            scatter(metered, part, DATA, owner)
            return metered.meter.cost, time.perf_counter() - begun

        def retrieve() -> tuple[Cost, float]:
            metered, begun = store(), time.perf_counter()
            with gathered(metered, part) as source:
                assert source.read(0, DATA.size) == DATA
            return metered.meter.cost, time.perf_counter() - begun

        saved, saving = agents.inside(owner, save)
        retrieved, retrieving = agents.inside(owner, retrieve)
    sent, received = saved.sent, retrieved.received
    assert sent.bytes == pytest.approx(DATA.size * 6 / 4, rel=0.01)
    assert DATA.size <= received.bytes < 1.6 * DATA.size
    # A bucket lets some bytes pass at once; a machine that is busy takes longer.
    assert sent.bytes / saving <= sent.bytes / sent.seconds < 1.3 * RATE
    assert received.bytes / retrieving <= received.bytes / received.seconds < 1.3 * RATE
