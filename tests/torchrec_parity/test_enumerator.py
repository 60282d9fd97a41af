"""Options and memory against TorchRec's real enumerator and storage estimator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import PipelineType

from predictor.model.memory.caches import DEFAULT_CACHE_LOAD_FACTOR, SLOT_BYTES
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Optimizer, Workload
from search.baselines.torchrec_memory import torchrec_memory
from search.space.enumerate import enumerate_space
from search.space.option import Option
from shardopt.torchrec.read_module import parameter_constraints
from shardopt.training.torchrec_planner import torchrec_topology
from tests.torchrec_parity import modules

PIPELINES = {
    "base": PipelineType.NONE,
    "sparse_dist": PipelineType.TRAIN_SPARSE_DIST,
    "prefetch_sparse_dist": PipelineType.TRAIN_PREFETCH_SPARSE_DIST,
}
Key = tuple[str, str, str, tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
Bytes = Sequence[tuple[float, float]]


@cache
def torchrec_options(
    workload: Workload, topology: Topology, device: str = "cuda", optimizer: Any = None
) -> list[ShardingOption]:
    """Return the options that the enumerator lists, cached as it takes longest.

    Args:
        optimizer: given by ``fused_params``, not in the backward.
    """
    torchrecs = torchrec_topology(topology, device)
    wants = parameter_constraints(workload)
    storage = EmbeddingStorageEstimator(torchrecs, wants, PIPELINES[workload.train_pipeline])
    enumerator = EmbeddingEnumerator(torchrecs, workload.batch_size, wants, [storage])
    fused = optimizer and {"optimizer": optimizer}
    module = modules.build(workload, in_backward=optimizer is None)
    kinds = EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
    options: list[ShardingOption] = enumerator.enumerate(
        module, [kind(fused_params=fused) for kind in kinds]
    )
    return options


def their_key(option: ShardingOption) -> Key:
    sizes = tuple(tuple(s.size) for s in option.shards)
    offsets = tuple(tuple(s.offset) for s in option.shards)
    return option.name, option.sharding_type, option.compute_kernel, sizes, offsets


def our_key(option: Option, workload: Workload) -> Key:
    name = workload.tables[option.table].name
    return name, option.sharding_type, option.compute_kernel, option.sizes, option.offsets


@cache
def our_options(workload: Workload, topology: Topology, device: str = "cuda") -> dict[Key, Option]:
    space = enumerate_space(workload, topology, device)
    # of a table's caches the usual one comes first
    return {our_key(o, workload): o for table in space.options for o in reversed(table)}


def torchrec_is_right(workload: Workload, option: Option) -> bool:
    """FBGEMM allocates what TorchRec counts; `predictor.model.memory` says where not."""
    table = workload.tables[option.table]
    stateless = table.optimizer == Optimizer.SGD
    fp32 = table.data_type == "fp32"
    if table.constraints.enforce_hbm and option.compute_kernel.startswith("fused_uvm"):
        return False
    if option.compute_kernel in (ComputeKernel.DENSE, ComputeKernel.FUSED_UVM_CACHING):
        return stateless and option.compute_kernel is not ComputeKernel.DENSE
    row_wise = (Optimizer.ROWWISE_ADAGRAD, Optimizer.PARTIAL_ROWWISE_ADAM)
    if option.compute_kernel == ComputeKernel.FUSED_UVM and table.optimizer in row_wise:
        return False
    if table.optimizer == Optimizer.ROWWISE_ADAGRAD:
        return fp32 and option.column_width == table.embedding_dim
    if table.optimizer == Optimizer.PARTIAL_ROWWISE_ADAM:
        return fp32 and option.column_width >= 128
    return stateless or fp32


def counted_bytes(option: ShardingOption) -> Bytes:
    """HBM and DDR of every shard, as TorchRec estimates it."""
    return [(shard.storage.hbm, shard.storage.ddr) for shard in option.shards]


def held_bytes(option: Option) -> Bytes:
    """Return each shard's bytes without buffers in flight, which shardopt counts differently."""
    return [(m.hbm_bytes - m.io_bytes, m.ddr_bytes) for m in option.memory]


def re_derived(workload: Workload, topology: Topology, mine: Option, device: str = "cuda") -> Any:
    """The memory of every shard by TorchRec's rules."""
    table = workload.tables[mine.table]
    kind, kernel, load_factor = mine.sharding_type, mine.compute_kernel, mine.cache_load_factor
    return torchrec_memory(
        table, workload, topology, kind, kernel, mine.sizes, load_factor, device=device
    )


