"""The busiest rank's excess raises the bound, but never above the best plan."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from predictor.cost.lookup.embedding import lookup_model
from predictor.hardware.schema import HardwareProfile
from predictor.model.plan import ShardingType
from predictor.model.workload import Constraints, Workload
from predictor.units import GIB
from search.bound.exchange_set import ExchangeSet
from search.bound.lower_bound import LowerBound
from search.bound.relaxation import Relaxation, _runs
from search.bound.stretches import CutTimes
from search.objective import Objective
from tests.quick import quick_only
from tests.search.problems import (
    CPU,
    H100,
    a_problem,
    a_table,
    a_workload,
    every_plan,
    hosts,
    objective_of,
    random_problem,
)

WHOLE = (ShardingType.TABLE_WISE,)
MIXED = (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.ROW_WISE)


def bound_of(objective: Objective) -> float:
    return LowerBound(objective.problem, objective.space, objective.scorer).solve(3000)


def bound_of_means(objective: Objective, monkeypatch: pytest.MonkeyPatch) -> float:
    with monkeypatch.context() as patch:
        patch.setattr(
            CutTimes, "peaks", lambda self, _, first: np.zeros((len(self.floor), len(first)))
        )
        return bound_of(objective)


def one_heavy(
    kinds: tuple[ShardingType, ...],
    pipeline: str = "base",
    *,
    ranks: tuple[int, ...] | None = None,
    co_locate: str | None = None,
    pooling_factor: float = 200.0,
    batch_size: int = 65536,
) -> Workload:
    """One table has most of the lookups; the others may be pinned or have to lie together."""
    free = Constraints(sharding_types=kinds, compute_kernels=("fused",))
    bound = replace(free, ranks=ranks, co_locate=co_locate)
    return a_workload(
        a_table("heavy", 2_000_000, 128, pooling_factor, constraints=free),
        a_table("b", 100_000, 128, 4.0, constraints=bound),
        a_table("c", 100_000, 64, 2.0, constraints=bound),
        batch_size=batch_size,
        train_pipeline=pipeline,
    )


CASES = {
    "two ranks": (one_heavy(WHOLE), hosts(2)),
    "four ranks": (one_heavy(WHOLE), hosts(4)),
    "pipelined": (one_heavy(WHOLE, "sparse_dist"), hosts(4)),
    "pinned": (one_heavy(WHOLE, ranks=(1, 3)), hosts(4)),
    "together": (one_heavy(WHOLE, co_locate="pair"), hosts(4)),
    "two hosts": (one_heavy(WHOLE), hosts(4, 2)),
    "several types": (one_heavy(MIXED), hosts(2)),
    "several types, pinned": (one_heavy(MIXED, ranks=(0,)), hosts(2)),
    "row-wise in a group": (one_heavy((*WHOLE, ShardingType.TABLE_ROW_WISE)), hosts(4, 2)),
}


@pytest.mark.parametrize("profile", [H100, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_it_stays_below_the_best_of_all_plans(
    case: str, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, topology = CASES[case]
    objective, _ = objective_of(a_problem(workload, topology, profile))
    times = objective.score(list(every_plan(objective)))
    bound, means = bound_of(objective), bound_of_means(objective, monkeypatch)
    assert 0 < means * (1 - 1e-3) <= bound <= times.min() * (1 + 1e-9)


@pytest.mark.parametrize(("ranks", "least"), [(2, 1.5), (4, 3.0)])
def test_a_table_that_cannot_be_split_sets_the_pace(
    ranks: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = one_heavy(WHOLE, pooling_factor=300.0)
    objective, _ = objective_of(a_problem(workload, hosts(ranks)))
    optimum = float(objective.score(list(every_plan(objective))).min())
    bound, means = bound_of(objective), bound_of_means(objective, monkeypatch)
    assert bound > least * means
    assert 0.95 * optimum < bound <= optimum


def test_a_cycle_is_parted_where_all_ranks_meet() -> None:
    assert _runs(np.array([False, True, False, True, False])) == [[4, 0], [2]]
    assert _runs(np.zeros(5, dtype=bool)) == [[0, 1, 2, 3, 4]]


def by_exchanges(objective: Objective) -> dict[frozenset[tuple[str, ShardingType]], float]:
    """The best time of all plans that use a set of exchanges, for every set."""
    plans = list(itertools.islice(every_plan(objective), 5000))
    best: dict[frozenset[tuple[str, ShardingType]], float] = {}
    for plan, ms in zip(plans, objective.score(plans).tolist(), strict=True):
        modules = [table.module for table in objective.problem.workload.tables]
        key = frozenset((modules[o.table], o.sharding_type) for o, _ in plan)
        best[key] = min(ms, best.get(key, np.inf))
    return best


@pytest.mark.parametrize("seed", quick_only((17, 18), range(4, 20)))
@pytest.mark.parametrize("batch_size", quick_only([512], [32, 512, 16384]))
def test_every_set_stays_below_its_best_plan(seed: int, batch_size: int) -> None:
    """Small batches: floors of launches are much of the time."""
    problem = random_problem(seed, world=((2, 2), (3, 3), (4, 2))[seed % 3], tables=3)
    ranks = problem.topology.world_size
    roomy = replace(problem.topology, hbm_cap_bytes=(1000 * GIB,) * ranks)
    workload = replace(problem.workload, batch_size=batch_size)
    objective, _ = objective_of(replace(problem, workload=workload, topology=roomy))
    best = by_exchanges(objective)
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    bound.solve(1)
    rng = random.Random(seed)
    for member in bound.sets:
        every = sorted(member.exchanges)
        all_use = frozenset(e for e in every if rng.random() < 0.5)
        for variant in (member, ExchangeSet(member.all_choices, member.index, all_use)):
            for _ in range(60):
                if variant.refine()[1]:
                    break
            holds = [ms for key, ms in best.items() if variant.used <= key <= variant.exchanges]
            assert variant.proven <= min(holds, default=np.inf) * (1 + 1e-9)


def test_a_floor_counts_where_some_ranks_may_launch_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A table a rank, beside one that all ranks have."""
    fused = Constraints(sharding_types=WHOLE, compute_kernels=("fused",))
    copied = Constraints(sharding_types=(ShardingType.DATA_PARALLEL,))
    tables = [a_table(f"t{i}", 500_000, 128, 100.0, constraints=fused) for i in range(2)]
    tables.append(a_table("copied", 1000, 64, constraints=copied))
    objective, _ = objective_of(a_problem(a_workload(*tables, batch_size=65536), hosts(2)))
    best = float(objective.score(list(every_plan(objective))).min())
    bound, segments = bound_of(objective), Relaxation._segments

    def free(self: Relaxation, *arguments: Any) -> tuple[np.ndarray, ...]:
        slopes, floors, uneven = segments(self, *arguments)
        return slopes, 0.0 * floors, uneven

    monkeypatch.setattr(Relaxation, "_segments", free)
    floor = min(lookup_model(H100).forward_floor_ms(), lookup_model(H100).backward_floor_ms())
    assert bound_of(objective) + 0.9 * floor < bound <= best * (1 + 1e-9)
