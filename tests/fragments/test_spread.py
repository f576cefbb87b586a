"""Which nodes hold fragments."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from anabranch.fragments import Holder, spread

holders = st.builds(
    Holder, st.sampled_from("abcdefghij"), st.sampled_from(["r1", "r2", "r3"]), st.integers(0, 5)
)
nodes = st.lists(holders, max_size=10, unique_by=lambda node: node.host)


@given(nodes, st.integers(0, 8), st.integers(1, 4), st.data())
def test_holders_are_distinct_hosts_and_as_many_as_there_can_be(
    near: list[Holder], fragments: int, parity: int, data: st.DataObject
) -> None:
    holding = data.draw(st.lists(st.sampled_from(near), unique=True)) if near else []
    chosen = spread(near, fragments, parity, holding)
    hosts = [node.host for node in chosen]
    assert len(set(hosts)) == len(hosts)
    assert set(chosen) <= set(near) - set(holding)
    assert len(chosen) == min(fragments, len(set(near) - set(holding)))


@given(nodes, st.integers(1, 8), st.integers(1, 4))
def test_at_most_k_are_in_a_rack_where_racks_allow(
    near: list[Holder], fragments: int, parity: int
) -> None:
    sizes = Counter(node.rack for node in near)
    chosen = Counter(node.rack for node in spread(near, fragments, parity))
    room = sum(min(size, parity) for size in sizes.values())
    if room >= fragments:
        assert max(chosen.values(), default=0) <= parity
    else:
        # As few in the fullest rack as any choice of so many nodes has.
        others = combinations(near, min(fragments, len(near)))
        best = min(max(Counter(n.rack for n in each).values(), default=0) for each in others)
        assert max(chosen.values(), default=0) <= max(best, parity)


@given(nodes, st.integers(1, 8))
def test_the_least_full_are_chosen_if_racks_do_not_matter(
    near: list[Holder], fragments: int
) -> None:
    chosen = spread(near, fragments, parity=len(near) + 1)
    assert chosen == sorted(near, key=lambda node: node.load)[:fragments]


@given(nodes, st.integers(1, 8), st.integers(1, 4))
def test_no_node_could_be_exchanged_for_one_that_is_less_full(
    near: list[Holder], fragments: int, parity: int
) -> None:
    chosen = spread(near, fragments, parity)
    racks = Counter(node.rack for node in chosen)
    if max(racks.values(), default=0) > parity:
        return
    for node in chosen:
        for other in set(near) - set(chosen):
            is_allowed = other.rack == node.rack or racks[other.rack] < parity
            assert not (is_allowed and other.load < node.load)


def test_a_host_with_several_nodes_is_one() -> None:
    near = [Holder("a", "r1", 1), Holder("a", "r1", 0), Holder("b", "r1", 9)]
    assert [(node.host, node.load) for node in spread(near, 3, 2)] == [("a", 0), ("b", 9)]


def test_a_new_holder_is_in_another_rack_than_too_many_of_the_others() -> None:
    holding = [Holder("a", "r1"), Holder("b", "r1")]
    near = [*holding, Holder("c", "r1", 0), Holder("d", "r2", 5)]
    assert [node.host for node in spread(near, 1, 2, holding)] == ["d"]
    assert [node.host for node in spread(near, 1, 3, holding)] == ["c"]
    assert [node.host for node in spread(near, 2, 2, holding)] == ["d", "c"]
