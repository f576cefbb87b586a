"""What the protocols do in histories in which one thing goes wrong, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from anabranch.protocols.events import Event, GiveUp, Scale, TakeCheckpoint
from anabranch.protocols.model import Change, serving
from anabranch.protocols.orders import SECOND, CommandId
from protocols.plans import AtPeers, Plan
from protocols.simulator import Simulation

QUIET = Plan(5, hosts=4, interval=1.0, retained=12, most_slices=3)


class Run:
    """A history without faults but for those that a test makes, and all that changed in it."""

    def __init__(self, plan: Plan = QUIET) -> None:
        self.simulation = Simulation(plan)
        self.simulation.faulty = False
        self.changes: list[Change] = []
        self.commands = 0

    def until(self, condition: Callable[[], bool], seconds: float = 1000) -> None:
        def look() -> bool:
            self.changes += self.simulation.driver.query.changes
            return condition()

        simulation = self.simulation
        simulation._run_until(simulation.now + int(seconds * SECOND), until=look)
        assert condition(), simulation.why()

    def commits(self, count: int) -> None:
        query = self.simulation.driver.query
        version = query.committed + count
        self.until(lambda: self.simulation.driver.query.committed >= version)

    def give(self, make: Callable[[CommandId], Event]) -> CommandId:
        self.commands += 1
        command = CommandId(self.commands)
        self.simulation.commands[command] = "given"
        self.simulation.driver.commands[command] = make(command)
        self.simulation.driver.take(make(command))
        return command

    def carry_out(self, make: Callable[[CommandId], Event]) -> None:
        command = self.give(make)
        self.until(lambda: command in self.simulation.ended)
        assert self.simulation.ended[command] is None

    def most_slices(self) -> int:
        slices = list(serving(self.simulation.driver.query.slices.values()))
        return max(
            sum((each.operator, each.instance) == (s.operator, s.instance) for each in slices)
            for s in slices
        )


def test_what_is_under_way_is_told() -> None:
    run = Run()
    run.commits(2)
    run.carry_out(lambda number: Scale(number, "a", 4))
    run.simulation.lose("h0", memory=True)
    run.commits(5)
    told = {(each.kind, each.what, each.why, each.step) for each in run.changes}
    assert ("move", "a", "scale to 4 instances", "making slices at their new nodes") in told
    assert any(kind == "checkpoint" and what == "a, b" for kind, what, _, _ in told)
    assert any(kind == "recovery" and step == "waiting for nodes" for kind, _, _, step in told) or (
        any(kind == "recovery" and "making" in step for kind, _, _, step in told)
    )
    assert any(kind == "restart" and "took the query over" in why for kind, _, why, _ in told)
    clock = run.simulation.now + run.simulation.driver.ahead
    assert all(run.simulation.driver.ahead <= each.since <= clock for each in run.changes)


def test_slices_of_an_instance_are_merged() -> None:
    run = Run(replace(QUIET, most_slices=2))
    run.commits(2)
    for instances in [6, 5, 4, 3, 2, 1]:
        run.carry_out(lambda number, count=instances: Scale(number, "a", count))  # type: ignore[misc]
        run.until(lambda: run.most_slices() <= 2)
        run.commits(3)
    assert run.simulation.told["slices merged"] > 0
    assert run.simulation.told["move failed"] == run.simulation.told["merge failed"] == 0


def test_a_stream_waits_for_a_checkpoint_before_the_offsets_run_out() -> None:
    run = Run()
    run.commits(3)
    run.simulation.world.durable.down = True
    run.until(lambda: run.simulation.told["stream held"] > 0)
    committed = run.simulation.driver.query.committed
    run.until(lambda: run.simulation.told["checkpoint failed"] > 5)
    assert run.simulation.driver.query.committed <= committed + 1
    run.simulation.world.durable.down = False
    run.commits(20)
    assert run.simulation.told["stream goes on"] == 1
    assert run.simulation.told["stopped"] == 0


def test_a_query_that_is_not_to_wait_stops() -> None:
    run = Run(replace(QUIET, hold=False))
    run.commits(3)
    run.simulation.world.durable.down = True
    run.until(lambda: run.simulation.told["stopped"] > 0)
    stopped = run.simulation.driver.query.stopped
    assert stopped is not None
    assert "checkpoints fail" in stopped


def test_too_many_failed_checkpoints_stop_the_query() -> None:
    run = Run()
    run.commits(3)
    driver = run.simulation.driver
    driver.query = replace(
        driver.query, policies=replace(driver.query.policies, tolerate=3, retained_offsets=500)
    )
    run.simulation.world.durable.down = True
    with pytest.raises(AssertionError, match="4 checkpoints in a row failed"):
        run.until(lambda: False)  # the model has no excuse for it, as it knows of a version
    assert run.simulation.told["checkpoint failed"] == 4


def test_a_checkpoint_can_be_given_up() -> None:
    run = Run(replace(QUIET, interval=1000.0))
    run.commits(3)
    run.simulation.world.durable.down = True
    command = run.give(TakeCheckpoint)
    run.simulation.driver.take(GiveUp(command))
    assert run.simulation.ended[command] == "the command was cancelled by its caller"
    run.simulation.driver.take(GiveUp(command))
    run.simulation.world.durable.down = False
    run.commits(3)


@pytest.mark.parametrize("backup", [AtPeers(1), AtPeers(2)], ids=repr)
def test_the_agent_of_an_idle_node_is_replaced_when_it_hangs(backup: AtPeers) -> None:
    run = Run(replace(QUIET, backup=backup, groups=3, hosts=6))
    run.until(run.simulation.is_settled_and_safe)
    busy = {each.node for each in run.simulation.driver.query.slices.values()}
    idle = next(m for m in run.simulation.world.machines.values() if m.name not in busy)
    idle.hung = True
    run.until(lambda: not idle.hung, seconds=150)
    assert run.simulation.told["failure"] == 0


def test_a_batch_on_an_executor_that_has_stopped_is_run_elsewhere() -> None:
    run = Run()
    run.until(run.simulation.is_settled_and_safe)
    where = next(serving(run.simulation.driver.query.slices.values())).node
    run.simulation.world.machines[where].stopped = True
    run.commits(5)
    assert run.simulation.told["recovery"] == 1
    assert run.simulation.told["going back"] == 0
