"""The preferred plan: simpler, about as fast, never slower than the tolerance or a baseline."""

from __future__ import annotations

import pytest

from predictor.cost.errors import CostErrors, known_errors
from predictor.predict import predict
from search.candidate import Candidate
from search.improve.local_search import LocalSearch
from search.objective import Assignment, Objective
from search.prefer import ALIKE, DRAWS, SEED, TOLERANCE, moved_bytes, prefer_simple, simplicity
from search.problem import Problem, Result
from search.solve import solve
from search.stop import Stop
from tests.quick import quick_only
from tests.search.problems import (
    CPU,
    a_problem,
    a_table,
    a_workload,
    assert_valid,
    hosts,
    objective_of,
    random_problem,
    several_lookups,
)

QUICK = 0.02


def assignment(
    problem: Problem, result: Result, objective: Objective | None = None
) -> tuple[Objective, Assignment]:
    objective = objective or objective_of(problem)[0]
    plan = result.best.plan
    choices = []
    for table, key in enumerate(objective.space.keys):
        option = objective.space.option_of(table, plan.tables[key])
        assert option is not None
        choices.append((option, plan.tables[key].ranks))
    return objective, tuple(choices)


@pytest.mark.parametrize("seed", quick_only((8,), range(10)))
def test_it_is_about_as_fast_and_no_baseline_is_faster(seed: int) -> None:
    problem = random_problem(seed, tables=4)
    fastest = solve(problem, Stop(effort=QUICK), 0, tolerance=0.0)
    result = solve(problem, Stop(effort=QUICK), 0)
    assert fastest.fastest is None
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


@pytest.mark.parametrize("seed", quick_only((0,), range(3)))
def test_it_is_expected_to_be_as_fast_as_the_fastest(seed: int) -> None:
    problem = several_lookups(seed)
    objective, preferred = assignment(problem, solve(problem, Stop(effort=QUICK), 0))
    fastest = solve(problem, Stop(effort=QUICK), 0, tolerance=0.0)
    sizes = known_errors(problem.hardware, problem.topology)
    plans = [preferred, assignment(problem, fastest, objective)[1]]
    times = objective.score_draws(plans, CostErrors(sizes, DRAWS, SEED))
    least = fastest.best.iteration_ms
    assert times[0].mean() <= times[1].mean() + ALIKE * least * (1 + 1e-9)
    assert_valid(objective, preferred)


def test_the_same_seed_prefers_the_same_plan() -> None:
    problem = several_lookups(3)
    first, second = (solve(problem, Stop(effort=QUICK), 5) for _ in range(2))
    assert [p.plan.tables for p in first.plans] == [p.plan.tables for p in second.plans]


def test_no_limit_no_choice() -> None:
    """Where only the fastest plan is within the limit, the ranking stays."""
    problem = several_lookups(0)
    objective, surrogate = objective_of(problem)
    found = solve(problem, Stop(effort=QUICK), 0, tolerance=0.0)
    _, own = assignment(problem, found, objective)
    search = LocalSearch(objective, surrogate, 0)
    ms = float(objective.score([own])[0])
    ranked = [Candidate(own, ms, "x")]
    assert prefer_simple(search, ranked, ms * (1 - 1e-9)) == ranked


def test_a_split_that_gains_nothing_is_undone() -> None:
    """A tiny table is split by columns, which takes an exchange of its own."""
    problem = a_problem(
        a_workload(a_table("large", 400_000, 128, 60.0), a_table("tiny", 500, 64, 1.0)), hosts(2)
    )
    objective, surrogate = objective_of(problem)
    large, tiny = (
        next(o for o in options if o.sharding_type == kind and o.num_shards == shards)
        for options, kind, shards in zip(
            objective.space.options, ("table_wise", "column_wise"), (1, 2), strict=True
        )
    )
    split: Assignment = ((large, (0,)), (tiny, (0, 1)))
    ms = float(objective.score([split])[0])
    search = LocalSearch(objective, surrogate, 0)
    chosen = prefer_simple(search, [Candidate(split, ms, "x")], ms * (1 + TOLERANCE))[0]
    assert simplicity(chosen.assignment) < simplicity(split)
    assert chosen.iteration_ms <= ms * (1 + TOLERANCE)
    assert chosen.iteration_ms == pytest.approx(float(objective.score([chosen.assignment])[0]))


def test_moved_bytes_are_those_of_the_busiest_rank() -> None:
    problem = a_problem(a_workload(a_table("a"), a_table("b")), hosts(2), CPU)
    objective, _ = objective_of(problem)
    one, other = (
        next(o for o in options if o.sharding_type == "table_wise")
        for options in objective.space.options
    )
    apart = moved_bytes(objective, ((one, (0,)), (other, (1,))))
    together = moved_bytes(objective, ((one, (0,)), (other, (0,))))
    assert together == pytest.approx(2 * apart)
