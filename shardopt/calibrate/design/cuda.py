"""What `calibrate` measures on a GPU: as on a CPU, over the range that training on GPUs has.

Each lookup point varies what one constant of the kernel model depends on: batches from a fraction
of a wave to many, widths around a warp's, tables on both sides of the L2, skew, tables a launch,
weights, optimizers, and tables in host memory with and without a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from predictor.cost.lookup.shard import state_row_bytes
from predictor.model.workload import DATA_TYPE_BYTES
from predictor.units import MIB
from shardopt.calibrate.design.points import (
    ELEMENTWISE_OPS,
    Point,
    Size,
    is_test,
    logarithmic,
    sobol,
)

BATCH = (512, 65_536)
DIMS = (16, 32, 64, 96, 128, 192, 256)
POOLING = (1.0, 100.0)
ROWS = (1e4, 1e7)
ALPHAS = (0.0, 0.8, 1.05, 1.2)
"""Zipf exponents: uniform ids, and from mild to strong skew."""
TABLES = (1, 1, 4, 16)
"""Tables of one launch; half of the launches have one, which separates the terms."""
DTYPES = ("fp32", "fp32", "fp16")
OPTIMIZERS = ("exact_row_wise_adagrad", "exact_row_wise_adagrad", "exact_sgd", "adam")
MAX_IDS = 8_000_000
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
UVM_EVERY, CACHED_EVERY = 5, 5
"""One launch over the link, and one with a cache, for so many launches from device memory."""
GEMM_M, GEMM_N, GEMM_K = (256, 65_536), (1, 4096), (13, 4096)
MAX_GEMM_FLOP = 1e12
GEMM_DTYPES = ("fp32", "tf32", "fp16", "bf16")
LAYOUTS = ("nn", "nt", "tn")
COPY_OCTAVES = (10, 29)
STREAMED_MIB = (384, 512, 640, 768, 896, 1024)
"""Read once from one end to the other: several times any L2."""
HOST = ("op", "op_on_host", "round_trip", "sync")
"""Host times; see `shardopt.calibrate.kernels.host`."""

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Device:
    """What limits the points: bytes of the device's memory, and of its host's."""

    memory_bytes: int
    host_bytes: int


def kernel_points(size: Size, device: Device) -> list[Point]:
    """All that one GPU measures alone."""
    low, high = size.elementwise_octaves
    moves = [
        Point("elementwise", {"op": op, "bytes": 2**octave}, is_test(i + octave))
        for i, op in enumerate(ELEMENTWISE_OPS)
        for octave in range(low, high + 4)
        if 2**octave <= device.memory_bytes / 16
    ]
    copies = [
        Point("copy_h2d", {"bytes": 2**octave}, is_test(octave))
        for octave in range(*COPY_OCTAVES)
        if octave <= high + 2
    ]
    reads = [
        Point("streaming", {"bytes": mib * MIB}, i % 3 == 2)
        for i, mib in enumerate(STREAMED_MIB)
        if mib * MIB <= device.memory_bytes / 8
    ]
    host = [Point("host", {"what": what}) for what in HOST]
    lookups, gemms = lookup_points(size.lookups, device), gemm_points(size.gemms)
    return [*host, *lookups, *gemms, *reads, *moves, *copies]


def lookup_points(count: int, device: Device) -> Iterator[Point]:
    """Lookups from device memory, over the host link, and through a cache."""
    most, uvm = MEMORY_SHARE * device.memory_bytes, UVM_SHARE * device.host_bytes
    for i, u in enumerate(sobol(count, dims=8)):
        yield Point("lookup", _lookup(u, most), is_test(i))
    for i, u in enumerate(sobol(max(count // UVM_EVERY, 5), dims=8)):
        params = _lookup(u, uvm, most_ids=UVM_IDS)
        yield Point("lookup", {**params, "kernel": "fused_uvm"}, is_test(i))
    for i, u in enumerate(sobol(max(count // CACHED_EVERY, 5), dims=8)):
        params = _lookup(u, uvm, most_ids=UVM_IDS, alphas=CACHED_ALPHAS)
        cache = {"kernel": "fused_uvm_caching", "cache_load_factor": CACHED[i % len(CACHED)]}
        yield Point("lookup_cached", {**params, **cache}, is_test(i))


def _lookup(
    u: NDArray[np.float64],
    most_bytes: float,
    most_ids: int = MAX_IDS,
    alphas: tuple[float, ...] = ALPHAS,
) -> dict[str, Any]:
    """One launch from a point of the unit cube; tables after the first differ from it."""
    batch, tables = round(logarithmic(u[0], *BATCH)), _choice(TABLES, u[5])
    dtype, first_dim, alpha = _choice(DTYPES, u[6]), _choice(DIMS, u[1]), _choice(alphas, u[4])
    optimizer = _choice(OPTIMIZERS, u[7])
    widest = max(DIMS) if tables > 1 else first_dim
    row_bytes = widest * DATA_TYPE_BYTES[dtype] + sum(state_row_bytes(optimizer, widest))
    rows = min(logarithmic(u[2], *ROWS), most_bytes / (row_bytes * tables))
    pooling = min(logarithmic(u[3], *POOLING), most_ids / (batch * tables))
    return {
        "batch": batch,
        "dtype": dtype,
        "optimizer": optimizer,
        "tables": [
            {
                "rows": round(rows),
                "dim": DIMS[(DIMS.index(first_dim) + j) % len(DIMS)],
                "pooling": round(max(pooling, 0.1), 2),
                "alpha": alphas[(alphas.index(alpha) + j) % len(alphas)],
            }
            for j in range(tables)
        ],
    }


def _choice(kinds: Sequence[Kind], u: float) -> Kind:
    """Of a point's own coordinate: the bits of its number are those of the other coordinates."""
    return kinds[int(u * len(kinds))]


def gemm_points(count: int) -> Iterator[Point]:
    """Multiplications in every data type; tf32 is fp32 with the tensor cores allowed."""
    for i, u in enumerate(sobol(2 * count, dims=5)):
        m, n, k = (
            round(logarithmic(x, *span))
            for x, span in zip(u[:3], (GEMM_M, GEMM_N, GEMM_K), strict=True)
        )
        m = max(64, min(m, int(MAX_GEMM_FLOP / (2 * n * k))))
        dtype, layout = _choice(GEMM_DTYPES, u[3]), _choice(LAYOUTS, u[4])
        params = {"m": m, "n": n, "k": k, "dtype": dtype, "layout": layout}
        yield Point("gemm", params, is_test(i))
