"""The ring under faults. ``RING`` sets the seconds, ``SEED`` repeats a run."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Collection, Iterable

import pytest

from anabranch.ring import peer as peers
from anabranch.ring.ids import NodeId
from anabranch.ring.leafset import LeafSet
from anabranch.ring.messages import Contact, Output
from anabranch.ring.neighbours import Neighbours
from anabranch.ring.peer import Peer, Status
from anabranch.ring.table import RoutingTable
from ring.rings import History, Ring, Violation

SECONDS = float(os.environ.get("RING", "5"))
SEED = int(os.environ.get("SEED", str(random.SystemRandom().randrange(10**9))))
MOST = 60
"""Histories within which a planted bug must be found."""


def test_histories_under_faults() -> None:
    print(f"SEED={SEED}")
    until, seed = time.monotonic() + SECONDS, SEED
    while time.monotonic() < until:
        history = History.of(seed)
        try:
            Ring(history).run()
        except Exception as error:
            pytest.fail(f"{history}: {error!r}")
        seed += 1
    print(f"{seed - SEED} histories")


def test_a_history_repeats() -> None:
    first, again = (Ring(History.of(12)).run().network for _ in range(2))
    assert first.sent == again.sent
    assert first.named == again.named


# Bugs that a history must show


def _believe_what_others_say(patch: pytest.MonkeyPatch) -> None:
    def hints(
        self: Neighbours, by: NodeId, leaves: Collection[Contact], others: Iterable[Contact] = ()
    ) -> list[Contact]:
        for contact in (*leaves, *others):
            if contact.id != self.leaves.center:
                known = self._known.get(contact.id)
                self.heard(contact, known.beat + 1 if known else 0)
        return []

    patch.setattr(Neighbours, "hints", hints)


def _never_give_a_leaf_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Neighbours, "silent", lambda self: [])


def _never_check_the_table(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Neighbours, "probes", lambda self: [])


def _never_join_again(patch: pytest.MonkeyPatch) -> None:
    tick, joining = Peer.tick, peers._joining

    def once(self: Peer) -> list[Output]:
        found = joining if self.status is Status.JOINING else (lambda me, addresses: [])
        with patch.context() as within:
            within.setattr(peers, "_joining", found)
            return tick(self)

    patch.setattr(Peer, "tick", once)


def _join_again_by_the_first_nodes_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Peer, "_join", lambda self, message: None)


def _forget_that_it_is_a_circle(patch: pytest.MonkeyPatch) -> None:
    def closest(self: LeafSet, key: int, avoid: Collection[int] = ()) -> NodeId:
        found = [id for id in self if id not in avoid]
        return min([self.center, *found], key=lambda id: (abs(key - id), id))

    patch.setattr(LeafSet, "closest", closest)


def _keep_the_farther_one(patch: pytest.MonkeyPatch) -> None:
    wants = LeafSet.wants

    def is_wanted(self: LeafSet, id: int) -> bool:
        return wants(self, id) and (len(self) < self.size or id > self.center)

    patch.setattr(LeafSet, "wants", is_wanted)


def _route_by_the_table_alone(patch: pytest.MonkeyPatch) -> None:
    def next_hop(
        key: int, leaves: LeafSet, table: RoutingTable, avoid: Collection[int] = ()
    ) -> NodeId | None:
        hop = table.toward(key)
        return None if hop in avoid else hop

    patch.setattr(peers, "next_hop", next_hop)


def _forget_the_order_of_processes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Contact, "age", property(lambda self: (0, "")))


def _leave_a_former_process_in_the_dark(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Neighbours, "newer", lambda self, sender: ())


BUGS: list[Callable[[pytest.MonkeyPatch], None]] = [
    _believe_what_others_say,
    _never_give_a_leaf_up,
    _never_check_the_table,
    _never_join_again,
    _join_again_by_the_first_nodes_alone,
    _forget_that_it_is_a_circle,
    _keep_the_farther_one,
    _route_by_the_table_alone,
    _forget_the_order_of_processes,
    _leave_a_former_process_in_the_dark,
]


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__.strip("_"))
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    for seed in range(MOST):
        try:
            Ring(History.of(seed)).run()
        except Violation:
            return
    pytest.fail(f"{MOST} histories do not show it")
