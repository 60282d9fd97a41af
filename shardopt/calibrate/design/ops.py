"""Points of what TorchRec and the dense part do around lookups and GEMMs; small, and few an op.

Every op of a family has the same shapes, so that ops can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardopt.calibrate.design.points import (
    ALPHA,
    DIMS,
    MAX_IDS,
    WEIGHT_BYTES,
    Point,
    Size,
    gemm_points,
    is_test,
    logarithmic,
    lookup_points,
    sobol,
)

FEATURES, BATCH, POOLING = (1, 32), (64, 4096), (1.0, 40.0)
"""Of a rank: sparse features, samples, ids a bag."""
BUCKETS = (2, 4, 8)
JAGGED_OPS = ("permute", "bucketize", "split", "concat")
PIECES = (2, 26)
MAX_POOLED = 2**23
"""Floats of the pooled embeddings of a rank."""
POOLED_OPS = ("permute", "cat", "split")
VECTORS = (2, 40)
INTERACTION_DIMS = (16, 32, 64, 128)
MAX_DOTS = 2**22
"""Of the dot products of a batch, both halves of the square."""
INTERACTION_OPS = ("bmm", "dot")
LAYERS, WIDTH = (2, 16), (16, 1024)
OPTIMIZERS = ("sgd", "adagrad", "adam")
DENSE_TABLES, DENSE_BATCH, DENSE_ROWS = (1, 4), (128, 4096), (100, 2e5)
"""Tables a launch, samples of a rank, and rows where every rank has a copy."""
MAX_DENSE_BYTES = 16 * 2**20
"""Of the tables of one launch."""
VARIANTS = (
    ("exact_sgd", False),
    ("exact_adagrad", False),
    ("exact_row_wise_adagrad", True),
)
"""Optimizer and whether ids have weights; FBGEMM has no Adam on CPUs."""


def op_points(size: Size) -> list[Point]:
    """All of this module."""
    shapes = {
        "jagged": (JAGGED_OPS, _jagged, 4),
        "pooled": (POOLED_OPS, _pooled, 3),
        "interaction": (INTERACTION_OPS, _interaction, 3),
        "optimizer": (OPTIMIZERS, _layers, 2),
    }
    points = [
        Point(family, {"op": op, **shape(u)}, is_test(i))
        for family, (ops, shape, dims) in shapes.items()
        for op in ops
        for i, u in enumerate(sobol(size.ops, dims))
    ]
    variants = [*variant_points(size.variants), *dense_points(2 * size.ops)]
    return [*points, *linear_points(size.ops), *variants]


def linear_points(count: int) -> Iterator[Point]:
    """Linear layers with a bias, of the shapes of the first multiplications."""
    for point in gemm_points(count):
        yield Point("gemm", {**point.params, "dtype": "fp32", "layout": "addmm"}, point.test)


def variant_points(count: int) -> Iterator[Point]:
    """The first lookups with other optimizers, and with weights."""
    for optimizer, weighted in VARIANTS:
        variant = {"optimizer": optimizer, "weighted": weighted}
        for point in lookup_points(count):
            yield Point("lookup_variant", {**point.params, **variant}, point.test)


def dense_points(count: int) -> Iterator[Point]:
    """Lookups whose gradient is dense, of tables as small as those that every rank copies."""
    for i, u in enumerate(sobol(count, dims=6)):
        tables = round(logarithmic(u[5], *DENSE_TABLES))
        batch = round(logarithmic(u[2], *DENSE_BATCH))
        most = MAX_IDS / 2 / (batch * tables)
        table = {
            "dim": DIMS[int(u[0] * len(DIMS))],
            "pooling": round(max(0.1, min(logarithmic(u[3], *POOLING), most)), 2),
            "alpha": round(float(u[4]) * ALPHA[1], 3),
        }
        bytes_of_row = table["dim"] * WEIGHT_BYTES * tables
        rows = round(min(logarithmic(u[1], *DENSE_ROWS), MAX_DENSE_BYTES / bytes_of_row))
        yield Point(
            "lookup_dense",
            {"batch": batch, "tables": [{"rows": rows, **table}] * tables},
            is_test(i),
        )


def _jagged(u: NDArray[np.float64]) -> dict[str, Any]:
    features, batch = round(logarithmic(u[0], *FEATURES)), round(logarithmic(u[1], *BATCH))
    pooling = min(logarithmic(u[2], *POOLING), MAX_IDS / (features * batch))
    buckets = BUCKETS[int(u[3] * len(BUCKETS))]
    pooling = round(max(pooling, 0.1), 2)
    return {"features": features, "batch": batch, "pooling": pooling, "buckets": buckets}


def _pooled(u: NDArray[np.float64]) -> dict[str, Any]:
    pieces = round(logarithmic(u[0], *PIECES))
    # the golden ratio, as for tables
    dims = [DIMS[int((u[1] + i * 0.618034) % 1.0 * len(DIMS))] for i in range(pieces)]
    batch = min(logarithmic(u[2], *BATCH), MAX_POOLED / sum(dims))
    return {"dims": dims, "batch": round(batch)}


def _interaction(u: NDArray[np.float64]) -> dict[str, Any]:
    vectors = round(logarithmic(u[0], *VECTORS))
    dim = INTERACTION_DIMS[int(u[1] * len(INTERACTION_DIMS))]
    batch = min(logarithmic(u[2], *BATCH), MAX_DOTS / vectors**2)
    return {"vectors": vectors, "dim": dim, "batch": round(batch)}


def _layers(u: NDArray[np.float64]) -> dict[str, Any]:
    return {"layers": round(logarithmic(u[0], *LAYERS)), "width": round(logarithmic(u[1], *WIDTH))}
