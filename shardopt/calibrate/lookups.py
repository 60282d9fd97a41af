"""Lookups of FBGEMM's TBE, as TorchRec runs it: forward, and backward with the optimizer inside.

Points of CPU ranks and of GPUs, how one is run on either, and the embedding group of CPU ranks;
`shardopt.calibrate.gpu_lookups` fits that of a GPU. The CPU's model is linear in its coefficients
(`predictor.cost.lookup.cpu`); the few constants inside logarithms are tried on a grid, on the
fitted rows alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from predictor import units
from predictor.cost.lookup.shard import state_row_bytes
from predictor.hardware.schema import CpuEmbedding
from predictor.model.plan import ComputeKernel
from predictor.model.workload import DATA_TYPE_BYTES, Optimizer, Workload
from shardopt.calibrate.fitting import (
    FEWEST_PER_CONSTANT,
    NS,
    Array,
    CalibratedProfile,
    HeldOut,
    after_call,
    mape,
    non_negative,
)
from shardopt.calibrate.points import (
    Coordinates,
    Device,
    Point,
    Size,
    choice,
    logarithmic,
    sobol_points,
)
from shardopt.calibrate.rows import PASSES, Measurement, rows_of_passes, times_ms
from shardopt.measure.sampling import Timer, sample_passes, sample_stages

ROWS = (1e3, 4e6)
DIMS = (8, 16, 32, 64, 128, 256)
BATCH = (256, 8192)
POOLING = (1.0, 50.0)
ALPHA = (0.0, 1.25)
TABLES = (1, 12)
"""Ranges of the lookups: rows and widths of tables, bags (samples of all ranks), ids a bag, Zipf
exponent, tables a TBE."""
UNIFORM_SHARE = 0.25
"""Of the range of exponents that stands for uniform ids: many features have no skew."""
MAX_IDS = 200_000
"""Ids of one TBE; more only take longer."""
MAX_TABLE_BYTES = 768 * 2**20
"""Of one TBE."""
WEIGHT_BYTES = 4
ROTATION = 0.6180339887498949
"""The golden ratio spreads the tables of one TBE evenly over the range, from the point's own."""
ONE_TABLE = (7, (0, 2, 4))
"""Points ``i`` with ``i % 7`` among these are TBEs of one table: they tell the terms apart, the
others add them up. Strides are odd: the bits of a Sobol point follow from those of its number."""
OPTIMIZER, DTYPE = "exact_row_wise_adagrad", "fp32"
"""Of a lookup point that names none."""
VARIANTS = (("exact_sgd", False), ("exact_row_wise_adagrad", True))
"""Optimizer and whether ids have weights; FBGEMM has no Adam on CPUs."""
DENSE_TABLES, DENSE_BATCH, DENSE_ROWS, DENSE_POOLING = (1, 4), (128, 4096), (100, 2e5), (1.0, 40.0)
"""Tables a launch, samples of a rank, and rows where every rank has a copy."""
MAX_DENSE_BYTES = 16 * 2**20
"""Of the tables of one launch."""
UNPOOLED_DIMS = (16, 32, 64, 128)
UNPOOLED_TABLES, UNPOOLED_BATCH, UNPOOLED_LENGTH = (1, 5), (32, 1024), (1.0, 50.0)
UNPOOLED_ROWS, UNPOOLED_ALPHA = (1e3, 1e6), 1.25
MAX_UNPOOLED_IDS = 60_000

