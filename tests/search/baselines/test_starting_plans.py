"""Baselines are what they say, and only those that fit are shown."""

from __future__ import annotations

import pytest

from predictor.model.plan import ShardingType
from predictor.units import MIB
from search.baselines.starting_plans import GREEDY, plan_baselines
from tests.search.problems import a_problem, a_table, a_workload, hosts, objective_of

TABLES = [
    a_table("large", 4_000_000, 32, 1.0),
    a_table("wide", 10_000, 256, 1.0),
    a_table("busy", 10_000, 32, 200.0),
    a_table("plain", 10_000, 32, 1.0),
]


def test_greedy_rules_put_their_heaviest_table_alone() -> None:
    objective, surrogate = objective_of(a_problem(a_workload(*TABLES), hosts(2)))
    plans = plan_baselines(objective, surrogate, 0)
    heaviest = {"greedy by size": 0, "greedy by dim": 1, "greedy by lookups": 2}
    for name, table in heaviest.items():
        plan = plans[name]
        assert all(o.sharding_type is ShardingType.TABLE_WISE for o, _ in plan)
        alone = plan[table][1]
        assert all(ranks != alone for t, (_, ranks) in enumerate(plan) if t != table), name
    assert all(o.sharding_type is ShardingType.ROW_WISE for o, _ in plans["row_wise all"])
    assert set(plans) == {"torchrec default", *GREEDY, "row_wise all", "random"}


def test_the_random_one_depends_on_the_seed_alone() -> None:
    objective, surrogate = objective_of(a_problem(a_workload(*TABLES), hosts(4)))
    plans = [plan_baselines(objective, surrogate, seed)["random"] for seed in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]


@pytest.mark.parametrize("hbm", [600 * MIB, 330 * MIB])
def test_only_what_fits_is_shown(hbm: int) -> None:
    objective, surrogate = objective_of(a_problem(a_workload(*TABLES), hosts(2, hbm=hbm)))
    plans = plan_baselines(objective, surrogate, 0)
    assert plans
    assert all(objective.fits(plan) for plan in plans.values())
