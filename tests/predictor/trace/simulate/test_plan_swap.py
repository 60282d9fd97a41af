"""Another plan on a trace: ratios of the predictions of both plans, rank by rank."""

from __future__ import annotations

import pytest

from predictor.errors import InputError
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.workload import Table
from predictor.trace.events import CollectiveCall, DeviceEvent, RankTrace
from predictor.trace.simulate.whatif import PlanSwap, plan_swap
from tests.builders import a_table, a_topology, a_workload, device_bound, table_wise

TABLES = [a_table("large", 1_000_000, 128), a_table("small", 10_000, 32)]


def a_trace(rank: int = 0) -> RankTrace:
    return RankTrace("made up", rank, 2, "Some GPU", (), (), ())


def placed(*ranks: int) -> ShardingPlan:
    tables = {t.name: table_wise(t, r) for t, r in zip(TABLES, ranks, strict=True)}
    return ShardingPlan(tables, 2, 2)


def row_wise(table: Table) -> TablePlan:
    half = table.num_embeddings // 2
    shards = tuple(Shard(r, (r * half, 0), (half, table.embedding_dim)) for r in (0, 1))
    return TablePlan(ShardingType.ROW_WISE, ComputeKernel.FUSED, shards, table.module)


def swap(before: ShardingPlan, after: ShardingPlan, *ranks: int) -> PlanSwap:
    workload = a_workload(*TABLES, batch_size=8192)
    traces = [a_trace(rank) for rank in ranks or (0, 1)]
    return plan_swap(traces, workload, a_topology(2), device_bound(), before, after)


def kernel(name: str) -> DeviceEvent:
    return DeviceEvent(name, "kernel", 7, 0.0, 10.0)


def test_the_same_plan_changes_nothing() -> None:
    found = swap(placed(0, 1), placed(0, 1))
    assert found.forward == found.backward == (1.0, 1.0)
    assert found.exchange == 1.0


def test_lookups_go_where_their_tables_go() -> None:
    found = swap(placed(0, 1), placed(1, 0))
    assert found.forward[0] < 1 < found.forward[1]
    assert found.forward[0] * found.forward[1] == pytest.approx(1.0)
    forward = kernel("split_embedding_codegen_forward_unweighted_kernel<float>")
    assert found.factor(0, forward) == found.forward[0]
    sort = kernel("cub::DeviceRadixSortOnesweepKernel")
    assert found.factor(1, sort) == found.backward[1]


def test_what_the_plan_does_not_touch_has_no_factor() -> None:
    found = swap(placed(0, 1), placed(1, 0))
    dense = "split_embedding_backward_codegen_dense_unweighted_kernel_warp_per_row_1"
    assert found.factor(0, kernel(dense)) is None
    assert found.factor(0, kernel("ampere_sgemm_128x64_tn")) is None
    reduced = DeviceEvent(
        "nccl", "kernel", 20, 0.0, 9.0, collective=CollectiveCall("all_reduce", 64, None, 0)
    )
    assert found.factor(0, reduced) is None


def test_uneven_exchanges_take_longer() -> None:
    found = swap(placed(0, 1), placed(0, 0))
    call = CollectiveCall("all_to_all", 64, None, 0)
    event = DeviceEvent("nccl", "kernel", 20, 0.0, 9.0, collective=call)
    assert found.factor(1, event) == found.exchange
    assert found.exchange > 1


def test_ranks_without_lookups_and_new_collectives_are_named() -> None:
    found = swap(placed(0, 0), ShardingPlan({t.name: row_wise(t) for t in TABLES}, 2, 2))
    assert found.forward[1] is None
    text = " ".join(found.notes)
    assert "rank 1 ran no lookups" in text
    assert "row_wise was not used when traced" in text


def test_a_rank_that_no_plan_has_is_refused() -> None:
    with pytest.raises(InputError, match="rank 5, the plans have ranks 0 to 1"):
        swap(placed(0, 1), placed(1, 0), 5)