GPU_BATCH, GPU_POOLING, GPU_ROWS = (512, 65_536), (1.0, 100.0), (1e4, 1e7)
GPU_DIMS = (16, 32, 64, 96, 128, 192, 256)
GPU_ALPHAS = (0.0, 0.8, 1.05, 1.2)
"""Zipf exponents: uniform ids, and from mild to strong skew."""
GPU_TABLES = (1, 1, 4, 16)
"""Tables of one launch; half of the launches have one, which separates the terms."""
GPU_DTYPES = ("fp32", "fp32", "fp16")
GPU_OPTIMIZERS = ("exact_row_wise_adagrad", "exact_row_wise_adagrad", "exact_sgd", "adam")
MAX_GPU_IDS = 8_000_000
"""Ids of one launch: as many rows gathered are a millisecond and more on any GPU."""
MEMORY_SHARE = 0.4
"""Of the device's memory that tables of one launch take, with their optimizer state."""
CACHED = (0.05, 0.1, 0.2, 0.4)
"""Load factors of the cache in front of tables in host memory."""
CACHED_ALPHAS = (0.8, 1.05, 1.2)
UVM_IDS = 500_000
"""Of a launch that reads rows over the host link."""
UVM_SHARE = 1 / 16
"""Of the host's memory that tables of one launch take there, with their state; hosts have several
GPUs."""
UVM_EVERY, FEWEST_UVM = 5, 5
"""One launch over the link, and one with a cache, for so many launches from device memory."""

BATCHES = 4
"""Distinct batches in turn: one batch again and again would find its rows in the caches."""
LEARNING_RATE = 0.01
WARM_CACHE = 4
"""Distinct rows looked up before a cache counts as warm, as multiples of what it holds."""
MOST_WARMING = 400
"""Batches."""

PAGE_KIB = (4.0, 16.0, 64.0)
TLB_MIB = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
FORWARD = (
    *("forward_us", "forward_table_us", "forward_ns_per_lookup", "forward_ns_per_lookup_dim"),
    *("forward_ns_per_row", "forward_ns_per_row_dim", "forward_ns_per_row_tlb"),
    "forward_ns_per_output",
)
BACKWARD = (
    *("backward_us", "backward_table_us", "backward_ns_per_lookup", "backward_ns_per_lookup_dim"),
    *("backward_ns_per_row", "backward_ns_per_row_dim", "backward_ns_per_row_tlb"),
    *("backward_ns_per_output", "backward_ns_per_lookup_pass"),
)
"""Coefficients in the order of the columns; the backward's last is the sort's."""
DENSE = (
    *("backward_dense_table_us", "backward_dense_ns_per_weight", "backward_dense_ns_per_lookup"),
    *("backward_dense_ns_per_lookup_dim", "backward_dense_ns_per_row_dim"),
)
"""The same of the backward of dense gradients, beyond the cost of its launch."""
UNPOOLED = {
    "forward": ("table_us", "ns_per_lookup", "ns_per_lookup_dim", "ns_per_row", "ns_per_row_dim"),
    "backward": ("table_us", "ns_per_lookup_dim", "ns_per_row", "ns_per_row_dim"),
}
"""The same of lookups without pooling, beyond a call of cold code."""
Table = Sequence[float]
"""Rows, dim, bags, ids, distinct rows of one table of a TBE; the last two are counted."""


# What is measured.


def cpu_points(size: Size) -> list[Point]:
    """Of one core."""
    return [
        *lookup_points(size.lookups),
        *_variant_points(size.variants),
        *sobol_points("lookup_dense", 2 * size.ops, 6, _dense),
        *sobol_points("lookup_unpooled", 2 * size.ops, 6, _unpooled),
    ]


def lookup_points(count: int) -> list[Point]:
    """TBEs of one to twelve tables."""
    return sobol_points("lookup", count, 6, _lookup)


def _lookup(u: Coordinates, index: int) -> dict[str, Any]:
    every, single = ONE_TABLE
    count = 1 if index % every in single else round(logarithmic(u[0], *TABLES))
    batch = round(logarithmic(u[1], *BATCH))
    tables = [_table((u[2:] + j * ROTATION) % 1.0, count) for j in range(count)]
    share = min(1.0, MAX_IDS / (batch * sum(table["pooling"] for table in tables)))
    kept = [{**t, "pooling": round(max(t["pooling"] * share, 0.1), 2)} for t in tables]
    return {"batch": batch, "tables": kept}


