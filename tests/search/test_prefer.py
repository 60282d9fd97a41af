"""Choice among tied plans: least memory on the fullest rank, then the simplest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.model.memory.ranks import plan_memory
from predictor.model.plan import ShardingType
from predictor.model.workload import Constraints
from predictor.predict import predict
from predictor.units import GIB
from search.candidate import Candidate
from search.objective import Assignment, Objective
from search.params import DEFAULT
from search.prefer import TOLERANCE, prefer, simplicity
from search.problem import Problem, Result, TieSummary
from search.solve import solve
from search.stop import Stop
from search.surrogate import Surrogate
from tests.quick import quick_only
from tests.search.problems import (
    CPU,
    H100,
    a_problem,
    a_table,
    a_workload,
    copying,
    hosts,
    objective_of,
    random_problem,
    several_lookups,
)

QUICK_PREFER = 0.02


def fullest(problem: Problem, result: Result) -> int:
    plan, device = result.best.plan, problem.hardware.device
    return max(r.hbm_bytes for r in plan_memory(problem.workload, problem.topology, plan, device))


def with_host(problem: Problem, times: float) -> Problem:
    """The same ranks with hosts that take so many times as long; five times as long, they set the
    pace whatever the plan."""
    cost = problem.hardware.overheads
    slower = {n: times * v for n, v in cost if n.endswith("_us") and isinstance(v, float)}
    hardware = problem.hardware.model_copy(update={"overheads": cost.model_copy(update=slower)})
    return replace(problem, hardware=hardware)


@pytest.mark.parametrize("seed", quick_only((8,), range(10)))
def test_it_is_about_as_fast_and_no_baseline_is_faster(seed: int) -> None:
    problem = random_problem(seed, tables=4)
    fastest = solve(problem, Stop(effort=QUICK_PREFER), 0, tolerance=0.0)
    result = solve(problem, Stop(effort=QUICK_PREFER), 0)
    assert fastest.fastest is None
    assert fastest.ties is None
    assert result.ties is not None
    assert result.best.iteration_ms <= fastest.best.iteration_ms * (1 + TOLERANCE) * (1 + 1e-9)
    assert result.lower_bound_ms <= result.best.iteration_ms * (1 + 1e-9)
    assert result.best.iteration_ms <= min(result.baselines.values()) * (1 + 1e-9)
    times = [p.iteration_ms for p in result.plans]
    assert times[0] <= min(times) * (1 + 1e-6)
    if result.fastest is not None:
        assert result.fastest.iteration_ms == pytest.approx(fastest.best.iteration_ms)
        assert result.fastest.iteration_ms < result.best.iteration_ms
    again = predict(problem.workload, problem.topology, problem.hardware, result.best.plan)
    assert again.iteration_ms == pytest.approx(result.best.iteration_ms, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", quick_only((4,), (4, 16)))
def test_where_the_host_sets_the_pace_the_devices_have_least_to_do(ranks: int) -> None:
    """The chosen plan's devices take no more than those of a search for devices alone."""
    tables = [a_table(f"t{i}", 20_000_000, 64, 5.0 * (1 + i % 4)) for i in range(8)]
    problem = with_host(a_problem(a_workload(*tables, batch_size=2048), hosts(ranks), H100), 5)
    result = solve(problem, Stop(effort=0.04), 0)
    ties = result.ties
    assert ties is not None
    assert ties.host_bound
    assert ties.plans > 10
    assert ties.device_ms <= ties.device_range_ms[0] * (1 + TOLERANCE)
    assert ties.device_ms < 0.5 * result.best.iteration_ms
    alone = solve(with_host(problem, 1e-6), Stop(effort=0.04), 0, tolerance=0.0)
    assert ties.device_ms <= alone.best.iteration_ms * 1.04


@pytest.mark.slow
def test_the_same_seed_prefers_the_same_plan() -> None:
    problem = several_lookups(3)
    first, second = (solve(problem, Stop(effort=QUICK_PREFER), 5) for _ in range(2))
    assert [p.plan.tables for p in first.plans] == [p.plan.tables for p in second.plans]


