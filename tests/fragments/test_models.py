"""The models against trials, and against what the equations say."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import PlanError
from anabranch.fragments import models
from anabranch.fragments.models import Rates, Sample

TRIALS = 40_000
SHAPES = [(4, 4), (4, 1), (10, 5), (10, 10), (16, 8), (1, 3)]


@pytest.mark.parametrize("p", [0.01, 0.1, 0.3, 0.5])
@pytest.mark.parametrize(("data", "parity"), SHAPES)
def test_reliability_is_how_often_no_more_than_k_holders_are_lost(
    data: int, parity: int, p: float
) -> None:
    lost = np.random.default_rng(1).random((TRIALS, data + parity)) < p
    share = np.mean(lost.sum(axis=1) <= parity)
    expected = models.reliability(data, parity, p)
    assert share == pytest.approx(expected, abs=5 * math.sqrt(0.25 / TRIALS))
    assert models.unreliability(data, parity, p) == pytest.approx(1 - expected)


@given(st.integers(1, 8), st.integers(1, 8), st.floats(0, 1))
def test_reliability_is_the_sum_over_all_sets_of_lost_holders(
    data: int, parity: int, p: float
) -> None:
    n = data + parity
    total = math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(parity + 1))
    assert models.reliability(data, parity, p) == pytest.approx(total, abs=1e-12)
    assert models.tails(n, 0.0) == [0.0] * (n + 1)
    assert models.tails(n, 1.0) == [1.0] * n + [0.0]


def test_probabilities_far_below_the_precision_of_one_are_exact() -> None:
    assert models.unreliability(2, 2, 1e-6) == pytest.approx(4e-18, rel=1e-5)
    assert 0 < models.unreliability(100, 100, 1e-3) < 1e-200
    assert models.unreliability(128, 127, 0.5) == pytest.approx(0.5, abs=0.01)


def test_exposure_is_that_of_a_poisson_process() -> None:
    """Nodes that live for exponential times, and are looked at after the exposure."""
    per_hour, exposure = 0.7, 1200.0
    lives = np.random.default_rng(1).exponential(3600 / per_hour, TRIALS)
    share = np.mean(lives < exposure)
    assert models.failure(per_hour, exposure) == pytest.approx(share, abs=0.01)
    assert models.failure(1e-9, 1.0) == pytest.approx(1e-9 / 3600)
    assert models.failure(0, 100) == 0


@given(st.floats(1e6, 1e10), st.floats(1e6, 1e10), st.floats(1e6, 1e10), st.floats(1e6, 1e12))
def test_fragments_are_faster_than_a_store_below_the_limit(
    store: float, link: float, recompute: float, size: float
) -> None:
    ours = models.fragment_recovery(size, link, recompute)
    limit = models.fastest_store(link, recompute)
    if store != pytest.approx(limit):
        assert (ours < models.checkpoint_recovery(size, store)) == (store < limit)


def sent_in_turn(data: int, parity: int, stripes: int, lost: int) -> list[int]:
    """The rows that each holder but the lost one sends, if they are asked in turn."""
    alive = [index for index in range(data + parity) if index != lost]
    sent = dict.fromkeys(alive, 0)
    asked = itertools.cycle(alive)
    for _ in range(stripes * data):
        sent[next(asked)] += 1
    return list(sent.values())


@pytest.mark.parametrize(("data", "parity"), SHAPES)
def test_providers_upload_what_they_are_asked_for(data: int, parity: int) -> None:
    stripes = 500
    sent = sent_in_turn(data, parity, stripes, lost=1)
    row = 1000
    expected = models.uploaded(stripes * data * row, data, parity)
    assert [rows * row for rows in sent] == pytest.approx([expected] * len(sent), rel=0.03)


def test_retrieval_is_limited_by_the_slowest_link() -> None:
    size, link = 128e6, 12.5e6
    alone = models.retrieval(size, 10, 10, up=link, down=link)
    assert alone == size / link
    assert models.retrieval(size, 1, 1, up=link, down=link) == alone
    assert models.retrieval(size, 10, 10, up=link / 100, down=link) == size / 19 / (link / 100)
    assert models.retrieval(size, 10, 10, up=link, down=link, at_once=38) == 2 * alone
    assert models.saving(size, 10, 5, up=link) == 1.5 * alone
    assert models.overhead(10, 5) == 0.5


def test_lost_rows_are_those_of_parity_in_turn() -> None:
    data, parity = 10, 6
    n = data + parity
    parity_rows = [sum((start * data + at) % n >= data for at in range(data)) for start in range(n)]
    assert models.lost_rows(data, parity) == np.mean(parity_rows)


def test_rates_are_those_that_were_measured() -> None:
    samples = [Sample(4, 2, 3e9), Sample(4, 8, 2e9), Sample(16, 8, 2.5e9)]
    rates = Rates(tuple(samples))
    for sample in samples:
        assert rates.of(sample.data, sample.rows) == pytest.approx(sample.rate, rel=1e-3)
    assert rates.of(4, 5) == pytest.approx(2.5e9, rel=0.2)
    slow = Rates(tuple(Sample(one.data, one.rows, one.rate / 10) for one in samples))
    for data, rows in ((1, 1), (4, 5), (100, 50)):
        assert slow.of(data, rows) == pytest.approx(rates.of(data, rows) / 10, rel=1e-6)


def test_repeated_samples_are_averaged() -> None:
    assert Rates((Sample(4, 2, 1e9), Sample(4, 2, 4e9))).of(4, 2) == pytest.approx(2e9)


@given(st.integers(1, 100), st.integers(1, 100))
def test_without_samples_more_rows_take_longer(data: int, rows: int) -> None:
    assert Rates().of(data, rows) > Rates().of(data, rows + 1) > 0


@pytest.mark.parametrize("sample", [Sample(4, 2, 0.0), Sample(0, 2, 1e9), Sample(4, -1, 1e9)])
def test_samples_that_cannot_be_are_refused(sample: Sample) -> None:
    with pytest.raises(PlanError):
        Rates((sample,))