def _table(u: Coordinates, count: int) -> dict[str, Any]:
    dim = choice(DIMS, u[0])
    most = MAX_TABLE_BYTES / (count * dim * WEIGHT_BYTES)
    skew = max(0.0, (float(u[3]) - UNIFORM_SHARE) / (1 - UNIFORM_SHARE))
    return {
        "rows": round(min(logarithmic(u[1], *ROWS), most)),
        "dim": dim,
        "pooling": logarithmic(u[2], *POOLING),
        "alpha": round(ALPHA[0] + skew * (ALPHA[1] - ALPHA[0]), 3),
    }


def _variant_points(count: int) -> list[Point]:
    """The first lookups with another optimizer, and with weights."""
    return [
        Point(
            "lookup_variant",
            {**point.params, "optimizer": optimizer, "weighted": weighted},
            point.test,
        )
        for optimizer, weighted in VARIANTS
        for point in lookup_points(count)
    ]


def _dense(u: Coordinates, _: int) -> dict[str, Any]:
    """Lookups whose gradient is dense, of tables as small as those that every rank copies."""
    tables, batch = round(logarithmic(u[5], *DENSE_TABLES)), round(logarithmic(u[2], *DENSE_BATCH))
    dim = choice(DIMS, u[0])
    pooling = max(0.1, min(logarithmic(u[3], *DENSE_POOLING), MAX_IDS / 2 / (batch * tables)))
    most = MAX_DENSE_BYTES / (dim * WEIGHT_BYTES * tables)
    table = {
        "rows": round(min(logarithmic(u[1], *DENSE_ROWS), most)),
        "dim": dim,
        "pooling": round(pooling, 2),
        "alpha": round(float(u[4]) * ALPHA[1], 3),
    }
    return {"batch": batch, "tables": [table] * tables}


def _unpooled(u: Coordinates, _: int) -> dict[str, Any]:
    """Lookups of sequences: one output row an id, tables of one width."""
    tables = round(logarithmic(u[0], *UNPOOLED_TABLES))
    batch = round(logarithmic(u[1], *UNPOOLED_BATCH))
    length = min(logarithmic(u[2], *UNPOOLED_LENGTH), MAX_UNPOOLED_IDS / (batch * tables))
    table: dict[str, Any] = {
        "rows": round(logarithmic(u[3], *UNPOOLED_ROWS)),
        "dim": choice(UNPOOLED_DIMS, u[4]),
        "pooling": round(max(length, 0.1), 2),
        "alpha": round(float(u[5]) * UNPOOLED_ALPHA, 3),
    }
    return {"batch": batch, "pooled": False, "tables": [table] * tables}


