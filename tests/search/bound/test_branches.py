"""Branches of single sets raise the bound, and never above their best plan."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from predictor.model.plan import ShardingType
from predictor.model.workload import Constraints
from predictor.units import GIB
from search.bound.exchange_set import ExchangeSet
from search.bound.lower_bound import LowerBound, UnsoundBoundError
from search.bound.program import Branch
from search.bound.relaxation import Cut
from search.bound.stretches import CutTimes, OptionTimes
from search.objective import Assignment, Objective
from search.space.enumerate import whole_space
from tests.quick import quick_first
from tests.search.bound.plans_of_sets import (
    ONE_HOST,
    WORLDS,
    roomy_objective,
    sets_with_plans,
)
from tests.search.problems import (
    a_problem,
    a_table,
    a_workload,
    every_plan,
    hosts,
    objective_of,
    random_plan,
)


def scarce() -> Objective:
    """Five tables alike, of which two and three quarters fit into device memory, where they are
    faster."""
    kernels = ("fused", "fused_uvm")
    wants = Constraints(sharding_types=(ShardingType.TABLE_WISE,), compute_kernels=kernels)
    tables = [a_table(f"t{i}", 4_000_000, 64, 20.0, constraints=wants) for i in range(5)]
    workload = a_workload(*tables, batch_size=32768)
    options = whole_space(a_problem(workload, hosts(2, ddr=80 * GIB))).options[0]
    needs = [sum(memory.hbm_bytes for memory in option.memory) for option in options]
    hbm = int(5 * min(needs) + 2.75 * (max(needs) - min(needs))) // 2
    problem = a_problem(workload, hosts(2, hbm=hbm, ddr=80 * GIB))
    return objective_of(problem, whole_space(problem))[0]


def bounds_of(objective: Objective, upper_ms: float) -> tuple[float, float]:
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    before = bound.solve(3000, upper_ms)
    return before, bound.tighten(300, upper_ms, lambda _: False)


def chosen_in(exchange_set: ExchangeSet, plan: Assignment) -> np.ndarray:
    """Shares of the choices of a set that a plan has."""
    options = [option for option, _ in plan]
    return np.array([float(choice.option in options) for choice in exchange_set.choices])


@pytest.mark.parametrize("batch_size", [512, 65536])
@pytest.mark.parametrize("seed", quick_first(2, range(16)))
def test_it_stays_below_the_best_plan(seed: int, batch_size: int) -> None:
    """Modules, pipelines, caches, constraints, two hosts."""
    objective = roomy_objective(seed, batch_size)
    best = float(objective.score(list(itertools.islice(every_plan(objective), 5000))).min())
    before, after = bounds_of(objective, 1.5 * best)
    assert before <= after <= best * (1 + 1e-9)


def test_scarce_memory_is_not_shared_between_halves_of_options() -> None:
    objective = scarce()
    plans = [plan for plan in every_plan(objective) if objective.fits(plan)]
    best = float(objective.score(plans).min())
    before, after = bounds_of(objective, 1.5 * best)
    assert before * 1.001 < after <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", quick_first(2, range(16)))
@pytest.mark.parametrize("alone", [True, False], ids=["sets", "families"])
def test_no_plan_is_faster_than_a_cut_at_its_options(seed: int, alone: bool) -> None:
    """A cut bounds its own set and the family of all plans, also when made at others' options."""
    objective = roomy_objective(seed)
    results = sets_with_plans(objective, seed)
    all_choices = results[0][0].all_choices
    family = ExchangeSet(all_choices, np.arange(len(all_choices.all)), frozenset())
    for _ in range(60):
        if family.refine()[1]:
            break
    for exchange_set, plan, ms in results:
        solved = exchange_set if alone else family
        chosen = chosen_in(solved, plan)
        cuts = [cut.times for cut in solved.program.cuts]
        for rival in (p for s, p, _ in results if s is exchange_set or not alone):
            shares = chosen_in(solved, rival)
            load = np.stack([shares[member] @ solved.loads[member] for member in solved.members])
            for more in (0.0, 0.3, 2.0):
                cut = solved.relaxation_of_ranks().evaluate(load, more * load, launched=True)[1]
                cuts.append(solved.times.under(cut))
        assert max(times.at(chosen, solved.first) for times in cuts) <= ms * (1 + 1e-9)


