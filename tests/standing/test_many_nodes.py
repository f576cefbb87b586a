"""A state at 32 standing nodes: any 20 of its 30 holders are killed at once, again and again.

``SETS=20`` in the environment is how many random sets; ``SEED`` repeats a run. Each line that is
printed has the holders that were killed, and how long the state took to be read without them.
"""

import os
import random
import time
from pathlib import Path

import pytest

from anabranch.nodes.standing.survey import survey
from anabranch.testing import LocalRing
from anabranch.testing.rings import hosts

SETS = int(os.environ.get("SETS", "3"))
SEED = int(os.environ.get("SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
DATA, PARITY, BYTES = 10, 20, 128_000_000
NAME = "words/at=10.0.0.1/parts/1"

pytestmark = [pytest.mark.chaos, pytest.mark.cluster, pytest.mark.timeout(7200)]


def test_any_twenty_of_thirty_holders_are_killed(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    print(f"\nSEED={SEED}")
    with LocalRing(tmp_path, hosts(32, start=130), period=5.0) as ring:
        store, data = ring.store(DATA, PARITY, "words"), chance.randbytes(BYTES)
        began = time.monotonic()
        store.put(NAME, data)
        print(f"stored in {time.monotonic() - began:.2f} s")
        pieces = survey(store.ring, "10.0.0.1", NAME).pieces
        holders = {piece.name.index: piece.node.host for piece in pieces}
        assert len(set(holders.values())) == len(holders) == DATA + PARITY
        for number in range(SETS):
            lost = sorted(chance.sample(range(DATA + PARITY), PARITY))
            killed = [holders[index] for index in lost]
            ring.kill(killed)
            began = time.monotonic()
            assert ring.store(DATA, PARITY, "words").get(NAME).to_pybytes() == data
            print(f"{number}: without {lost}: {time.monotonic() - began:.2f} s", flush=True)
            ring.start(killed)
            ring.wait_closed()
        ring.kill(ring.alive)
        ring.start(ring.hosts)
        ring.wait_closed()
        began = time.monotonic()
        assert ring.store(DATA, PARITY, "words").get(NAME).to_pybytes() == data
        print(f"all were killed and started again: {time.monotonic() - began:.2f} s")