def gpu_points(size: Size, device: Device) -> list[Point]:
    """Lookups from device memory, over the host link, and through a cache.

    Each varies what one constant of the kernel model depends on: batches from a fraction of a wave
    to many, widths around a warp's, tables on both sides of the L2, skew, tables a launch, weights,
    optimizers, and tables in host memory with and without a cache.
    """
    most, uvm = MEMORY_SHARE * device.memory_bytes, UVM_SHARE * device.host_bytes
    few = max(size.lookups // UVM_EVERY, FEWEST_UVM)

    def from_device(u: Coordinates, _: int) -> dict[str, Any]:
        return _launch(u, most)

    def over_link(u: Coordinates, _: int) -> dict[str, Any]:
        return {**_launch(u, uvm, UVM_IDS), "kernel": "fused_uvm"}

    def cached(u: Coordinates, i: int) -> dict[str, Any]:
        cache = {"kernel": "fused_uvm_caching", "cache_load_factor": CACHED[i % len(CACHED)]}
        return {**_launch(u, uvm, UVM_IDS, CACHED_ALPHAS), **cache}

    return [
        *sobol_points("lookup", size.lookups, 8, from_device),
        *sobol_points("lookup", few, 8, over_link),
        *sobol_points("lookup_cached", few, 8, cached),
    ]


def _launch(
    u: Coordinates,
    most_bytes: float,
    most_ids: int = MAX_GPU_IDS,
    alphas: tuple[float, ...] = GPU_ALPHAS,
) -> dict[str, Any]:
    """One launch from a point of the unit cube; tables after the first differ from it."""
    batch, tables = round(logarithmic(u[0], *GPU_BATCH)), choice(GPU_TABLES, u[5])
    dtype, first_dim, alpha = choice(GPU_DTYPES, u[6]), choice(GPU_DIMS, u[1]), choice(alphas, u[4])
    optimizer = choice(GPU_OPTIMIZERS, u[7])
    widest = max(GPU_DIMS) if tables > 1 else first_dim
    row_bytes = widest * DATA_TYPE_BYTES[dtype] + sum(state_row_bytes(optimizer, widest))
    rows = min(logarithmic(u[2], *GPU_ROWS), most_bytes / (row_bytes * tables))
    pooling = min(logarithmic(u[3], *GPU_POOLING), most_ids / (batch * tables))
    return {
        "batch": batch,
        "dtype": dtype,
        "optimizer": optimizer,
        "tables": [
            {
                "rows": round(rows),
                "dim": GPU_DIMS[(GPU_DIMS.index(first_dim) + j) % len(GPU_DIMS)],
                "pooling": round(max(pooling, 0.1), 2),
                "alpha": alphas[(alphas.index(alpha) + j) % len(alphas)],
            }
            for j in range(tables)
        ],
    }


def model_points(model: Workload, ranks: int) -> list[Point]:
    """Every table of a model, one by one, for the samples of all ranks; every other is held out."""
    shape = {"model_sha": model.sha256, "batch_size": model.batch_size, "ranks": ranks}
    return [
        Point("model_lookup", {**shape, "table": key}, test=i % 2 == 1)
        for i, key in enumerate(model.keys)
    ]


# How it is measured.


def measure_lookup(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Rows ``forward`` and ``backward`` of one TBE.

    Their facts: per table ``[rows, dim, bags, ids, distinct rows]``, means over the batches.
    """
    launch = Launch(point.params, timer.device)
    return _measure_passes(
        point, launch, timer, seconds, lambda output: output.backward(launch.gradient)
    )


def measure_dense_lookup(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """The same of a TBE whose backward makes a dense gradient and no step."""
    import torch

    launch = Launch({**point.params, "kernel": ComputeKernel.DENSE}, timer.device)

    def backward(output: Any) -> Any:
        # not .backward(), which would add to the gradient of the sample before
        return torch.autograd.grad(output, launch.tbe.weights, launch.gradient)

    return _measure_passes(point, launch, timer, seconds, backward)


def measure_unpooled_lookup(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """The same of a TBE that gives a row for each id; its tables have one width."""
    import torch

    launch = Launch(point.params, timer.device)
    width = point.params["tables"][0]["dim"]
    gradient = torch.full((1, width), 1e-3, device=timer.device)

    def backward(output: Any) -> Any:
        nonlocal gradient
        if len(gradient) < len(output):
            gradient = gradient[:1].repeat(2 * len(output), 1)
        return output.backward(gradient[: len(output)])

    return _measure_passes(point, launch, timer, seconds, backward)


def _measure_passes(
    point: Point, launch: Launch, timer: Timer, seconds: float, run_backward: Callable[[Any], Any]
) -> list[Measurement]:
    batches, counts = zip(*(launch.draw() for _ in range(BATCHES)), strict=True)
    spent = sample_passes(timer, lambda i: launch.tbe(*batches[i % BATCHES]), run_backward, seconds)
    return rows_of_passes(point, spent, tables=launch.facts(list(counts)))


def measure_cached(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Rows ``prefetch``, ``forward`` and ``backward`` of one TBE with a cache, facts as of lookups.

    Every repeat looks up another batch, after as many others as fill the cache several times:
    a ring of few batches would be in the cache as a whole, and fetch nothing.
    """
    launch = Launch(point.params, timer.device)
    facts = launch.facts([launch.draw()[1] for _ in range(BATCHES)])
    held = point.params["cache_load_factor"] * sum(table[0] for table in facts)
    warming = WARM_CACHE * held / max(sum(table[4] for table in facts), 1.0)

    def draw(_: int, __: object) -> Any:
        return launch.draw()[0]

    def prefetch(_: int, arguments: Any) -> Any:
        launch.tbe.prefetch(*arguments[:2])
        return arguments

    def forward(_: int, arguments: Any) -> Any:
        return launch.tbe(*arguments)

    def backward(_: int, output: Any) -> None:
        output.backward(launch.gradient)

    stages = (draw, prefetch, forward, backward)
    for i in range(min(int(np.ceil(warming)), MOST_WARMING)):
        made: Any = None
        for stage in stages:
            made = stage(i, made)
    return rows_of_passes(point, sample_stages(timer, stages, seconds)[1:], tables=facts)


def measure_model_lookup(
    model: Workload, point: Point, timer: Timer, seconds: float
) -> list[Measurement]:
    """Rows ``forward`` and ``backward`` of one whole table that serves the samples of all ranks.

    Facts as of a lookup with one table, and what else its kernels depend on.
    """
    import torch
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode

    from shardopt.training.batch import batch_ring

    table = model.tables[model.keys.index(point.params["table"])]
    samples = point.params["batch_size"] * point.params["ranks"]
    only = replace(model, tables=(table,), batch_size=samples)
    ring = [batch.sparse[table.module] for batch in batch_ring(only, size=BATCHES)]
    inputs = []
    for sparse in ring:
        given = sparse.to(timer.device)
        weights = given.weights_or_none()
        inputs.append((given.values(), given.offsets(), *(() if weights is None else (weights,))))
    # TorchRec makes its SGD the exact one
    plain_sgd = table.optimizer == Optimizer.SGD
    optimizer = str(Optimizer.EXACT_SGD if plain_sgd else table.optimizer)
    tbe = make_tbe(
        [(table.num_embeddings, table.embedding_dim)],
        timer.device,
        optimizer,
        table.data_type,
        feature_table_map=[0] * len(table.features),
        pooling_mode=PoolingMode[table.pooling.upper()],
    )
    gradients = [torch.full_like(tbe(*given), 1e-3) for given in inputs]

    def forward(repeat: int) -> Any:
        i = repeat % BATCHES
        return tbe(*inputs[i]), gradients[i]

    spent = sample_passes(timer, forward, lambda made: made[0].backward(made[1]), seconds)
    ids = float(np.mean([sparse.values().numel() for sparse in ring]))
    distinct = float(np.mean([len(np.unique(sparse.values().numpy())) for sparse in ring]))
    bags = samples * len(table.features)
    return rows_of_passes(
        point,
        spent,
        tables=[[table.num_embeddings, table.embedding_dim, bags, ids, distinct]],
        dtype=table.data_type,
        optimizer=optimizer,
        weighted=table.weighted,
        pooled=table.is_pooled,
        mean=table.pooling == "mean",
    )


class Launch:
    """The TBE of a point, and batches for it."""

    def __init__(self, params: dict[str, Any], device: str) -> None:
        import torch

        self.params, self.device = params, device
        self.generator = torch.Generator(device).manual_seed(0)
        self.tables = [_DrawnTable(table, device) for table in params["tables"]]
        others: dict[str, Any] = {}
        if "cache_load_factor" in params:
            others["cache_load_factor"] = params["cache_load_factor"]
        if not params.get("pooled", True):
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode

            others["pooling_mode"] = PoolingMode.NONE
        self.tbe = make_tbe(
            [(table["rows"], table["dim"]) for table in params["tables"]],
            device,
            params.get("optimizer", OPTIMIZER),
            params.get("dtype", DTYPE),
            params.get("kernel", ComputeKernel.FUSED),
            **others,
        )

    @cached_property
    def gradient(self) -> Any:
        """Of the pooled outputs of all tables."""
        import torch

        width = sum(table["dim"] for table in self.params["tables"])
        return torch.full((self.params["batch"], width), 1e-3, device=self.device)

    def draw(self) -> tuple[tuple[Any, ...], list[tuple[int, int]]]:
        """One more batch: ids, offsets and, where ids are weighted, weights; and ids and distinct
        rows of each table."""
        import torch

        drawn = [table.draw(self.params["batch"], self.generator) for table in self.tables]
        ids = torch.cat([ids for ids, _ in drawn])
        offsets = torch.cat([ids.new_zeros(1), torch.cat([n for _, n in drawn]).cumsum(0)])
        weights = (torch.full_like(ids, 0.5, dtype=torch.float32),)
        return (
            (ids, offsets, *(weights if self.params.get("weighted", False) else ())),
            [(ids.numel(), int(torch.unique(ids).numel())) for ids, _ in drawn],
        )

    def facts(self, counts: list[list[tuple[int, int]]]) -> list[list[float]]:
        """``[tables, 5]``: rows, dim, bags; ids and distinct rows as counted in some batches."""
        means = np.mean(counts, axis=0)
        return [
            [table["rows"], table["dim"], self.params["batch"], *mean.tolist()]
            for table, mean in zip(self.params["tables"], means, strict=True)
        ]


class _DrawnTable:
    """Draws the ids of one table."""

    def __init__(self, params: dict[str, Any], device: str) -> None:
        import torch

        self.params = params
        self.upto: Any = None
        self.place: Any = None
        if params["alpha"] > 0:
            ranks = torch.arange(1, params["rows"] + 1, dtype=torch.float64, device=device)
            self.upto = (ranks ** -params["alpha"]).cumsum(0)
            # the same popular rows in every batch, spread over the table
            seeded = torch.Generator(device).manual_seed(params["rows"])
            self.place = torch.randperm(params["rows"], generator=seeded, device=device)

    def draw(self, bags: int, generator: Any) -> tuple[Any, Any]:
        """Ids and bag sizes; each bag has floor or ceil of the pooling factor."""
        import torch

        device, rows = generator.device, self.params["rows"]
        least = int(self.params["pooling"])
        more = torch.rand(bags, generator=generator, device=device)
        lengths = least + (more < self.params["pooling"] - least).long()
        count = int(lengths.sum())
        if self.upto is None:
            return torch.randint(rows, (count,), generator=generator, device=device), lengths
        at = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
        ranks = torch.searchsorted(self.upto, at * self.upto[-1])
        return self.place[ranks.clamp(max=rows - 1)], lengths


def make_tbe(
    shapes: list[tuple[int, int]],
    device: str,
    optimizer: str,
    dtype: str = DTYPE,
    kernel: str = ComputeKernel.FUSED,
    **others: Any,
) -> Any:
    """A TBE of tables of these rows and widths.

    Args:
        others: further arguments of FBGEMM's class.
    """
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        DenseTableBatchedEmbeddingBagsCodegen,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    cuda = device == "cuda"
    if kernel == ComputeKernel.DENSE:
        dense = DenseTableBatchedEmbeddingBagsCodegen(
            shapes, weights_precision=SparseType(dtype), use_cpu=not cuda
        )
        dense.weights.data.fill_(0.01)
        return dense
    on_gpu = {
        ComputeKernel.FUSED: EmbeddingLocation.DEVICE,
        ComputeKernel.FUSED_UVM: EmbeddingLocation.MANAGED,
        ComputeKernel.FUSED_UVM_CACHING: EmbeddingLocation.MANAGED_CACHING,
    }
    where = on_gpu[ComputeKernel(kernel)] if cuda else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if cuda else ComputeDevice.CPU
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, where, compute) for rows, dim in shapes],
        optimizer=EmbOptimType(optimizer),
        learning_rate=LEARNING_RATE,
        weights_precision=SparseType(dtype),
        device=torch.device(device),
        **others,
    )
    # pages that nobody wrote are all the same page of zeros, and cheap to read
    for weights in tbe.split_embedding_weights():
        weights.fill_(0.01)
    return tbe


