"""Packing: never slower, always valid, and better than balancing where options must change."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from predictor.model.plan import ShardingType
from predictor.model.workload import Constraints
from search.improve.balance import balance
from search.improve.cycle_cuts import critical_cut
from search.improve.packing import Packer
from search.improve.placed_plan import Changes, PlacedPlan
from search.improve.shard_moves import Neighbourhood
from search.objective import Assignment, Objective
from search.partitioner import GreedyPartitioner
from search.surrogate import Surrogate
from tests.quick import quick_first
from tests.search.problems import (
    H100,
    a_problem,
    a_table,
    a_workload,
    assert_valid,
    copying,
    hosts,
    objective_of,
    random_plan,
    random_problem,
)

FREE = copying(H100, 1.0)
"""Nothing but the ranks' work and what they send sets the pace."""


def table_wise(objective: Objective) -> list:  # type: ignore[type-arg]
    return [next(o for o in opts if o.label == "TW/fused") for opts in objective.space.options]


@pytest.mark.parametrize("seed", quick_first(6, range(12)))
def test_random_plans_of_random_problems(seed: int) -> None:
    objective, surrogate = objective_of(random_problem(seed))
    rng = random.Random(seed)
    start = next((p for _ in range(200) if objective.fits(p := random_plan(objective, rng))), None)
    if start is None:
        options = [rng.choice(opts) for opts in objective.space.options]
        start = GreedyPartitioner(objective, surrogate).place_all(options)
    if start is None:
        pytest.skip("no plan at hand fits")
    plan, ms = Packer(objective, surrogate).pack(start, 60)
    assert_valid(objective, plan)
    assert ms == pytest.approx(objective.score([plan])[0])
    assert ms <= objective.score([start])[0]
    assert Packer(objective, surrogate).pack(start, 60) == (plan, ms), "the same once more"


@pytest.mark.parametrize("local", [None, 2])
@pytest.mark.parametrize("seed", quick_first(2, range(8)))
def test_changes_cost_what_the_plan_with_them_does(seed: int, local: int | None) -> None:
    """Moves, swaps and other options are rated as if they were made, and are legal."""
    objective, surrogate, _ = a_case(4, local=local)
    rng = random.Random(seed)
    plans = (random_plan(objective, rng) for _ in range(200))
    start = next(p for p in plans if objective.fits(p) and critical_cut(objective, p))
    plan = a_plan(objective, surrogate, start)
    plan.aim()
    slowest = np.argsort(-plan.counted(plan.now.loads), kind="stable")[:1]

    def after(change: Changes) -> float:
        before = plan.chosen
        plan.apply([change])
        fits = objective.fits(plan.assignment)
        found = float(plan.counted(plan.now.loads).sum() + plan.even_ms @ plan.shares)
        plan.put(before)
        return found if fits else np.inf

    mine = np.flatnonzero(np.isin(plan.shards.ranks, slowest))
    near = Neighbourhood(plan.shards, plan.now, plan.counted, mine)
    even = float(plan.even_ms @ plan.shares)
    values = np.concatenate([near.moves(), near.swaps()], axis=1) + even
    for row, target in np.argwhere(np.isfinite(values)).tolist():
        change = plan.moved(near.placements(int(mine[row]), target))
        assert all(objective.is_legal(*choice) for choice in change.values())
        assert after(change) == pytest.approx(values[row, target], rel=1e-9)
    for value, change in plan.other_options(np.unique(plan.shards.table[mine]), near):
        if change:
            assert all(objective.is_legal(*choice) for choice in change.values())
            assert after(change) == pytest.approx(value, rel=1e-9)


def test_a_plan_that_lost_an_exchange_is_packed_on() -> None:
    """Cuts of a plan that emptied an exchange say nothing of the plan before."""
    objective, surrogate = objective_of(random_problem(33))
    rng = random.Random(33)
    for _ in range(3):
        plans = (random_plan(objective, rng) for _ in range(50))
        start = next(plan for plan in plans if objective.fits(plan))
        plan, ms = Packer(objective, surrogate).pack(start, 60)
        assert_valid(objective, plan)
        assert ms <= objective.score([start])[0]


def a_case(ranks: int, **more: object) -> tuple[Objective, Surrogate, Assignment]:
    tables = [
        a_table(f"t{i}", 50_000 * (i % 7 + 1), (32, 64, 128)[i % 3], 1.0 + 7 * (i * i % 5))
        for i in range(40)
    ]
    topology = hosts(ranks, **more)  # type: ignore[arg-type]
    problem = a_problem(a_workload(*tables, batch_size=32768), topology, FREE)
    objective, surrogate = objective_of(problem)
    start = GreedyPartitioner(objective, surrogate).place_all(table_wise(objective))
    assert start is not None
    return objective, surrogate, start


