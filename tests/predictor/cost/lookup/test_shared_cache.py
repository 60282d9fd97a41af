"""UVM caches that a launch's tables share: tabulated against the law, and in whole plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from predictor.cost.loads import Load
from predictor.cost.lookup import shared_cache
from predictor.cost.lookup.embedding import lookup_model
from predictor.cost.lookup.shard import LookupShard, shared_fetched_rows
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.distribution import Uniform, Zipf
from predictor.model.plan import ComputeKernel, TablePlan
from predictor.model.workload import Feature, Workload
from predictor.predict import predict
from tests.builders import (
    a_table,
    a_topology,
    a_workload,
    device_bound,
    hardware,
    neighbours_ms,
    plan_of,
    table_wise,
)

CACHED = ComputeKernel.FUSED_UVM_CACHING
AHEAD = "prefetch_sparse_dist"


def shard(rows: int, draws: float, clf: float, alpha: float = 0.0) -> LookupShard:
    bins = (Zipf(alpha) if alpha else Uniform()).bins(rows)
    return LookupShard(bins, draws, draws, rows, 128, kernel=CACHED, cache_load_factor=clf)


def tables_of(launch: list[LookupShard], hw: HardwareProfile) -> np.ndarray:
    times = shared_cache.common_times(launch)
    return np.stack([shared_cache.tabulate(s, hw, times) for s in launch])


def error(launch: list[LookupShard]) -> float:
    """Return the error of tabulated fetches, as a share of the launch's with split or one cache."""
    hw = hardware()
    total = tables_of(launch, hw).sum(axis=0)
    law = lookup_model(hw).fetch_ms(launch[0]) * sum(shared_fetched_rows(tuple(launch)))
    return float(shared_cache.fetches_ms(total) - law) / max(law, total[shared_cache.OWN_MS])


def test_most_launches_are_within_a_percent_of_the_law() -> None:
    rng = np.random.default_rng(0)
    errors = [
        error(
            [
                shard(
                    int(10 ** rng.uniform(5, 7.5)),
                    10 ** rng.uniform(3, 6.5),
                    rng.choice([0.01, 0.05, 0.1, 0.2, 0.5, 0.9]),
                    rng.choice([0.0, 0.8, 1.05, 1.2]),
                )
                for _ in range(rng.integers(2, 6))
            ]
        )
        for _ in range(100)
    ]
    assert np.quantile(np.abs(errors), 0.95) < 0.01


def cached(workload: Workload, ranks: tuple[int, ...], clf: float | None = None) -> list[TablePlan]:
    parameters = {} if clf is None else {"cache_params": {"load_factor": clf}}
    return [
        replace(table_wise(t, r), compute_kernel=CACHED, parameters=parameters)
        for t, r in zip(workload.tables, ranks, strict=True)
    ]


def unlike(train_pipeline: str = "base") -> Workload:
    """A hot, a cold and a flat table, of one lookup group."""
    kinds = {"hot": (200_000, 40.0, Zipf(0.9)), "cold": (3_000_000, 2.0, Zipf(1.05))}
    kinds["flat"] = (500_000, 5.0, Uniform())
    tables = (
        a_table(n, rows, 64, features=(Feature(n, lookups, 1.0, ids),))
        for n, (rows, lookups, ids) in kinds.items()
    )
    return a_workload(*tables, batch_size=8192, train_pipeline=train_pipeline)


@pytest.mark.parametrize("pipeline", ["base", AHEAD])
def test_tables_that_meet_on_a_rank_share_and_others_do_not(pipeline: str) -> None:
    workload, hw = unlike(pipeline), hardware()
    batch = PlanScorer(workload, a_topology(3), hw)
    column, forward = Load.PREFETCH_MS, Load.FORWARD_MS
    if pipeline == "base":
        column, forward = forward, column
    apart = batch.totals(cached(workload, (0, 1, 2)))[0]
    alone = [batch.shards.of_table(i, p)[1][0] for i, p in enumerate(cached(workload, (0, 0, 0)))]
    assert apart[:, column] == pytest.approx([load[column] for load in alone], rel=1e-12)
    shared = batch.totals(cached(workload, (0, 0, 1)))[0, 0]
    lookups = [
        LookupShard(
            f.distribution.bins(t.num_embeddings),
            3 * 8192 * f.lookups_per_sample,
            3 * 8192,
            t.num_embeddings,
            64,
            kernel=CACHED,
        )
        for t in workload.tables[:2]
        for f in t.features
    ]
    own = sum(shared_fetched_rows((s,))[0] for s in lookups)
    change = lookup_model(hw).fetch_ms(lookups[0]) * (
        sum(shared_fetched_rows(tuple(lookups))) - own
    )
    assert abs(change) > 0.05 * own * lookup_model(hw).fetch_ms(lookups[0])
    assert shared[column] - sum(load[column] for load in alone[:2]) == pytest.approx(
        change, rel=0.05
    )
    assert shared[forward] == pytest.approx(sum(load[forward] for load in alone[:2]), rel=1e-12)


@pytest.mark.parametrize("pipeline", ["base", "sparse_dist", AHEAD])
def test_scores_equal_single_predictions(pipeline: str) -> None:
    """Caches are summed anew, or updated from the base's, with the same result."""
    workload, topology, hw = unlike(pipeline), a_topology(2), device_bound()
    batch = PlanScorer(workload, topology, hw)
    fused = [table_wise(t) for t in workload.tables]
    plans = [cached(workload, ranks, clf) for ranks in np.ndindex(2, 2, 2) for clf in (None, 0.01)]
    plans += [[fused[0], *plan[1:]] for plan in plans[:4]] + [[plans[0][0], *fused[1:]], fused]
    scores = batch.score(plans)
    assert len(set(np.round(scores, 9))) > 8
    for plan, ms in zip(plans, scores, strict=True):
        prediction = predict(workload, topology, hw, plan_of(workload, topology, plan))
        assert ms == pytest.approx(prediction.iteration_ms, rel=1e-9)
    for base in (plans[0], plans[3], fused):
        changes = [dict(enumerate(plan)) for plan in plans]
        changes += [{1: plan[1]} for plan in plans]
        full = [[c.get(t, p) for t, p in enumerate(base)] for c in changes]
        assert neighbours_ms(batch, base, changes) == pytest.approx(batch.score(full), rel=1e-9)