# What the rows of CPU ranks say.


def fit_cpu(made: CalibratedProfile) -> CalibratedProfile:
    """Every coefficient of the CPU's embedding model."""
    embedding = made.profile.embedding
    parts = {
        part: made.of("lookup", part, test=False) + _of_model(made, part, test=False)
        for part in PASSES
    }
    if not isinstance(embedding, CpuEmbedding):
        return made
    if min(map(len, parts.values())) < FEWEST_PER_CONSTANT * len(BACKWARD):
        return _fit_unpooled(made.kept("lookup") if any(parts.values()) else made)
    fitted = _best_on_grid(parts["forward"], parts["backward"], embedding)
    for part, names in zip(PASSES, (FORWARD, BACKWARD), strict=True):
        test, count = made.of("lookup", part, test=True), len(parts[part])
        mine, theirs = (lookup_errors(of, test, names) for of in (fitted, embedding))
        made = made.error(f"lookup {part}", HeldOut(mine, count, times_ms(test)), theirs)
        many = np.array([len(row.facts["tables"]) > 1 for row in test], dtype=bool)
        for label, keep in (("one table", ~many), ("several tables", many)):
            made = made.error(f"lookup {part}, {label}", HeldOut(mine[keep], count))
        of_model = _of_model(made, part, test=True)
        if of_model:
            errors = lookup_errors(fitted, of_model, names)
            made = made.error(f"model's lookup {part}", HeldOut(errors, count))
    fitted = fitted.model_copy(update=_variants(made, fitted))
    made, fitted = _fit_dense(made, fitted)
    rows = parts["forward"] + parts["backward"]
    error = made.errors["lookup forward"] + made.errors["lookup backward"]
    made = made.update(embedding=fitted).measured("embedding", rows, error, lookup_ranges(rows))
    return _fit_unpooled(made)


