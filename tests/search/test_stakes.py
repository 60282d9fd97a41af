"""Whether sharding matters: where the dense part takes nearly all time it does not."""

from dataclasses import replace
from functools import cache

import pytest

from predictor.model.workload import MeasuredDense
from search.problem import Problem, Result
from search.solve import solve
from search.stakes import INSANE, stakes
from search.stop import Stop
from tests.search.problems import a_problem, a_table, a_workload, hosts


@cache
def solved(forward_ms: float) -> tuple[Problem, Result]:
    tables = [a_table(f"t{i}", 10**7, 128, 80.0 / (i + 1)) for i in range(6)]
    dense = MeasuredDense(16384, forward_ms, 2 * forward_ms, 0.1, 2**20)
    workload = replace(a_workload(*tables, batch_size=16384), dense=dense)
    problem = a_problem(workload, hosts(4))
    return problem, solve(problem, Stop(effort=0.02), 0)


def test_beside_a_long_dense_part_plans_are_alike() -> None:
    problem, result = solved(5000.0)
    found = stakes(problem, result)
    assert found is not None
    assert not found.matters
    assert found.spread < 0.01
    sane = [name for name in result.baselines if name not in INSANE]
    assert found.plans == len(result.plans) + len(sane)


def test_beside_a_short_one_they_are_not() -> None:
    problem, result = solved(0.01)
    found = stakes(problem, result)
    assert found is not None
    assert found.matters
    assert found.spread > 0.1


def test_one_plan_is_compared_with_nothing() -> None:
    problem, result = solved(5000.0)
    alone = replace(result, plans=result.plans[:1], baselines={}, baseline_plans={})
    assert stakes(problem, alone) is None
    random = {"random": result.baselines.get("random", 1.0)}
    assert stakes(problem, replace(alone, baselines=random, baseline_plans={})) is None


@pytest.mark.parametrize("share", [0.03, 0.2])
def test_a_difference_that_no_error_hides_matters(share: float) -> None:
    """All of the difference lies in the lookups; only a small one can be hidden."""
    problem, result = solved(5000.0)
    slower = {name: ms * (1 + share) for name, ms in result.baselines.items()}
    found = stakes(problem, replace(result, baselines=slower))
    assert found is not None
    assert found.spread == pytest.approx(share, abs=0.02)
    assert found.matters == (share > 0.1)
