"""The loop: events are taken one by one, commands have a future, nothing hangs at its end."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

import pytest

from anabranch.backup import Files
from anabranch.checkpointing import Periodic
from anabranch.coordinator import loop as module
from anabranch.coordinator.loop import Loop
from anabranch.errors import AnabranchError, QueryFailed
from anabranch.placement.even import Even
from anabranch.protocols import orders as o
from anabranch.protocols.events import Done, Inspected, NodeCame, Scale, Started, TakeCheckpoint
from anabranch.protocols.model import Facts, OperatorPlan, Routed
from anabranch.protocols.query import Policies, Query
from anabranch.state.groups import Routing
from anabranch.units import NO_VERSION

SECONDS = 10


@dataclass
class FakeHands:
    """Nodes that do at once what they are asked."""

    loop: Loop
    given: list[o.Order] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)

    def carry_out(self, number: o.OrderId | None, order: o.Order) -> None:
        self.given.append(order)
        if number is not None:
            prepared = isinstance(order, o.Prepare)
            self.loop.tell(Done(number, Inspected({}) if prepared else None))

    def stop(self, reason: str, kind: type[AnabranchError]) -> None:
        self.stopped.append(reason)


@pytest.fixture
def loop() -> Iterator[Loop]:
    policies = Policies(Periodic(), Files("/nowhere"), Even())
    loop = Loop(Query({"op": OperatorPlan("op", 8)}, policies, 1))
    yield loop
    loop.close()


def started(loop: Loop, kind: type[FakeHands] = FakeHands) -> FakeHands:
    hands = kind(loop)
    loop.begin(hands)
    loop.tell(Started(Facts({"op": Routed(Routing.even(8, 2), ())})))
    loop.tell(NodeCame("a"))
    assert loop.wait_for(lambda q: q.settled, SECONDS) is not None
    return hands


def test_a_new_query_has_its_slices(loop: Loop) -> None:
    hands = started(loop)
    assert sorted(str(each.groups) for each in loop.query.slices.values()) == ["0-3", "4-7"]
    assert {each.node for each in loop.query.slices.values()} == {"a"}
    assert sum(isinstance(order, o.Make) for order in hands.given) == 2


def test_a_command_has_a_future(loop: Loop) -> None:
    started(loop)
    done = loop.command(lambda number: Scale(number, "op", 3))
    assert done.result(SECONDS) is None
    assert loop.query.routed["op"].routing.instances == 3


def test_a_checkpoint_of_nothing_is_at_no_version(loop: Loop) -> None:
    started(loop)
    saved = loop.command(TakeCheckpoint)
    assert saved.result(SECONDS) == NO_VERSION


def test_commands_end_with_the_loop(loop: Loop) -> None:
    class Deaf(FakeHands):
        def carry_out(self, number: o.OrderId | None, order: o.Order) -> None:
            self.given.append(order)

    loop.begin(Deaf(loop))
    done = loop.command(lambda number: Scale(number, "op", 3))
    loop.close("somebody wanted it")
    with pytest.raises(QueryFailed, match="somebody wanted it"):
        done.result(SECONDS)
    with pytest.raises(QueryFailed, match="somebody wanted it"):
        loop.command(TakeCheckpoint)
    with pytest.raises(QueryFailed, match="somebody wanted it"):
        loop.wait_for(lambda q: False)


class Slow(FakeHands):
    """Nodes that take as long as a test wants to make a table, once the query is ready."""

    def carry_out(self, number: o.OrderId | None, order: o.Order) -> None:
        if isinstance(order, o.Make) and self.loop.query.settled:
            self.given.append(order)
        else:
            super().carry_out(number, order)


def test_to_cancel_a_command_is_to_give_it_up(loop: Loop) -> None:
    hands = started(loop, Slow)
    before = loop.query.routed
    done = loop.command(lambda number: Scale(number, "op", 3))
    assert loop.wait_for(lambda q: bool(q.moves), SECONDS) is not None
    assert done.cancel()
    assert done.cancelled()
    with pytest.raises(CancelledError):
        done.result(SECONDS)
    assert loop.query.routed == before
    assert loop.query.moves == {}
    assert hands.stopped == []
    assert done.cancel(), "to cancel it once more is the same"


def test_what_is_done_cannot_be_cancelled(loop: Loop) -> None:
    started(loop)
    done = loop.command(lambda number: Scale(number, "op", 3))
    done.result(SECONDS)
    assert not done.cancel()
    assert not done.cancelled()
    assert loop.query.routed["op"].routing.instances == 3


def test_what_ends_with_the_query_was_cancelled_if_nobody_wanted_it(loop: Loop) -> None:
    done = loop.command(lambda number: Scale(number, "op", 3))  # nobody takes it
    cancelled: list[bool] = []
    thread = threading.Thread(target=lambda: cancelled.append(done.cancel()))
    thread.start()
    while not done.unwanted:
        time.sleep(0.001)
    loop.close()
    thread.join(SECONDS)
    assert cancelled == [True]


def test_a_mistake_of_the_protocols_ends_the_query(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands = started(loop)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(module, "step", fail)
    done = loop.command(TakeCheckpoint)
    with pytest.raises(QueryFailed, match="a mistake"):
        done.result(SECONDS)
    assert loop.wait_for(lambda q: True) is not None
    for thread in threading.enumerate():
        if thread.name == "anabranch-loop":
            thread.join(SECONDS)
    assert hands.stopped == [
        "its coordinator failed because of a bug: ZeroDivisionError: a mistake"
    ]
