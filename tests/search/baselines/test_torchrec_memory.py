"""TorchRec's estimate of a shard's memory, counted by hand."""

from __future__ import annotations

from predictor.model.memory.ranks import ShardMemory
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.workload import Workload
from search.baselines.torchrec_memory import torchrec_memory
from tests.predictor.model.memory.one_table import (
    DIM,
    IDS,
    OUT,
    ROWS,
    TOPOLOGY,
    WEIGHTS,
    WORLD,
    a_workload,
)


def one(workload: Workload, kernel: ComputeKernel, clf: float | None = None) -> ShardMemory:
    kind, sizes = ShardingType.TABLE_WISE, [(ROWS, DIM)]
    return torchrec_memory(workload.tables[0], workload, TOPOLOGY, kind, kernel, sizes, clf)[0]


def test_ids_alone_count_where_they_are_exchanged_ahead() -> None:
    ids, fused = WORLD * IDS, ComputeKernel.FUSED
    assert one(a_workload(), fused).io_bytes == ids + WORLD * OUT
    assert one(a_workload(pipeline="sparse_dist"), fused).io_bytes == 2 * ids
    prefetch = a_workload(pipeline="prefetch_sparse_dist")
    assert one(prefetch, ComputeKernel.FUSED_UVM_CACHING).io_bytes == 10 * ids


def test_a_cache_holds_a_share_of_the_state_too() -> None:
    memory = one(a_workload("adam"), ComputeKernel.FUSED_UVM_CACHING, 0.5)
    cache = WEIGHTS // 2
    assert memory.hbm_bytes == WORLD * (IDS + OUT) + 3 * cache + ROWS * 12
    assert memory.ddr_bytes == 3 * WEIGHTS
