"""Key-value tables of TorchRec: what their caches, their stores and their memory cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from predictor.cost.lookup.embedding import lookup_model
from predictor.cost.lookup.shard import LookupShard
from predictor.hardware.loader import load_hardware
from predictor.model.distribution import Zipf
from predictor.model.memory.ranks import shard_memory
from predictor.model.plan import STORED, ComputeKernel, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Constraints
from predictor.predict import predict
from predictor.units import GIB, MIB
from search.problem import Problem
from search.solve import solve
from search.space.enumerate import enumerate_space
from search.stop import Stop
from tests.search.problems import a_table, a_workload

HW = load_hardware("h100-sxm")
ROWS, DIM = 50_000_000, 128
RANKS = Topology.uniform(4, 4, hbm_bytes=16 * GIB, ddr_bytes=100 * GIB)


def lookup(kernel: ComputeKernel, factor: float = 0.1, host_gib: float = 0.0) -> LookupShard:
    return LookupShard(
        bins=Zipf(1.05).bins(ROWS),
        draws=1e6,
        bags=1e5,
        rows=ROWS,
        dim=DIM,
        kernel=kernel,
        cache_load_factor=factor,
        host_bytes=host_gib * GIB,
    )


def forward_ms(shard: LookupShard) -> float:
    return lookup_model(HW).forward_ms(shard)


def test_what_is_read_from_ssd_takes_longest() -> None:
    on_device = forward_ms(lookup(ComputeKernel.FUSED))
    in_memory = forward_ms(lookup(ComputeKernel.DRAM_VIRTUAL_TABLE))
    on_ssd = forward_ms(lookup(ComputeKernel.KEY_VALUE))
    assert on_device < in_memory < on_ssd
    assert forward_ms(lookup(ComputeKernel.KEY_VALUE, 0.5)) < on_ssd, "a larger cache misses less"
    behind = [forward_ms(lookup(ComputeKernel.KEY_VALUE, 0.1, gib)) for gib in (1.0, 8.0, 64.0)]
    assert on_ssd > behind[0] > behind[1] > behind[2], "the host's memory holds what is hot"
    assert behind[2] == pytest.approx(forward_ms(replace(lookup(ComputeKernel.KEY_VALUE),
                                                         host_bytes=1e15)))  # fmt: skip


def test_rows_come_from_ssd_at_its_bandwidth() -> None:
    costs, shard = lookup_model(HW), lookup(ComputeKernel.KEY_VALUE)
    read = DIM * 4 / (0.105 * 1e6)
    assert costs.fetch_ms(shard) == pytest.approx(read, rel=0.05)
    assert costs.fetch_ms(replace(shard, kernel=ComputeKernel.DRAM_VIRTUAL_TABLE)) < 0.1 * read


TABLE = a_table("t", ROWS, DIM)


def memory(kernel: ComputeKernel, most_mib: float | None, device: str = "cuda") -> Any:
    workload = a_workload(TABLE)
    (shard,) = shard_memory(
        TABLE,
        workload,
        RANKS,
        ShardingType.TABLE_WISE,
        kernel,
        [(ROWS, DIM)],
        0.1,
        device=device,
        most_cache_mib=most_mib,
    )
    return shard


def test_the_device_has_the_cache_alone() -> None:
    fused, stored = memory(ComputeKernel.FUSED, None), memory(ComputeKernel.KEY_VALUE, None)
    cache = 0.1 * ROWS * DIM * 4
    assert cache < stored.hbm_bytes - stored.io_bytes - stored.optimizer_bytes < 1.05 * cache
    assert stored.optimizer_bytes == fused.optimizer_bytes == ROWS * 4, "on the device"
    assert stored.ddr_bytes == 0
    capped = memory(ComputeKernel.KEY_VALUE, 256.0)
    assert capped.hbm_bytes - capped.io_bytes - capped.optimizer_bytes < 1.05 * 256 * MIB


def test_a_virtual_table_has_the_cache_that_it_is_given() -> None:
    """Nobody knows its rows; so TorchRec counts it."""
    for kernel in STORED[1:]:
        none, with_cache = memory(kernel, None), memory(kernel, 256.0)
        assert none.hbm_bytes == none.io_bytes
        assert 256 * MIB <= with_cache.hbm_bytes - with_cache.io_bytes < 1.05 * 256 * MIB


def constrained(**wants: Any) -> Problem:
    table = replace(TABLE, constraints=Constraints(**wants))
    return Problem(a_workload(table), RANKS, HW)


def test_it_is_offered_where_a_constraint_names_it() -> None:
    def kernels(problem: Problem) -> set[str]:
        (options,) = enumerate_space(problem.workload, problem.topology).options
        return {str(option.compute_kernel) for option in options}

    assert kernels(constrained()).isdisjoint(STORED)
    assert kernels(constrained(compute_kernels=("key_value",))) == {"key_value"}
    virtual = constrained(compute_kernels=("dram_virtual_table",))
    (options,) = enumerate_space(virtual.workload, virtual.topology).options
    assert all(option.column_width == DIM for option in options), "never cut by columns"


def test_a_table_that_fits_nowhere_is_planned_with_its_caches() -> None:
    problem = constrained(compute_kernels=("key_value",), max_l1_cache_size=512, l2_cache_size=32)
    best = solve(problem, Stop(effort=0.01), 0).best.plan
    (table,) = best.tables.values()
    assert table.compute_kernel is ComputeKernel.KEY_VALUE
    assert table.store_caches == (512.0, 32.0)
    prediction = predict(problem.workload, problem.topology, problem.hardware, best)
    assert all(rank.fits for rank in prediction.memory)
    bare = replace(table, parameters={})
    without = replace(best, tables={"t": bare})
    slower = predict(problem.workload, problem.topology, problem.hardware, without)
    assert slower.iteration_ms > prediction.iteration_ms, "no memory of the host before the SSD"
