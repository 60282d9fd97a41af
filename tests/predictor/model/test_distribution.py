"""Distinct rows and hits from bins, against exact sums and against drawn ids."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.errors import InputError
from predictor.model.distribution import (
    Distribution,
    Empirical,
    EmpiricalByRange,
    ReuseHistogram,
    Uniform,
    Zipf,
)

distributions = st.one_of(
    st.just(Uniform()),
    st.builds(Zipf, st.floats(0, 3), st.floats(0, 50)),
    st.builds(
        ReuseHistogram,
        st.floats(1, 1e7),
        st.lists(st.floats(0.01, 1), min_size=1, max_size=17).map(tuple),
    ),
    st.builds(
        lambda pairs: Empirical(tuple(c for c, _ in pairs), tuple(w for _, w in pairs)),
        st.lists(st.tuples(st.floats(1, 1e5), st.floats(0.01, 10)), min_size=1, max_size=9),
    ),
)
rows = st.integers(1, 10**9)


def zipf_probs(alpha: float, q: float, n: int) -> np.ndarray:
    weights = (np.arange(1, n + 1) + float(q)) ** -alpha
    return weights / weights.sum()


@given(distributions, rows)
@settings(max_examples=100, deadline=None)
def test_probabilities_sum_to_one_hottest_first(distribution: Distribution, n: int) -> None:
    bins = distribution.bins(n)
    assert bins.mass == pytest.approx(1, rel=1e-9)
    assert bins.rows <= n * (1 + 1e-9)
    assert (bins.counts > 0).all()
    assert (bins.probs >= 0).all()
    assert (np.diff(bins.probs) <= 1e-12).all()


@given(distributions, rows, st.lists(st.floats(0, 1), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_slices_and_random_parts_conserve_mass_rows_and_distinct(
    distribution: Distribution, n: int, cuts: list[float]
) -> None:
    bins = distribution.bins(n)
    edges = [0.0, *sorted(round(c * n) for c in cuts), float(n)]
    pieces = [bins.slice(a, b) for a, b in pairwise(edges)]
    shares = np.diff(edges) / n
    for parts in (pieces, [bins.scaled(s) for s in shares]):
        assert sum(p.mass for p in parts) == pytest.approx(1, rel=1e-9)
        assert sum(p.rows for p in parts) == pytest.approx(bins.rows, rel=1e-9)
        assert sum(p.unique(1000) for p in parts) == pytest.approx(bins.unique(1000), rel=1e-9)
    assert bins.slice(0, n / 2).mass >= 0.5 - 1e-6


@pytest.mark.parametrize(("alpha", "q"), [(0, 0), (0.5, 0), (1, 0), (1.05, 2.7), (2, 10)])
@pytest.mark.parametrize("n", [1, 7, 256, 257, 20_000])
def test_zipf_bins_follow_the_exact_law(alpha: float, q: float, n: int) -> None:
    bins, probs = Zipf(alpha, q).bins(n), zipf_probs(alpha, q, n)
    for draws in (1, 30, 5000):
        exact = float((1 - (1 - probs) ** draws).sum())
        assert bins.unique(draws) == pytest.approx(exact, rel=2e-3)
    head = min(n, 256)
    assert bins.probs[:head] == pytest.approx(probs[:head], rel=1e-4)


def test_lru_hit_rate_agrees_with_a_simulated_cache() -> None:
    generator = np.random.default_rng(1)
    ids = generator.choice(2000, 60_000, p=zipf_probs(0.9, 0, 2000))
    cache: dict[int, None] = {}
    hits = 0
    for position, row in enumerate(ids.tolist()):
        hit = row in cache
        hits += hit and position >= 10_000
        cache.pop(row, None)
        cache[row] = None
        if len(cache) > 200:
            del cache[next(iter(cache))]
    assert Zipf(0.9).bins(2000).hit_rate(200) == pytest.approx(hits / 50_000, abs=0.01)


@given(distributions, st.integers(2, 10**8), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_hit_rate_rises_with_the_cache(
    distribution: Distribution, n: int, one: float, other: float
) -> None:
    bins, (small, large) = distribution.bins(n), sorted((one, other))
    assert 0 <= bins.hit_rate(small * n) <= bins.hit_rate(large * n) + 1e-9 <= 1 + 2e-9
    assert bins.hit_rate(0) == 0
    assert bins.hit_rate(n) == pytest.approx(1)
    assert 0 <= bins.batch_hits(5000, small * n) <= 5000 - bins.unique(5000) + 1e-6


def test_misses_from_an_empty_cache_agree_with_a_simulated_one() -> None:
    rng = np.random.default_rng(1)
    n, cache, draws = 5000, 200, 3000
    bins = Zipf(1.0).bins(n)
    misses = []
    for _ in range(20):
        rows_in_cache: dict[int, None] = {}
        missed = 0
        for row in rng.choice(n, draws, p=zipf_probs(1.0, 0.0, n)).tolist():
            missed += row not in rows_in_cache
            rows_in_cache.pop(row, None)
            rows_in_cache[row] = None
            if len(rows_in_cache) > cache:
                rows_in_cache.pop(next(iter(rows_in_cache)))
        misses.append(missed)
    assert bins.batch_misses(draws, cache) == pytest.approx(np.mean(misses), rel=0.03)


@given(distributions, rows, st.floats(1, 1e6), st.floats(1, 1e6), st.floats(1, 10))
@settings(max_examples=150, deadline=None)
def test_misses_from_an_empty_cache_rise_with_draws_and_fall_with_room(
    distribution: Distribution, n: int, draws: float, room: float, factor: float
) -> None:
    bins = distribution.bins(n)
    misses = bins.batch_misses(draws, room)
    slack = 1e-6 * (1 + misses)
    assert bins.unique(draws) - slack <= misses <= draws + slack
    assert bins.batch_misses(draws * factor, room) >= misses - slack
    assert bins.batch_misses(draws, room * factor) <= misses + slack
    most = max(float(n), bins.rows)
    assert bins.batch_misses(draws, most) == pytest.approx(bins.unique(draws), rel=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Zipf(-1),
        lambda: Zipf(float("nan")),
        lambda: Zipf(1, -1),
        lambda: Empirical((1.0,), ()),
        lambda: Empirical((0.0,), (1.0,)),
        lambda: Empirical((1.0,), (0.0,)),
    ],
)
def test_what_is_no_distribution_is_refused(make: object) -> None:
    with pytest.raises(InputError):
        make()  # type: ignore[operator]


@given(
    st.lists(st.lists(st.floats(0, 100), min_size=3, max_size=3), min_size=1, max_size=5),
    st.lists(st.integers(0, 290), max_size=4),
    st.integers(0, 500),
)
@settings(max_examples=80, deadline=None)
def test_id_ranges_share_rows_mass_and_distinct(
    shares: list[list[float]], cuts: list[int], more: int
) -> None:
    # ranges of 100, 100 and 90 rows
    rows = np.array(shares) + 1.0
    rows *= np.array([100.0, 100.0, 90.0]) / rows.sum(axis=0)
    all_rows = Empirical(tuple(rows.sum(axis=1)), tuple(range(len(rows), 0, -1)))
    law, table = EmpiricalByRange(all_rows, rows, 100, 290), 290 + more
    edges = [0, *sorted(cuts), table]
    parts = [law.between(a, b, table) for a, b in pairwise(edges)]
    bins = law.bins(table)
    for part, (a, b) in zip(parts, pairwise(edges), strict=True):
        assert part is not None
        assert part.rows == pytest.approx(b - a, abs=1e-6)
        assert (np.diff(part.probs) <= 0).all()
    assert sum(p.mass for p in parts if p) == pytest.approx(1)
    assert sum(p.unique(50) for p in parts if p) == pytest.approx(bins.unique(50))
    assert law.between(0, 10, 289) is None


@pytest.mark.parametrize(
    ("rows", "width", "table"),
    [([[50.0]], 0, 50), ([[50.0]], 100, 90), ([[25.0, 25.0]], 50, 50), ([[60.0, -10.0]], 25, 50)],
)
def test_id_ranges_that_do_not_fit_are_refused(
    rows: list[list[float]], width: int, table: int
) -> None:
    with pytest.raises(InputError, match="range"):
        EmpiricalByRange(Empirical((50.0,), (1.0,)), np.array(rows), width, table)


def test_empirical_bins_are_cut_or_filled_at_the_cold_end() -> None:
    measured = Empirical((10.0, 90.0), (1.0, 5.0))
    assert measured.bins(1000).rows == 1000
    assert measured.bins(90).probs == pytest.approx([1 / 90])
    assert measured.bins(100).slice(0, 90).mass == pytest.approx(450 / 460)


def test_a_reuse_histogram_gives_back_its_distinct_ids() -> None:
    """A sample of the histogram's own size has about as many distinct ids as it says."""
    fractions = (0.2, 0.3, 0.3, 0.2)
    repeats = np.array([1, 2**0.5, 2**1.5, 2**2.5])
    lookups = 1e5
    distinct = lookups / float(np.dot(fractions, repeats))
    bins = ReuseHistogram(lookups, fractions).bins(10**7)
    assert bins.rows == pytest.approx(10**7)
    assert bins.unique(lookups) == pytest.approx(distinct, rel=0.15)
