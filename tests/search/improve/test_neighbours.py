"""Neighbours of a plan fit, and some move whole exchanges."""

from __future__ import annotations

import random

from predictor.model.plan import ShardingType
from search.baselines.starting_plans import pick
from search.improve.merges import ExchangeMerges
from search.improve.neighbours import Neighbours
from search.objective import Assignment, Objective, apply
from search.partitioner import GreedyPartitioner
from search.surrogate import Surrogate
from tests.search.problems import (
    a_problem,
    a_table,
    a_workload,
    assert_valid,
    hosts,
    objective_of,
    random_plan,
    random_problem,
)


def test_neighbours_fit_and_differ() -> None:
    objective, surrogate = objective_of(random_problem(1))
    rng = random.Random(0)
    base = next(p for p in (random_plan(objective, rng) for _ in range(500)) if objective.fits(p))
    neighbours = list(Neighbours(objective, surrogate, 0).of(base))
    assert neighbours
    for change in neighbours:
        after = apply(base, change)
        assert_valid(objective, after)
        assert after != base


def table_wise() -> tuple[Objective, Surrogate, Assignment]:
    tables = [a_table(f"t{i}", 10**6, 128, 20.0) for i in range(8)]
    objective, surrogate = objective_of(a_problem(a_workload(*tables), hosts(4)))
    options = [pick(o, ShardingType.TABLE_WISE) for o in objective.space.options]
    base = GreedyPartitioner(objective, surrogate).place_all(options)
    assert base is not None
    return objective, surrogate, base


def test_all_tables_of_an_exchange_move() -> None:
    objective, surrogate, base = table_wise()
    plans = list(ExchangeMerges(objective, surrogate).whole(base))
    assert plans
    for plan in plans:
        assert len({option.exchange for option, _ in plan}) == 1
        assert_valid(objective, plan)
    neighbours = Neighbours(objective, surrogate, 0).of(base)
    assert any(len(change) == len(base) for change in neighbours)


def test_one_column_shard_keeps_its_rank() -> None:
    """It joins the exchange of column-wise tables without moving a byte."""
    objective, surrogate, base = table_wise()
    plans = ExchangeMerges(objective, surrogate).whole(base)
    columns = next(p for p in plans if p[0][0].sharding_type is ShardingType.COLUMN_WISE)
    assert [ranks for _, ranks in columns] == [ranks for _, ranks in base]
