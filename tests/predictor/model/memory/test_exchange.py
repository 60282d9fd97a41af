"""Bytes that exchanges move, by hand."""

from __future__ import annotations

from dataclasses import replace

from predictor.model.memory.iteration import batch_bytes, exchanges, unplaced
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import DenseArch, Feature, Table, Workload

ROWS, DIM, BATCH, WORLD = 1000, 64, 32, 2
TOPOLOGY = Topology.uniform(WORLD, hbm_bytes=1, ddr_bytes=1)
TABLE = Table("t", ROWS, DIM, (Feature("f", 2.0),))
WORKLOAD = Workload("w", BATCH, (TABLE,), DenseArch(4, (8,), (2, 1), "concat"))
RECEIVED = 2 * BATCH * 8 + BATCH * 8
OUT = BATCH * DIM * 4


def plan_of(kind: ShardingType, *shards: Shard) -> ShardingPlan:
    kernel = ComputeKernel.DENSE if kind is ShardingType.DATA_PARALLEL else ComputeKernel.FUSED
    return ShardingPlan({"t": TablePlan(kind, kernel, shards)}, WORLD, WORLD)


def test_a_table_on_one_rank_gets_all_ids_and_looks_all_samples_up() -> None:
    plan = plan_of(ShardingType.TABLE_WISE, Shard(1, (0, 0), (ROWS, DIM)))
    (without,), (holder,) = exchanges(WORKLOAD, TOPOLOGY, plan)
    assert (without.received, without.looked_up, without.ids) == (0, 0, 0)
    assert without.sent == holder.sent == RECEIVED
    assert without.output == holder.output == OUT
    assert holder.received == WORLD * RECEIVED
    assert holder.looked_up == WORLD * OUT


def test_row_shards_get_their_part_of_the_ids_and_write_every_sample() -> None:
    half = (ROWS // 2, DIM)
    shards = Shard(0, (0, 0), half), Shard(1, (ROWS // 2, 0), half)
    for (e,) in exchanges(WORKLOAD, TOPOLOGY, plan_of(ShardingType.ROW_WISE, *shards)):
        assert e.ids == 2 * BATCH
        assert e.received == 2 * BATCH * 8 + WORLD * BATCH * 8
        assert e.looked_up == WORLD * OUT
        assert e.sent == RECEIVED


def test_every_column_shard_is_sent_all_ids() -> None:
    half = (ROWS, DIM // 2)
    shards = Shard(0, (0, 0), half), Shard(1, (0, DIM // 2), half)
    for (e,) in exchanges(WORKLOAD, TOPOLOGY, plan_of(ShardingType.COLUMN_WISE, *shards)):
        assert e.sent == 2 * RECEIVED
        assert e.received == WORLD * RECEIVED
        assert e.looked_up == WORLD * OUT / 2
        assert e.output == OUT


def test_replicas_look_up_their_own_batch() -> None:
    shards = tuple(Shard(r, (0, 0), (ROWS, DIM)) for r in range(WORLD))
    for (e,) in exchanges(WORKLOAD, TOPOLOGY, plan_of(ShardingType.DATA_PARALLEL, *shards)):
        assert (e.sent, e.received, e.looked_up, e.output) == (0, RECEIVED, OUT, OUT)
        assert e.replica == ROWS * DIM * 4
        assert e.local


def test_sequences_are_a_row_an_id() -> None:
    workload = replace(WORKLOAD, tables=(replace(TABLE, pooling="none"),))
    plan = plan_of(ShardingType.TABLE_WISE, Shard(1, (0, 0), (ROWS, DIM)))
    _, (holder,) = exchanges(workload, TOPOLOGY, plan)
    assert holder.looked_up == WORLD * 2 * BATCH * DIM * 4
    assert not holder.pooled


def test_weights_travel_with_the_ids_of_their_module() -> None:
    workload = replace(WORKLOAD, tables=(replace(TABLE, weighted=True),))
    assert unplaced(workload)[0].sent == 2 * BATCH * 12 + BATCH * 8
    assert batch_bytes(workload) == BATCH * (4 + 1) * 4 + 2 * BATCH * 12 + BATCH * 8
