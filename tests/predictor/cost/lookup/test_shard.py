"""One LRU cache for the tables of a launch: against a simulated cache, and in what it must hold."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.cost.lookup.shard import (
    LookupShard,
    cache_rows,
    own_fetched_rows,
    shared_fetched_rows,
    table_of,
)
from predictor.model.distribution import Bins, Uniform, Zipf, mix_features
from predictor.model.plan import ComputeKernel


def shard(rows: int, draws: float, clf: float, alpha: float = 0.0, dim: int = 64) -> LookupShard:
    bins = (Zipf(alpha) if alpha else Uniform()).bins(rows)
    kernel = ComputeKernel.FUSED_UVM_CACHING
    return LookupShard(bins, draws, draws, rows, dim, kernel=kernel, cache_load_factor=clf)


shards = st.builds(
    shard,
    rows=st.sampled_from([100, 10_000, 1_000_000]),
    draws=st.floats(1, 1e6),
    clf=st.sampled_from([0.01, 0.1, 0.2, 0.5, 1.0]),
    alpha=st.sampled_from([0.0, 0.8, 1.2]),
)


def test_a_simulated_lru_of_two_tables_misses_as_often() -> None:
    """Ids of a hot and of a cold table, one after the other, through one list of rows."""
    tables = shard(2000, 300.0, 0.05, 1.1), shard(500, 100.0, 0.3)
    rng = np.random.default_rng(0)
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    room, steps, warm = round(sum(map(cache_rows, tables))), 400_000, 50_000
    second = rng.random(steps) < 0.25
    weights = np.repeat(tables[0].bins.probs, tables[0].bins.counts.astype(int))
    rows = np.where(second, rng.integers(500, size=steps), rng.choice(2000, steps, p=weights))
    missed = np.zeros(2)
    for step, key in enumerate(zip(second.tolist(), rows.tolist(), strict=True)):
        if key in cache:
            cache.move_to_end(key)
            continue
        missed[int(key[0])] += step >= warm
        cache[key] = None
        if len(cache) > room:
            cache.popitem(last=False)
    per_iteration = missed / (steps - warm) * 400.0
    assert shared_fetched_rows(tables) == pytest.approx(per_iteration, rel=0.03)
    alone = [own_fetched_rows(t) for t in tables]
    assert abs(alone[1] / per_iteration[1] - 1) > 0.1, "the split cache is a different one"


@given(shards)
@settings(max_examples=50, deadline=None)
def test_a_table_alone_has_the_hit_rate_of_its_own_cache(one: LookupShard) -> None:
    hits = one.bins.hit_rate(cache_rows(one))
    law = min(one.distinct_rows, one.ids * (1.0 - hits))
    assert shared_fetched_rows((one,)) == (law,)
    twins = shared_fetched_rows((one, replace(one)))
    assert twins == pytest.approx((law, law), rel=1e-6, abs=1e-9 * one.ids)


def test_features_of_a_table_look_up_the_same_rows() -> None:
    single = shard(100_000, 1e4, 0.1, 1.05)
    both = table_of([single, single])
    twice = replace(single, draws=2 * single.draws)
    assert both.ids == pytest.approx(twice.ids)
    assert own_fetched_rows(both) == pytest.approx(own_fetched_rows(twice))
    assert table_of([single]) is single
    unlike = table_of([single, replace(single, bins=Uniform().bins(100_000), draws=3e4)])
    assert unlike.bins.rows == pytest.approx(100_000)
    assert unlike.bins.mass == pytest.approx(1.0)
    assert own_fetched_rows(unlike) > own_fetched_rows(both)


def test_a_mixture_adds_up_row_by_row() -> None:
    first = Bins(np.array([1.0, 3.0]), np.array([0.4, 0.2]))
    second = Bins(np.array([2.0, 2.0]), np.array([0.3, 0.2]))
    mixture = mix_features([first, second], [1.0, 3.0])
    assert mixture.counts == pytest.approx([1, 1, 2])
    assert mixture.probs == pytest.approx([0.1 + 0.225, 0.05 + 0.225, 0.05 + 0.15])
