"""Adaptation: m, k and stripes follow what was measured, and older parts keep what they promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.backup import Fragments
from anabranch.checkpointing.policy import Periodic
from anabranch.fragments import Adapt, Prefer
from anabranch.fragments.cost import Coded, Cost, Standing, Transferred
from anabranch.protocols import orders as o
from anabranch.protocols.adaptation import measurements
from anabranch.protocols.events import Cause
from anabranch.protocols.orders import SECOND
from protocols.played import Play

OFTEN = Periodic("1 hour", at_most=1)
"""With every second batch."""
STORAGE = Adapt(prefer=Prefer.STORAGE, reliability=0.99)
MB = 1_000_000


def cost(rate: float = 10 * MB, size: int = MB) -> Cost:
    """Of an order that sends a MB, over a link of this rate."""
    return Cost(Transferred(size, size / rate), encoded=(Coded(2, 2, size, size / 1e9),))


def adapting(adapt: Adapt = STORAGE, hosts: str = "abcdefgh", instances: int = 2) -> Play:
    backup = Fragments(2, 2, adapt=adapt)
    play = Play.started(hosts=hosts, instances=instances, backup=backup, checkpointing=OFTEN)
    play.cost, play.bytes = cost(), 100 * MB
    return play


def shape(play: Play) -> tuple[int, int]:
    backup = play.query.policies.backup
    assert isinstance(backup, Fragments)
    return backup.data, backup.parity


def rounds(play: Play, count: int, seconds: float = 5) -> None:
    """So many checkpoints, some seconds apart."""
    for _ in range(count):
        play.wait(seconds)
        play.batches(2)


def test_the_first_checkpoints_have_what_the_user_gave_and_later_ones_what_suits() -> None:
    play = adapting()
    rounds(play, 3)
    assert shape(play) == (2, 2)
    assert not play.told("fragments adapted")
    rounds(play, 1)
    (told,) = play.told("fragments adapted")
    assert told["before"] == [2, 2]
    assert (told["data"], told["parity"]) == shape(play) == (6, 1)
    assert "stores least within the limits" in told["reason"]
    rounds(play, 10)
    assert len(play.told("fragments adapted")) == 1


def test_all_parts_of_a_checkpoint_have_one_m_and_k() -> None:
    play = adapting(instances=4)
    rounds(play, 12)
    found: dict[int, set[tuple[int, int]]] = {}
    for order in play.given(o.Store):
        of = found.setdefault(order.captured.version, set())
        of.add((order.shape.needed, order.shape.parity))
    assert all(len(shapes) == 1 for shapes in found.values())
    assert set.union(*found.values()) == {(2, 2), (6, 1)}


def test_another_attempt_of_a_batch_is_not_another_checkpoint() -> None:
    play = adapting()
    rounds(play, 2)
    play.batch()
    order = play.ask()
    for _ in range(5):
        assert order is not None
        assert order.captures
        play.break_off(order, Cause.PROCESS_LOST)
        play.wait(5)
        order = next(each for each in reversed(play.sent) if isinstance(each, o.RunBatch))
    assert shape(play) == (2, 2)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.9, 1.1), min_size=20, max_size=20), st.sampled_from(Prefer))
def test_noise_does_not_make_it_go_to_and_fro(noise: list[float], prefer: Prefer) -> None:
    play = adapting(Adapt(prefer=prefer, reliability=0.9))
    for each in noise:
        play.cost = cost(10 * MB * each)
        rounds(play, 1)
    assert len(play.told("fragments adapted")) <= 1


def test_what_needs_more_nodes_than_there_are_is_left_at_once() -> None:
    play = adapting()
    rounds(play, 6)
    assert shape(play) == (6, 1)
    free = [host for host in "abcdefgh" if not play.at(host)]
    for host in free[:2]:
        play.lose(host)
    rounds(play, 1)
    assert shape(play) == (4, 1)


def test_what_is_not_reliable_enough_is_left_at_once() -> None:
    play = adapting(replace(STORAGE, reliability=1 - 1e-9))
    rounds(play, 3, seconds=3600)
    assert shape(play)[1] > 2, "three nodes may be lost in an hour, if rarely"


def test_after_more_parity_is_promised_all_rows_are_captured() -> None:
    play = adapting(replace(STORAGE, reliability=1 - 1e-9))
    before = shape(play)
    while shape(play) == before:
        rounds(play, 1, seconds=3600)
    last = max(order.captured.version for order in play.given(o.Store))
    bases = {order.captured.base for order in play.given(o.Store) if order.captured.version == last}
    assert bases == {None}
    rounds(play, 1)
    assert play.last(o.Store).captured.base is not None


def test_older_parts_are_kept_at_what_they_promised() -> None:
    play = adapting(hosts="abcdefghij")
    rounds(play, 3)
    old = next(part for part in play.query.inventory["op"].parts if part.base is None)
    assert (old.needed, old.parity, len(old.holders)) == (2, 2, 4)
    rounds(play, 2)
    assert shape(play)[1] == 1
    free = [host for host in old.holders if not play.at(host)]
    play.lose(free[0])
    play.wait(1)
    found = next(part for part in play.query.inventory["op"].parts if part.name == old.name)
    alive = play.query.nodes.keys()
    assert sum(host in alive for host in found.holders) == 4
    assert found.parity == 2


def test_lost_nodes_count_as_failures_and_repair_takes_time() -> None:
    play = adapting(hosts="abcdefghij")
    rounds(play, 2)
    calm = measurements(play.query, STORAGE)
    assert calm.failures == 0.5 / (50 + 10 * 10 / 3600)
    play.hold(o.Mend)
    holder = play.query.inventory["op"].parts[0].holders[0]
    play.lose(holder)
    play.wait(7)
    play.let_go(o.Mend)
    found = measurements(play.query, STORAGE)
    assert 2.9 < found.failures / calm.failures < 3.1
    assert found.repair == 7.0
    assert found.exposure == found.interval + found.detection + 7.0


def test_what_a_node_sends_at_once_shares_its_link() -> None:
    play = adapting(instances=2, hosts="abc")
    rounds(play, 1)
    assert measurements(play.query, STORAGE).up == 10 * MB
    one_node = adapting(instances=2, hosts="a")
    rounds(one_node, 1)
    assert measurements(one_node.query, STORAGE).up == 20 * MB


def test_small_transfers_do_not_count_beside_large_ones() -> None:
    play = adapting(instances=1)
    rounds(play, 1)
    play.cost = cost(rate=1000, size=100)
    rounds(play, 5)
    assert measurements(play.query, STORAGE).up == 10 * MB


def test_intervals_are_those_of_checkpoints() -> None:
    play = adapting()
    for _ in range(6):
        play.wait(12)
        play.batches(2)
    assert measurements(play.query, STORAGE).interval == 12.0
    assert play.query.observed is not None
    assert play.query.observed.rounds[-1] == 72 * SECOND


def test_it_is_told_once_that_files_are_better() -> None:
    play = adapting(replace(STORAGE, store=100 * MB))
    rounds(play, 8)
    assert len(play.told("files are better")) == 1
    assert "Files is better" in play.told("files are better")[0]["reason"]
    slow = adapting(replace(STORAGE, store=MB))
    rounds(slow, 8)
    assert not slow.told("files are better")


def test_without_adapt_nothing_is_chosen() -> None:
    play = Play.started(hosts="abcdefgh", instances=2, backup=Fragments(2, 2), checkpointing=OFTEN)
    play.cost = cost()
    rounds(play, 8)
    assert shape(play) == (2, 2)
    assert play.query.observed is None


def test_two_nodes_are_too_few_to_choose() -> None:
    play = adapting(hosts="ab")
    rounds(play, 8)
    assert shape(play) == (2, 2)
    assert len(play.published) > 0


def at_ring(nodes: int, *, near: int = 0, data: int = 2, parity: int = 2, rate: float = 10) -> Cost:
    """Of a save that found so many standing nodes, and coded the state for them."""
    found = Standing(nodes, near or nodes, data, parity, repair=60.0)
    return replace(cost(rate * MB), standing=found)


def adapting_at_ring(adapt: Adapt | None = STORAGE, nodes: int = 8, **given: int) -> Play:
    """A query on one node, whose fragments are at standing nodes."""
    backup = Fragments(2, 2, adapt=adapt, ring="ring.json")
    play = Play.started(hosts="a", instances=2, backup=backup, checkpointing=OFTEN)
    play.cost, play.bytes = at_ring(nodes, **given), 100 * MB
    return play


def test_fragments_at_standing_nodes_adapt_to_these_and_not_to_the_nodes_of_the_query() -> None:
    play = adapting_at_ring()
    rounds(play, 3)
    assert shape(play) == (2, 2)
    assert measurements(play.query, STORAGE).repair == 60.0
    rounds(play, 1)
    assert shape(play) == (7, 1)
    (told,) = play.told("fragments adapted")
    assert "stores least within the limits" in told["reason"]
    rounds(play, 1)
    last = play.last(o.Store)
    assert (last.holders, last.shape.needed, last.shape.parity) == ((), 7, 1)
    assert last.shape.row == told["stripe"] // 7
    play.cost = at_ring(5, data=4, parity=1)
    rounds(play, 2)
    assert shape(play) == (4, 1), "at once, as there are too few nodes"


def test_standing_nodes_that_are_gone_count_as_failures_and_nodes_of_the_query_do_not() -> None:
    play = adapting_at_ring(Adapt(prefer=Prefer.STORAGE, reliability=0.9), nodes=20)
    rounds(play, 2)
    calm = measurements(play.query, STORAGE).failures
    play.come("b")
    play.lose("b")
    rounds(play, 1)
    assert measurements(play.query, STORAGE).failures <= calm
    play.cost = at_ring(18)
    rounds(play, 1)
    assert measurements(play.query, STORAGE).failures == pytest.approx(5 * calm, rel=0.02)


def test_an_owner_that_is_a_standing_node_itself_has_one_less() -> None:
    play = adapting_at_ring(None)
    for nodes in (8, 7, 8):
        play.cost = at_ring(nodes, near=8)
        rounds(play, 1)
    assert measurements(play.query, STORAGE).nodes == 7


def test_it_is_told_once_that_a_ring_has_too_few_nodes_until_it_has_grown() -> None:
    play = adapting_at_ring(None, nodes=3, data=1, parity=2)
    rounds(play, 4)
    expected = {"wanted": [2, 2], "data": 1, "parity": 2, "nodes": 3}
    assert play.told("fragments lowered") == [expected]
    play.cost = at_ring(2, data=1, parity=1)
    rounds(play, 2)
    assert play.told("fragments lowered")[1:] == [{**expected, "parity": 1, "nodes": 2}]
    play.cost = at_ring(8)
    rounds(play, 2)
    play.cost = at_ring(3, data=1, parity=2)
    rounds(play, 2)
    assert play.told("fragments lowered")[2:] == [expected]
    whole = adapting_at_ring(None)
    rounds(whole, 3)
    assert not whole.told("fragments lowered")