def two_plans(problem: Problem) -> tuple[Objective, Surrogate, list[Assignment]]:
    """All tables whole: alternately on both ranks, and all on the first."""
    objective, surrogate = objective_of(problem)
    unsharded = [
        next(o for o in options if o.sharding_type == "table_wise")
        for options in objective.space.options
    ]
    spread = tuple((option, (i % 2,)) for i, option in enumerate(unsharded))
    return (
        objective,
        surrogate,
        [spread, tuple((option, (0,)) for option in unsharded)],
    )


def preferred(
    objective: Objective,
    surrogate: Surrogate,
    ranked: list[Candidate],
    limit: float,
    tolerance: float,
    moves: int,
) -> tuple[list[Candidate], TieSummary]:
    return prefer(objective, surrogate, objective.score, ranked, limit, tolerance, DEFAULT, moves)


def test_no_limit_no_choice() -> None:
    """The ranking stays if only the fastest plan is within the limit."""
    objective, surrogate, (plan, _) = two_plans(a_problem(a_workload(a_table("a")), hosts(2), CPU))
    ms = float(objective.score([plan])[0])
    ranked = [Candidate(plan, ms, "x")]
    chosen, ties = preferred(objective, surrogate, ranked, ms / 2, 0.0, moves=2000)
    assert chosen == ranked
    assert ties.plans == 1
    assert ties.decided_by is None


def test_of_tied_plans_the_fullest_rank_decides() -> None:
    tables = [a_table(f"t{i}", 20_000_000, 64) for i in range(4)]
    problem = a_problem(a_workload(*tables), hosts(2), H100)
    objective, surrogate, (spread, together) = two_plans(problem)
    ms = float(objective.score([together])[0])
    ranked = [Candidate(together, ms, "x")]
    chosen, ties = preferred(objective, surrogate, ranked, ms * 1.5, 0.5, moves=2000)
    most = objective.memory(chosen[0].assignment)[0].max()
    assert ties.decided_by == "memory"
    assert ties.fullest_bytes == (most, objective.memory(together)[0].max())
    assert most <= objective.memory(spread)[0].max() * (1 + DEFAULT.alike)


def test_where_the_host_sets_the_pace_devices_that_take_longer_do_not_tie() -> None:
    tables = [a_table(f"t{i}", 20_000_000, 64) for i in range(4)]
    problem = with_host(a_problem(a_workload(*tables), hosts(2), H100), 5)
    objective, surrogate, (_, together) = two_plans(problem)
    ms = float(objective.score([together])[0])
    chosen, ties = preferred(
        objective, surrogate, [Candidate(together, ms, "x")], ms * 1.5, TOLERANCE, moves=2000
    )
    assert chosen[0].assignment != together
    assert ties.device_ms * (1 + TOLERANCE) < ties.device_range_ms[1]
    assert ties.decided_by == "device time"


def test_a_plan_that_a_slow_host_makes_slow_does_not_tie() -> None:
    """It needs less memory, and twice the launches: two exchanges instead of one."""
    tables = [a_table(f"t{i}", 20_000_000, 64, 1.0) for i in range(4)]
    problem = with_host(a_problem(a_workload(*tables, batch_size=16384), hosts(2), H100), 5)
    objective, surrogate, (spread, _) = two_plans(problem)
    columns = [
        next(o for o in options if o.sharding_type == "column_wise" and o.num_shards == 1)
        for options in objective.space.options
    ]
    lean = (*spread[:2], (columns[2], (0,)), (columns[3], (1,)))
    few = (*((option, (0,)) for option, _ in spread[:3]), spread[3])
    ranked = [Candidate(plan, 1.0, "x") for plan in (lean, few)]
    candidates, ties = preferred(objective, surrogate, ranked, 1.5, 0.1, moves=0)
    assert candidates[0].assignment == few
    assert ties.decided_by == "expected time"
    assert ties.expected_ms[0] * 1.1 < ties.expected_ms[1]


