"""Ids, leaf sets and routing tables against brute force."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import PlanError
from anabranch.ring import NodeId, Settings, closest, distance, label
from anabranch.ring.converged import leaf_set, routing_tables
from anabranch.ring.ids import BITS, CIRCLE, COLUMNS, DIGITS, clockwise, digit, shared_digits
from anabranch.ring.leafset import LeafSet
from anabranch.ring.routing import next_hop
from anabranch.ring.table import RoutingTable
from ring.rings import neighbours

# Near each other, near the ends of the circle, and anywhere.
places = st.one_of(
    st.integers(0, 40),
    st.integers(CIRCLE - 40, CIRCLE - 1),
    st.integers(0, 15).map(lambda high: high << (BITS - 4)),
    st.integers(0, CIRCLE - 1),
).map(NodeId)
rings = st.sets(places, min_size=1, max_size=60)
sizes = st.sampled_from([2, 4, 8, 16])


@given(places)
def test_an_id_prints_and_parses(id: NodeId) -> None:
    assert NodeId.parse(str(id)) == id
    assert id.label == id >> 112
    assert [digit(id, row) for row in range(DIGITS)] == [int(d, 16) for d in f"{int(id):032x}"]


@given(places, places)
def test_digits_in_common_are_counted(a: NodeId, b: NodeId) -> None:
    one, other = f"{int(a):032x}", f"{int(b):032x}"
    count = next((i for i in range(DIGITS) if one[i] != other[i]), DIGITS)
    assert shared_digits(a, b) == count


@given(places, places)
def test_the_distance_is_the_shorter_way(a: NodeId, b: NodeId) -> None:
    assert distance(a, b) == distance(b, a) == min(abs(a - b), CIRCLE - abs(a - b))
    assert clockwise(a, b) + clockwise(b, a) in (0, CIRCLE)


def test_a_host_has_its_place_again_and_a_rack_is_together() -> None:
    ids = {host: NodeId.of(host, "z", f"r{i % 7}") for i, host in enumerate(map(str, range(500)))}
    assert len(set(ids.values())) == 500
    assert all(id == NodeId.of(host, "z", f"r{int(host) % 7}") for host, id in ids.items())
    assert {id.label for id in ids.values()} == {label("z", f"r{rack}") for rack in range(7)}
    assert len({id.label >> 12 for id in ids.values()}) == 1
    assert label("z", "r1") != label("y", "r1")
    assert label("ab", "c") & 0xFFF != label("a", "bc") & 0xFFF


@given(rings, sizes, st.data())
def test_leaf_sets_are_those_of_brute_force(
    ids: set[NodeId], size: int, data: st.DataObject
) -> None:
    me = data.draw(st.sampled_from(sorted(ids)))
    leaves = LeafSet(me, size)
    added: set[NodeId] = set()
    for id in data.draw(st.permutations(sorted(ids))):
        before = set(leaves)
        wanted = leaves.wants(id)
        out = leaves.add(id)
        added.add(id)
        assert set(leaves) == neighbours(me, added, size)
        assert wanted == (id in leaves and id not in before)
        assert before - set(leaves) == ({out} if out is not None else set())
    gone = data.draw(st.sets(st.sampled_from(sorted(ids))))
    here = set(leaves)
    for id in gone:
        assert leaves.remove(id) == (id in here)
        assert id not in leaves
    assert set(leaves) == here - gone
    assert len(leaves) == len(set(leaves))


@given(rings, sizes, st.data())
def test_the_sides_are_half_each_and_nearest_first(
    ids: set[NodeId], size: int, data: st.DataObject
) -> None:
    me = data.draw(st.sampled_from(sorted(ids)))
    leaves = LeafSet(me, size, ids)
    others = ids - {me}
    assert leaves.clockwise == sorted(others, key=lambda id: clockwise(me, id))[: size // 2]
    assert leaves.counter_clockwise == sorted(others, key=lambda id: clockwise(id, me))[: size // 2]
    assert set(leaves) == set(leaf_set(me, sorted(ids), size))


@given(rings, rings, sizes, st.data())
def test_the_best_of_many_are_those_that_would_stay(
    ids: set[NodeId], more: set[NodeId], size: int, data: st.DataObject
) -> None:
    me = data.draw(st.sampled_from(sorted(ids)))
    leaves = LeafSet(me, size, ids)
    assert leaves.best(more) == neighbours(me, set(leaves) | more, size) - set(leaves)


@given(rings, sizes, places, st.data())
def test_a_covered_key_is_closest_to_a_leaf_or_the_center(
    ids: set[NodeId], size: int, key: NodeId, data: st.DataObject
) -> None:
    me = data.draw(st.sampled_from(sorted(ids)))
    leaves = LeafSet(me, size, ids)
    if leaves.covers(key):
        assert leaves.closest(key) == closest(key, ids)
    assert all(leaves.covers(id) for id in (me, *leaves))
    avoid = data.draw(st.sets(st.sampled_from(sorted(ids))))
    assert leaves.closest(key, avoid) == closest(key, {me, *leaves} - (avoid - {me}))


@given(rings, st.data())
def test_routing_tables_are_those_of_brute_force(ids: set[NodeId], data: st.DataObject) -> None:
    me = data.draw(st.sampled_from(sorted(ids)))
    others = sorted(ids - {me})
    table = RoutingTable(me, others)
    model: dict[tuple[int, int], NodeId] = {}
    for id in others:
        row = shared_digits(me, id)
        model.setdefault((row, digit(id, row)), id)
    assert table.places == set(model)
    assert set(table) == set(model.values())
    assert table.rows() == sorted({row for row, _ in model})
    for row in range(DIGITS):
        assert table.row(row) == [model[row, c] for c in range(COLUMNS) if (row, c) in model]
    for key in ids | data.draw(rings):
        place = shared_digits(me, key)
        wanted = None if key == me else model.get((place, digit(key, place)))
        assert table.toward(key) == wanted
        assert wanted is None or shared_digits(wanted, key) > place
    for id in data.draw(st.sets(st.sampled_from(sorted(ids)))):
        assert table.remove(id) == (id in set(model.values()))
        assert id not in table
        if id != me and id in model.values():
            assert table.wants(id)


@given(rings, st.integers(0, 2**32))
def test_tables_that_are_made_at_once_have_a_node_in_every_place(
    ids: set[NodeId], seed: int
) -> None:
    tables = routing_tables(sorted(ids), random.Random(seed))
    for me, found in tables.items():
        assert set(found) <= ids - {me}
        table = RoutingTable(me, found)
        assert set(table) == set(found)
        assert table.places == RoutingTable(me, ids - {me}).places


@given(rings, sizes, places, st.data())
def test_routes_end_at_the_closest_node_whatever_tables_lack(
    ids: set[NodeId], size: int, key: NodeId, data: st.DataObject
) -> None:
    """The leaf sets alone are enough. Without them even a full table is not."""
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    tables = routing_tables(sorted(ids), chance)
    share = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    at = data.draw(st.sampled_from(sorted(ids)))
    for _ in range(len(ids) + DIGITS):
        kept = [id for id in tables[at] if chance.random() < share]
        leaves = LeafSet(at, size, ids)
        hop = next_hop(key, leaves, RoutingTable(at, kept))
        if hop is None:
            break
        is_longer = shared_digits(hop, key) > shared_digits(at, key)
        is_closer = (distance(hop, key), hop) < (distance(at, key), at)
        assert is_longer or is_closer
        at = hop
    assert at == closest(key, ids)


def test_without_a_fitting_node_in_the_table_the_prefix_is_kept() -> None:
    """The rare case: of the closer nodes, one that has the digits in common that this one has."""
    me, key, kept, nearest, *near = (
        NodeId(digits << 112) for digits in (0x1000, 0x1F00, 0x1800, 0x2000, 0x0F00, 0x1100)
    )
    leaves, table = LeafSet(me, 2, near), RoutingTable(me, [kept, nearest])
    assert closest(key, [kept, nearest, *near]) == nearest
    assert next_hop(key, leaves, table) == kept
    assert next_hop(key, leaves, table, {kept}) == near[1]
    assert next_hop(key, leaves, table, {kept, near[1]}) == nearest


def test_beyond_a_leaf_to_avoid_there_may_be_a_closer_node() -> None:
    """The leaf set covers the key, but only because of the leaf that is avoided."""
    me, leaf, other, beyond = (NodeId(d << 112) for d in (0x1000, 0x0000, 0x2000, 0xFFFF))
    leaves, table = LeafSet(me, 2, [leaf, other]), RoutingTable(me, [leaf, other, beyond])
    assert next_hop(leaf, leaves, table) == leaf
    assert next_hop(leaf, leaves, table, {leaf}) == beyond


@given(rings, sizes, places, st.data())
def test_nodes_to_avoid_are_avoided(
    ids: set[NodeId], size: int, key: NodeId, data: st.DataObject
) -> None:
    me = data.draw(st.sampled_from(sorted(ids)))
    avoid = data.draw(st.sets(st.sampled_from(sorted(ids))))
    leaves, table = LeafSet(me, size, ids), RoutingTable(me, ids - {me})
    hop = next_hop(key, leaves, table, avoid)
    assert hop is None or (hop in ids - avoid and hop != me)
    if hop is None:
        assert closest(key, {me, *leaves, *table} - avoid | {me}) == me


def test_settings_are_checked() -> None:
    Settings().check(31)
    with pytest.raises(PlanError, match="32 fragments do not fit in a leaf set of 32"):
        Settings().check(32)
    for wrong in ({"leaves": 7}, {"leaves": 0}, {"period": 0}, {"missed": 0}, {"probes": 0}):
        with pytest.raises(PlanError):
            Settings(**wrong)  # type: ignore[arg-type]
