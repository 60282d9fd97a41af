"""An older plan for the model of today: what stays, what is cut anew, what is new."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.errors import InputError, PlanError
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.plan_check import check_plan
from predictor.model.workload import Workload
from search.in_use.price import MovePrice
from shardopt.api.older_plan import OlderPlan, adapt_plan, read_renamed
from tests.search.problems import a_problem, a_table, a_workload, hosts

WORLD = 4


def workload_with(**rows: int) -> Workload:
    return a_workload(*(a_table(name, count) for name, count in rows.items()))


def row_wise(rows: int) -> TablePlan:
    block = -(-rows // WORLD)
    starts = [min(rank * block, rows) for rank in range(WORLD)]
    shards = tuple(
        Shard(rank, (start, 0), (min(block, rows - start), 64)) for rank, start in enumerate(starts)
    )
    return TablePlan(ShardingType.ROW_WISE, ComputeKernel.FUSED, shards)


def whole(rows: int, rank: int) -> TablePlan:
    shard = Shard(rank, (0, 0), (rows, 64))
    return TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED, (shard,))


def adapted(workload: Workload, renamed: str | None = None, **tables: TablePlan) -> OlderPlan:
    plan = ShardingPlan(tables, WORLD, WORLD)
    older = adapt_plan(plan, workload, read_renamed(renamed), where="p.json")
    check_plan(older.plan, workload)
    return older


@pytest.mark.parametrize("rows", [1_000, 1_003, 2_500, 999, 3, 1])
def test_a_table_with_other_rows_keeps_its_sharding_and_ranks(rows: int) -> None:
    older = adapted(workload_with(a=rows, b=rows), a=row_wise(1_000), b=whole(1_000, 3))
    assert older.plan.tables["a"] == row_wise(rows)
    assert older.plan.tables["b"] == whole(rows, 3)
    assert older.held == {"a": row_wise(1_000).shards, "b": whole(1_000, 3).shards}
    assert len(older.notes) == (rows != 1_000)


@pytest.mark.parametrize(
    ("rows", "moved_rows"), [(1_000, 0), (1_200, 50 + 100 + 150), (2_000, 750)]
)
def test_rows_that_stay_on_their_rank_move_no_bytes(rows: int, moved_rows: int) -> None:
    workload = workload_with(a=rows)
    older = adapted(workload, a=row_wise(1_000))
    price = MovePrice(a_problem(workload, hosts(WORLD)), older.plan, older.held)
    move = price.of(older.plan)
    assert move.tables == ()
    weights = moved_rows * 64 * workload.tables[0].element_bytes
    states = moved_rows * 4  # row-wise Adagrad: one number a row
    assert move.bytes == pytest.approx(weights + states, abs=WORLD)


def test_new_and_dropped_tables_move_nothing() -> None:
    workload = workload_with(a=1_000, new=50)
    older = adapted(workload, a=whole(1_000, 0), gone=whole(10, 2))
    assert older.plan.tables["new"].ranks == (1,), "the emptiest rank, of the lowest number"
    assert older.held["new"] == ()
    price = MovePrice(a_problem(workload, hosts(WORLD)), older.plan, older.held)
    for rank in range(WORLD):
        tables = {**older.plan.tables, "new": whole(50, rank)}
        assert price.of(replace(older.plan, tables=tables)).bytes == 0
    assert len(older.notes) == 2


def test_renamed_tables_are_found() -> None:
    older = adapted(workload_with(b=1_000), renamed="a=b", a=whole(1_000, 2))
    assert (older.plan.tables["b"], older.notes) == (whole(1_000, 2), ())


@pytest.mark.parametrize("text", ["a", "a=", "=b", "a=b,a=c", "a=b,c=b", ""])
def test_renamed_has_one_form(text: str) -> None:
    with pytest.raises(InputError, match="OLD=NEW"):
        read_renamed(text)


def test_what_names_no_table_is_an_error() -> None:
    for renamed, name in (("x=b", "'x'"), ("a=y", "'y'")):
        with pytest.raises(InputError, match=name):
            adapted(workload_with(b=1_000), renamed=renamed, a=whole(1_000, 2))
    with pytest.raises(PlanError, match="no table of it is in"):
        adapted(workload_with(b=1_000), a=whole(1_000, 2))
    with pytest.raises(PlanError, match="two tables"):
        adapted(workload_with(b=1_000), renamed="a=b", a=whole(1_000, 2), b=whole(1_000, 1))