def test_a_rule_decides_where_the_fastest_plan_differs_from_the_best_by_it() -> None:
    """The chosen plan is alike to either one: its spread of memory is between theirs."""
    size = 80 * GIB // 260
    tables = [a_table("a", size // 10, 64), a_table("b", size // 10, 64)]
    tables += [a_table(f"t{i}", round(0.0075 * size), 64) for i in range(4)]
    problem = with_host(a_problem(a_workload(*tables), hosts(2), H100), 1e-6)
    objective, surrogate, (first, _) = two_plans(problem)
    fastest, middle, even = (
        tuple((option, (rank,)) for (option, _), rank in zip(first, ranks, strict=True))
        for ranks in ((0, 1, 0, 0, 0, 0), (0, 1, 0, 0, 0, 1), (0, 1, 0, 0, 1, 1))
    )
    ranked = [Candidate(p, ms, "x") for p, ms in ((fastest, 0.1), (middle, 0.11), (even, 0.12))]
    chosen, ties = preferred(objective, surrogate, ranked, 2.0, 1.0, moves=0)
    assert not ties.host_bound
    assert chosen[0].assignment == middle
    assert ties.decided_by == "balance"
    slower = [replace(candidate, iteration_ms=1.0) for candidate in ranked]
    chosen, ties = preferred(objective, surrogate, slower, 2.0, 1.0, moves=0)
    assert chosen[0].iteration_ms < 1.0
    assert ties.decided_by is None  # it is the fastest itself


@pytest.mark.slow
def test_of_plans_with_as_little_memory_the_simplest_is_chosen() -> None:
    """Tables stay whole even though halves fit the limit too."""
    tables = [a_table(f"t{i}", 20_000_000, 64) for i in range(4)]
    problem = a_problem(a_workload(*tables), hosts(2), H100)
    objective, surrogate, (unsharded, _) = two_plans(problem)
    halves = tuple(
        (next(o for o in options if o.num_shards == 2 and o.column_width == 32), (0, 1))
        for options in objective.space.options
    )
    cut = (*unsharded[:2], *halves[2:])
    limit = 2 * float(objective.score([cut, unsharded]).max())
    chosen, ties = preferred(
        objective, surrogate, [Candidate(cut, 0.1, "x")], limit, 1.0, moves=2000
    )
    assert ties.decided_by == "sharding types"
    assert simplicity(chosen[0].assignment) == simplicity(unsharded) == (1, 4)


def test_memory_is_evened_out_within_the_tolerance() -> None:
    """Lookups part evenly only with both large tables on one rank; no baseline sees that."""
    table_wise = Constraints(sharding_types=(ShardingType.TABLE_WISE,), compute_kernels=("fused",))
    loads = [(80, 80.0), (80, 70.0), (8, 60.0), (8, 50.0), (8, 40.0)]
    tables = [
        a_table(f"t{i}", millions * 10**6, 64, lookups, constraints=table_wise)
        for i, (millions, lookups) in enumerate(loads)
    ]
    problem = a_problem(a_workload(*tables), hosts(2), copying(H100))
    fastest = solve(problem, Stop(effort=QUICK_PREFER), 0, tolerance=0.0)
    result = solve(problem, Stop(effort=QUICK_PREFER), 0, tolerance=0.3)
    assert result.best.iteration_ms <= fastest.best.iteration_ms * 1.3 * (1 + 1e-9)
    assert fullest(problem, result) < fullest(problem, fastest)


def test_a_table_in_one_column_shard_becomes_table_wise_where_that_ties() -> None:
    tables = [a_table("a", 20_000_000, 64), *(a_table(n, 10_000_000, 32) for n in "bc")]
    problem = a_problem(a_workload(*tables), hosts(2), H100)
    objective, surrogate, _ = two_plans(problem)
    column = [
        next(o for o in options if o.sharding_type == "column_wise")
        for options in objective.space.options
    ]
    assert [option.num_shards for option in column] == [2, 1, 1]
    plan = tuple(zip(column, ((0, 1), (0,), (1,)), strict=True))
    ms = float(objective.score([plan])[0])
    for limit, stays in ((ms / 2, True), (2 * ms, False)):
        chosen, _ = preferred(
            objective, surrogate, [Candidate(plan, ms, "x")], limit, 1.0, moves=2000
        )
        kinds = {o.sharding_type for o, _ in chosen[0].assignment if o.num_shards == 1}
        assert ("column_wise" in kinds) is stays
