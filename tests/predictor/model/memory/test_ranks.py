"""What a plan's shards need on every rank, and what a misfit says."""

from __future__ import annotations

from dataclasses import replace

from predictor.model.memory.ranks import RankMemory, RankPeak, fits, missing, plan_memory
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from tests.predictor.model.memory.one_table import (
    IDS,
    LENGTHS,
    OUT,
    ROWS,
    TOPOLOGY,
    WEIGHTS,
    WORLD,
    a_workload,
    held,
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
    io = held(4, WORLD * IDS, WORLD * LENGTHS, WORLD * OUT // 2)
    assert need == memory[1].hbm_bytes == 3 * WEIGHTS // 2 + io
    tight = plan_memory(workload, replace(TOPOLOGY, hbm_cap_bytes=(need, need - 10)), plan)
    assert not fits(tight)
    assert tight[1].missing_hbm_bytes == 10
    assert missing(tight).startswith("rank 1 misses 10 bytes of HBM")


def test_the_peak_decides_where_it_is_known() -> None:
    peak = RankPeak(10, 80, 100, 200, 90)
    memory = RankMemory(1, 50, 60, 0, 0, peak)
    assert memory.missing_hbm_bytes == 10
    assert not memory.fits
    assert missing([memory]).startswith("rank 1 misses 10 bytes of HBM")
    assert replace(memory, peak=replace(peak, limit_bytes=100)).fits
    on_cpu = replace(memory, ddr_cap_bytes=60, peak=replace(peak, on_device=False))
    assert (on_cpu.missing_hbm_bytes, on_cpu.missing_ddr_bytes) == (0, 10)
