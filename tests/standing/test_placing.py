"""Where fragments go, and what they are named: named properties of plain values."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import Deposed, DidNotHappen
from anabranch.nodes.standing.client import Neighbourhood
from anabranch.nodes.standing.names import (
    FragmentName,
    generation_of,
    owner_of,
    prefix_of,
    read_holder,
    under_owner,
    write_holder,
)
from anabranch.nodes.standing.repair import actor
from anabranch.nodes.standing.requests import Neighbour
from anabranch.nodes.standing.saving import Placing, Shape, candidates
from anabranch.nodes.standing.survey import Piece, Survey, new_generation
from anabranch.ring import Contact, NodeId, distance
from anabranch.stores.store import check_name

segments = st.from_regex(r"[A-Za-z0-9_%=+~-][A-Za-z0-9_%=+~.-]{0,8}", fullmatch=True)
names = st.lists(segments, min_size=1, max_size=3).map("/".join)
hosts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


def near(racks: list[str], loads: list[int], owner: str) -> Neighbourhood:
    """Nodes in racks, as the one next to the place of an owner sees them."""
    place = NodeId.of(owner)
    members = [
        Neighbour(Contact(NodeId.of(f"n{at}", rack=rack), f"n{at}", f"n{at}:1"), load)
        for at, (rack, load) in enumerate(zip(racks, loads, strict=False))
    ]
    members.sort(key=lambda each: distance(place, each.contact.id))
    return Neighbourhood(members[0].contact, tuple(members), 0)


@given(names, st.integers(0, (1 << 127) - 1), st.data())
def test_names_of_fragments(state: str, generation: int, chance: st.DataObject) -> None:
    total = chance.draw(st.integers(1, 255))
    index, data = chance.draw(st.integers(0, total - 1)), chance.draw(st.integers(1, total))
    name = FragmentName(state, generation, index, data, total)
    assert FragmentName.parse(str(name)) == name
    assert check_name(str(name)).startswith(prefix_of(state))


@given(names)
def test_other_names_are_no_fragments(name: str) -> None:
    found = FragmentName.parse(name)
    assert found is None or str(found) == name


@pytest.mark.parametrize("shape", ["0-0-4", "4-2-4", "0-5-4", "0-0-0", "0-2-256"])
def test_shapes_that_nothing_can_have_are_no_fragments(shape: str) -> None:
    """Each node looks at the names that a query gave, to make what is lost again."""
    assert FragmentName.parse(f"a~{7:032x}~0-2-4") is not None
    assert FragmentName.parse(f"a~{7:032x}~{shape}") is None


@given(hosts, st.text("abc", min_size=1, max_size=4))
def test_the_owner_is_in_the_name(host: str, query: str) -> None:
    name = check_name(f"{query}/{under_owner(host)}parts/1")
    assert owner_of(name, query) == host
    assert owner_of(f"{query}/parts/at=x", query) == query


@given(st.integers(0, (1 << 128) - 1).map(NodeId), hosts)
def test_holders_in_labels(id: NodeId, host: str) -> None:
    assert read_holder(write_holder(Contact(id, host, "a:1"))) == (id, host)
    assert read_holder(host) is None


@given(st.integers(1, 30), st.integers(1, 30), st.integers(2, 70))
def test_with_fewer_nodes_parity_is_kept(data: int, parity: int, nodes: int) -> None:
    shape = Shape(data, parity).within(nodes)
    assert shape.total == min(nodes, data + parity)
    assert shape.parity == min(parity, nodes - 1)
    assert shape.data >= 1


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1000)), min_size=3, max_size=20),
    st.integers(1, 4),
    st.integers(1, 3),
    st.data(),
)
def test_holders_are_distinct_and_never_the_owner(
    nodes: list[tuple[str, int]], data: int, parity: int, chance: st.DataObject
) -> None:
    racks, loads = [rack for rack, _ in nodes], [load for _, load in nodes]
    owner = chance.draw(st.sampled_from([f"n{at}" for at in range(len(nodes))]))
    found = candidates(near(racks, loads, owner), owner)
    assert owner not in found
    shape = Shape(data, parity).within(len(found))
    placing = Placing(found, shape)
    chosen = placing.first(shape.total)
    assert len({each.host for each in chosen}) == shape.total
    in_rack = Counter(each.id.label for each in chosen)
    room = Counter(contact.id.label for contact, _ in found.values())
    if sum(min(count, shape.parity) for count in room.values()) >= shape.total:
        assert max(in_rack.values()) <= shape.parity, "any rack can be lost"
    # Those that are left follow, one after the other, and none twice.
    others = []
    while (other := placing.another()) is not None:
        others.append(other.host)
    assert sorted([*others, *(each.host for each in chosen)]) == sorted(found)


def test_one_other_node_is_too_few() -> None:
    with pytest.raises(DidNotHappen, match="at least two"):
        candidates(near(["a", "b"], [0, 0], "n0"), "n0")


def test_a_generation_is_later_than_all_that_are_there() -> None:
    found = Survey("a", near(["a"], [0], "n0"))
    first = new_generation(found)
    assert new_generation(found) != first, "two that put at once differ"
    ahead = FragmentName("a", first << 1, 0, 1, 2)  # by a clock that is ahead
    found.pieces.append(Piece(found.near.root, ahead))
    assert new_generation(found) > ahead.generation


@given(st.integers(0, (1 << 62) - 1), st.integers(1, 1 << 40), st.integers(0, (1 << 64) - 1))
def test_what_a_deposed_driver_stores_is_not_the_newest(old: int, more: int, count: int) -> None:
    """Also if its clock is ahead, and it has not seen what the next one stores."""
    found = Survey("a", near(["a"], [0], "n0"), epoch=old + more)
    assert new_generation(found) > generation_of(old, count)
    late = Survey("a", found.near, epoch=old)
    late.pieces.append(Piece(found.near.root, FragmentName("a", new_generation(found), 0, 1, 2)))
    with pytest.raises(Deposed, match=f"driver {old + more} has taken the query over"):
        new_generation(late)


def test_one_holder_acts_also_if_two_have_the_same_fragment() -> None:
    a, b = (Contact(NodeId(n), f"n{n}", f"n{n}:1") for n in (1, 2))
    pieces = [Piece(node, FragmentName("a", 1, 0, 1, 3)) for node in (a, b)]
    assert actor(pieces) == actor(pieces[::-1]) == a.id
