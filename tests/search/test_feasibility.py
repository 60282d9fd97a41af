"""Plans in little memory: what fits is found, what does not is proven not to."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from predictor.errors import InfeasibleError
from predictor.model.plan import ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Constraints
from predictor.units import MIB
from search.feasibility import can_fit, find_feasible, least_extra_bytes
from search.problem import Problem
from search.solve import solve
from search.stop import Stop
from tests.quick import quick_first
from tests.search.problems import a_problem, a_table, a_workload, assert_valid, hosts, objective_of

WHOLE = Constraints(sharding_types=(ShardingType.TABLE_WISE,), compute_kernels=("fused",))


def packed(seed: int, fill: float) -> Problem:
    """20 to 60 tables that stay whole, cut such that each of 4 to 8 ranks can be filled alike."""
    rng = random.Random(seed)
    ranks, parts = rng.randint(4, 8), rng.randint(5, 7)
    cuts = [
        np.diff([0.0, *sorted(rng.uniform(0, 1) for _ in range(parts - 1)), 1.0])
        for _ in range(ranks)
    ]
    rows = [max(50, int(2_000_000 * share)) for rank in cuts for share in rank]
    order = rng.sample(range(len(rows)), len(rows))
    tables = [a_table(f"t{i}", rows[k], 32, constraints=WHOLE) for i, k in enumerate(order)]
    workload = a_workload(*tables, batch_size=64)
    objective, _ = objective_of(a_problem(workload, hosts(ranks)))
    need = {
        k: o[0].memory[0].hbm_bytes for k, o in zip(order, objective.space.options, strict=True)
    }
    used = [sum(need[r * parts + i] for i in range(parts)) for r in range(ranks)]
    return a_problem(workload, hosts(ranks, hbm=int(max(used) / fill), ddr=0))


@pytest.mark.parametrize("fill", [0.99, 0.999])
@pytest.mark.parametrize("seed", quick_first(1, range(6)))
def test_what_is_packed_to_the_brim_is_found(seed: int, fill: float) -> None:
    problem = packed(seed, fill)
    assert 20 <= len(problem.workload.tables) <= 60
    objective, _ = objective_of(problem)
    all_of_it = float(objective.caps[0].sum())
    least = sum(o[0].memory[0].hbm_bytes for o in objective.space.options)
    assert least > 0.985 * all_of_it
    result = find_feasible(objective, 10.0, 0)
    assert result.assignment is not None
    assert_valid(objective, result.assignment)


def test_the_search_finds_it_too() -> None:
    result = solve(packed(0, 0.995), Stop(effort=0.02), 0)
    assert result.plans


def test_what_cannot_be_packed_is_proven_not_to_fit() -> None:
    """Room for all tables together, but each fills more than half of a rank."""
    tables = [a_table(f"t{i}", 120_000, 64, constraints=WHOLE) for i in range(5)]
    problem = a_problem(
        a_workload(*tables, batch_size=16), Topology(4, 4, (50 * MIB,) * 4, (0,) * 4)
    )
    objective, _ = objective_of(problem)
    need = [o[0].memory[0].hbm_bytes for o in objective.space.options]
    assert sum(need) < objective.caps.sum()
    result = find_feasible(objective, 10.0, 0)
    assert result.assignment is None
    assert result.proven
    assert sum(hbm for hbm, _ in result.missing) == 2 * need[0] - 50 * MIB
    assert can_fit(problem, objective.space, 10.0) is False
    extra, least = least_extra_bytes(problem, objective.space, 0, 10.0)
    assert (extra, least) == (2 * need[0] - 50 * MIB, True)
    with pytest.raises(InfeasibleError, match="no plan fits;"):
        solve(problem, Stop(effort=0.1), 0)


def test_ranks_of_two_kinds_of_hosts() -> None:
    """Tables that fit the large hosts alone lie there; the bound and baselines know the caps."""
    large = [a_table(f"large{i}", 400_000, 64, 5.0, constraints=WHOLE) for i in range(2)]
    small = [a_table(f"small{i}", 60_000, 64, 20.0, constraints=WHOLE) for i in range(4)]
    caps = (40 * MIB, 40 * MIB, 130 * MIB, 130 * MIB)
    problem = a_problem(a_workload(*large, *small, batch_size=256), Topology(4, 2, caps, (0,) * 4))
    result = solve(problem, Stop(effort=0.1), 0, top_k=4)
    objective, _ = objective_of(problem)
    for ranked in [*(r.plan for r in result.plans), *result.baseline_plans.values()]:
        plans = [ranked.tables[key] for key in objective.space.keys]
        chosen = [objective.space.option_of(i, plan) for i, plan in enumerate(plans)]
        assert_valid(
            objective, tuple((o, p.ranks) for o, p in zip(chosen, plans, strict=True) if o)
        )
        assert {r for i in range(2) for r in ranked.tables[f"large{i}"].ranks} <= {2, 3}
    assert result.lower_bound_ms <= result.best.iteration_ms
    tighter = replace(problem, topology=replace(problem.topology, hbm_cap_bytes=caps[:2] * 2))
    with pytest.raises(InfeasibleError, match="'large0': no sharding option is left"):
        solve(tighter, Stop(effort=0.1), 0)
