"""The search on TorchRec's cost: bound, plans, and both against brute force."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.planners.additive import AdditiveBound, AdditivePlan, solve_additive, stack_options
from lab.planners.published import TorchRecObjective
from predictor.errors import InfeasibleError
from predictor.model.plan import ShardingType
from predictor.model.workload import Constraints
from predictor.units import MIB
from search.baselines.torchrec_planner import torchrec_plan
from search.objective import Objective
from search.problem import Problem
from search.space.enumerate import enumerate_space
from search.space.filters import prune
from search.stop import Stop
from tests.search.problems import (
    H100,
    a_problem,
    a_table,
    a_workload,
    every_plan,
    hosts,
    random_plan,
    random_problem,
)

LITTLE = 0.05


def torchrec_of(problem: Problem) -> TorchRecObjective:
    return TorchRecObjective(problem.workload, problem.topology, problem.hardware.device)


def counted(problem: Problem, *, extended: bool = False) -> Objective:
    """The options of the search, with memory as TorchRec counts it."""
    space = enumerate_space(problem.workload, problem.topology, H100.device, extended=extended)
    return Objective(
        problem, prune(torchrec_of(problem).with_torchrec_memory(space), problem.topology)
    )


def assert_sound(problem: Problem, result: AdditivePlan) -> None:
    """Legal, within TorchRec's count, rated as said, and not below its bound."""
    torchrec = torchrec_of(problem)
    tables = [result.plan.tables[key] for key in problem.workload.keys]
    assert torchrec.fits(tables)
    assert torchrec.rating_ms(tables) == pytest.approx(result.rating_ms, rel=1e-9)
    assert result.lower_bound_ms <= result.rating_ms * (1 + 1e-9)
    for option, ranks in result.assignment:
        assert option.is_legal(ranks, problem.topology)
    shared = [ranks for _, ranks in result.assignment]
    for group in enumerate_space(problem.workload, problem.topology).co_locate:
        assert len({frozenset(shared[t]) for t in group}) == 1


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_never_worse_than_torchrec_and_never_below_the_bound(seed: int) -> None:
    problem = random_problem(seed)
    baseline = torchrec_plan(problem.workload, problem.topology)
    try:
        result = solve_additive(problem, Stop(effort=LITTLE), seed)
    except InfeasibleError:
        assert baseline is None or not _legal(problem)
        return
    assert_sound(problem, result)
    if baseline is not None and _legal(problem):
        assert result.rating_ms <= baseline.rating_ms * (1 + 1e-9)
    objective, rng = counted(problem, extended=True), random.Random(seed)
    torchrec = torchrec_of(problem)
    for _ in range(20):
        plan = random_plan(objective, rng)
        if objective.fits(plan):
            assert torchrec.rating_ms(objective.table_plans(plan)) >= result.lower_bound_ms * (
                1 - 1e-9
            )


def _legal(problem: Problem) -> bool:
    """TorchRec's plan keeps constraints that TorchRec does not know."""
    baseline = torchrec_plan(problem.workload, problem.topology)
    assert baseline is not None
    space = enumerate_space(problem.workload, problem.topology)
    ranks = [plan.ranks for plan in baseline.tables]
    placed = zip(baseline.options, baseline.tables, strict=True)
    legal = all(o.is_legal(p.ranks, problem.topology) for o, p in placed)
    return legal and space.co_located(ranks)


