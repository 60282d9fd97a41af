"""Plans from the programs of the lower bound."""

from __future__ import annotations

import math

import pytest

from lab.planners.instances import Instance, problem_of
from predictor.model.plan import ShardingType
from search.bound.lower_bound import LowerBound
from search.objective import Assignment, Objective
from search.propose import rounding
from search.propose.rounding import Rounding
from search.space.enumerate import whole_space
from search.space.filters import drop_uvm
from search.surrogate import Surrogate
from tests.search.problems import a_problem, a_table, a_workload, assert_valid, hosts, objective_of


def many_tables() -> tuple[Objective, Surrogate]:
    tables = [a_table(f"t{i}", 100_000 + 1000 * i, 64, 2.0 + i % 7) for i in range(64)]
    return objective_of(a_problem(a_workload(*tables, batch_size=65536), hosts(8)))


def propose(objective: Objective, surrogate: Surrogate, bound: LowerBound) -> list[Assignment]:
    return [c.assignment for c in Rounding(objective, surrogate).propose(bound)]


def test_many_like_tables_come_close_to_the_bound() -> None:
    objective, surrogate = many_tables()
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    proven = bound.solve(200)
    plans = propose(objective, surrogate, bound)
    for plan in plans:
        assert_valid(objective, plan)
    best = objective.score(plans).min()
    assert proven <= best <= proven * 1.05


@pytest.mark.slow
def test_sets_that_the_clock_cut_short_are_solved_first() -> None:
    objective, surrogate = many_tables()
    best = []
    for steps in (5, 200):
        bound = LowerBound(objective.problem, objective.space, objective.scorer)
        bound.solve(steps)
        best.append(objective.score(propose(objective, surrogate, bound)).min())
    assert best[0] < best[1] * 1.1


def test_sets_that_cannot_hold_a_better_plan_are_left_out() -> None:
    objective, surrogate = many_tables()
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    proven = bound.solve(200)
    rounding = Rounding(objective, surrogate)
    assert list(rounding.propose(bound, proven * 0.99)) == []
    assert list(rounding.propose(bound, proven * 1.2))


@pytest.mark.slow
def test_of_many_sets_the_cheapest_is_tried_first_however_little_the_bound_was_solved() -> None:
    tables = [a_table(f"t{i}", 100_000 + 1000 * i, 64, 2.0 + i % 7) for i in range(8)]
    objective, surrogate = objective_of(a_problem(a_workload(*tables), hosts(4, 2)))
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    bound.solve(1)
    assert len(bound.sets) > rounding.MANY
    few = {s for s in bound.sets if len(s.exchanges) <= rounding.FEW}
    found = Rounding(objective, surrogate)._sets(bound, math.inf, lambda: False)
    for one in bound.sets:
        Rounding.solve(one, lambda: False)
    assert found[0].proven == pytest.approx(min(one.proven for one in few))
    least = min(one.proven for one in found[:2])
    assert least == pytest.approx(min(one.proven for one in bound.sets))


def test_it_stops_with_one_plan_when_told() -> None:
    objective, surrogate = many_tables()
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    bound.solve(200)
    assert len(list(Rounding(objective, surrogate).propose(bound, stop=lambda: True))) == 1


def test_one_table_too_busy_for_a_rank_is_split() -> None:
    """All work at one table: where it stays whole, seven ranks wait."""
    tables = [a_table("busy", 1_000_000, 128, 100.0), *(a_table(f"t{i}") for i in range(7))]
    objective, surrogate = objective_of(a_problem(a_workload(*tables, batch_size=16384), hosts(8)))
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    bound.solve(200)
    plans = propose(objective, surrogate, bound)
    best = plans[int(objective.score(plans).argmin())]
    assert best[0][0].num_shards > 1


def test_a_bound_that_was_not_solved_proposes_nothing() -> None:
    objective, surrogate = objective_of(a_problem(a_workload(a_table()), hosts(2)))
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    assert propose(objective, surrogate, bound) == []


def test_solving_in_parts_proves_what_solving_at_once_does() -> None:
    tables = [a_table(f"t{i}", 200_000 * (i + 1), 64, 3.0 * (i + 1)) for i in range(5)]
    objective, _ = objective_of(a_problem(a_workload(*tables), hosts(4)))
    whole, parts = (
        LowerBound(objective.problem, objective.space, objective.scorer) for _ in range(2)
    )
    proven = [parts.solve(3) for _ in range(100)]
    assert proven == sorted(proven)
    assert proven[-1] == pytest.approx(whole.solve(300))


@pytest.mark.slow
def test_where_memory_is_scarce_rounding_with_room_left_places_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program fills all memory; whole shards do not."""
    problem = problem_of(Instance(tables=12, gpus=4, fill=0.93, seed=5))
    space = drop_uvm(whole_space(problem, lambda: None), problem.topology, 1.0)
    objective, surrogate = objective_of(problem, space)
    best = []
    for roomier in ((), rounding.ROOMIER):
        monkeypatch.setattr(rounding, "ROOMIER", roomier)
        bound = LowerBound(problem, space, objective.scorer)
        bound.solve(100)
        plans = propose(objective, surrogate, bound)
        for plan in plans:
            assert_valid(objective, plan)
        best.append(objective.score(plans).min())
    assert best[1] < best[0] * 0.99


def test_sets_whose_tables_do_not_fit_are_refuted() -> None:
    """A replica of either table fits beside shards of the other, replicas of both do not."""
    tables = [a_table(f"t{i}", 40_000_000, 64) for i in range(2)]
    problem = a_problem(a_workload(*tables), hosts(2, hbm=12 * 10**9, ddr=0))
    objective, _ = objective_of(problem)
    bound = LowerBound(problem, objective.space, objective.scorer)
    bound.solve(1)
    for one in bound.sets:
        Rounding.solve(one, lambda: False)
        kinds = {kind for _, kind in one.exchanges}
        assert (one.proven == math.inf) == (kinds == {ShardingType.DATA_PARALLEL})
