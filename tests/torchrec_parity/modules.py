"""Workloads for the parity tests, and the TorchRec modules that match them."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from predictor.model.plan import ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Constraints, DenseArch, Feature, Table, Workload
from predictor.units import GIB
from shardopt.training.loop import apply_sparse_optimizers
from shardopt.training.model import build_model

DENSE = DenseArch(13, (512, 256, 128), (1024, 1024, 512, 256, 1), "concat")


def once_pooled(workload: Workload) -> Workload:
    """With every feature pooled once a sample, as models that are built have."""
    tables = (
        replace(table, features=tuple(replace(f, num_poolings=1.0) for f in table.features))
        for table in workload.tables
    )
    return replace(workload, tables=tuple(tables))


def build(workload: Workload, *, in_backward: bool = True) -> nn.Module:
    """The model on the meta device, its optimizers in the backward."""
    workload = once_pooled(workload)
    model = build_model(workload, "meta")
    if in_backward:
        apply_sparse_optimizers(model, workload)
    return model


def topology(world_size: int, hbm: int = 80 * GIB, ddr: int = 256 * GIB) -> Topology:
    """Hosts of eight."""
    return Topology.uniform(world_size, hbm_bytes=hbm, ddr_bytes=ddr)


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
    return Workload("dlrm_dcnv2", 8192, tuple(tables), DENSE)


def criteo_kaggle() -> Workload:
    """Small dim, plain SGD, and the three-stage pipeline's input copies."""
    rows = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194]
    rows += [27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]
    tables = [_table(f"c{i}", r, 16, 1.0, optimizer="sgd") for i, r in enumerate(rows)]
    return Workload("criteo_kaggle", 2048, tuple(tables), DENSE, train_pipeline="sparse_dist")


def rm_like() -> Workload:
    """Many lookups a table, several features a table, Adam."""
    tables = [
        _table(f"r{i}", 500_000 * (i + 1), 64, 80.0, 20.5, optimizer="adam") for i in range(8)
    ]
    return Workload("rm", 512, tuple(tables), DENSE)


def mixed() -> Workload:
    """Dims from 16 to 512 in fp32, fp16 and bf16; fewer ids than samples in one table."""
    tables = [
        _table("m0", 1_000_003, 16, 3.0),
        _table("m1", 5, 32, 0.25, data_type="fp16"),
        _table("m2", 2_000_000, 256, 10.0, data_type="fp16", optimizer="exact_adagrad"),
        _table("m3", 777, 512, 1.5, data_type="bf16", optimizer="sgd", pooling="mean"),
        _table("m4", 100_000, 384, 2.0, 4.0, optimizer="partial_row_wise_adam"),
    ]
    return Workload("mixed", 1000, tuple(tables), DENSE, train_pipeline="prefetch_sparse_dist")


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
    return Workload("constrained", 4096, tuple(tables), DENSE)


def unpooled() -> Workload:
    """Two EmbeddingCollections, for TorchRec wants one dim in each."""
    tables = [
        _table("u0", 1_000_000, 64, 50.0, pooling="none", module="ec_64"),
        _table("u1", 30, 256, 0.5, pooling="none", module="ec_256"),
        _table("u2", 2_000_000, 256, 7.0, 3.0, pooling="none", module="ec_256", optimizer="adam"),
    ]
    return Workload("unpooled", 256, tuple(tables), DENSE)


def weighted() -> Workload:
    """A weighted and an unweighted module side by side, one table with several poolings."""
    tables = (
        _table("w0", 300_000, 128, 30.0, module="weighted", weighted=True),
        _table("w1", 9, 64, 12.0, module="weighted", weighted=True, optimizer="adam"),
        Table("w2", 80_000, 128, (Feature("w2_f", 2.0, num_poolings=3.0),), module="plain"),
    )
    return Workload("weighted", 1024, tables, DENSE)


MODELS = (dlrm_dcnv2, criteo_kaggle, rm_like, mixed, constrained, unpooled, weighted)
