"""Block moves take tables from one exchange to another, legally, wholly or in part."""

from __future__ import annotations

import random

from predictor.model.plan import ShardingType
from search.baselines.starting_plans import pick
from search.improve.local_search import LocalSearch
from search.improve.transfers import Transfers
from search.objective import Assignment, Objective, apply
from search.partitioner import GreedyPartitioner
from search.surrogate import Surrogate
from tests.search.problems import a_problem, a_table, a_workload, assert_valid, hosts, objective_of


def table_wise() -> tuple[Objective, Surrogate, Assignment]:
    tables = [a_table(f"t{i}", 10**6, 128, 20.0) for i in range(8)]
    objective, surrogate = objective_of(a_problem(a_workload(*tables), hosts(4)))
    options = [pick(o, ShardingType.TABLE_WISE) for o in objective.space.options]
    base = GreedyPartitioner(objective, surrogate).place_all(options)
    assert base is not None
    return objective, surrogate, base


def test_whole_exchanges_and_parts_of_them_move() -> None:
    objective, surrogate, base = table_wise()
    changes = list(Transfers(objective, surrogate, random.Random(0)).propose(base))
    assert {len(change) for change in changes} == {8, 4, 2}
    for change in changes:
        assert len({surrogate.exchange(option) for option, _ in change.values()}) == 1
        assert_valid(objective, apply(base, change))


def test_one_column_shard_keeps_its_rank() -> None:
    """It joins the exchange of column-wise tables without moving a byte."""
    objective, surrogate, base = table_wise()
    changes = Transfers(objective, surrogate, random.Random(0)).propose(base, (1.0,))
    columns = next(
        c for c in changes if next(iter(c.values()))[0].sharding_type is ShardingType.COLUMN_WISE
    )
    assert {t: ranks for t, (_, ranks) in columns.items()} == {
        t: ranks for t, (_, ranks) in enumerate(base)
    }


def test_descent_uses_them() -> None:
    objective, surrogate, base = table_wise()
    neighbours = LocalSearch(objective, surrogate, 0).neighbours(base)
    assert any(len(change) > 2 for change in neighbours)
