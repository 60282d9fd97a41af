"""What `calibrate` measures: few points, placed by a Sobol sequence over what users have.

The points of a quick calibration are the first ones of the full design, so that it can be extended.
Every fifth point is a test point: it is measured like the others and never fitted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
GEMM_M, GEMM_N, GEMM_K = (256, 8192), (1, 1024), (13, 2048)
MAX_GEMM_FLOP = 8e9
GEMM_DTYPES = ("fp32", "fp32", "bf16")
ELEMENTWISE_OPS = ("clone", "relu", "add", "cat")
SLOWEST_CALL_S = 0.15
"""Of a collective over a slow link; larger messages only take longer."""
COLLECTIVE_OPS = ("all_to_all", "all_reduce", "reduce_scatter", "all_gather")
UNEVEN_SIZES = tuple(2**octave for octave in range(10, 25, 2))
TEST_EVERY = 5
ONE_TABLE = (7, (0, 2, 4))
"""Points ``i`` with ``i % 7`` among these are TBEs of one table: they tell the terms apart, the
others add them up. Strides are odd: the bits of a Sobol point follow from those of its number."""
OPTIMIZER, DTYPE = "exact_row_wise_adagrad", "fp32"
"""Of a lookup point that names none."""
MIX, MIX_LAUNCHES = 5, 3
"""Small ops timed as one by a host point, and those of them that launch a kernel on a GPU."""


@dataclass(frozen=True)
class Size:
    """How much is measured: points a family, and seconds a point (kernels) or rounds.

    Args:
        ops: points an op around the lookups and the GEMMs.
        variants: lookups measured with each other optimizer.
        reference_calls: of the reference kernels, each time.
    """

    lookups: int
    gemms: int
    elementwise_octaves: tuple[int, int]
    collective_octaves: tuple[int, int]
    seconds: float
    rounds: int
    ops: int
    variants: int
    iteration_rounds: int
    reference_calls: int


QUICK = Size(112, 64, (12, 25), (8, 24), 0.5, 40, 10, 3, 30, 3)
FULL = Size(320, 128, (12, 27), (8, 26), 1.2, 60, 20, 6, 100, 6)
TINY = Size(8, 8, (14, 17), (10, 15), 0.02, 3, 2, 1, 1, 1)
"""For tests of the machinery: seconds, and constants that mean nothing."""


@dataclass(frozen=True)
class Point:
    """One thing to measure.

    Args:
        family: what is measured, such as lookup; says how, and which parts a point has.
        params: what names it within its family; JSON types only.
        test: held out of every fit.
    """

    family: str
    params: dict[str, Any]
    test: bool = False


@dataclass(frozen=True)
class LookupTable:
    """One table of a TBE point."""

    rows: int
    dim: int
    pooling: float
    alpha: float


def kernel_points(size: Size) -> list[Point]:
    """Small ops, lookups, GEMMs and memory-bound kernels, which one rank measures alone."""
    low, high = size.elementwise_octaves
    moves = [
        Point("elementwise", {"op": op, "bytes": 2**octave}, is_test(i + octave))
        for i, op in enumerate(ELEMENTWISE_OPS)
        for octave in range(low, high + 1)
    ]
    small = Point("host", {"what": "op"})
    return [small, *lookup_points(size.lookups), *gemm_points(size.gemms), *moves]


def lookup_points(count: int) -> list[Point]:
    """TBEs of one to twelve tables."""
    return [Point("lookup", _lookup(u, i), is_test(i)) for i, u in enumerate(sobol(count, dims=6))]


def _lookup(u: NDArray[np.float64], index: int) -> dict[str, Any]:
    every, single = ONE_TABLE
    count = 1 if index % every in single else round(logarithmic(u[0], *TABLES))
    batch = round(logarithmic(u[1], *BATCH))
    tables = [_table((u[2:] + j * ROTATION) % 1.0, count) for j in range(count)]
    share = min(1.0, MAX_IDS / (batch * sum(t.pooling for t in tables)))
    kept = [
        LookupTable(t.rows, t.dim, round(max(t.pooling * share, 0.1), 2), t.alpha) for t in tables
    ]
    return {"batch": batch, "tables": [asdict(t) for t in kept]}


def _table(u: NDArray[np.float64], count: int) -> LookupTable:
    dim = DIMS[int(u[0] * len(DIMS))]
    most = MAX_TABLE_BYTES / (count * dim * WEIGHT_BYTES)
    skew = max(0.0, (float(u[3]) - UNIFORM_SHARE) / (1 - UNIFORM_SHARE))
    return LookupTable(
        rows=round(min(logarithmic(u[1], *ROWS), most)),
        dim=dim,
        pooling=logarithmic(u[2], *POOLING),
        alpha=round(ALPHA[0] + skew * (ALPHA[1] - ALPHA[0]), 3),
    )


def gemm_points(count: int) -> list[Point]:
    """Multiplications of MLPs; the three layouts are those of forward and backward."""
    points = []
    for i, u in enumerate(sobol(count, dims=3)):
        m, n, k = (
            round(logarithmic(x, *span))
            for x, span in zip(u, (GEMM_M, GEMM_N, GEMM_K), strict=True)
        )
        m = max(64, min(m, int(MAX_GEMM_FLOP / (2 * n * k))))
        # a stride prime to the layouts and to the test points
        dtype = GEMM_DTYPES[(i // TEST_EVERY) % len(GEMM_DTYPES)]
        params = {"m": m, "n": n, "k": k, "dtype": dtype, "layout": ("nn", "nt", "tn")[i % 3]}
        points.append(Point("gemm", params, is_test(i)))
    return points


def collective_points(size: Size, ranks: int, link_gbit_s: float | None = None) -> list[Point]:
    """All collectives at every octave, in an order that no drift of the machine follows.

    Octaves alternate between fit and test, the first and the last are fitted; all-to-alls whose
    busiest rank sends four times what the others send are only tested.

    Args:
        link_gbit_s: of the link between the ranks, where each is a host; limits the sizes.
    """
    low, high = size.collective_octaves
    among: dict[str, Any] = {"ranks": ranks}
    if link_gbit_s is not None:
        high = _last_octave(low, high, link_gbit_s)
        among["link_gbit_s"] = link_gbit_s
    points = [
        Point("collective", {"op": op, "bytes": 2**octave, **among}, (octave - low) % 2 == 1)
        for op in COLLECTIVE_OPS
        for octave in range(low, high + 1)
    ]
    points += [
        Point("collective", {"op": "all_to_all_uneven", "bytes": b, **among}, test=True)
        for b in UNEVEN_SIZES
        if b <= 2**high
    ]
    points.append(Point("collective", {"op": "issue", "bytes": 256, **among}))
    order = np.random.default_rng(0).permutation(len(points))
    return [points[i] for i in order]


def _last_octave(low: int, high: int, gbit_s: float) -> int:
    """The last that a link carries within `SLOWEST_CALL_S`; an even number of steps from the first.

    An all-reduce of two ranks sends its whole buffer each way, the other collectives less.
    """
    fits = int(np.log2(SLOWEST_CALL_S * gbit_s * 1e9 / 8))
    if fits >= high:
        return high
    return low + max(fits - low, 2) // 2 * 2


def sobol(count: int, dims: int) -> NDArray[np.float64]:
    """The first points of a Sobol sequence in [0, 1), shape ``[count, dims]``; always the same."""
    from scipy.stats import qmc

    sequence = qmc.Sobol(dims, scramble=False)
    # the sequence starts in the corner of the range, which says least
    exponent = int(np.ceil(np.log2(count + 1)))
    return np.asarray(sequence.random_base2(exponent))[1 : count + 1]


def is_test(index: int) -> bool:
    """Whether the point of this number is held out."""
    return index % TEST_EVERY == TEST_EVERY - 1


def logarithmic(u: float, low: float, high: float) -> float:
    """``u`` in [0, 1) onto a logarithmic range."""
    return float(low * (high / low) ** float(u))
