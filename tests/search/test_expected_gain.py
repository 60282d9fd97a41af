"""Expected saving of a plan: repeatable, priced, and right on simulated truths."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from predictor.cost.errors import CostErrors, known_errors
from predictor.errors import PlanError
from predictor.model.plan import ShardingPlan
from predictor.model.workload import DenseTimes, MeasuredDense
from search import expected_gain as of_gains
from search.baselines.starting_plans import TORCHREC
from search.expected_gain import (
    INSANE,
    ExpectedGain,
    drawn_times,
    expected_gain,
    gain_over_baseline,
    stakes,
)
from search.objective import Objective
from search.problem import Problem, Result
from search.solve import solve
from search.space.enumerate import reduced_space
from search.stop import Stop
from tests.search.problems import (
    CPU,
    H100,
    a_problem,
    a_table,
    a_workload,
    hosts,
    random_plan,
    several_lookups,
)


def two_plans(problem: Problem, seed: int = 0) -> tuple[ShardingPlan, ShardingPlan]:
    objective, rng = Objective(problem, reduced_space(problem)), random.Random(seed)
    first, second = (objective.sharding_plan(random_plan(objective, rng)) for _ in range(2))
    return first, second


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_gives_the_same_gain(seed: int) -> None:
    problem = several_lookups(seed)
    plan, baseline = two_plans(problem, seed)
    first, second = (expected_gain(problem, plan, baseline, "x", seed=3) for _ in range(2))
    assert first == second
    assert first.interval[0] <= first.mean <= first.interval[1]
    assert first.baseline == "x"
    assert all(map(math.isfinite, (first.mean, *first.interval, first.nominal)))
    assert first != expected_gain(problem, plan, baseline, "x", seed=4)


def test_a_plan_gains_nothing_over_itself() -> None:
    problem = several_lookups(0)
    plan, _ = two_plans(problem)
    gain = expected_gain(problem, plan, plan, "itself")
    assert gain == ExpectedGain("itself", 0.0, (0.0, 0.0), 0.0, gain.draws)


def test_without_errors_the_gain_is_the_foretold_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile that states no errors."""
    monkeypatch.setattr(of_gains, "PLAN_ERROR", 0.0)
    problem = several_lookups(1)
    exact = {}
    for name in ("memory", "gemm", "embedding", "elementwise", "overheads"):
        group = getattr(CPU, name)
        provenance = group.provenance.model_copy(
            update={"error": CPU.embedding.provenance.error.model_copy(update={"mean": 0.0})}
        )
        exact[name] = group.model_copy(update={"rel_error": 0.0, "provenance": provenance})
    links = {}
    for name in ("intra", "inter"):
        link = getattr(CPU.collectives, name)
        provenance = link.provenance.model_copy(update={"error": exact["gemm"].provenance.error})
        links[name] = link.model_copy(update={"rel_error": 0.0, "provenance": provenance})
    exact["collectives"] = CPU.collectives.model_copy(update=links)
    hardware = CPU.model_copy(update=exact)
    plan, baseline = two_plans(problem)
    gain = expected_gain(a_problem(problem.workload, hosts(2), hardware), plan, baseline, "x")
    assert gain.mean == pytest.approx(gain.nominal)
    assert gain.interval == pytest.approx((gain.nominal, gain.nominal))


def test_a_plan_of_another_model_is_refused() -> None:
    plan, _ = two_plans(several_lookups(0))
    with pytest.raises(PlanError):
        expected_gain(several_lookups(0, tables=4), plan, plan, "x")


def test_the_gain_over_a_baseline_is_that_of_the_best_plan() -> None:
    problem = several_lookups(2)
    result = solve(problem, Stop(effort=0.002), 0)
    gain = gain_over_baseline(problem, result)
    assert gain is not None
    assert gain.baseline == TORCHREC
    foretold = 1 - result.best.iteration_ms / result.baselines[TORCHREC]
    assert gain.nominal == pytest.approx(foretold)
    assert gain_over_baseline(problem, result, "no such planner") is None


