"""Lookups of FBGEMM's TBE, as TorchRec runs it: forward, and backward with the optimizer inside.

Points of CPU ranks and of GPUs, their measurement, and the fit of the embedding group of CPU ranks;
`shardopt.calibrate.gpu_lookups` fits that of a GPU. The CPU's model is linear in its coefficients
(`predictor.cost.lookup.cpu`); a grid search over the fitted rows gives the few constants inside
logarithms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from predictor import units
from predictor.cost.lookup.shard import state_row_bytes
from predictor.hardware.schema import CpuEmbedding
from predictor.model.workload import DATA_TYPE_BYTES, Workload
from shardopt.calibrate import Group
from shardopt.calibrate.fitting import (
    FEWEST_PER_CONSTANT,
    NS,
    Array,
    CalibratedProfile,
    HeldOut,
    after_call,
    mape,
    non_negative,
    total,
)
from shardopt.calibrate.points import (
    Coordinates,
    Device,
    Family,
    Point,
    Size,
    choice,
    logarithmic,
    sobol_points,
    whole,
)
from shardopt.calibrate.rows import PASSES, Measurement, times_ms

DIMS, MOST_ALPHA, TABLES = (8, 16, 32, 64, 128, 256), 1.25, (1, 12)
"""Widths of tables, largest Zipf exponent, tables a TBE."""
UNIFORM_SHARE = 0.25
"""Share of the range of exponents for uniform ids: many features have no skew."""
MAX_IDS = 200_000
"""Most ids of one TBE; more only take longer."""
MAX_TABLE_BYTES = 768 * 2**20
"""Most bytes of the tables of one TBE."""
WEIGHT_BYTES = 4
ROTATION = 0.6180339887498949
"""Golden ratio: it spreads the tables of one TBE evenly over the range, from the point's own."""
ONE_TABLE = (7, (0, 2, 4))
"""Points ``i`` with ``i % 7`` among these are TBEs of one table, which separate the terms. The
stride is odd, because the bits of a Sobol point follow from those of its index."""
OPTIMIZER, DTYPE = "exact_row_wise_adagrad", "fp32"
"""Defaults of a lookup point."""
VARIANTS = (("exact_sgd", False), ("exact_row_wise_adagrad", True))
"""Optimizer, and True for ids with weights; FBGEMM has no Adam on CPUs."""
MAX_DENSE_BYTES = 16 * 2**20
"""Most bytes of the tables of one launch where every rank has a copy."""
UNPOOLED_DIMS, MAX_UNPOOLED_IDS = (16, 32, 64, 128), 60_000

GPU_DIMS = (16, 32, 64, 96, 128, 192, 256)
GPU_ALPHAS = (0.0, 0.8, 1.05, 1.2)
"""Zipf exponents: uniform ids, and from mild to strong skew."""
GPU_TABLES = (1, 1, 4, 16)
"""Tables of one launch; half of the launches have a single one, to separate the terms."""
GPU_DTYPES = ("fp32", "fp32", "fp16")
GPU_OPTIMIZERS = ("exact_row_wise_adagrad", "exact_row_wise_adagrad", "exact_sgd", "adam")
MAX_GPU_IDS = 8_000_000
"""Most ids of one launch: gathering so many rows takes a millisecond and more on any GPU."""
MEMORY_SHARE = 0.4
"""Largest share of the device's memory for tables of one launch with their optimizer state."""
CACHED = (0.05, 0.1, 0.2, 0.4)
"""Load factors of the cache in front of tables in host memory."""
CACHED_ALPHAS = (0.8, 1.05, 1.2)
UVM_IDS = 500_000
"""Most ids of a launch that reads rows over the host link."""
UVM_SHARE = 1 / 16
"""Largest share of the host's memory for tables of one launch with their state; hosts have several
GPUs."""
UVM_EVERY, FEWEST_UVM = 5, 5
"""Launches from device memory for each one over the link or with a cache; fewest of these."""

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
"""Coefficients of the backward of dense gradients, beyond the cost of its launch."""
UNPOOLED = {
    "forward": (
        *("forward_unpooled_table_us", "forward_unpooled_ns_per_lookup"),
        *("forward_unpooled_ns_per_lookup_dim", "forward_unpooled_ns_per_row"),
        "forward_unpooled_ns_per_row_dim",
    ),
    "backward": (
        *("backward_unpooled_table_us", "backward_unpooled_ns_per_lookup_dim"),
        *("backward_unpooled_ns_per_row", "backward_unpooled_ns_per_row_dim"),
    ),
}
"""Coefficients of lookups without pooling, beyond a call of cold code."""


# Points.


