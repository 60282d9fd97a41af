"""Cost of a move, on plans whose bytes can be counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.units import GIB
from search.in_use.price import INTER, INTRA, Move, MovePrice
from search.problem import Problem
from tests.search.problems import a_problem, a_table, a_workload, hosts

ROWS, DIM = 1000, 64
WEIGHTS, STATE = ROWS * DIM * 4, ROWS * 4
"""Bytes of a table, and of its one fp32 state a row."""


def tables(*names: str, module: str = "ebc") -> Problem:
    alike = [
        a_table(n, ROWS, DIM, optimizer="exact_row_wise_adagrad", module=module) for n in names
    ]
    return a_problem(a_workload(*alike), hosts(4, 2))


def on(*ranks: int) -> TablePlan:
    """A table in columns on these ranks."""
    width = DIM // len(ranks)
    shards = tuple(Shard(r, (0, i * width), (ROWS, width)) for i, r in enumerate(ranks))
    kind = ShardingType.TABLE_WISE if len(ranks) == 1 else ShardingType.COLUMN_WISE
    return TablePlan(kind, ComputeKernel.FUSED, shards)


def replicas(world: int = 4) -> TablePlan:
    shards = tuple(Shard(r, (0, 0), (ROWS, DIM)) for r in range(world))
    return TablePlan(ShardingType.DATA_PARALLEL, ComputeKernel.DENSE, shards)


def move(before: TablePlan, after: TablePlan) -> Move:
    plans = [ShardingPlan({"t": plan}, 4, 2) for plan in (before, after)]
    return MovePrice(tables("t"), plans[0]).of(plans[1])


@pytest.mark.parametrize(
    ("before", "after", "inter", "intra"),
    [
        (on(0), on(0), 0, 0),
        (on(0), on(1), 0, WEIGHTS + STATE),
        (on(0), on(2), WEIGHTS + STATE, 0),
        (on(0), on(0, 1), 0, WEIGHTS // 2 + STATE),
        (on(0), on(0, 3), WEIGHTS // 2 + STATE, 0),
        (on(0, 1), on(1), 0, WEIGHTS // 2 + STATE // 2),
        (on(0), replicas(), 2 * WEIGHTS, WEIGHTS),
        (replicas(), on(3), 0, 0),
    ],
)
def test_bytes_by_link(before: TablePlan, after: TablePlan, inter: int, intra: int) -> None:
    cost = move(before, after)
    assert cost.link_bytes == {INTER: inter, INTRA: intra}
    assert cost.bytes == inter + intra
    assert (cost.seconds > 0) == bool(inter + intra)


def test_a_rank_gets_replicas_from_its_own_host() -> None:
    two = TablePlan(
        ShardingType.DATA_PARALLEL,
        ComputeKernel.DENSE,
        tuple(Shard(r, (0, 0), (ROWS, DIM)) for r in (0, 2)),
    )
    assert move(two, on(3)).link_bytes[INTER] == 0


def test_a_larger_move_takes_longer_and_links_between_hosts_are_slower() -> None:
    within, between = move(on(0), on(1)).seconds, move(on(0), on(2)).seconds
    assert within < between
    assert move(on(0), on(0, 1)).seconds < within


def test_several_tables_follow_one_another() -> None:
    problem = tables("a", "b")
    before = ShardingPlan({"a": on(0), "b": on(0)}, 4, 2)
    price = MovePrice(problem, before)
    single = price.of(replace(before, tables={"a": on(2), "b": on(0)}))
    both = price.of(replace(before, tables={"a": on(2), "b": on(2)}))
    assert (single.tables, both.tables) == (("a",), ("a", "b"))
    # of the first move also the copy of the table that stays counts
    assert single.seconds < both.seconds < 2 * single.seconds + 1e-9
    assert single.both_copies_bytes == 3 * (WEIGHTS + STATE), "a once and b twice, on rank 0"


def test_only_types_that_torchrec_reshards_move_in_place() -> None:
    assert move(on(0), on(1)).in_place
    assert not move(on(0), on(1, 2)).in_place, "table_wise becomes column_wise"
    assert not move(on(0), replicas()).in_place
    uvm = replace(on(1), compute_kernel=ComputeKernel.FUSED_UVM)
    assert not move(on(0), uvm).in_place


def test_both_copies_need_memory() -> None:
    problem = tables("t")
    small = replace(problem.topology, hbm_cap_bytes=(WEIGHTS,) * 4)
    before, after = (ShardingPlan({"t": plan}, 4, 2) for plan in (on(0), on(1)))
    assert not MovePrice(replace(problem, topology=small), before).of(after).in_place
    assert min(problem.topology.hbm_cap_bytes) == 80 * GIB


def test_a_move_pays_back_only_where_it_gains() -> None:
    two_seconds = Move(("t",), {}, 2.0, 0, True)
    assert two_seconds.pays_back_after(10.0, 9.0) == 2000
    assert two_seconds.pays_back_after(10.0, 10.0) is None
