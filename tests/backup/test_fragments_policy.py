"""The policy ``Fragments``: holders, shapes, what a part survives, and what is chosen for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.backup import Fragments
from anabranch.errors import PlanError
from anabranch.fragments import Adapt, Measured, Prefer
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part, Shape
from anabranch.units import Version

HOSTS = [f"10.0.0.{n}" for n in range(1, 13)]
MEASURED = Measured(size=10**8, nodes=9, up=1e8, down=1e8)


def stored(policy: Fragments, nodes: list[str]) -> Part:
    """A part of a slice on the first node."""
    holders = policy.holders(nodes[0], "op/1", nodes, ())
    shape = policy.shape(len(holders))
    return Part(
        "p", "op", Version(1), None, KeyGroups.all(8), holders, shape.needed, parity=shape.parity
    )


shapes = st.tuples(st.integers(1, 6), st.integers(1, 5))


@given(shapes, shapes, st.integers(2, 12))
def test_a_part_survives_what_was_promised_whatever_is_promised_now(
    then: tuple[int, int], now: tuple[int, int], count: int
) -> None:
    nodes = HOSTS[:count]
    part, policy = stored(Fragments(*then), nodes), Fragments(*now)
    assert policy.survives(part, nodes[0], nodes)
    lost = min(then[1], count - 2)
    for gone in combinations(nodes[1:], lost):
        assert part.available(set(nodes[1:]) - set(gone))


@given(shapes, shapes, st.data())
def test_as_many_fragments_are_made_again_as_the_part_had(
    then: tuple[int, int], now: tuple[int, int], data: st.DataObject
) -> None:
    nodes = HOSTS[: then[0] + then[1] + 1]
    part, policy = stored(Fragments(*then), nodes), Fragments(*now)
    lost = data.draw(st.sets(st.sampled_from(part.holders), max_size=then[1]))
    fresh = [f"10.0.1.{n}" for n in range(12)]
    alive = [*(set(nodes) - lost), *fresh]
    assert len(policy.substitutes(part, nodes[:1], alive)) == len(lost)


def test_what_is_chosen_is_a_policy_that_keeps_everything_else() -> None:
    policy = Fragments(2, 1, capacity="1 GiB", adapt=Adapt(prefer=Prefer.STORAGE))
    found = policy.adapted(MEASURED)
    assert found is not None
    best, choice = found
    assert (best.data, best.parity, best.stripe) == (choice.data, choice.parity, choice.stripe)
    assert replace(best, data=2, parity=1, stripe=None) == policy
    assert best.shape(best.data + best.parity).row == choice.row
    again = best.adapted(MEASURED)
    assert again is not None
    assert again[0] is best


def test_a_ring_is_told_how_to_code_each_part() -> None:
    policy = Fragments(2, 2, ring="ring.json", adapt=Adapt(prefer=Prefer.STORAGE))
    assert policy.shape(0) == Shape(2, 2)
    found = policy.adapted(MEASURED)
    assert found is not None
    best, choice = found
    assert best.shape(0) == Shape(choice.data, choice.parity, choice.row)
    assert best.ring == policy.ring


def test_it_chooses_no_more_fragments_than_a_leaf_set_has_room_for() -> None:
    policy = Fragments(adapt=Adapt(prefer=Prefer.RELIABILITY, overhead=30.0))
    found = policy.adapted(replace(MEASURED, nodes=500))
    assert found is not None
    assert found[0].data + found[0].parity == 31


def test_without_a_wish_or_nodes_nothing_is_chosen() -> None:
    assert Fragments().adapted(MEASURED) is None
    assert Fragments(adapt=Adapt()).adapted(replace(MEASURED, nodes=1)) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"adapt": "fast"}, "adapt='fast': give an Adapt"),
        ({"adapt": Prefer.STORAGE}, "give an Adapt"),
        ({"stripe": 0}, "stripe=0: give a size"),
        ({"stripe": "wide"}, "Fragments: stripe: cannot read 'wide'"),
        ({"parity": 0}, "both must be at least 1"),
        ({"data": 40}, "do not fit in a leaf set"),
    ],
)
def test_what_cannot_be_is_refused_at_once(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Fragments(**wrong)
