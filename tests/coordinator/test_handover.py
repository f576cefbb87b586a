"""Spark's thread is let go when the query ends or is taken back, at whatever moment."""

from typing import Any

import pytest

from anabranch.backup import Files
from anabranch.checkpointing import Periodic
from anabranch.coordinator.commits import NOTHING
from anabranch.coordinator.handover import HandOver, TakenBack
from anabranch.coordinator.loop import Loop
from anabranch.errors import QueryFailed
from anabranch.placement.even import Even
from anabranch.protocols.events import BatchCommitted, BatchFailed
from anabranch.protocols.model import OperatorPlan
from anabranch.protocols.orders import RunBatch
from anabranch.protocols.query import Policies, Query
from anabranch.units import Version


class Batches(HandOver):
    def attempt(
        self, frame: Any, order: RunBatch, began: float, attempts: int
    ) -> BatchCommitted | BatchFailed:
        return BatchCommitted(order.version, order.fence, {})

    def trim(self, operator: str, upto: Version) -> None:
        pass


@pytest.fixture
def batches() -> Batches:
    policies = Policies(Periodic(), Files("/nowhere"), Even())
    return Batches(Loop(Query({"op": OperatorPlan("op", 8)}, policies, 1)))


def test_a_query_that_is_taken_back_goes_on_when_it_is_resumed(batches: Batches) -> None:
    batches.end(TakenBack("to version 3"))
    with pytest.raises(TakenBack):
        batches.take(None, Version(0))
    batches.resume(NOTHING)
    assert not batches.taken_back
    batches.end(QueryFailed("it can be ended again"))
    with pytest.raises(QueryFailed, match="it can be ended again"):
        batches.take(None, Version(0))


@pytest.mark.parametrize("taken_back", [False, True])
def test_a_query_that_has_ended_does_not_go_on(batches: Batches, taken_back: bool) -> None:
    """It ends while the thread that resumes it has just found that it is ready."""
    if taken_back:
        batches.end(TakenBack("to version 3"))
    batches.end(QueryFailed("another driver has it"))
    if taken_back:
        batches.end(TakenBack("to version 2"))
    batches.resume(NOTHING)
    with pytest.raises(QueryFailed, match="another driver has it"):
        batches.take(None, Version(0))
