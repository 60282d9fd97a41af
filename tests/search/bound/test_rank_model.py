"""The model of plans under a target has every plan that is as fast, and only real plans."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ortools.sat.python import cp_model

from search.bound.rank_targets import RankChoice, RankModel
from search.objective import Assignment
from search.reproducible import reproducible_solver, run
from tests.quick import quick_first
from tests.search.bound.plans_of_sets import ONE_HOST, roomy_objective, sets_with_plans


def only(choices: Sequence[RankChoice], plan: Assignment) -> list[RankChoice]:
    """The choices that a plan has."""
    return [c for c in choices if any(c.option is option for option, _ in plan)]


@pytest.mark.parametrize("seed", quick_first(3, range(12)))
def test_a_plan_is_a_solution_at_its_own_time(seed: int) -> None:
    objective = roomy_objective(seed, worlds=ONE_HOST)
    topology = objective.problem.topology
    for one, plan, ms in sets_with_plans(objective, seed):
        targets = one.targets_of_ranks()
        mine = only(targets.choices, plan)
        model = RankModel(mine, targets.cuts, topology, one.priced_ms, ms)
        solver = reproducible_solver(1.0, 0, float("inf"))
        assert run(solver, model.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        found = model.read(solver)
        assert [option for option, _ in found] == [option for option, _ in plan]
        assert all(option.is_legal(ranks, topology) for option, ranks in found)