def lookup_ranges(rows: Sequence[Measurement]) -> dict[str, list[float]]:
    """What lookups of these rows range over."""
    launches = [row.facts["tables"] for row in rows]
    return {
        "tables": [len(tables) for tables in launches],
        "ids": [sum(table[3] for table in tables) for tables in launches],
        "rows": [table[0] for tables in launches for table in tables],
        "dim": [table[1] for tables in launches for table in tables],
    }


def _of_model(made: CalibratedProfile, part: str, test: bool) -> list[Measurement]:
    """Lookups of the given model's tables that the coefficients are for.

    Other optimizers, weights and types have factors of their own, or none.
    """
    plain: dict[str, Any] = {"dtype": "fp32", "weighted": False, "pooled": True}
    if part == "backward":
        plain["optimizer"] = OPTIMIZER
    rows = made.of("model_lookup", part, test)
    return [row for row in rows if plain.items() <= row.facts.items()]


def _best_on_grid(
    forward: Sequence[Measurement], backward: Sequence[Measurement], base: CpuEmbedding
) -> CpuEmbedding:
    """``base`` with every coefficient fitted, at the grid point with the smallest loss."""
    best, least = base, math.inf
    for page, tlb in itertools.product(PAGE_KIB, TLB_MIB):
        found = base.model_copy(update={"page_kib": page, "tlb_mib": tlb})
        loss = 0.0
        for rows, names in ((forward, FORWARD), (backward, BACKWARD)):
            solution = non_negative(lookup_columns(found, rows, names), times_ms(rows))
            found = found.model_copy(update=dict(zip(names, solution.tolist(), strict=True)))
            loss += mape(lookup_errors(found, rows, names))
        if loss < least - 1e-12:
            best, least = found, loss
    return best