def holds(exchange_set: ExchangeSet, branch: Branch, plan: Assignment) -> bool:
    """Tell whether a plan is in a branch."""
    chosen = chosen_in(exchange_set, plan) > 0
    has_one_of_each = all((each & chosen).any() for each in branch.one_of)
    return bool(branch.allowed[chosen].all() and has_one_of_each)


@pytest.mark.parametrize("seed", quick_first(2, range(24)))
@pytest.mark.parametrize("worlds", [WORLDS, ONE_HOST], ids=["hosts", "one host"])
def test_no_plan_of_a_branch_is_faster_and_none_is_lost(
    seed: int, worlds: tuple[tuple[int, int], ...]
) -> None:
    """Every plan of a set below the limit lies in one of the halves of its branch."""
    objective = roomy_objective(seed, 65536, worlds)
    results = sets_with_plans(objective, seed)
    for exchange_set in {id(exchange_set): exchange_set for exchange_set, _, _ in results}.values():
        plans = [(plan, ms) for owner, plan, ms in results if owner is exchange_set]
        limit = 1.01 * max(ms for _, ms in plans)
        waiting: list[Branch] = [exchange_set.program.whole]
        for _ in range(40):
            if not waiting:
                break
            branch = waiting.pop()
            inside = [i for i, each in enumerate(plans) if holds(exchange_set, branch, each[0])]
            for _ in range(30):
                bound, done = exchange_set.refine(branch)
                assert all(bound <= plans[i][1] * (1 + 1e-9) for i in inside)
                if done:
                    break
            halves = exchange_set.halves(branch, limit)
            for i in inside if halves is not None else ():
                assert any(holds(exchange_set, half, plans[i][0]) for half in halves or ())
            waiting += halves or []


@pytest.mark.parametrize(("dim", "pooling"), [(512, 600.0), (2048, 1.0)], ids=["work", "message"])
def test_the_longest_shard_counts_in_full_and_no_more(dim: int, pooling: float) -> None:
    wants = Constraints(sharding_types=(ShardingType.TABLE_WISE,), compute_kernels=("fused",))
    tables = [
        a_table("heavy", 50_000, dim, pooling, constraints=wants),
        a_table("light", 1000, 16, 0.1, constraints=wants),
    ]
    workload = a_workload(*tables, batch_size=65536)
    objective, _ = objective_of(a_problem(workload, hosts(8, 4)))
    best = float(objective.score(list(every_plan(objective))).min())
    before, after = bounds_of(objective, 2 * best)
    assert 0.99 * best < after <= best * (1 + 1e-9)
    assert before <= after


def test_a_bound_above_a_known_plan_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that are too long are seen; they are not clipped to the plan."""
    objective = scarce()
    plans = [plan for plan in every_plan(objective) if objective.fits(plan)]
    best = float(objective.score(plans).min())
    under = OptionTimes.under

    def twice(self: OptionTimes, cut: Cut) -> CutTimes:
        times = under(self, cut)
        return replace(times, constant=2 * times.constant, weights=2 * times.weights)

    monkeypatch.setattr(OptionTimes, "under", twice)
    with pytest.raises(UnsoundBoundError):
        bounds_of(objective, best)


def test_random_plans_of_a_larger_problem() -> None:
    tables = [
        a_table(f"t{i}", 10 ** (4 + i % 4), 32 * (1 + i % 4), 40.0 / (i + 1)) for i in range(10)
    ]
    objective, _ = objective_of(a_problem(a_workload(*tables, batch_size=16384), hosts(8, 4)))
    rng = random.Random(0)
    plans = [random_plan(objective, rng) for _ in range(1000)]
    best = float(objective.score(plans).min())
    before, after = bounds_of(objective, best)
    assert 0 < before <= after <= best