def test_what_was_balanced_by_predicted_costs_is_expected_to_gain_less() -> None:
    """Every error of a cost makes one rank of a balanced plan slower than the others; where one
    rank has more work than the others anyway, errors even out."""
    tables = [a_table(f"t{i}", 50_000, 64, 30.0) for i in range(8)]
    problem = a_problem(a_workload(*tables, batch_size=2048), hosts(2), CPU)
    objective = Objective(problem, reduced_space(problem))
    unsharded = [
        next(o for o in t if o.sharding_type == "table_wise") for t in objective.space.options
    ]
    even, uneven = (
        objective.sharding_plan(tuple((o, (int(i < first),)) for i, o in enumerate(unsharded)))
        for first in (4, 6)
    )
    gain = expected_gain(problem, even, uneven, "uneven")
    assert 0.005 < gain.nominal - gain.mean < 0.05


@pytest.mark.slow
def test_the_interval_holds_nine_truths_of_ten() -> None:
    """Truths drawn with other seeds than the gain's; each ratio has an error of its own."""
    inside, off = [], []
    own = np.exp(of_gains.PLAN_ERROR * np.random.default_rng(0).standard_normal(400))
    for seed in range(4):
        problem = several_lookups(seed)
        result = solve(problem, Stop(effort=0.02), 0)
        gain = gain_over_baseline(problem, result)
        assert gain is not None
        baseline = result.baseline_plans[TORCHREC]
        plans = result.best.plan, baseline
        _, times = drawn_times(problem, plans, draws=400, seed=100 + seed)
        truths = 1 - own * times[0] / times[1]
        low, high = gain.interval
        inside.append(float(np.mean((truths >= low) & (truths <= high))))
        off.append(gain.mean - float(truths.mean()))
    assert 0.85 <= np.mean(inside) <= 0.95
    assert max(map(abs, off)) < 0.01


def test_errors_that_all_plans_share_leave_little_spread() -> None:
    """One error of all lookups changes both plans; errors by table decide between them."""
    problem = several_lookups(4)
    plan, baseline = two_plans(problem)
    numbers = Objective(problem, reduced_space(problem)).scorer
    rows = np.array(
        [
            [numbers.number(i, p.tables[k]) for i, k in enumerate(problem.workload.keys)]
            for p in (plan, baseline)
        ]
    )
    sizes = known_errors(problem.hardware, problem.topology)
    spread = {}
    for name, error in (("shared", "own"), ("own", "shared")):
        shared = {k: type(s)(**{name: 0.07, error: 0.0}) for k, s in sizes.items()}
        times = problem.perturbed(numbers, CostErrors(shared, 64, 0)).score_numbered(rows)
        spread[name] = float((times[0] / times[1]).std())
    assert spread["shared"] < spread["own"]


def test_gpu_ranks_are_priced_too() -> None:
    problem = a_problem(several_lookups(5).workload, hosts(4), H100)
    plan, baseline = two_plans(problem)
    gain = expected_gain(problem, plan, baseline, "x")
    assert gain.interval[0] < gain.mean < gain.interval[1]


@cache
def solved(forward_ms: float) -> tuple[Problem, Result]:
    tables = [a_table(f"t{i}", 10**7, 128, 80.0 / (i + 1)) for i in range(6)]
    dense = MeasuredDense(DenseTimes(16384, forward_ms, 2 * forward_ms, 0.1, 1.0))
    workload = replace(a_workload(*tables, batch_size=16384), dense=dense)
    problem = a_problem(workload, hosts(4))
    return problem, solve(problem, Stop(effort=0.002), 0)


def test_beside_a_long_dense_part_plans_are_alike() -> None:
    problem, result = solved(5000.0)
    outcome = stakes(problem, result)
    assert outcome is not None
    assert not outcome.matters
    assert outcome.spread < 0.01
    sane = [plan for name, plan in result.baseline_plans.items() if name not in INSANE]
    distinct: list[ShardingPlan] = []
    for plan in [*(ranked.plan for ranked in result.plans), *sane]:
        distinct += [plan] if all(plan.tables != other.tables for other in distinct) else []
    assert outcome.plans == len(distinct)
    twice = replace(result, plans=(*result.plans, *result.plans))
    assert stakes(problem, twice) == outcome


def test_beside_a_short_one_they_are_not() -> None:
    problem, result = solved(0.01)
    outcome = stakes(problem, result)
    assert outcome is not None
    assert outcome.matters
    assert outcome.spread > 0.1


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
    outcome = stakes(problem, replace(result, baselines=slower))
    assert outcome is not None
    assert outcome.spread == pytest.approx(share, abs=0.02)
    assert outcome.matters == (share > 0.1)