def lookup_columns(
    constants: CpuEmbedding, rows: Sequence[Measurement], names: Sequence[str]
) -> Array:
    """``[rows, names]``: time in ms that one unit of each coefficient adds."""
    launches = [row.facts["tables"] for row in rows]
    terms = [np.sum([_terms(constants, t, names) for t in tables], axis=0) for tables in launches]
    # the cost of a launch counts once for all its tables
    counts = np.array([[len(tables)] for tables in launches], dtype=np.float64)
    launch = np.array([name in ("forward_us", "backward_us") for name in names])
    return np.array(terms) * np.where(launch, 1.0 / counts, 1.0)


def _terms(constants: CpuEmbedding, table: Table, names: Sequence[str]) -> list[float]:
    rows, dim, bags, ids, distinct = table
    touched = distinct * 1024 * constants.page_kib
    tlb = math.log1p(min(rows * dim * 4, touched) / units.mib(constants.tlb_mib))
    digits = math.ceil(math.log2(max(rows, 2)) / constants.sort_digit_bits)
    terms = {
        "us": units.us(1.0),
        "table_us": units.us(1.0),
        "ns_per_lookup": NS * ids,
        "ns_per_lookup_dim": NS * ids * dim,
        "ns_per_row": NS * distinct,
        "ns_per_row_dim": NS * distinct * dim,
        "ns_per_row_tlb": NS * distinct * tlb,
        "ns_per_output": NS * bags * dim,
        "ns_per_lookup_pass": NS * ids * digits,
        "ns_per_weight": NS * rows * dim,
    }
    return [terms[name.split("_", 1)[1].removeprefix("dense_")] for name in names]