@pytest.mark.parametrize("fill", [0.4, 0.95])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_all_plans(seed: int, fill: float) -> None:
    """Three tables on two ranks, every placement of every option."""
    rng = random.Random(seed)
    wants = Constraints(compute_kernels=("fused", "dense"))
    tables = [
        a_table(
            f"t{i}", rng.randrange(20_000, 90_000), 128, 1 + 20 * rng.random(), constraints=wants
        )
        for i in range(3)
    ]
    workload = a_workload(*tables, batch_size=64)
    problem = a_problem(workload, hosts(2))
    all_plans = sum(
        torchrec_of(problem).memory(options[1])[0].hbm_bytes
        for options in enumerate_space(workload, problem.topology).options
    )
    problem = a_problem(workload, hosts(2, hbm=int(all_plans / 2 / fill)))
    objective, torchrec = counted(problem), torchrec_of(problem)
    best = min(torchrec.rating_ms(objective.table_plans(p)) for p in every_plan(objective))
    result = solve_additive(problem, Stop(effort=LITTLE), 0, extended=False)
    assert_sound(problem, result)
    assert result.lower_bound_ms <= best * (1 + 1e-9)
    assert result.rating_ms == pytest.approx(best, rel=1e-9)


def test_the_bound_is_near_where_there_are_many_tables() -> None:
    tables = [a_table(f"t{i}", 10_000 + 999 * i, 128, 1.0 + i % 17) for i in range(60)]
    problem = a_problem(a_workload(*tables), hosts(8))
    result = solve_additive(problem, Stop(effort=0.2), 0)
    assert_sound(problem, result)
    assert result.rating_ms < 1.01 * result.lower_bound_ms


def test_a_packing_that_greedy_placement_misses() -> None:
    """Sizes 4 4 | 3 3 2 fill both ranks; the largest first onto the freest does not."""
    sizes, only = (4, 4, 3, 3, 2), Constraints(sharding_types=(ShardingType.TABLE_WISE,))
    tables = [
        a_table(f"t{i}", 100_000 * s, 64, 1.0, optimizer="sgd", constraints=only)
        for i, s in enumerate(sizes)
    ]
    workload = a_workload(*tables, batch_size=8)
    problem = a_problem(workload, hosts(2, ddr=0))
    memory = [
        torchrec_of(problem).memory(o[0])[0].hbm_bytes for o in counted(problem).space.options
    ]
    topology = hosts(2, hbm=max(sum(memory[:2]), sum(memory[2:])), ddr=0)
    tight = replace(problem, topology=topology)
    result = solve_additive(tight, Stop(effort=LITTLE), 0)
    assert_sound(tight, result)
    placed = [set(ranks) for _, ranks in result.assignment]
    assert placed[0] == placed[1] != placed[2] == placed[3] == placed[4]


def test_what_fits_nowhere_is_said() -> None:
    only = Constraints(sharding_types=(ShardingType.TABLE_WISE,))
    tables = [a_table(f"t{i}", 100_000, 64, constraints=only) for i in range(3)]
    # each fits alone, no two together
    problem = a_problem(a_workload(*tables, batch_size=8), hosts(2, hbm=40 * MIB, ddr=0))
    with pytest.raises(InfeasibleError, match="fits"):
        solve_additive(problem, Stop(effort=LITTLE), 0)


def test_the_same_seed_gives_the_same_plan_and_out_of_time_there_is_one() -> None:
    problem = random_problem(5, world=(8, 4), tables=12)
    once, again = (solve_additive(problem, Stop(effort=LITTLE), 3) for _ in range(2))
    assert once.plan == again.plan
    assert_sound(problem, solve_additive(problem, Stop(time_limit_s=1e-9), 0))


def test_the_bound_counts_memory() -> None:
    """Two options: cheap and large, dear and small. Room for one large table of two."""
    memory = [[np.array([[10.0, 0.0]]), np.array([[1.0, 0.0]])] for _ in range(2)]
    costs = [[1.0, 3.0], [1.0, 3.0]]
    for room, least in ((20.0, 1.0), (12.0, 3.0)):
        caps = np.array([[room / 2] * 2, [0.0, 0.0]])
        bound = AdditiveBound(stack_options(costs, memory, caps), 2).lower_bound_ms()
        # 1 + 3 over two ranks; the relaxation may mix the options of a table
        assert bound <= least
        assert bound >= (1.0 if room == 20.0 else 1.8) * (1 - 1e-3)
