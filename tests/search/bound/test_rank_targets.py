"""Targets that no placement reaches raise the bound, and never above the best plan."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from ortools.sat.python import cp_model

from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.workload import Constraints
from search.bound.lower_bound import LowerBound
from search.bound.program import Branch
from search.reproducible import reproducible_solver, run
from tests.quick import quick_first
from tests.search.bound.plans_of_sets import (
    ONE_HOST,
    rank_loads,
    roomy_objective,
    sets_with_plans,
)
from tests.search.problems import (
    DENSE,
    a_problem,
    a_table,
    a_workload,
    every_plan,
    hosts,
    objective_of,
)


@pytest.mark.parametrize("batch_size", [512, 65536])
@pytest.mark.parametrize("seed", quick_first(2, range(12)))
def test_it_stays_below_the_best_plan(
    seed: int, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules, pipelines, caches, constraints; refuted targets reach up to the best."""
    objective = roomy_objective(seed, batch_size, ONE_HOST)
    best = float(objective.score(list(itertools.islice(every_plan(objective), 5000))).min())
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    before = bound.solve(3000, 1.5 * best)
    after = bound.tighten(3000, 1.5 * best, lambda _: False)
    assert before <= after <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", quick_first(2, range(8)))
def test_targets_count_the_plans_of_all_branches(seed: int) -> None:
    """Even if the fastest plan of a set is in the last one."""
    objective = roomy_objective(seed, 65536, ONE_HOST)
    results = sets_with_plans(objective, seed)
    for exchange_set in dict.fromkeys(s for s, _, _ in results):
        members = [(ms, plan) for s, plan, ms in results if s is exchange_set]
        best, fastest = min(members, key=lambda member: member[0])
        options = [option for option, _ in fastest]
        chosen = np.array([choice.option in options for choice in exchange_set.choices])
        mixed = np.diff(exchange_set.first, append=len(chosen)).argmax()  # the most choices
        mine = exchange_set.program.table == mixed
        branches = [Branch(~(chosen & mine)), Branch(chosen | ~mine)]
        while not exchange_set.is_settled and exchange_set.proven <= best:
            with_bounds = [(exchange_set.proven, branch) for branch in branches]
            exchange_set.place_ranks(with_bounds, 2 * best, 0.5, lambda: 1e9)
        assert exchange_set.proven <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", quick_first(2, range(12)))
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_no_plan_is_faster_than_a_cut_at_its_loads(seed: int, share: float) -> None:
    """Also than the cuts that are critical at the loads of other plans."""
    objective = roomy_objective(seed)
    results = sets_with_plans(objective, seed)
    for exchange_set, plan, ms in results:
        relaxation = exchange_set.relaxation_of_ranks()
        loads, launched = rank_loads(objective, exchange_set, plan)
        for rival in (p for s, p, _ in results if s is exchange_set):
            rival_loads = rank_loads(objective, exchange_set, rival)[0]
            mean = rival_loads.mean(axis=1)
            more = share * (rival_loads.max(axis=1) - mean)
            cut = relaxation.evaluate(mean, more, launched=share > 0)[1]
            assert cut.of_ranks().at(loads, launched) <= ms * (1 + 1e-9)


def test_a_rank_steps_the_dense_optimizer_over_its_own_shards() -> None:
    """One rank may look up while another steps: they do not wait for each other's mean."""
    unsharded = (ShardingType.TABLE_WISE,)
    dense, fused = (
        Constraints(sharding_types=unsharded, compute_kernels=(k,))
        for k in (ComputeKernel.DENSE, ComputeKernel.FUSED)
    )
    tables = [a_table("dense", 8_000_000, 64, 0.1, constraints=dense)]
    tables += [a_table("fused", 500_000, 128, 100.0, constraints=fused)]
    workload = a_workload(*tables, batch_size=65536)
    workload = replace(workload, dense=replace(DENSE, optimizer="adam"))
    objective, _ = objective_of(a_problem(workload, hosts(2)))
    for exchange_set, plan, ms in sets_with_plans(objective, 0):
        loads, launched = rank_loads(objective, exchange_set, plan)
        cut = exchange_set.relaxation_of_ranks().evaluate(loads.mean(axis=1))[1]
        assert cut.of_ranks().at(loads, launched) <= ms * (1 + 1e-9)


@pytest.mark.parametrize("seed", quick_first(2, range(12)))
def test_a_plan_is_a_solution_of_the_model_at_its_own_time(seed: int) -> None:
    objective = roomy_objective(seed, worlds=ONE_HOST)
    topology = objective.problem.topology
    for exchange_set, plan, ms in sets_with_plans(objective, seed):
        targets = exchange_set.targets_of_ranks()
        options = [option for option, _ in plan]
        chosen = [c for c in targets.choices if c.option in options]
        model = targets.model(chosen, exchange_set.priced_ms, ms)
        solver = reproducible_solver(1.0, 0, float("inf"))
        assert run(solver, model.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        solution = model.read(solver)
        assert [option for option, _ in solution] == options
        assert all(option.is_legal(ranks, topology) for option, ranks in solution)


def test_without_a_cut_a_plan_tells_the_first_one() -> None:
    """No cycle is critical before ranks are uneven if the host sets the pace."""
    objective = roomy_objective(0)
    exchange_set, _, ms = sets_with_plans(objective, 0)[0]
    targets = exchange_set.targets_of_ranks()
    targets.cuts.clear()
    every = np.ones(len(targets.choices), dtype=bool)
    refuted, _ = targets.refute(1.1 * ms, every, 0.0, 1.0, lambda: 1e9)
    assert not refuted
