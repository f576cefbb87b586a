from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import PlanError
from anabranch.state.groups import KeyGroups, Routing, assign, group_of

SETS = st.frozensets(st.integers(0, 40))
COUNTS = st.integers(1, 200).flatmap(lambda g: st.tuples(st.just(g), st.integers(1, g)))


@given(SETS, SETS)
def test_key_groups_are_sets(a: frozenset[int], b: frozenset[int]) -> None:
    left, right = KeyGroups.of(a), KeyGroups.of(b)
    assert set(left | right) == a | b
    assert set(left & right) == a & b
    assert set(left - right) == a - b
    assert (left <= right) == (a <= b)
    assert (left == right) == (a == b)
    assert len(left) == len(a)
    assert bool(left) == bool(a)
    assert [g in left for g in range(42)] == [g in a for g in range(42)]
    assert left.mask(np.arange(42, dtype=np.uint16)).tolist() == [g in a for g in range(42)]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted)))
def test_ranges_have_one_form(given_ranges: list[list[int]]) -> None:
    groups = KeyGroups(tuple((a, b) for a, b in given_ranges))
    assert set(groups) == {g for a, b in given_ranges for g in range(a, b)}
    assert groups == KeyGroups.of(groups)
    flat = [edge for bounds in groups.ranges for edge in bounds]
    assert flat == sorted(set(flat))
    assert KeyGroups.parse(str(groups)) == groups
    assert list(groups) == sorted(groups)


def test_text() -> None:
    assert str(KeyGroups.of([0, 1, 2, 5, 7, 8])) == "0-2,5,7-8"
    assert KeyGroups.parse("") == KeyGroups()
    assert KeyGroups.parse("7,0-3,2-5") == KeyGroups(((0, 6), (7, 8)))


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1,,2", "1 - 2", "0-65536", ","])
def test_text_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="key groups"):
        KeyGroups.parse(text)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.integers(1, 1000))
def test_group_of_is_pmod(hashes: list[int], key_groups: int) -> None:
    unsigned = np.array(hashes, np.int64).view(np.uint64)
    for count in (key_groups, 1 << (key_groups % 17)):
        assert group_of(unsigned, count).tolist() == [h % count for h in hashes]


@given(COUNTS)
def test_assignment_is_total_disjoint_balanced(counts: tuple[int, int]) -> None:
    key_groups, instances = counts
    owners = assign(key_groups, instances)
    assert sorted(g for owned in owners for g in owned) == list(range(key_groups))
    assert max(map(len, owners)) - min(map(len, owners)) <= 1
    assert all(len(owned.ranges) == 1 for owned in owners)


@pytest.mark.parametrize("counts", [(0, 1), (-1, 1), (8, 0), (8, 9), (65537, 1), (8, -1)])
def test_assignment_refuses(counts: tuple[int, int]) -> None:
    with pytest.raises(PlanError):
        assign(*counts)
    with pytest.raises(PlanError):
        Routing.even(8, 2).scaled(9)


@given(COUNTS, st.lists(st.integers(1, 40), max_size=6))
def test_scaling_is_total_disjoint_balanced(counts: tuple[int, int], steps: list[int]) -> None:
    routing = Routing.even(*counts)
    for step in steps:
        instances = min(step, routing.key_groups)
        after = routing.scaled(instances)
        assert after.instances == instances
        assert after.key_groups == counts[0]  # Routing itself refuses gaps and overlaps
        sizes = [len(owned) for owned in after.owners]
        assert max(sizes) - min(sizes) <= 1
        assert after.epoch == routing.epoch + (after.owners != routing.owners)
        assert after.scaled(instances) is after
        routing = after


def _balanced(key_groups: int, instances: int) -> list[tuple[int, ...]]:
    tables = product(range(instances), repeat=key_groups)
    sizes = {key_groups // instances, -(-key_groups // instances)}
    return [t for t in tables if {t.count(i) for i in range(instances)} <= sizes]


@given(st.lists(st.integers(0, 3), min_size=4, max_size=7), st.integers(1, 4))
def test_scaling_is_sticky(table: list[int], instances: int) -> None:
    """No balanced routing moves fewer groups; every one of them is tried."""
    used = sorted(set(table))
    owners = [KeyGroups.of([g for g, i in enumerate(table) if i == u]) for u in used]
    before = Routing(tuple(owners))
    after = before.scaled(instances).table()
    moves = [
        int((np.array(other) != before.table()).sum()) for other in _balanced(len(table), instances)
    ]
    assert int((after != before.table()).sum()) == min(moves)


def test_routing_table_and_json() -> None:
    routing = Routing.even(10, 2).scaled(3)
    assert Routing.from_json(routing.to_json()) == routing
    for instance, owned in enumerate(routing.owners):
        assert KeyGroups.of(np.flatnonzero(routing.table() == instance)) == owned


@pytest.mark.parametrize(
    "value",
    [{}, {"epoch": 0, "owners": ["0-3", "3-7"]}, {"epoch": 0, "owners": ["0-3", "5-7"]},
     {"epoch": 0, "owners": ["1-3"]}, {"epoch": 0, "owners": []}, {"epoch": 0, "owners": [4]}],
)  # fmt: skip
def test_routing_json_that_is_none(value: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Routing.from_json(value)


@given(
    groups=st.integers(1, 300), instances=st.integers(1, 8), parts=st.integers(1, 5), data=st.data()
)
def test_it_divides_some_instances_and_leaves_the_others(
    groups: int, instances: int, parts: int, data: st.DataObject
) -> None:
    before = Routing.even(groups, min(groups, instances))
    chosen = data.draw(st.sets(st.integers(0, before.instances - 1)))
    after = before.divided(chosen, parts)
    for instance in range(before.instances):
        if instance not in chosen:
            assert after.owners[instance] == before.owners[instance]
        else:
            assert after.owners[instance] <= before.owners[instance]
            assert len(after.owners[instance]) >= 1
    pieces = [len(owned) for owned in after.owners[before.instances :]]
    assert all(pieces)
    assert len(pieces) == sum(min(parts, len(before.owners[i])) - 1 for i in chosen)