def lookup_points(count: int) -> list[Point]:
    """Return points of TBEs of one to twelve tables."""
    return sobol_points("lookup", count, 6, _lookup)


def variant_points(count: int) -> list[Point]:
    """Return the first of `lookup_points` with other optimizers, and with weights."""
    return [
        Point("lookup_variant", {**p.params, "optimizer": optimizer, "weighted": weighted}, p.test)
        for optimizer, weighted in VARIANTS
        for p in lookup_points(count)
    ]


def _drawn(rows: float, dim: int, pooling: float, alpha: float) -> dict[str, Any]:
    """Describe one table of a point."""
    pooling = round(max(pooling, 0.1), 2)
    return {"rows": round(rows), "dim": dim, "pooling": pooling, "alpha": round(alpha, 3)}


def _lookup(u: Coordinates, index: int) -> dict[str, Any]:
    every, single = ONE_TABLE
    count = 1 if index % every in single else whole(u[0], TABLES)
    # samples of all ranks
    batch = whole(u[1], (256, 8192))
    places = [(u[2:] + j * ROTATION) % 1.0 for j in range(count)]
    poolings = [logarithmic(place[2], (1.0, 50.0)) for place in places]
    share = min(1.0, MAX_IDS / (batch * sum(poolings)))
    tables = []
    for place, pooling in zip(places, poolings, strict=True):
        dim = choice(DIMS, place[0])
        rows = min(
            logarithmic(place[1], (1e3, 4e6)), MAX_TABLE_BYTES / (count * dim * WEIGHT_BYTES)
        )
        skew = max(0.0, (float(place[3]) - UNIFORM_SHARE) / (1 - UNIFORM_SHARE))
        tables.append(_drawn(rows, dim, pooling * share, skew * MOST_ALPHA))
    return {"batch": batch, "tables": tables}


def _dense(u: Coordinates, _: int) -> dict[str, Any]:
    """Describe a lookup with a dense gradient, of tables small enough for a copy on every rank."""
    tables, batch, dim = whole(u[5], (1, 4)), whole(u[2], (128, 4096)), choice(DIMS, u[0])
    pooling = min(logarithmic(u[3], (1.0, 40.0)), MAX_IDS / 2 / (batch * tables))
    rows = min(logarithmic(u[1], (100, 2e5)), MAX_DENSE_BYTES / (dim * WEIGHT_BYTES * tables))
    table = _drawn(rows, dim, pooling, float(u[4]) * MOST_ALPHA)
    return {"batch": batch, "tables": [table] * tables}


def _unpooled(u: Coordinates, _: int) -> dict[str, Any]:
    """Describe a lookup of sequences: one output row an id, tables of one width."""
    tables, batch = whole(u[0], (1, 5)), whole(u[1], (32, 1024))
    length = min(logarithmic(u[2], (1.0, 50.0)), MAX_UNPOOLED_IDS / (batch * tables))
    dim, rows = choice(UNPOOLED_DIMS, u[4]), logarithmic(u[3], (1e3, 1e6))
    table = _drawn(rows, dim, length, float(u[5]) * MOST_ALPHA)
    return {"batch": batch, "pooled": False, "tables": [table] * tables}


def gpu_lookup_points(size: Size, device: Device) -> list[Point]:
    """Return the points of lookups from device memory, and over the host link.

    They vary all inputs of the kernel model: batches from a fraction of a wave to many, widths
    around a warp's, tables below and above the L2, skew, tables a launch, data types, optimizers.
    """
    most, uvm = MEMORY_SHARE * device.memory_bytes, UVM_SHARE * device.host_bytes
    return [
        *sobol_points("lookup", size.lookups, 8, lambda u, _: _launch(u, most)),
        *sobol_points(
            "lookup",
            _few(size),
            8,
            lambda u, _: {**_launch(u, uvm, UVM_IDS), "kernel": "fused_uvm"},
        ),
    ]


def cached_points(size: Size, device: Device) -> list[Point]:
    """Return the points of lookups through a cache in front of host memory."""

    def cached(u: Coordinates, i: int) -> dict[str, Any]:
        cache = {"kernel": "fused_uvm_caching", "cache_load_factor": CACHED[i % len(CACHED)]}
        return {**_launch(u, UVM_SHARE * device.host_bytes, UVM_IDS, CACHED_ALPHAS), **cache}

    return sobol_points("lookup_cached", _few(size), 8, cached)


