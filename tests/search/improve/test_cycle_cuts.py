"""The cut of a plan is its predicted time there, and near it for plans like it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from predictor.hardware.schema import HardwareProfile
from search.improve.cycle_cuts import critical_cut
from search.model.cycle_cut import CycleCut
from search.objective import Assignment, Objective
from tests.search.problems import (
    CPU,
    H100,
    a_problem,
    a_table,
    a_workload,
    copying,
    hosts,
    objective_of,
    random_plan,
    random_problem,
)


def value_of(cut: CycleCut, objective: Objective, plan: Assignment) -> float:
    totals = objective.scorer.totals(objective.table_plans(plan))
    return cut.at(totals, totals.any(axis=-1))


@pytest.mark.parametrize("profile", [copying(H100), H100, CPU], ids=["no host", "h100", "cpu"])
@pytest.mark.parametrize("seed", range(6))
def test_it_is_tight_at_its_own_plan(seed: int, profile: HardwareProfile) -> None:
    objective, surrogate = objective_of(replace(random_problem(seed), hardware=profile))
    plan = random_plan(objective, random.Random(seed))
    cut = critical_cut(surrogate, plan)
    assert cut is not None or profile is H100
    if cut is not None:
        assert value_of(cut, objective, plan) == pytest.approx(objective.score([plan])[0])


def test_it_follows_what_moves_do_to_the_slowest_rank() -> None:
    tables = [a_table(f"t{i}", 10**5 * (i + 1), 128, 20.0) for i in range(12)]
    problem = a_problem(a_workload(*tables, batch_size=32768), hosts(4))
    objective, surrogate = objective_of(problem)
    options = [next(o for o in opts if o.label == "TW/fused") for opts in objective.space.options]
    rng = random.Random(1)
    plans = [tuple((o, (rng.randrange(4),)) for o in options) for _ in range(40)]
    times = objective.score(plans)
    cut = critical_cut(surrogate, plans[int(times.argmin())])
    assert cut is not None
    values = np.array([value_of(cut, objective, plan) for plan in plans])
    assert np.abs(values / times - 1).max() < 0.05
    assert np.corrcoef(values, times)[0, 1] > 0.98


def test_groups_are_those_of_the_plan() -> None:
    objective, surrogate = objective_of(
        a_problem(a_workload(a_table(), batch_size=65536), hosts(2))
    )
    for option in objective.space.options[0]:
        ranks = tuple(r for unit in objective.legal(option).units for r in unit[0])
        cut = critical_cut(surrogate, ((option, ranks),))
        if cut is not None:
            assert cut.groups == {objective.scorer.group_index(0, objective.place(option, ranks))}
