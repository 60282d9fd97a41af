"""Local search only improves, keeps to its budget, and reaches local optima."""

from __future__ import annotations

import random

import pytest

from predictor.model.plan import ShardingType
from predictor.model.workload import Constraints
from search.baselines.starting_plans import pick
from search.improve.local_search import LocalSearch
from search.improve.merges import ExchangeMerges
from search.objective import Assignment, Objective, apply
from search.partitioner import GreedyPartitioner
from search.surrogate import Surrogate
from tests.quick import quick_only
from tests.search.problems import (
    a_problem,
    a_table,
    a_workload,
    assert_valid,
    every_plan,
    hosts,
    objective_of,
    random_plan,
    random_problem,
)


@pytest.mark.parametrize("seed", quick_only((4, 5), range(6)))
def test_it_improves_and_stays_valid(seed: int) -> None:
    objective, surrogate = objective_of(random_problem(seed))
    rng = random.Random(seed)
    starts = [p for p in (random_plan(objective, rng) for _ in range(300)) if objective.fits(p)]
    if not starts:
        pytest.skip("no random plan fits")
    before = float(objective.score([starts[0]])[0])
    spent = objective.evaluations
    plan, ms = LocalSearch(objective, surrogate, 0).improve(starts[0], 2000)
    assert_valid(objective, plan)
    assert ms <= before
    assert ms == pytest.approx(float(objective.score([plan])[0]), rel=1e-9)
    assert objective.evaluations - spent <= 2000 + 513


def test_neighbours_fit_and_differ() -> None:
    objective, surrogate = objective_of(random_problem(1))
    rng = random.Random(0)
    base = next(p for p in (random_plan(objective, rng) for _ in range(500)) if objective.fits(p))
    neighbours = list(LocalSearch(objective, surrogate, 0).neighbours(base))
    assert neighbours
    for change in neighbours:
        after = apply(base, change)
        assert_valid(objective, after)
        assert after != base


def test_stop_ends_it_at_once() -> None:
    objective, surrogate = objective_of(a_problem(a_workload(a_table()), hosts(2)))
    start = random_plan(objective, random.Random(0))
    search = LocalSearch(objective, surrogate, 0)
    assert search.improve(start, 10**6, lambda best: True)[0] == start


def test_a_small_space_ends_the_search_before_its_budget_does() -> None:
    """One table on two ranks has a handful of plans: a script with one table waited minutes."""
    objective, surrogate = objective_of(a_problem(a_workload(a_table()), hosts(2)))
    best = min(
        float(objective.score([plan])[0]) for plan in every_plan(objective) if objective.fits(plan)
    )
    spent, start = objective.evaluations, random_plan(objective, random.Random(0))
    _, ms = LocalSearch(objective, surrogate, 0).improve(start, 10**6)
    assert ms == pytest.approx(best, rel=1e-9)
    assert objective.evaluations - spent < 2000


def test_a_descent_that_gains_nothing_ends() -> None:
    objective, surrogate, start = table_wise()
    best, _ = LocalSearch(objective, surrogate, 0).improve(start, 5000)
    spent = objective.evaluations
    LocalSearch(objective, surrogate, 1).improve(best, 20_000)
    assert objective.evaluations - spent < 0.2 * 20_000


def test_tied_tables_stay_together() -> None:
    pair = Constraints(co_locate="pair")
    tables = (a_table(n, 10**6, 64, 9.0, constraints=pair) for n in "ab")
    workload = a_workload(*tables, a_table("c"), batch_size=32768)
    objective, surrogate = objective_of(a_problem(workload, hosts(3)))
    one = [next(o for o in opts if o.label == "TW/fused") for opts in objective.space.options]
    start = tuple((o, (0,)) for o in one)
    plan, _ = LocalSearch(objective, surrogate, 0).improve(start, 1000)
    assert_valid(objective, plan)


def table_wise() -> tuple[Objective, Surrogate, Assignment]:
    tables = [a_table(f"t{i}", 10**6, 128, 20.0) for i in range(8)]
    objective, surrogate = objective_of(a_problem(a_workload(*tables), hosts(4)))
    options = [pick(o, ShardingType.TABLE_WISE) for o in objective.space.options]
    base = GreedyPartitioner(objective, surrogate).place_all(options)
    assert base is not None
    return objective, surrogate, base


def test_whole_exchanges_and_parts_of_them_move() -> None:
    objective, surrogate, base = table_wise()
    changes = list(ExchangeMerges(objective, surrogate).some(base, random.Random(0)))
    assert {len(change) for change in changes} == {8, 4, 2}
    for change in changes:
        assert len({surrogate.exchange(option) for option, _ in change.values()}) == 1
        assert_valid(objective, apply(base, change))
    neighbours = LocalSearch(objective, surrogate, 0).neighbours(base)
    assert any(len(change) > 2 for change in neighbours)


def test_one_column_shard_keeps_its_rank() -> None:
    """It joins the exchange of column-wise tables without moving a byte."""
    objective, surrogate, base = table_wise()
    changes = ExchangeMerges(objective, surrogate).some(base, random.Random(0))
    columns = next(
        c for c in changes if next(iter(c.values()))[0].sharding_type is ShardingType.COLUMN_WISE
    )
    assert len(columns) == 8
    assert {t: ranks for t, (_, ranks) in columns.items()} == {
        t: ranks for t, (_, ranks) in enumerate(base)
    }
