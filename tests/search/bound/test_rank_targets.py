"""Targets that no placement reaches raise the bound, and never above the best plan."""

from __future__ import annotations

import itertools

import pytest

from predictor.model.plan import ShardingType
from predictor.model.workload import Constraints
from search.bound import exchange_set
from search.bound.lower_bound import LowerBound
from search.objective import Objective
from tests.quick import quick_first
from tests.search.bound.plans_of_sets import ONE_HOST, roomy_objective, sets_with_plans
from tests.search.problems import a_problem, a_table, a_workload, every_plan, hosts, objective_of


def bounds_of(objective: Objective, upper_ms: float) -> tuple[float, float]:
    """Without and with shards placed on ranks."""
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    before = bound.solve(3000, upper_ms)
    return before, bound.tighten(3000, upper_ms, 1.0, lambda _: False)


@pytest.mark.parametrize("batch_size", [512, 65536])
@pytest.mark.parametrize("seed", quick_first(3, range(12)))
def test_it_stays_below_the_best_plan(
    seed: int, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules, pipelines, caches, constraints; refuted targets reach up to the best."""
    monkeypatch.setattr(exchange_set, "FEW", 0)
    objective = roomy_objective(seed, batch_size, ONE_HOST)
    best = float(objective.score(list(itertools.islice(every_plan(objective), 5000))).min())
    before, after = bounds_of(objective, 1.5 * best)
    assert before <= after <= best * (1 + 1e-9)


def test_tables_that_cannot_be_split_evenly_raise_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tables alike on four ranks: some rank has two."""
    monkeypatch.setattr(exchange_set, "FEW", 0)
    wants = Constraints(sharding_types=(ShardingType.TABLE_WISE,), compute_kernels=("fused",))
    tables = [a_table(f"t{i}", 500_000, 128, 60.0, constraints=wants) for i in range(5)]
    objective, _ = objective_of(a_problem(a_workload(*tables, batch_size=16384), hosts(4)))
    best = float(objective.score(list(every_plan(objective))).min())
    before, after = bounds_of(objective, best)
    assert before < 0.8 * best
    assert after > 0.97 * best


def test_without_a_cut_a_plan_tells_the_first_one() -> None:
    """Where the host sets the pace no cycle is critical before ranks are uneven."""
    objective = roomy_objective(0)
    one, _, ms = sets_with_plans(objective, 0)[0]
    targets = one.targets_of_ranks()
    targets.cuts.clear()
    refuted, _ = targets.refute(1.1 * ms, 0.0, 1.0, lambda: 1e9)
    assert not refuted
