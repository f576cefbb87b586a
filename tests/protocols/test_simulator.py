"""The protocols under faults. ``SIMULATE`` sets the seconds, ``SEED`` repeats a run.

``make simulate FAULTS=1000000`` tries a million faults on all cores.
"""

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from anabranch.protocols import batches, checkpoint, move, nodes, query, recover, restart
from anabranch.protocols.events import Inspected
from anabranch.protocols.model import NO_GROUPS, Inventory, serving
from anabranch.protocols.query import Turn
from protocols.simulator import AtPeers, InStore, Plan, Simulation, fails, shrink

SECONDS = float(os.environ.get("SIMULATE", "60"))
SEED = int(os.environ.get("SEED", str(random.SystemRandom().randrange(10**9))))
MOST = 1500
"""Histories within which a planted bug must be found."""


def test_histories_under_faults() -> None:
    print(f"SEED={SEED}")
    until, seed = time.monotonic() + SECONDS, SEED
    while time.monotonic() < until:
        plan = Plan.of(seed)
        error = fails(plan)
        if error is not None:
            pytest.fail(f"seed {seed}: {error!r}; the shortest such history: {shrink(plan)}")
        seed += 1
    print(f"{seed - SEED} histories")


def test_a_history_repeats() -> None:
    first, again = (Simulation(Plan.of(12345), story=[]).run() for _ in range(2))
    assert first.story == again.story


# Bugs that the simulator must find


def _give_all_orders_one_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turn, "fence", lambda turn: turn.query.epoch * query.FENCES)


def _switch_before_the_last_changes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(move, "_finish", lambda turn, moving: move._switch(turn, moving))


def _serve_without_replay(patch: pytest.MonkeyPatch) -> None:
    def made(turn: Turn) -> None:
        if not any(w.owner is query.Owner.RECOVERY for w in turn.query.outstanding.values()):
            recover._switch(turn)

    patch.setattr(recover, "_made", made)


def _build_on_parts_that_were_not_stored(patch: pytest.MonkeyPatch) -> None:
    original = checkpoint._capture

    def capture(query: object, each: object) -> object:
        return replace(original(query, each), base=each.base)  # type: ignore[arg-type,attr-defined]

    patch.setattr(checkpoint, "_capture", capture)


def _deliver_twice(patch: pytest.MonkeyPatch) -> None:
    original = restart._finish

    def finish(turn: Turn) -> None:
        original(turn)
        turn.change(delivered=turn.query.committed)

    patch.setattr(restart, "_finish", finish)


def _serve_groups_that_have_left(patch: pytest.MonkeyPatch) -> None:
    original = move._switch

    def switch(turn: Turn, moving: move.Move) -> None:
        before = turn.query.slices
        original(turn, moving)
        for source in moving.moved:
            if source in turn.query.slices:
                turn.put(replace(before[source], leaving=NO_GROUPS))

    patch.setattr(move, "_switch", switch)


def _use_chains_with_a_gap(patch: pytest.MonkeyPatch) -> None:
    def newest(
        self: Inventory, groups: object, usable: frozenset[str], upto: object = None
    ) -> object:
        return max((p.version for p in self.parts if p.name in usable), default=None)

    patch.setattr(Inventory, "newest", newest)


def _take_every_answer(patch: pytest.MonkeyPatch) -> None:
    """Let a recovery go on with the slices of an attempt that it gave up."""
    original = recover._again

    def again(turn: Turn, reason: str, *more: object, **named: object) -> None:
        recovery = turn.query.recovery
        assert recovery is not None
        if recovery.phase is recover.Phase.REPLAY:
            recover._switch(turn)
        else:
            original(turn, reason, *more, **named)  # type: ignore[arg-type]

    patch.setattr(recover, "_again", again)


def _trim_what_is_needed(patch: pytest.MonkeyPatch) -> None:
    def trim(turn: Turn) -> None:
        for name in turn.query.operators:
            turn.send(batches.Trim(name, turn.query.committed))

    patch.setattr(batches, "trim", trim)
    # Found only because it never comes to an end: the query must not go back then.
    patch.setattr(recover, "_go_back", lambda turn, reason: None)


def _forget_what_must_be_shed(patch: pytest.MonkeyPatch) -> None:
    original = move._switch

    def switch(turn: Turn, moving: move.Move) -> None:
        original(turn, moving)
        turn.put(*(replace(s, leaving=NO_GROUPS) for s in turn.query.slices.values()))

    patch.setattr(move, "_switch", switch)


def _withdraw_what_is_needed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint, "_needed", lambda query: set())


def _never_ask_whether_agents_answer(patch: pytest.MonkeyPatch) -> None:
    """An executor that stops is not seen to: the batch that runs on it never ends."""
    patch.setattr(nodes, "_probe", lambda turn: None)


def _believe_in_nodes_that_are_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nodes, "remove", lambda turn, host: None)


def _leave_captured_files(patch: pytest.MonkeyPatch) -> None:
    original = nodes._drop_strangers

    def drop(turn: Turn, host: str, found: Inspected) -> None:
        original(turn, host, replace(found, files={}))

    patch.setattr(nodes, "_drop_strangers", drop)


def _drop_files_of_what_is_under_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nodes, "_wanted_files", lambda query, found: frozenset())


BUGS: list[Callable[[pytest.MonkeyPatch], None]] = [
    _give_all_orders_one_fence,
    _switch_before_the_last_changes,
    _serve_without_replay,
    _build_on_parts_that_were_not_stored,
    _deliver_twice,
    _serve_groups_that_have_left,
    _use_chains_with_a_gap,
    _take_every_answer,
    _trim_what_is_needed,
    _believe_in_nodes_that_are_gone,
    _forget_what_must_be_shed,
    _withdraw_what_is_needed,
    _never_ask_whether_agents_answer,
    _leave_captured_files,
    _drop_files_of_what_is_under_way,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    for seed in range(MOST):
        error = fails(Plan.of(seed))
        if error is not None:
            print(f"found by seed {seed}: {error!r:.300}")
            return
    pytest.fail(f"not found in {MOST} histories")


# What a backup promises


@pytest.mark.parametrize("backup", [InStore(), AtPeers(1), AtPeers(2)], ids=repr)
@pytest.mark.parametrize("seed", range(20))
def test_one_node_after_another_can_be_lost(backup: InStore | AtPeers, seed: int) -> None:
    """Idle nodes, too, may hold backups: what they held is stored again."""
    plan = replace(Plan.of(seed), backup=backup, faults=(), commands=(), hosts=4)
    simulation = Simulation(plan)
    simulation.faulty = False
    for number in range(8):
        simulation.run_until_protected()
        simulation.lose(f"h{(seed + number) % 4}", memory=True, disk=True)
    simulation.run_until_protected()
    assert simulation.told["going back"] == 0, simulation.told
    assert simulation.told["stopped"] == 0
    committed = simulation.driver.query.committed
    simulation.world.check_served(list(serving(simulation.driver.query.slices.values())), committed)
