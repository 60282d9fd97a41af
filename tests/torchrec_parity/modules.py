"""Workloads for the parity tests, and the TorchRec modules and constraints that match them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams, DataType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from predictor.model.plan import ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import (
    Constraints,
    DcnV2,
    DenseArch,
    Feature,
    Optimizer,
    Table,
    Workload,
)
from predictor.units import GIB

DATA_TYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16, "bf16": DataType.BF16}
POOLINGS = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], EmbOptimType]] = {
    Optimizer.SGD: (torchrec.optim.SGD, EmbOptimType.EXACT_SGD),
    Optimizer.ADAM: (torchrec.optim.Adam, EmbOptimType.ADAM),
    Optimizer.ADAGRAD: (torchrec.optim.Adagrad, EmbOptimType.EXACT_ADAGRAD),
    Optimizer.ROWWISE_ADAGRAD: (
        torchrec.optim.RowWiseAdagrad,
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    ),
    Optimizer.PARTIAL_ROWWISE_ADAM: (
        torchrec.optim.PartialRowWiseAdam,
        EmbOptimType.PARTIAL_ROWWISE_ADAM,
    ),
}
HBM, DDR = 80 * GIB, 256 * GIB


def build(workload: Workload, *, in_backward: bool = True) -> nn.Module:
    """A module on the meta device with one child per embedding module of the workload."""
    model = nn.Module()
    for name in workload.modules:
        tables = [t for t in workload.tables if t.module == name]
        model.add_module(name, _collection(tables))
    if in_backward:
        for table in workload.tables:
            module = model.get_submodule(table.module)
            parameter = module.get_parameter(f"{_children(table)}.{table.name}.weight")
            apply_optimizer_in_backward(OPTIMIZERS[table.optimizer][0], [parameter], {"lr": 0.1})
    return model


def _children(table: Table) -> str:
    return "embedding_bags" if table.is_pooled else "embeddings"


def _collection(tables: Sequence[Table]) -> nn.Module:
    fields = [
        {
            "name": t.name,
            "num_embeddings": t.num_embeddings,
            "embedding_dim": t.embedding_dim,
            "feature_names": [f.name for f in t.features],
            "data_type": DATA_TYPES[t.data_type],
        }
        for t in tables
    ]
    if not tables[0].is_pooled:
        return torchrec.EmbeddingCollection(
            device=torch.device("meta"),
            tables=[torchrec.EmbeddingConfig(**f) for f in fields],
        )
    configs = [
        torchrec.EmbeddingBagConfig(pooling=POOLINGS[t.pooling], **f)
        for t, f in zip(tables, fields, strict=True)
    ]
    return torchrec.EmbeddingBagCollection(
        device=torch.device("meta"), tables=configs, is_weighted=tables[0].weighted
    )


def sharders(fused_params: dict[str, object] | None = None) -> list[object]:
    """TorchRec's default sharders of the two collections."""
    return [
        EmbeddingBagCollectionSharder(fused_params=fused_params),
        EmbeddingCollectionSharder(fused_params=fused_params),
    ]


def constraints(workload: Workload) -> dict[str, ParameterConstraints]:
    """Pooling factors of every table, and what its constraints say in TorchRec's words."""
    result = {}
    for table in workload.tables:
        wants = table.constraints
        clf = wants.cache_load_factor
        result[table.name] = ParameterConstraints(
            sharding_types=list(map(str, wants.sharding_types)) if wants.sharding_types else None,
            compute_kernels=list(wants.compute_kernels) if wants.compute_kernels else None,
            min_partition=wants.min_partition,
            pooling_factors=[f.pooling_factor for f in table.features],
            num_poolings=[f.num_poolings for f in table.features],
            is_weighted=table.weighted,
            cache_params=CacheParams(load_factor=clf) if clf is not None else None,
            enforce_hbm=wants.enforce_hbm,
        )
    return result


def topology(world_size: int, hbm: int = HBM, ddr: int = DDR) -> Topology:
    """Hosts of eight."""
    return Topology.uniform(world_size, hbm_bytes=hbm, ddr_bytes=ddr)


def torchrec_topology(ours: Topology, device: str = "cuda") -> TorchRecTopology:
    """The same in TorchRec's class, with its default bandwidths."""
    return TorchRecTopology(
        world_size=ours.world_size,
        local_world_size=ours.local_world_size,
        compute_device=device,
        hbm_cap=ours.hbm_cap_bytes[0],
        ddr_cap=ours.ddr_cap_bytes[0],
    )


