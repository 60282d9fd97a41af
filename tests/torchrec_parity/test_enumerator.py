"""Options and memory against TorchRec's real enumerator and storage estimator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

pytest.importorskip("torchrec")

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import PipelineType

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
WORLDS = (2, 8, 16)
Key = tuple[str, str, str, tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]

each_model = pytest.mark.parametrize("model", modules.MODELS, ids=lambda m: m.__name__)
each_world = pytest.mark.parametrize("world", WORLDS)


@cache
def torchrec_options(
    workload: Workload, topology: Topology, device: str = "cuda", optimizer: Any = None
) -> list[ShardingOption]:
    """What the enumerator lists; it takes longest.

    Args:
        optimizer: given by ``fused_params``, not in the backward.
    """
    theirs = torchrec_topology(topology, device)
    wants = parameter_constraints(workload)
    storage = EmbeddingStorageEstimator(theirs, wants, PIPELINES[workload.train_pipeline])
    enumerator = EmbeddingEnumerator(theirs, workload.batch_size, wants, [storage])
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


def our_options(workload: Workload, topology: Topology, device: str = "cuda") -> dict[Key, Option]:
    space = enumerate_space(workload, topology, device)
    # of a table's caches the usual one comes first
    return {our_key(o, workload): o for table in space.options for o in reversed(table)}


@each_model
@each_world
def test_same_options(model: Callable[[], Workload], world: int) -> None:
    workload, topology = model(), modules.topology(world)
    theirs = [their_key(o) for o in torchrec_options(workload, topology)]
    ours = our_options(workload, topology)
    usual = [key for key, option in ours.items() if not option.added_by_shardopt]
    assert len(usual) == len(theirs)
    assert set(usual) == set(theirs)


@each_model
def test_same_options_on_cpu(model: Callable[[], Workload]) -> None:
    workload, topology = model(), modules.topology(4)
    if workload.name == "constrained":
        # TorchRec stops at the first table that the CPU has nothing for
        tables = (workload.tables[0], workload.tables[1], workload.tables[3])
        workload = replace(workload, tables=tables)
    theirs = {their_key(o): o for o in torchrec_options(workload, topology, "cpu")}
    ours = our_options(workload, topology, "cpu")
    assert {k for k, o in ours.items() if not o.added_by_shardopt} == set(theirs)
    for key, option in theirs.items():
        table = workload.tables[ours[key].table]
        mine = torchrec_memory(
            table,
            workload,
            topology,
            ShardingType(key[1]),
            ComputeKernel(key[2]),
            ours[key].sizes,
            device="cpu",
        )
        for shard, memory in zip(option.shards, mine, strict=True):
            assert memory.hbm_bytes == 0
            assert memory.ddr_bytes == pytest.approx(shard.storage.ddr, rel=1e-6, abs=8)


@each_model
@each_world
def test_same_bytes_under_torchrecs_rules(model: Callable[[], Workload], world: int) -> None:
    workload, topology = model(), modules.topology(world)
    ours = our_options(workload, topology)
    for option in torchrec_options(workload, topology):
        mine = ours[their_key(option)]
        table = workload.tables[mine.table]
        memories = torchrec_memory(
            table,
            workload,
            topology,
            mine.sharding_type,
            mine.compute_kernel,
            mine.sizes,
            mine.cache_load_factor,
        )
        for shard, memory in zip(option.shards, memories, strict=True):
            assert memory.hbm_bytes == pytest.approx(shard.storage.hbm, rel=1e-6, abs=8)
            assert memory.ddr_bytes == pytest.approx(shard.storage.ddr, rel=1e-6, abs=8)


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


def held_bytes(option: Option) -> list[tuple[int, int]]:
    """HBM and DDR of every shard without what is in flight, which we count in another way."""
    return [(m.hbm_bytes - m.io_bytes, m.ddr_bytes) for m in option.memory]


def their_bytes(
    workload: Workload, topology: Topology, option: ShardingOption, mine: Option
) -> list[tuple[int, int]]:
    """As `held_bytes`, of TorchRec's estimate."""
    table = workload.tables[mine.table]
    kind, kernel, clf = mine.sharding_type, mine.compute_kernel, mine.cache_load_factor
    found = torchrec_memory(table, workload, topology, kind, kernel, mine.sizes, clf)
    return [
        (shard.storage.hbm - memory.io_bytes, shard.storage.ddr)
        for shard, memory in zip(option.shards, found, strict=True)
    ]


@each_model
@each_world
def test_same_bytes_where_torchrec_is_right(model: Callable[[], Workload], world: int) -> None:
    workload, topology = model(), modules.topology(world)
    ours = our_options(workload, topology)
    compared = 0
    for option in torchrec_options(workload, topology):
        mine = ours[their_key(option)]
        if not torchrec_is_right(workload, mine):
            continue
        compared += 1
        theirs = their_bytes(workload, topology, option, mine)
        for held, (hbm, ddr) in zip(held_bytes(mine), theirs, strict=True):
            assert held[0] == pytest.approx(hbm, rel=0.01, abs=8)
            assert held[1] == pytest.approx(ddr, rel=0.01, abs=8)
    assert compared


def test_dense_state_is_what_torchrec_leaves_out_of_data_parallel() -> None:
    workload, topology = modules.criteo_kaggle(), modules.topology(8)
    ours = our_options(workload, topology)
    for option in torchrec_options(workload, topology):
        if option.sharding_type == ShardingType.DATA_PARALLEL:
            mine = ours[their_key(option)]
            theirs = their_bytes(workload, topology, option, mine)
            for memory, held, (hbm, _) in zip(mine.memory, held_bytes(mine), theirs, strict=True):
                assert held[0] - memory.dense_bytes == hbm
                assert memory.dense_bytes > 0


def test_optimizer_given_through_fused_params_is_zero_in_torchrec_and_counted_here() -> None:
    """``fused_params={"optimizer": ...}`` is how most examples pass it; TorchRec then counts 0."""
    workload, topology = modules.rm_like(), modules.topology(8)
    seen = torchrec_options(workload, topology)
    unseen = torchrec_options(workload, topology, optimizer=EmbOptimType.ADAM)
    ours = our_options(workload, topology)
    by_key = {their_key(o): o for o in seen}
    for option in unseen:
        key = their_key(option)
        if key[1] != ShardingType.TABLE_WISE or key[2] != ComputeKernel.FUSED:
            continue
        weights = workload.tables[ours[key].table].weight_bytes
        counted = by_key[key].shards[0].storage.hbm
        assert counted - option.shards[0].storage.hbm == 2 * weights
        theirs = their_bytes(workload, topology, by_key[key], ours[key])
        assert held_bytes(ours[key])[0][0] == theirs[0][0]
        assert ours[key].memory[0].optimizer_bytes == 2 * weights
