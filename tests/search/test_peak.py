"""Plans that a search returns fit at the peak of an iteration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.errors import InfeasibleError
from predictor.model.memory.peak import leave_for_shards, memory_of_plan
from predictor.model.plan import ShardingPlan
from search.in_use.plan import PlanInUse
from search.peak import fits_at_peak
from search.problem import Problem, Result
from search.solve import solve
from search.stop import Stop
from tests.search.problems import H100, a_table, a_workload, hosts

WORKLOAD = a_workload(
    *(a_table(f"t{i}", 100_000 * (i + 1), 128, 4.0 + 10 * i) for i in range(4)), batch_size=2048
)
TOPOLOGY = leave_for_shards(WORKLOAD, hosts(2), 0.0)


def a_search(problem: Problem, **more: object) -> Result:
    return solve(problem, Stop(effort=0.005), 0, **more)  # type: ignore[arg-type]


def with_limit(size: int) -> Problem:
    """Caps that let more in than there is, as sums of parts may."""
    return Problem(WORKLOAD, replace(TOPOLOGY, limit_bytes=(size, size)), H100)


def most_reserved(plan: ShardingPlan) -> int:
    memory = memory_of_plan(WORKLOAD, TOPOLOGY, plan)
    return max(rank.peak.reserved_bytes for rank in memory if rank.peak is not None)


@pytest.fixture(scope="module")
def first() -> Result:
    return a_search(Problem(WORKLOAD, TOPOLOGY, H100), tolerance=0.0)


def test_a_plan_that_does_not_fit_at_its_peak_gives_way(first: Result) -> None:
    limit = most_reserved(first.best.plan) - 1
    problem = with_limit(limit)
    assert not fits_at_peak(problem, first.best.plan)
    found = a_search(problem, tolerance=0.0)
    assert all(most_reserved(p.plan) <= limit for p in found.plans)
    assert found.lower_bound_ms <= first.lower_bound_ms
    assert found.evaluations > first.evaluations


def test_a_plan_that_fits_is_searched_once(first: Result) -> None:
    found = a_search(with_limit(most_reserved(first.best.plan)), tolerance=0.0)
    assert found.best == first.best
    assert found.evaluations == first.evaluations


def test_an_unmeetable_limit_says_what_the_best_plan_misses() -> None:
    with pytest.raises(InfeasibleError, match=r"at the peak.*rank . misses [\d.]+ \w+ of HBM"):
        a_search(with_limit(1000))


def test_a_plan_in_use_that_fits_but_for_its_peak_cannot_stay(first: Result) -> None:
    plan = first.best.plan
    problem = with_limit(most_reserved(plan) - 1)
    found = a_search(problem, in_use=PlanInUse(plan))
    assert found.in_use is not None
    assert "misses" in found.in_use.misfits[0]
