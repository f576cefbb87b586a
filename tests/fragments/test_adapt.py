"""m and k for what was measured, for each preference and limit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import PlanError
from anabranch.fragments import Adapt, Choice, Measured, Prefer, choose
from anabranch.fragments.adapt import Expected, expect
from anabranch.fragments.models import Rates, Sample

LINK = 12.5e6
MEASURED = Measured(size=128_000_000, nodes=24, up=LINK, down=LINK, failures=2.0, interval=30.0)


@st.composite
def measurements(draw: st.DrawFn) -> Measured:
    rate = st.floats(1e6, 1e10)
    samples = st.builds(Sample, st.integers(1, 20), st.floats(0, 20), rate)
    rates = st.builds(Rates, st.lists(samples, max_size=3).map(tuple))
    return Measured(
        size=draw(st.integers(0, 10**11)),
        nodes=draw(st.integers(2, 14)),
        up=draw(rate),
        down=draw(rate),
        encode=draw(rates),
        recompute=draw(rates),
        store=draw(st.none() | rate),
        failures=draw(st.floats(0, 10)),
        interval=draw(st.floats(0, 100)),
        at_once=draw(st.integers(1, 40)),
    )


@st.composite
def wishes(draw: st.DrawFn) -> Adapt:
    return Adapt(
        prefer=draw(st.sampled_from(Prefer)),
        reliability=draw(st.sampled_from([0.0, 0.9, 0.999, 0.999999, 1 - 1e-12])),
        overhead=draw(st.sampled_from([0.05, 0.3, 1.0, 3.0, math.inf])),
        seconds=draw(st.none() | st.floats(0.001, 1000)),
    )


def keeps(one: Expected, adapt: Adapt) -> bool:
    return (
        one.unreliability <= 1 - adapt.reliability
        and one.overhead <= adapt.overhead
        and one.recovery <= adapt.limit
    )


def goal(one: Expected, prefer: Prefer) -> float:
    if prefer is Prefer.RECOVERY:
        return one.recovery
    if prefer is Prefer.STORAGE:
        return one.overhead
    return math.log10(max(one.unreliability, 1e-300))


@given(measurements(), wishes())
@settings(max_examples=150)
def test_no_other_m_and_k_within_the_limits_is_better(measured: Measured, adapt: Adapt) -> None:
    choice = choose(measured, adapt)
    every = [expect(measured, n - k, k) for n in range(2, measured.nodes + 1) for k in range(1, n)]
    assert choice.expected in every
    good = [one for one in every if keeps(one, adapt)]
    if good:
        assert keeps(choice.expected, adapt)
        best = min(goal(one, adapt.prefer) for one in good)
        assert goal(choice.expected, adapt.prefer) <= best + 0.011 * abs(best) + 1e-12
        assert "within the limits: " in choice.reason
    else:
        assert "comes closest to the limits: " in choice.reason
        assert "No m and k on these nodes has a" in choice.reason
        safest = min(one.unreliability for one in every)
        if safest > 1 - adapt.reliability:
            assert choice.expected.unreliability == safest


@given(
    measurements(),
    st.sampled_from(Prefer),
    st.sampled_from([0.05, 0.3, math.inf]),
    st.floats(0.97, 1.03),
    st.floats(0.97, 1.03),
)
@settings(max_examples=100)
def test_noise_changes_nothing(
    measured: Measured, prefer: Prefer, overhead: float, up: float, down: float
) -> None:
    adapt = Adapt(prefer=prefer, reliability=0.0, overhead=overhead)
    first = choose(measured, adapt)
    noisy = replace(measured, up=measured.up * up, down=measured.down * down)
    again = choose(noisy, adapt, now=(first.data, first.parity))
    assert (again.data, again.parity) == (first.data, first.parity)


def test_a_choice_that_is_no_longer_good_is_left() -> None:
    adapt = Adapt(prefer=Prefer.STORAGE)
    best = choose(MEASURED, adapt)
    for now in ((1, 1), (10, 10), (23, 1), (50, 2), None):
        again = choose(MEASURED, adapt, now=now)
        assert (again.data, again.parity) == (best.data, best.parity)
    near = (best.data - 1, best.parity)
    again = choose(MEASURED, adapt, now=near)
    assert (again.data, again.parity) == near
    assert "used before" in again.reason


def test_one_that_is_as_fast_and_saves_slower_is_left() -> None:
    again = choose(MEASURED, Adapt(), now=(12, 12))
    assert again.expected.saving < 0.7 * expect(MEASURED, 12, 12).saving


def shape(choice: Choice) -> tuple[int, int]:
    return choice.data, choice.parity


def test_each_preference_gets_what_it_asks_for() -> None:
    fast, small, safe = (choose(MEASURED, Adapt(prefer=prefer)).expected for prefer in Prefer)
    assert small.overhead < safe.overhead
    assert safe.unreliability < small.unreliability / 1e6
    assert safe.overhead <= 2.0
    assert fast.recovery <= 1.01 * min(small.recovery, safe.recovery)
    assert max(fast.unreliability, small.unreliability) <= 1e-6


def test_more_failures_get_more_parity() -> None:
    adapt = Adapt(prefer=Prefer.STORAGE)
    parity = [
        choose(replace(MEASURED, failures=rate), adapt).parity for rate in (0.001, 0.1, 1.0, 10.0)
    ]
    assert parity == sorted(parity)
    assert parity[0] < parity[-1]
    exposed = replace(MEASURED, interval=600.0)
    assert choose(exposed, adapt).parity > choose(MEASURED, adapt).parity


def test_slow_providers_get_more_of_them() -> None:
    """5.4: each provider sends m B / (m + k - 1)."""
    slow = replace(MEASURED, up=LINK / 100)
    choice = choose(slow, Adapt(overhead=1.0))
    assert sum(shape(choice)) == MEASURED.nodes
    assert choice.expected.recovery == pytest.approx(128e6 / 23 / (LINK / 100), rel=0.02)


def test_a_slow_processor_gets_less_parity() -> None:
    slow = Rates((Sample(10, 5, 20e6),))
    many = replace(MEASURED, encode=slow, recompute=slow, failures=1e-6)
    assert choose(many, Adapt(reliability=0.9)).parity == 1


def test_stripes_use_all_holders_evenly_and_fit_into_the_cache() -> None:
    rows = [choose(replace(MEASURED, size=size), Adapt()).row for size in (0, 10**6, 10**10)]
    assert rows == sorted(rows)
    assert rows[0] == 4096
    assert rows[-1] == 128 << 10
    assert all(row % 64 == 0 for row in rows)
    choice = choose(MEASURED, Adapt())
    assert choice.stripe == choice.data * choice.row


def test_files_are_better_over_a_fast_store() -> None:
    slow = choose(replace(MEASURED, store=LINK / 2), Adapt())
    fast = choose(replace(MEASURED, store=LINK * 2), Adapt())
    assert (slow.files, fast.files) == (False, True)
    assert "Files is not better: it recovers in 20.5 s instead of 10.3 s." in slow.reason
    assert "Files is better: it recovers in 5.12 s instead of 10.3 s." in fast.reason
    assert not choose(MEASURED, Adapt()).files
    assert "Files" not in choose(MEASURED, Adapt()).reason


def test_a_store_has_one_link_and_nodes_have_many() -> None:
    adapt = Adapt(prefer=Prefer.STORAGE)
    alone = choose(replace(MEASURED, store=LINK), adapt)
    together = choose(replace(MEASURED, store=LINK, at_once=8), adapt)
    assert (alone.files, together.files) == (True, False)


@pytest.mark.parametrize("nodes", [0, 1])
def test_two_nodes_are_needed(nodes: int) -> None:
    with pytest.raises(PlanError, match=f"{nodes} nodes can hold fragments, and two are needed"):
        choose(replace(MEASURED, nodes=nodes), Adapt())
    assert shape(choose(replace(MEASURED, nodes=2), Adapt())) == (1, 1)


def test_many_nodes_are_used_up_to_the_limit_of_the_code() -> None:
    choice = choose(replace(MEASURED, nodes=300), Adapt(prefer=Prefer.RELIABILITY))
    assert sum(shape(choice)) == 255


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefer": "recovery"},
        {"reliability": 1.0},
        {"reliability": -0.1},
        {"reliability": math.nan},
        {"overhead": 0.0},
        {"overhead": math.nan},
        {"seconds": 0},
        {"seconds": "soon"},
        {"seconds": True},
    ],
    ids=str,
)
def test_wrong_limits_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"Adapt\("):
        Adapt(**wrong)
    assert Adapt(seconds="2 minutes").limit == 120


@pytest.mark.parametrize(
    "wrong",
    [{"up": 0.0}, {"down": -1.0}, {"store": 0.0}, {"failures": -1.0}, {"at_once": 0}, {"size": -1}],
    ids=str,
)
def test_wrong_measurements_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="rates must be positive"):
        replace(MEASURED, **wrong)


def test_rows_are_of_a_power_of_two_and_stay_while_they_are_about_right() -> None:
    adapt = Adapt(prefer=Prefer.STORAGE)
    best = choose(MEASURED, adapt)
    m, now = best.data, (best.data, best.parity)
    fits = {2**power: replace(MEASURED, size=8 * m * 2**power) for power in range(12, 17)}
    for row, measured in fits.items():
        assert choose(measured, adapt).row == row
        for other, elsewhere in fits.items():
            kept = choose(elsewhere, adapt, now=now, row=row).row
            assert kept == (row if row // 2 <= other < 4 * row else other)


def test_rows_are_those_of_parts_that_are_coded_one_by_one() -> None:
    one = replace(MEASURED, size=8_000_000)
    assert choose(replace(one, size=64_000_000, pieces=8), Adapt()).row == choose(one, Adapt()).row


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"reliability": "high"}, "reliability='high'.*give a probability below 1"),
        ({"overhead": True}, "overhead=True.*give a positive share"),
        ({"overhead": math.nan}, "overhead=nan"),
        ({"store": 0}, "store=0.*give bytes per second"),
        ({"store": "fast"}, r"Adapt\(store\): cannot read 'fast'"),
    ],
)
def test_limits_that_are_none_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Adapt(**wrong)
