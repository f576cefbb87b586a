"""Placement: total, on live nodes only, balanced, sticky."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.placement import Even, NoNodes

hosts = st.sets(st.sampled_from([f"10.0.0.{n}" for n in range(1, 9)]), min_size=1)
counts = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(1, 12), min_size=1)


@given(alive=hosts, instances=counts, pool=st.integers(0, 3))
def test_fresh_placement(alive: set[str], instances: dict[str, int], pool: int) -> None:
    placed = Even(pool).place(instances, alive)
    assert {name: len(of) for name, of in placed.items()} == instances
    for of in placed.values():
        assert set(of) <= alive
        usable = max(1, len(alive) - pool)
        loads = sorted((of.count(host) for host in alive), reverse=True)[:usable]
        assert max(loads) - min(loads) <= 1
    assert len(Even(pool).idle(alive, placed)) >= min(pool, len(alive) - 1)


@given(before=hosts, alive=hosts, instances=counts)
def test_instances_stay_where_they_can(
    before: set[str], alive: set[str], instances: dict[str, int]
) -> None:
    first = Even().place(instances, before)
    second = Even().place(instances, alive, first)
    for name, of in first.items():
        for was, is_ in zip(of, second[name], strict=True):
            assert is_ == was if was in alive else is_ in alive


def test_nobody_is_left() -> None:
    with pytest.raises(NoNodes, match="no executor is left"):
        Even().place({"a": 1}, [])