def _dense() -> DenseArch:
    return DenseArch(13, (512, 256, 128), (1024, 1024, 512, 256, 1), DcnV2(3, 512))


def _table(name: str, rows: int, dim: int, *poolings: float, **more: object) -> Table:
    features = tuple(Feature(f"{name}_f{i}", p) for i, p in enumerate(poolings))
    return Table(name, rows, dim, features, **more)  # type: ignore[arg-type]


def dlrm_dcnv2() -> Workload:
    """Cardinalities and multi-hot sizes like MLPerf's DLRM-DCNv2."""
    rows = [40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10]
    rows += [2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36]
    hots = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
    sizes = zip(rows, hots, strict=True)
    tables = [_table(f"t{i}", r, 128, float(h)) for i, (r, h) in enumerate(sizes)]
    return Workload("dlrm_dcnv2", 8192, tuple(tables), _dense())


def criteo_kaggle() -> Workload:
    """Small dim, plain SGD, and the three-stage pipeline's input copies."""
    rows = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194]
    rows += [27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]
    tables = [_table(f"c{i}", r, 16, 1.0, optimizer="sgd") for i, r in enumerate(rows)]
    return Workload("criteo_kaggle", 2048, tuple(tables), _dense(), train_pipeline="sparse_dist")


def rm_like() -> Workload:
    """Many lookups a table, several features a table, Adam."""
    tables = [
        _table(f"r{i}", 500_000 * (i + 1), 64, 80.0, 20.5, optimizer="adam") for i in range(8)
    ]
    return Workload("rm", 512, tuple(tables), _dense())


def mixed() -> Workload:
    """Dims from 16 to 512 in fp32, fp16 and bf16; fewer ids than samples in one table."""
    tables = [
        _table("m0", 1_000_003, 16, 3.0),
        _table("m1", 5, 32, 0.25, data_type="fp16"),
        _table("m2", 2_000_000, 256, 10.0, data_type="fp16", optimizer="exact_adagrad"),
        _table("m3", 777, 512, 1.5, data_type="bf16", optimizer="sgd", pooling="mean"),
        _table("m4", 100_000, 384, 2.0, 4.0, optimizer="partial_row_wise_adam"),
    ]
    return Workload("mixed", 1000, tuple(tables), _dense(), train_pipeline="prefetch_sparse_dist")


def constrained() -> Workload:
    """Every constraint TorchRec knows."""
    types = ShardingType
    wants = [
        Constraints(sharding_types=(types.TABLE_WISE, types.ROW_WISE)),
        Constraints(compute_kernels=("fused",)),
        Constraints(compute_kernels=("dense", "fused_uvm")),
        Constraints(min_partition=32),
        Constraints(min_partition=24, sharding_types=(types.COLUMN_WISE, types.GRID_SHARD)),
        Constraints(cache_load_factor=0.35, compute_kernels=("fused_uvm_caching",)),
        Constraints(enforce_hbm=True),
        Constraints(sharding_types=(types.DATA_PARALLEL,)),
    ]
    tables = [
        _table(f"k{i}", 40_000 * (i + 1), 256, 4.0, constraints=c) for i, c in enumerate(wants)
    ]
    return Workload("constrained", 4096, tuple(tables), _dense())


def unpooled() -> Workload:
    """Two EmbeddingCollections, for TorchRec wants one dim in each."""
    tables = [
        _table("u0", 1_000_000, 64, 50.0, pooling="none", module="ec_64"),
        _table("u1", 30, 256, 0.5, pooling="none", module="ec_256"),
        _table("u2", 2_000_000, 256, 7.0, 3.0, pooling="none", module="ec_256", optimizer="adam"),
    ]
    return Workload("unpooled", 256, tuple(tables), _dense())


def weighted() -> Workload:
    """A weighted and an unweighted module side by side, one table with several poolings."""
    tables = (
        _table("w0", 300_000, 128, 30.0, module="weighted", weighted=True),
        _table("w1", 9, 64, 12.0, module="weighted", weighted=True, optimizer="adam"),
        Table("w2", 80_000, 128, (Feature("w2_f", 2.0, num_poolings=3.0),), module="plain"),
    )
    return Workload("weighted", 1024, tables, _dense())


MODELS = (dlrm_dcnv2, criteo_kaggle, rm_like, mixed, constrained, unpooled, weighted)
