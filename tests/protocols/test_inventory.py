"""Which versions can be made of which parts, against a model that tries every chain."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.protocols.model import Inventory
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.units import Version

GROUPS = 4


@st.composite
def parts(draw: st.DrawFn) -> list[Part]:
    found = []
    for number in range(draw(st.integers(1, 7))):
        version = draw(st.integers(0, 9))
        base = draw(st.none() | st.integers(-1, version))  # at its own version: of no use
        groups = draw(st.sets(st.integers(0, GROUPS - 1), min_size=1))
        found.append(
            Part(
                f"p{number}",
                "op",
                Version(version),
                None if base is None else Version(base),
                KeyGroups.of(sorted(groups)),
            )
        )
    return found


def makeable(given: list[Part], group: int) -> set[int]:
    """The versions of a group that some chain of parts leads to."""
    mine = [part for part in given if group in part.groups]
    found = {part.version for part in mine if part.base is None}
    while True:
        more = {
            part.version
            for part, at in product(mine, found)
            if part.base is not None and part.base <= at < part.version
        }
        if more <= found:
            return {int(version) for version in found}
        found |= more


@given(parts())
def test_reach_is_what_some_chain_leads_to(given: list[Part]) -> None:
    names = frozenset(part.name for part in given)
    reach = Inventory(given).reach(names)
    for group in range(GROUPS):
        assert {v for v, groups in reach.items() if group in groups} == makeable(given, group)


@given(parts(), st.sets(st.integers(0, GROUPS - 1), min_size=1))
def test_a_recipe_brings_every_group_to_its_version(given: list[Part], chosen: set[int]) -> None:
    names, groups = frozenset(part.name for part in given), KeyGroups.of(sorted(chosen))
    inventory = Inventory(given)
    version = inventory.newest(groups, names)
    wanted = set.intersection(*(makeable(given, group) for group in chosen))
    assert version == max(wanted, default=None)
    if version is None:
        return
    recipe = inventory.recipe(groups, version, names)
    assert list(recipe) == sorted(recipe, key=lambda part: part.version)
    for group in chosen:
        at: int | None = None
        for part in recipe:
            if group not in part.groups:
                continue
            if part.base is None or (at is not None and part.base <= at < part.version):
                at = part.version
        assert at == version


@given(parts(), st.data())
def test_parts_that_cannot_be_had_are_not_used(given: list[Part], data: st.DataObject) -> None:
    left = data.draw(st.sets(st.sampled_from([part.name for part in given])))
    inventory, usable = Inventory(given), frozenset(left)
    everything = KeyGroups.all(GROUPS)
    version = inventory.newest(everything, usable)
    if version is not None:
        assert {part.name for part in inventory.recipe(everything, version, usable)} <= usable
    smaller = Inventory([part for part in given if part.name in left])
    assert version == smaller.newest(everything, usable)


@given(parts(), st.integers(-1, 9))
def test_what_follows_on_a_version_follows(given: list[Part], at: int) -> None:
    groups = KeyGroups.parse("0-1")
    for part in Inventory(given).after(groups, Version(at)):
        assert part.base is not None
        assert part.base <= at < part.version
        assert groups <= part.groups
        at = part.version


def test_a_version_that_cannot_be_made_is_refused() -> None:
    change = Part("c", "op", Version(3), Version(1), KeyGroups.all(GROUPS))
    with pytest.raises(LookupError, match="version 3"):
        Inventory([change]).recipe(KeyGroups.all(GROUPS), Version(3), frozenset("c"))
