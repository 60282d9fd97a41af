"""Annealing: what its arrays say of plans, what it may change, that a seed gives one plan."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from predictor.cost.loads import Load
from predictor.model.plan import ShardingType
from predictor.model.workload import Constraints
from predictor.units import MIB
from search.improve.annealing import Annealer, AnnealingTask
from search.improve.cycle_cuts import judge
from search.improve.kernel import anneal
from search.model.shard_costs import ShardModel
from search.objective import Assignment, Objective
from search.space.option import ChoicesInUse
from search.surrogate import Surrogate
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

SQUARES = 8


def a_model(objective: Objective, surrogate: Surrogate) -> ShardModel:
    options = objective.space.options
    for option in objective.space.every_option:
        surrogate.shard_loads(option)
    return ShardModel(objective, options, surrogate.shard_loads, range(len(options)))


@pytest.mark.parametrize("seed", range(6))
def test_the_arrays_say_of_a_plan_what_its_cut_says(seed: int) -> None:
    """Nothing is changed where nothing is free; a norm of a high power is the maximum nearly."""
    objective, surrogate = objective_of(random_problem(seed))
    plan = random_plan(objective, random.Random(seed))
    model = a_model(objective, surrogate)
    ms, cut = judge(surrogate, plan)
    if cut is None:
        pytest.skip("the host sets the pace")
    chosen, where = model.numbers(plan)
    assert model.plan(chosen, where) == plan
    costs = model.costs([cut])
    value, *_ = anneal(model.space, costs, chosen, where, 1, 1e-12, SQUARES, 0.0, seed)
    loads = objective.scorer.totals(objective.table_plans(model.plan(chosen, where)))
    there = loads[..., Load.SHARDS] > 0
    ranks = objective.problem.topology.world_size
    at = cut.at(loads, there)
    spread = sum(
        float(times.max()) for times in np.einsum("sgc,grc->sr", cut.segments, loads)
    ) + float(cut.floors.sum())
    assert at - 1e-6 <= value <= at + spread * (ranks ** (1 / 2**SQUARES) - 1) + 1e-6
    assert cut.at(*_of(objective, plan)) == pytest.approx(ms, rel=1e-6)


def _of(objective: Objective, plan: Assignment) -> tuple[np.ndarray, np.ndarray]:
    loads = objective.scorer.totals(objective.table_plans(plan))
    return loads, loads[..., Load.SHARDS] > 0


def everywhere(objective: Objective) -> Assignment:
    """The first option of every table on the first ranks that it may lie on."""
    return tuple(
        (table[0], tuple(rank for unit in objective.legal(table[0]).units for rank in unit[0]))
        for table in objective.space.options
    )


def whole(*pooling: float, rows: int = 200_000, **more: int) -> Objective:
    """Tables that lie whole on one of two ranks, whose lookups are most of an iteration."""
    wants = Constraints(sharding_types=(ShardingType.TABLE_WISE,), compute_kernels=("fused",))
    tables = [
        a_table(f"t{i}", rows, 128, factor, constraints=wants) for i, factor in enumerate(pooling)
    ]
    return objective_of(a_problem(a_workload(*tables, batch_size=65_536), hosts(2, **more)))[0]


def test_it_finds_next_to_the_best_of_all_placements() -> None:
    objective = whole(90.0, 70.0, 60.0, 50.0, 40.0, 30.0, 20.0)
    annealer = Annealer(objective, Surrogate(objective))
    start = everywhere(objective)
    task = AnnealingTask(start, objective.space.options, 40_000, 8, 0)
    plan, ms = annealer.improve(task)[0]
    options = [table[0] for table in objective.space.options]
    every = [
        tuple((option, (rank,)) for option, rank in zip(options, ranks, strict=True))
        for ranks in itertools.product(range(2), repeat=len(options))
    ]
    assert plan is not None
    assert ms == pytest.approx(float(objective.score(every).min()), rel=2e-3)
    assert annealer.improve(task)[0] == (plan, ms)


def test_a_plan_that_does_not_fit_comes_to_fit() -> None:
    objective = whole(9.0, 8.0, 7.0, 6.0, 5.0, 4.0, hbm=470 * MIB)
    start = everywhere(objective)
    assert not objective.fits(start)
    task = AnnealingTask(start, objective.space.options, 20_000, 8, 0)
    plan, _ = Annealer(objective, Surrogate(objective)).improve(task)[0]
    assert_valid(objective, plan)


def test_blocks_of_a_host_move_to_another() -> None:
    """Rows over the ranks of one host; two such tables go to two hosts."""
    wants = Constraints(sharding_types=(ShardingType.TABLE_ROW_WISE,), compute_kernels=("fused",))
    tables = [a_table(f"t{i}", 400_000, 128, 60.0, constraints=wants) for i in range(2)]
    problem = a_problem(a_workload(*tables, batch_size=32_768), hosts(4, 2), copying(H100, 10.0))
    objective, surrogate = objective_of(problem)
    task = AnnealingTask(everywhere(objective), objective.space.options, 4_000, 4, 0)
    plan, _ = Annealer(objective, surrogate).improve(task)[0]
    assert {ranks for _, ranks in plan} == {(0, 1), (2, 3)}


@pytest.mark.parametrize("limit", ["moves", "bytes"])
def test_it_ends_within_a_limit_on_moves_and_at_its_best_plan(limit: str) -> None:
    """All tables lie on one of two ranks, and two may leave it."""
    free = whole(90.0, 70.0, 60.0, 50.0, 40.0)
    start = everywhere(free)
    size = {"max_bytes": 2.5} if limit == "bytes" else {}
    moves = 5 if limit == "bytes" else 2
    near = ChoicesInUse(start, moves, lambda table, choice: 1.0, **size)
    objective = free.over(replace(free.space, in_use=near))
    task = AnnealingTask(start, objective.space.options, 20_000, 8, 0)
    plan, ms = Annealer(objective, Surrogate(objective)).improve(task)[0]
    options = [table[0] for table in objective.space.options]
    every = [
        tuple((option, (rank,)) for option, rank in zip(options, ranks, strict=True))
        for ranks in itertools.product(range(2), repeat=len(options))
        if sum(ranks) <= 2
    ]
    assert len(near.moved(plan)) == 2
    assert ms == pytest.approx(float(objective.score(every).min()), rel=2e-3)


def test_the_loop_ends_within_what_the_ranks_have_and_tells_its_best_plan() -> None:
    """Two tables to a rank fit, three do not; one round, with a wall from the start."""
    objective, surrogate = objective_of(whole(9.0, 8.0, 7.0, 6.0, hbm=300 * MIB).problem)
    model, start = a_model(objective, surrogate), everywhere(objective)
    _, cut = judge(surrogate, start)
    assert cut is not None
    chosen, where = model.numbers(start)
    costs = model.costs([cut])
    assert not objective.fits(start)
    _, best, best_where = anneal(model.space, costs, chosen, where, 2_000, 1e-6, 3, 1e3, 0)
    for plan in (model.plan(chosen, where), model.plan(best, best_where)):
        assert_valid(objective, plan)


def test_tables_that_are_tied_stay() -> None:
    tables = [
        a_table(f"t{i}", 400_000, 64, 60.0, constraints=Constraints(co_locate="both"))
        for i in range(2)
    ]
    problem = a_problem(a_workload(*tables, batch_size=32_768), hosts(2))
    objective, surrogate = objective_of(problem)
    start = everywhere(objective)
    task = AnnealingTask(start, objective.space.options, 4_000, 4, 0)
    [(plan, ms)] = Annealer(objective, surrogate).improve(task)
    assert plan == start
    assert ms == pytest.approx(float(objective.score([start])[0]), rel=1e-12)


def test_tables_of_one_data_type_gather() -> None:
    """A rank launches a lookup for every data type that it has. Where each has half of both, no
    change of one table or two makes an iteration faster, only several one after the other."""
    wants = Constraints(sharding_types=(ShardingType.TABLE_WISE,), compute_kernels=("fused",))
    tables = [
        a_table(f"t{i}", 2_000, 32, 1.0, data_type=kind, constraints=wants)
        for i, kind in enumerate(["fp16", "bf16"] * 6)
    ]
    slow = H100.embedding.model_copy(update={"kernel_us": 100.0})
    profile = copying(H100).model_copy(update={"embedding": slow})
    problem = a_problem(a_workload(*tables, batch_size=64), hosts(2), profile)
    objective, surrogate = objective_of(problem)
    options = [table[0] for table in objective.space.options]
    mixed = tuple((option, (i // 2 % 2,)) for i, option in enumerate(options))
    apart = tuple((option, (i % 2,)) for i, option in enumerate(options))
    before, best = objective.score([mixed, apart]).tolist()
    assert best < before * 0.99
    task = AnnealingTask(mixed, objective.space.options, 40_000, 6, 0)
    _, ms = Annealer(objective, surrogate).improve(task)[0]
    assert ms == pytest.approx(best, rel=1e-3)