def test_it_beats_moving_shards_alone() -> None:
    objective, surrogate, start = a_case(8)
    balanced = balance(objective, surrogate, start)
    before = float(objective.score([balanced])[0])
    plan, ms = Packer(objective, surrogate).pack(balanced, 200)
    assert ms < before * 0.998
    assert_valid(objective, plan)


def test_caps_hold() -> None:
    """With the memory that a greedy placement takes, and no more."""
    objective, _, start = a_case(8)
    most = int(objective.memory(start)[0].max())
    tight, surrogate, start = a_case(8, hbm=most)
    plan, ms = Packer(tight, surrogate).pack(start, 100)
    assert_valid(tight, plan)
    assert ms < tight.score([start])[0]


def test_tables_bound_to_a_host_move_within_it_and_to_another() -> None:
    """All column shards of a table start on one rank, and all tables on one host."""
    full, *_ = a_case(4, local=2)
    options = tuple(
        tuple(o for o in opts if o.sharding_type is ShardingType.TABLE_COLUMN_WISE)
        or tuple(o for o in opts if o.sharding_type is ShardingType.TABLE_ROW_WISE)
        for opts in full.space.options
    )
    objective, surrogate = objective_of(full.problem, replace(full.space, options=options))
    start = tuple(
        (opts[0], (0, 0) if opts[0].sharding_type is ShardingType.TABLE_COLUMN_WISE else (0, 1))
        for opts in options
    )
    plan, ms = Packer(objective, surrogate).pack(start, 100)
    assert_valid(objective, plan)
    assert ms < 0.6 * objective.score([start])[0]
    split = [set(ranks) for option, ranks in plan if option.num_shards == 2]
    assert {0, 1} in split
    assert {2, 3} in split


def test_co_located_tables_stay() -> None:
    tied = Constraints(co_locate="pair")
    tables = [
        *(a_table(f"tied{i}", pooling_factor=30.0, constraints=tied) for i in range(2)),
        *(a_table(f"free{i}", pooling_factor=9.0) for i in range(6)),
    ]
    objective, surrogate = objective_of(
        a_problem(a_workload(*tables, batch_size=32768), hosts(2), FREE)
    )
    start = tuple((option, (0,)) for option in table_wise(objective))
    plan, ms = Packer(objective, surrogate).pack(start, 60)
    assert plan[:2] == start[:2]
    assert ms < objective.score([start])[0]


def test_no_steps_no_change() -> None:
    objective, surrogate, start = a_case(4)
    assert Packer(objective, surrogate).pack(start, 0)[0] == start  # type: ignore[arg-type]
    stopped = Packer(objective, surrogate).pack(start, 100, lambda best: True)  # type: ignore
    assert stopped[0] == start


def a_plan(objective: Objective, surrogate: Surrogate, start: Assignment) -> PlacedPlan:
    packer = Packer(objective, surrogate)  # makes all lookup groups known
    cut = critical_cut(objective, start)
    assert cut is not None
    return PlacedPlan(objective, packer.columns([cut]), start, set())


def a_random_plan() -> PlacedPlan:
    objective, surrogate, _ = a_case(4)
    return a_plan(objective, surrogate, random_plan(objective, random.Random(1)))


@pytest.mark.parametrize("squares", [4, 5])
def test_norms_are_above_maxima_and_near_them(squares: int) -> None:
    plan = a_random_plan()
    plan.squares = squares
    slowest = plan.now.loads.max(axis=0) * plan.scale
    ms = plan.aim()
    assert plan.slowest_ms <= ms * (1 + 1e-9)
    assert ms - plan.slowest_ms <= slowest.sum() * (plan.world ** (1 / 2**squares) - 1) + 1e-9


def test_what_ranks_count_is_the_slope_of_the_norms() -> None:
    plan = a_random_plan()
    before, loads = plan.aim(), plan.now.loads.copy()
    counted = plan.counted(loads).sum()
    step = 1e-6 * np.random.default_rng(0).random(loads.shape)
    added = plan.counted(loads + step).sum() - counted
    plan.now.loads[:] = loads + step
    assert plan.aim() - before == pytest.approx(added, rel=1e-2)
