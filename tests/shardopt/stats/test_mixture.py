"""Rows by probability: conservation, the curve, unseen rows, ranges, small samples."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.model.distribution import Zipf
from shardopt.stats.mixture import estimate
from shardopt.stats.spectrum import fit_zipf
from tests.quick import quick_first
from tests.shardopt.stats.id_distributions import (
    DISTRIBUTIONS,
    bins_of,
    counted,
    distinct,
    draw,
    measured,
)

ROWS = 100_000


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=300),
    st.integers(401, 10**6),
    st.integers(1, 500),
)
@settings(max_examples=60, deadline=None)
def test_rows_and_draws_add_up(ids: list[int], rows: int, limit: int) -> None:
    spectrum = counted(np.array(ids, dtype=np.int64), limit, chunks=3).spectrum(rows)
    mixture = estimate(spectrum, fit_zipf(spectrum))
    assert mixture.counts.sum() == pytest.approx(rows, rel=2e-2)
    assert mixture.counts @ mixture.probs == pytest.approx(1)
    assert mixture.range_rows.shape == (len(mixture.counts), len(spectrum.range_draws))
    assert mixture.range_rows.sum() == pytest.approx(rows, rel=2e-2)
    assert (mixture.range_rows >= 0).all()
    assert (np.diff(mixture.probs) <= 0).all()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=80))
@settings(max_examples=60, deadline=None)
def test_the_curve_ends_at_the_distinct_rows_and_never_passes_the_draws(ids: list[int]) -> None:
    draws, distinct = counted(np.array(ids)).spectrum(31).curve()
    assert draws[-1] == len(ids)
    assert distinct[-1] == pytest.approx(len(set(ids)))
    assert distinct[0] == pytest.approx(1)
    assert (np.diff(distinct) >= -1e-9).all()
    assert (distinct <= draws + 1e-9).all()


def test_the_curve_is_that_of_picking_from_the_sample() -> None:
    ids = draw(DISTRIBUTIONS["zipf 1.05"], ROWS, 20_000, 0, shuffled=True)
    draws, distinct = counted(ids).spectrum(ROWS).curve()
    rng = np.random.default_rng(0)
    for n, expected in zip(draws[6:-1:3], distinct[6:-1:3], strict=True):
        tried = [len(np.unique(rng.permutation(ids)[: int(n)])) for _ in range(30)]
        assert expected == pytest.approx(np.mean(tried), rel=0.01)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("limit", quick_first(1, [2**20, 2**13]))
def test_distinct_rows_follow_the_data_below_and_beyond_the_sample(
    distribution: str, limit: int
) -> None:
    ids = draw(DISTRIBUTIONS[distribution], ROWS, 400_000, 3, shuffled=True)
    sample = ids[::10]
    bins = bins_of(counted(sample, limit, chunks=4), ROWS)
    # a sample of 8192 rows knows their number to 1.3 %
    exact = limit == 2**20
    for draws in (512, 4096, 40_000):
        expected = distinct(ids, draws)
        assert bins.unique(draws) == pytest.approx(expected, rel=0.03 if exact else 0.05)
    assert bins.unique(80_000) == pytest.approx(distinct(ids, 80_000), rel=0.05)


@pytest.mark.parametrize(("alpha", "q"), [(0.0, 0.0), (0.8, 0.0), (1.05, 0.0), (1.2, 30.0)])
def test_the_zipf_law_is_found(alpha: float, q: float) -> None:
    ids = draw(((1.0, Zipf(alpha, q)),), ROWS, 200_000, 4, shuffled=True)
    fit = fit_zipf(counted(ids).spectrum(ROWS))
    assert fit is not None
    assert fit.alpha == pytest.approx(alpha, abs=0.05)
    assert fit.distinct_error < 0.02
    assert fit.distribution.bins(ROWS).unique(50_000) == pytest.approx(
        distinct(ids, 50_000), rel=0.03
    )


def test_a_law_that_is_none_is_told_by_its_error() -> None:
    ids = draw(DISTRIBUTIONS["mixture"], ROWS, 200_000, 5, shuffled=True)
    fit = fit_zipf(counted(ids).spectrum(ROWS))
    assert fit is not None
    assert fit.distinct_error > 0.1
    assert fit.ks > 0.1


@pytest.mark.parametrize("shuffled", [True, False])
def test_row_ranges_have_their_own_share(shuffled: bool) -> None:
    ids = draw(DISTRIBUTIONS["zipf 1.05"], ROWS, 1_000_000, 6, shuffled=shuffled)
    distribution = measured(counted(ids[::10]), ROWS)
    edges = [0, 12_500, 25_000, 61_234, ROWS]
    for first, last in pairwise(edges):
        part = distribution.between(first, last, ROWS)
        assert part is not None
        in_range = ids[(ids >= first) & (ids < last)]
        assert part.rows == pytest.approx(last - first, rel=0.02)
        # a hot row inside the range that the edge cuts counts for both sides
        assert part.mass == pytest.approx(len(in_range) / len(ids), rel=0.05, abs=0.002)
        drawn = np.random.default_rng(0).permutation(ids)[:50_000]
        distinct = len(np.unique(drawn[(drawn >= first) & (drawn < last)]))
        # of cold ranges a sample this small says how many ids they get, less how these repeat:
        # where ids lie in order of frequency a tenth too few distinct rows is what it comes to
        assert part.unique(50_000) == pytest.approx(distinct, rel=0.06 if shuffled else 0.1)


def test_rows_that_no_id_uses_stay_cold() -> None:
    ids = draw(DISTRIBUTIONS["zipf 0.8"], 1000, 50_000, 7, shuffled=True)
    distribution = measured(counted(ids), 1_000_000)
    used, unused = (
        distribution.between(0, 1024, 1_000_000),
        distribution.between(500_000, 1_000_000, 1_000_000),
    )
    assert used is not None
    assert unused is not None
    assert used.mass > 0.9
    assert unused.mass < 0.01
    assert distribution.bins(1_000_000).unique(50_000) == pytest.approx(
        len(np.unique(ids)), rel=0.02
    )


def test_one_id_says_next_to_nothing_and_breaks_nothing() -> None:
    spectrum = counted(np.array([5])).spectrum(100)
    assert fit_zipf(spectrum) is None
    mixture = estimate(spectrum, None)
    assert mixture.counts.sum() == pytest.approx(100)
    assert mixture.counts @ mixture.probs == pytest.approx(1)


@pytest.mark.parametrize("rows", [1, 2, 3, 1025, 10**9])
@pytest.mark.parametrize("ids", [[0] * 5000, [0, 0], [0] * 31 + [0] * 31])
def test_tables_of_any_size_and_rows_that_are_always_drawn(ids: list[int], rows: int) -> None:
    distribution = measured(counted(np.array(ids)), rows)
    bins = distribution.bins(rows)
    assert bins.mass == pytest.approx(1)
    # one row may be split over points of the grid
    assert 0.99 <= bins.unique(100) <= min(rows, 100) + 1e-6
    half = [distribution.between(0, rows // 2, rows), distribution.between(rows // 2, rows, rows)]
    assert sum(part.mass for part in half if part) == pytest.approx(1)