def part_of_a_row(workload: Workload, option: Option, size: tuple[int, int]) -> float:
    """Bytes of the last row of a cache where TorchRec counts a part of one: FBGEMM's have whole
    rows."""
    if option.compute_kernel is not ComputeKernel.FUSED_UVM_CACHING:
        return 0.0
    part = (option.cache_load_factor or DEFAULT_CACHE_LOAD_FACTOR) * size[0] % 1
    return part * (size[1] * workload.tables[option.table].element_bytes + SLOT_BYTES)


def same(computed: Bytes, expected: Bytes, rel: float) -> None:
    there = np.array(expected, float)
    assert (np.abs(np.array(computed) - there) <= np.maximum(rel * there, 8)).all()


@pytest.mark.parametrize(
    ("model", "world", "device"),
    [
        *((model, world, "cuda") for model in modules.MODELS for world in (2, 8, 16)),
        *((model, 4, "cpu") for model in modules.MODELS),
    ],
)
def test_same_options_and_bytes(model: Callable[[], Workload], world: int, device: str) -> None:
    """Under TorchRec's rules; and those that we say are held where its rules are right."""
    workload, topology = model(), modules.topology(world)
    if (workload.name, device) == ("constrained", "cpu"):
        # TorchRec stops at the first table that the CPU has nothing for
        tables = (workload.tables[0], workload.tables[1], workload.tables[3])
        workload = replace(workload, tables=tables)
    options = torchrec_options(workload, topology, device)
    theirs = {their_key(option): option for option in options}
    ours = our_options(workload, topology, device)
    assert {key for key, option in ours.items() if not option.added_by_shardopt} == set(theirs)
    assert len(theirs) == len(options)
    counted, by_rules, held, right = [], [], [], []
    for key, option in theirs.items():
        mine, bytes_ = ours[key], counted_bytes(option)
        memory = re_derived(workload, topology, mine, device)
        by_rules += [(m.hbm_bytes, m.ddr_bytes) for m in memory]
        if device == "cpu":
            counted += [(0, ddr) for _, ddr in bytes_]
            continue
        counted += bytes_
        if torchrec_is_right(workload, mine):
            held += held_bytes(mine)
            right += [
                (hbm - m.io_bytes - part_of_a_row(workload, mine, size), ddr)
                for (hbm, ddr), m, size in zip(bytes_, memory, mine.sizes, strict=True)
            ]
    same(by_rules, counted, 1e-6)
    if device == "cuda":
        assert held
        same(held, right, 0.01)


def test_dense_state_is_what_torchrec_leaves_out_of_data_parallel() -> None:
    workload, topology = modules.criteo_kaggle(), modules.topology(8)
    ours = our_options(workload, topology)
    for option in torchrec_options(workload, topology):
        if option.sharding_type == ShardingType.DATA_PARALLEL:
            mine = ours[their_key(option)]
            flying = re_derived(workload, topology, mine)
            theirs = counted_bytes(option)
            for memory, (hbm, _), there in zip(mine.memory, theirs, flying, strict=True):
                assert memory.hbm_bytes - memory.io_bytes - memory.dense_bytes == (
                    hbm - there.io_bytes
                )
                assert memory.dense_bytes > 0


def test_optimizer_given_through_fused_params_is_zero_in_torchrec_and_counted_here() -> None:
    """``fused_params={"optimizer": ...}`` is how most examples pass it; TorchRec then counts 0."""
    workload, topology = modules.rm_like(), modules.topology(8)
    options = torchrec_options(workload, topology)
    unseen = torchrec_options(workload, topology, optimizer=EmbOptimType.ADAM)
    ours = our_options(workload, topology)
    by_key = {their_key(o): o for o in options}
    for option in unseen:
        key = their_key(option)
        if key[1] != ShardingType.TABLE_WISE or key[2] != ComputeKernel.FUSED:
            continue
        weights = workload.tables[ours[key].table].weight_bytes
        counted = by_key[key].shards[0].storage.hbm
        assert counted - option.shards[0].storage.hbm == 2 * weights
        flying = re_derived(workload, topology, ours[key])[0].io_bytes
        assert held_bytes(ours[key])[0][0] == counted - flying
        assert ours[key].memory[0].optimizer_bytes == 2 * weights