def predict_lookups(
    constants: CpuEmbedding, rows: Sequence[Measurement], names: Sequence[str]
) -> Array:
    """Times ``[rows]`` in ms, as the kernel model gives them."""
    if not rows:
        return np.zeros(0)
    coefficients = np.array([getattr(constants, name) for name in names])
    return np.asarray(lookup_columns(constants, rows, names) @ coefficients)


def lookup_errors(
    constants: CpuEmbedding, rows: Sequence[Measurement], names: Sequence[str]
) -> Array:
    """Relative errors ``[rows]``."""
    return predict_lookups(constants, rows, names) / times_ms(rows) - 1.0


def _variants(made: CalibratedProfile, embedding: CpuEmbedding) -> dict[str, float]:
    """Backwards of another kind over what the kernel model gives: the median of each."""
    rows = made.of("lookup_variant", "backward")
    kinds = {
        "backward_stateless": [r for r in rows if r.point.params["optimizer"] == "exact_sgd"],
        "backward_weighted": [r for r in rows if r.point.params["weighted"]],
    }
    return {
        name: float(np.median(times_ms(some) / predict_lookups(embedding, some, BACKWARD)))
        for name, some in kinds.items()
        if some
    }


def _fit_dense(
    made: CalibratedProfile, base: CpuEmbedding
) -> tuple[CalibratedProfile, CpuEmbedding]:
    """Constants of backwards that make dense gradients; as they were where rows are too few.

    A launch in these rows is a call of cold code; among other kernels it costs what a fused one
    does, so that it is no constant of its own.
    """
    fit, test = made.fit_and_test("lookup_dense", "backward")
    if len(fit) < FEWEST_PER_CONSTANT * (1 + len(DENSE)):
        return made, base
    launch = np.full((len(fit), 1), units.us(1.0))
    columns = np.hstack((launch, lookup_columns(base, fit, DENSE)))
    launch_us, *found = non_negative(columns, times_ms(fit)).tolist()
    fitted = base.model_copy(update=dict(zip(DENSE, found, strict=True)))
    predicted = predict_lookups(fitted, test, DENSE) + units.us(launch_us)
    errors = np.asarray(predicted / times_ms(test) - 1.0)
    return made.error("lookup backward, dense gradient", HeldOut(errors, len(fit))), fitted


def _fit_unpooled(made: CalibratedProfile) -> CalibratedProfile:
    """Lookups without pooling; their tables have one width."""
    for part, names in UNPOOLED.items():
        rows = made.of("lookup_unpooled", part)
        columns = []
        for tables in (row.facts["tables"] for row in rows):
            width = tables[0][1]
            ids, distinct = (sum(table[i] for table in tables) for i in (3, 4))
            known = {
                "table_us": units.us(float(len(tables))),
                "ns_per_lookup": NS * ids,
                "ns_per_lookup_dim": NS * ids * width,
                "ns_per_row": NS * distinct,
                "ns_per_row_dim": NS * distinct * width,
            }
            columns.append([known[name] for name in names])
        made, costs = after_call(made, f"lookup {part}, unpooled", rows, columns)
        if costs is not None:
            found = zip(names, costs.tolist(), strict=True)
            costs_of = {f"{part}_unpooled_{name}": cost for name, cost in found}
            made = made.constants("embedding", **costs_of)
    return made
