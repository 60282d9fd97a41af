"""Problems of pooled tables on four ranks with plans of whole tables, and their explanations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from predictor.model.plan import ShardingPlan
from predictor.model.workload import Table
from predictor.predict import predict
from search.problem import Problem
from shardopt.api.document import ExplainAnswer, GivenPlan
from shardopt.api.explanation import explain_plans
from shardopt.api.setting import Setting
from tests.builders import a_table, a_topology, a_workload, device_bound, plan_of, table_wise

NASTY = "<script>alert('t')</script>&amp;\"]]>"
WORLD = 4


def tables(*rows: int) -> list[Table]:
    """``t0``, ``t1``, ... of so many rows each."""
    return [a_table(f"t{i}", n) for i, n in enumerate(rows)]


def a_problem(
    model_tables: Sequence[Table], world: int = WORLD, local: int | None = None
) -> Problem:
    """Work enough that kernels, on a quick host, set the time."""
    workload = a_workload(*model_tables, batch_size=16384)
    return Problem(workload, a_topology(world, local), device_bound())


def whole(problem: Problem, ranks: Sequence[int]) -> ShardingPlan:
    """Every table whole, on the rank given for it."""
    pairs = zip(problem.workload.tables, ranks, strict=True)
    candidate = [table_wise(table, rank) for table, rank in pairs]
    return plan_of(problem.workload, problem.topology, candidate)


def predicted(problem: Problem, plan: ShardingPlan, name: str = "plan.json") -> GivenPlan:
    """A plan with its prediction."""
    prediction = predict(problem.workload, problem.topology, problem.hardware, plan)
    return GivenPlan.of(plan, prediction, plan=name)


def a_setting(problem: Problem) -> Setting:
    """Return a setting as the command line would have it."""
    return Setting(
        problem.workload, problem.topology, problem.topology, problem.hardware, "h100", "default"
    )


def explained(problem: Problem, *plans: GivenPlan) -> ExplainAnswer:
    """Explain the first of some plans, without advice."""
    return explain_plans(a_setting(problem), plans, advise=False)


@cache
def nasty() -> ExplainAnswer:
    """Twelve tables, one with a hostile name; most on rank 0, beside a plan that spreads them."""
    model_tables = tables(*(1000 * (i + 1) for i in range(12)))
    model_tables[3] = replace(model_tables[3], name=NASTY)
    problem = a_problem(model_tables)
    return explained(
        problem,
        predicted(problem, whole(problem, [0] * 9 + [1, 2, 3]), "</script>.json"),
        predicted(problem, whole(problem, [i % WORLD for i in range(12)]), "even.json"),
    )
