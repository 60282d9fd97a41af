"""Bytes per shard and rank: the numbers by hand, and what a misfit says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from predictor.errors import InfeasibleError
from predictor.model.memory import (
    MemoryRules,
    ShardMemory,
    dense_parameters,
    fits,
    missing,
    plan_memory,
    reserve_topology,
    reserved_bytes,
    shard_memory,
)
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import DcnV2, DenseArch, Feature, Table, Workload
from predictor.units import GIB

ROWS, DIM, BATCH, WORLD = 1000, 64, 32, 2
WEIGHTS = ROWS * DIM * 4
IDS = 2 * BATCH * 8
OUT = BATCH * DIM * 4
TOPOLOGY = Topology.uniform(WORLD, hbm_bytes=GIB, ddr_bytes=GIB)


def a_workload(optimizer: str = "sgd", pipeline: str = "base", **more: Any) -> Workload:
    table = Table("t", ROWS, DIM, (Feature("f", 2.0),), optimizer=optimizer, **more)
    return Workload(
        "w", BATCH, (table,), DenseArch(4, (8,), (2, 1), "concat", optimizer="adam"), pipeline
    )


def one(
    workload: Workload,
    kind: ShardingType = ShardingType.TABLE_WISE,
    kernel: ComputeKernel = ComputeKernel.FUSED,
    size: tuple[int, int] = (ROWS, DIM),
    **more: Any,
) -> ShardMemory:
    table = workload.tables[0]
    return shard_memory(table, workload, TOPOLOGY, kind, kernel, [size], **more)[0]


def test_table_wise_sees_the_batches_of_all_ranks() -> None:
    memory = one(a_workload())
    assert memory == ShardMemory(
        WEIGHTS + WORLD * (IDS + OUT), 0, optimizer_bytes=0, io_bytes=WORLD * (IDS + OUT)
    )


def test_a_row_shard_gets_its_part_of_the_ids_and_writes_every_sample() -> None:
    workload = a_workload()
    table = workload.tables[0]
    kind, kernel = ShardingType.ROW_WISE, ComputeKernel.FUSED
    sizes = [(ROWS // 2, DIM), (ROWS // 2, DIM)]
    for memory in shard_memory(table, workload, TOPOLOGY, kind, kernel, sizes):
        assert memory.io_bytes == IDS + WORLD * OUT


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        ("sgd", 0),
        ("exact_sgd", 0),
        ("exact_row_wise_adagrad", ROWS * 4),
        ("exact_adagrad", WEIGHTS),
        ("adam", 2 * WEIGHTS),
        ("lamb", 2 * WEIGHTS),
        ("lars_sgd", WEIGHTS),
        ("partial_row_wise_adam", WEIGHTS + ROWS * 4),
    ],
)
def test_optimizer_state_is_fp32_whatever_the_weights_are(optimizer: str, state: int) -> None:
    assert one(a_workload(optimizer)).optimizer_bytes == state
    assert one(a_workload(optimizer, data_type="fp16")).optimizer_bytes == state


def test_pipelines_hold_more_ids_and_no_outputs() -> None:
    ids = WORLD * IDS
    assert one(a_workload(pipeline="sparse_dist")).io_bytes == 2 * ids
    prefetch = a_workload(pipeline="prefetch_sparse_dist")
    assert one(prefetch).io_bytes == 3 * ids
    assert one(prefetch, kernel=ComputeKernel.FUSED_UVM_CACHING).io_bytes == 10 * ids


def test_uvm_tables_lie_in_host_memory_but_for_the_cache() -> None:
    workload = a_workload("adam")
    io = WORLD * (IDS + OUT)
    uvm = one(workload, kernel=ComputeKernel.FUSED_UVM)
    assert (uvm.hbm_bytes, uvm.ddr_bytes) == (io, 3 * WEIGHTS)
    cached = one(workload, kernel=ComputeKernel.FUSED_UVM_CACHING, cache_load_factor=0.5)
    assert cached.hbm_bytes == io + WEIGHTS // 2 + ROWS * 12
    assert cached.ddr_bytes == 3 * WEIGHTS
    forced = one(workload, kernel=ComputeKernel.FUSED_UVM, enforce_hbm=True)
    assert (forced.hbm_bytes, forced.ddr_bytes) == (io + 2 * WEIGHTS, WEIGHTS)
    theirs = one(
        workload,
        kernel=ComputeKernel.FUSED_UVM_CACHING,
        cache_load_factor=0.5,
        rules=MemoryRules.TORCHREC,
    )
    assert theirs.hbm_bytes == cached.hbm_bytes + 2 * (WEIGHTS // 2)


def test_data_parallel_has_a_dense_gradient_and_the_dense_optimizers_state() -> None:
    memory = one(a_workload("sgd"), ShardingType.DATA_PARALLEL, ComputeKernel.DENSE)
    assert memory.dense_bytes == 3 * WEIGHTS
    assert memory.hbm_bytes == 4 * WEIGHTS + IDS + OUT


def test_on_cpu_everything_is_host_memory() -> None:
    memory = one(a_workload("adam"), device="cpu")
    assert (memory.hbm_bytes, memory.ddr_bytes) == (0, 3 * WEIGHTS + WORLD * (IDS + OUT))


def test_plan_memory_and_what_is_missing() -> None:
    workload = a_workload("adam")
    shards = tuple(Shard(r, (0, 32 * r), (ROWS, 32)) for r in (0, 1))
    table = TablePlan(ShardingType.COLUMN_WISE, ComputeKernel.FUSED, shards)
    plan = ShardingPlan({"t": table}, WORLD, WORLD)
    memory = plan_memory(workload, TOPOLOGY, plan)
    assert fits(memory)
    assert missing(memory) == ""
    need = memory[0].hbm_bytes
    assert need == memory[1].hbm_bytes == 3 * WEIGHTS // 2 + WORLD * (IDS + OUT // 2)
    tight = plan_memory(workload, replace(TOPOLOGY, hbm_cap_bytes=(need, need - 10)), plan)
    assert not fits(tight)
    assert tight[1].missing_hbm_bytes == 10
    assert missing(tight).startswith("rank 1 misses 10 bytes of HBM")


def test_dense_parameters() -> None:
    workload = a_workload()
    assert dense_parameters(workload) == (4 * 8 + 8) + ((8 + DIM) * 2 + 2) + (2 + 1)
    dot = replace(workload, dense=DenseArch(4, (DIM,), (1,), "dot"))
    assert dense_parameters(dot) == (4 * DIM + DIM) + (DIM + 1 + 1)
    cross = replace(workload, dense=DenseArch(4, (8,), (1,), DcnV2(2, 5)))
    width = 8 + DIM
    assert dense_parameters(cross) == 40 + 2 * (2 * width * 5 + width) + width + 1


def test_reserve() -> None:
    workload = a_workload()
    rest = 6 * 4 * dense_parameters(workload) + 20 * IDS
    assert reserved_bytes(workload, 1000, 0.25) == 250 + rest
    left = reserve_topology(workload, TOPOLOGY, 0.25)
    assert left.hbm_cap_bytes == (GIB * 3 // 4 - rest,) * 2
    assert left.ddr_cap_bytes == TOPOLOGY.ddr_cap_bytes
    assert reserve_topology(workload, TOPOLOGY, device="cpu").ddr_cap_bytes == (GIB - rest,) * 2
    with pytest.raises(InfeasibleError, match=r"rank 0 has .*a smaller batch"):
        reserve_topology(workload, replace(TOPOLOGY, hbm_cap_bytes=(1000, 1000)))