def _few(size: Size) -> int:
    return max(size.lookups // UVM_EVERY, FEWEST_UVM)


def _launch(
    u: Coordinates,
    most_bytes: float,
    most_ids: int = MAX_GPU_IDS,
    alphas: tuple[float, ...] = GPU_ALPHAS,
) -> dict[str, Any]:
    """Describe a launch by a point of the unit cube; tables after the first differ from it."""
    batch, tables = whole(u[0], (512, 65_536)), choice(GPU_TABLES, u[5])
    dtype, optimizer = choice(GPU_DTYPES, u[6]), choice(GPU_OPTIMIZERS, u[7])
    dim_at, alpha_at = int(u[1] * len(GPU_DIMS)), int(u[4] * len(alphas))
    widest = max(GPU_DIMS) if tables > 1 else GPU_DIMS[dim_at]
    row_bytes = widest * DATA_TYPE_BYTES[dtype] + sum(state_row_bytes(optimizer, widest))
    rows = min(logarithmic(u[2], (1e4, 1e7)), most_bytes / (row_bytes * tables))
    pooling = min(logarithmic(u[3], (1.0, 100.0)), most_ids / (batch * tables))
    drawn = [
        _drawn(
            rows,
            GPU_DIMS[(dim_at + j) % len(GPU_DIMS)],
            pooling,
            alphas[(alpha_at + j) % len(alphas)],
        )
        for j in range(tables)
    ]
    return {"batch": batch, "dtype": dtype, "optimizer": optimizer, "tables": drawn}


def model_points(model: Workload, ranks: int) -> list[Point]:
    """Return a point for every table of a model and the samples of all ranks; half are held out."""
    shape = {"model_sha": model.sha256, "batch_size": model.batch_size, "ranks": ranks}
    return [
        Point("model_lookup", {**shape, "table": key}, test=i % 2 == 1)
        for i, key in enumerate(model.keys)
    ]


FAMILIES = (
    Family(
        "lookup",
        (Group.EMBEDDING,),
        cpu=lambda size: lookup_points(size.lookups),
        gpu=gpu_lookup_points,
    ),
    Family("lookup_variant", cpu=lambda size: variant_points(size.variants)),
    Family(
        "lookup_dense",
        (Group.EMBEDDING,),
        cpu=lambda size: sobol_points("lookup_dense", 2 * size.ops, 6, _dense),
    ),
    Family(
        "lookup_unpooled",
        cpu=lambda size: sobol_points("lookup_unpooled", 2 * size.ops, 6, _unpooled),
    ),
    Family("lookup_cached", (Group.EMBEDDING,), gpu=cached_points),
    Family("model_lookup", (Group.EMBEDDING,)),
)


# Fit of CPU ranks.


def fit_cpu(draft: CalibratedProfile) -> CalibratedProfile:
    """Fit every coefficient of the CPU's embedding model."""
    embedding = draft.profile.embedding
    parts = {
        part: draft.of("lookup", part, test=False) + _of_model(draft, part, test=False)
        for part in PASSES
    }
    if not isinstance(embedding, CpuEmbedding):
        return draft
    if min(map(len, parts.values())) < FEWEST_PER_CONSTANT * len(BACKWARD):
        return _fit_unpooled(draft.kept("lookup") if any(parts.values()) else draft, embedding)
    fitted = _best_on_grid(parts["forward"], parts["backward"], embedding)
    for part, names in zip(PASSES, (FORWARD, BACKWARD), strict=True):
        test, count = draft.of("lookup", part, test=True), len(parts[part])
        mine, theirs = (lookup_errors(constants, test, names) for constants in (fitted, embedding))
        draft = draft.error(f"lookup {part}", HeldOut(mine, count, times_ms(test)), theirs)
        of_model = _of_model(draft, part, test=True)
        if of_model:
            errors = lookup_errors(fitted, of_model, names)
            draft = draft.error(f"model's lookup {part}", HeldOut(errors, count))
    fitted = fitted.model_copy(update=_variants(draft, fitted))
    # the launch in rows of dense gradients is a call of cold code; among other kernels it costs as
    # much as a fused one, so that it has no constant of its own
    dense = draft.of("lookup_dense", "backward")
    columns = lookup_columns(fitted, dense, DENSE)
    draft, costs = after_call(draft, "lookup backward, dense gradient", dense, columns)
    if costs is not None:
        fitted = fitted.model_copy(update=dict(zip(DENSE, costs.tolist(), strict=True)))
    rows = parts["forward"] + parts["backward"]
    error = total([draft.errors[f"lookup {part}"] for part in PASSES])
    draft = draft.update(embedding=fitted).measured("embedding", rows, error, lookup_ranges(rows))
    return _fit_unpooled(draft, fitted)


def lookup_ranges(rows: Sequence[Measurement]) -> dict[str, list[float]]:
    """Return the tables, ids, rows and widths of lookups, for the ranges of a profile."""
    launches = [row.facts["tables"] for row in rows]
    return {
        "tables": [len(tables) for tables in launches],
        "ids": [sum(table[3] for table in tables) for tables in launches],
        "rows": [table[0] for tables in launches for table in tables],
        "dim": [table[1] for tables in launches for table in tables],
    }


def _of_model(draft: CalibratedProfile, part: str, test: bool) -> list[Measurement]:
    """Return the lookups of the model's tables to which the coefficients apply.

    Other optimizers, weights and types have separate factors, or none.
    """
    plain: dict[str, Any] = {"dtype": "fp32", "weighted": False, "pooled": True}
    if part == "backward":
        plain["optimizer"] = OPTIMIZER
    rows = draft.of("model_lookup", part, test)
    return [row for row in rows if plain.items() <= row.facts.items()]


def _best_on_grid(
    forward: Sequence[Measurement], backward: Sequence[Measurement], base: CpuEmbedding
) -> CpuEmbedding:
    """Return ``base`` with every coefficient fitted, at the grid point with the smallest loss."""
    best, least = base, math.inf
    for page, tlb in itertools.product(PAGE_KIB, TLB_MIB):
        candidate = base.model_copy(update={"page_kib": page, "tlb_mib": tlb})
        loss = 0.0
        for rows, names in ((forward, FORWARD), (backward, BACKWARD)):
            solution = non_negative(lookup_columns(candidate, rows, names), times_ms(rows))
            fitted = dict(zip(names, solution.tolist(), strict=True))
            candidate = candidate.model_copy(update=fitted)
            loss += mape(lookup_errors(candidate, rows, names))
        if loss < least - 1e-12:
            best, least = candidate, loss
    return best


def lookup_columns(
    constants: CpuEmbedding, rows: Sequence[Measurement], names: Sequence[str]
) -> Array:
    """Return the time in ms that one unit of each coefficient adds, ``[rows, names]``."""

    def terms(table: Sequence[float]) -> list[float]:
        rows, dim, bags, ids, distinct = table
        touched = distinct * 1024 * constants.page_kib
        tlb = math.log1p(min(rows * dim * 4, touched) / units.mib(constants.tlb_mib))
        digits = math.ceil(math.log2(max(rows, 2)) / constants.sort_digit_bits)
        unit_ms = {
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
        plain = (name.split("_", 1)[1] for name in names)
        return [unit_ms[n.removeprefix("dense_").removeprefix("unpooled_")] for n in plain]

    if not rows:
        return np.zeros((0, len(names)))
    launches = [row.facts["tables"] for row in rows]
    sums = [np.sum([terms(table) for table in tables], axis=0) for tables in launches]
    # the cost of a launch counts once for all its tables
    counts = np.array([[len(tables)] for tables in launches], dtype=np.float64)
    launch = np.array([name in ("forward_us", "backward_us") for name in names])
    return np.array(sums) * np.where(launch, 1.0 / counts, 1.0)


def predict_lookups(
    constants: CpuEmbedding, rows: Sequence[Measurement], names: Sequence[str]
) -> Array:
    """Predict times ``[rows]`` in ms by the kernel model."""
    coefficients = np.array([getattr(constants, name) for name in names])
    return np.asarray(lookup_columns(constants, rows, names) @ coefficients)


def lookup_errors(
    constants: CpuEmbedding, rows: Sequence[Measurement], names: Sequence[str]
) -> Array:
    """Return the relative errors ``[rows]``."""
    return predict_lookups(constants, rows, names) / times_ms(rows) - 1.0


def _variants(draft: CalibratedProfile, embedding: CpuEmbedding) -> dict[str, float]:
    """Return the median of measured over predicted backwards for each variant."""
    rows = draft.of("lookup_variant", "backward")
    kinds = {
        "backward_stateless": [r for r in rows if r.point.params["optimizer"] == "exact_sgd"],
        "backward_weighted": [r for r in rows if r.point.params["weighted"]],
    }
    return {
        name: float(np.median(times_ms(group) / predict_lookups(embedding, group, BACKWARD)))
        for name, group in kinds.items()
        if group
    }


def _fit_unpooled(draft: CalibratedProfile, embedding: CpuEmbedding) -> CalibratedProfile:
    """Fit lookups without pooling; their tables have one width."""
    for part, names in UNPOOLED.items():
        rows = draft.of("lookup_unpooled", part)
        columns = lookup_columns(embedding, rows, names)
        draft, costs = after_call(draft, f"lookup {part}, unpooled", rows, columns)
        if costs is not None:
            draft = draft.constants("embedding", **dict(zip(names, costs.tolist(), strict=True)))
    return draft
