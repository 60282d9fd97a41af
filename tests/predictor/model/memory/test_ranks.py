"""Memory of a plan's shards on every rank, and messages about plans that do not fit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from predictor.model.memory.ranks import (
    RankMemory,
    RankPeak,
    ShardMemory,
    fits,
    missing,
    plan_memory,
    shard_memory,
)
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.workload import Workload
from tests.predictor.model.memory.one_table import (
    DIM,
    IDS,
    LENGTHS,
    OUT,
    ROWS,
    TOPOLOGY,
    WEIGHTS,
    WORLD,
    a_workload,
    kept,
)


def test_plan_memory_and_what_is_missing() -> None:
    workload = a_workload("adam")
    shards = tuple(Shard(r, (0, 32 * r), (ROWS, 32)) for r in (0, 1))
    table = TablePlan(ShardingType.COLUMN_WISE, ComputeKernel.FUSED, shards)
    plan = ShardingPlan({"t": table}, WORLD, WORLD)
    memory = plan_memory(workload, TOPOLOGY, plan)
    assert fits(memory)
    assert missing(memory) == ""
    need = memory[0].hbm_bytes
    io = kept(WORLD * IDS, WORLD * LENGTHS)
    assert need == memory[1].hbm_bytes == 3 * WEIGHTS // 2 + io
    tight = plan_memory(workload, replace(TOPOLOGY, hbm_cap_bytes=(need, need - 10)), plan)
    assert not fits(tight)
    assert tight[1].missing_hbm_bytes == 10
    assert missing(tight).startswith("rank 1 lacks 10 B of HBM")


def test_the_peak_decides_where_it_is_known() -> None:
    peak = RankPeak(10, 80, 100, 200, 90)
    memory = RankMemory(1, 50, 60, 0, 0, peak)
    assert memory.missing_hbm_bytes == 10
    assert not memory.fits
    assert missing([memory]).startswith("rank 1 lacks 10 B of HBM")
    assert replace(memory, peak=replace(peak, limit_bytes=100)).fits
    on_cpu = replace(memory, ddr_cap_bytes=60, peak=replace(peak, on_device=False))
    assert (on_cpu.missing_hbm_bytes, on_cpu.missing_ddr_bytes) == (0, 10)


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
    io = kept(WORLD * IDS, WORLD * LENGTHS)
    flight = 2 * WORLD * OUT + math.ceil(6.5 * io)
    assert memory == ShardMemory(WEIGHTS + io, 0, io_bytes=io, flight_bytes=flight)


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


@pytest.mark.parametrize("pipeline", ["base", "sparse_dist", "prefetch_sparse_dist"])
def test_what_may_be_gone_at_the_peak_is_not_counted(pipeline: str) -> None:
    for kernel in (ComputeKernel.FUSED, ComputeKernel.FUSED_UVM_CACHING):
        memory = one(a_workload(pipeline=pipeline), kernel=kernel)
        assert memory.io_bytes == kept(WORLD * IDS, WORLD * LENGTHS)


def test_one_value_a_row_of_a_uvm_table_stays_on_the_device() -> None:
    """`construct_split_state` in FBGEMM's split_table_batched_embeddings_ops_training.py."""
    for optimizer, host in (("exact_row_wise_adagrad", 0), ("partial_row_wise_adam", WEIGHTS)):
        memory = one(a_workload(optimizer), kernel=ComputeKernel.FUSED_UVM)
        assert memory.ddr_bytes == WEIGHTS + host
        assert memory.hbm_bytes == memory.io_bytes + ROWS * 4


def test_uvm_tables_lie_in_host_memory_but_for_the_cache() -> None:
    workload = a_workload("adam")
    io = kept(WORLD * IDS, WORLD * LENGTHS)
    uvm = one(workload, kernel=ComputeKernel.FUSED_UVM)
    assert (uvm.hbm_bytes, uvm.ddr_bytes) == (io, 3 * WEIGHTS)
    cached = one(workload, kernel=ComputeKernel.FUSED_UVM_CACHING, cache_load_factor=0.5)
    assert cached.hbm_bytes == io + WEIGHTS // 2 + ROWS * 12
    assert cached.ddr_bytes == 3 * WEIGHTS
    forced = one(workload, kernel=ComputeKernel.FUSED_UVM, enforce_hbm=True)
    assert (forced.hbm_bytes, forced.ddr_bytes) == (io + 2 * WEIGHTS, WEIGHTS)


def test_data_parallel_has_a_dense_gradient_and_the_dense_optimizers_state() -> None:
    memory = one(a_workload("sgd"), ShardingType.DATA_PARALLEL, ComputeKernel.DENSE)
    assert memory.dense_bytes == 3 * WEIGHTS
    assert memory.hbm_bytes == 4 * WEIGHTS + kept(IDS, LENGTHS)


def test_on_cpu_everything_is_host_memory() -> None:
    memory = one(a_workload("adam"), device="cpu")
    io = kept(WORLD * IDS, WORLD * LENGTHS)
    assert (memory.hbm_bytes, memory.ddr_bytes) == (0, 3 * WEIGHTS + io)
