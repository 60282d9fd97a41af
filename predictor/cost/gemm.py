"""Dense matrix multiplication from tiles and waves (docs/model.md, chapter 4).

A library cuts the output into tiles, runs as many as the device holds at once and repeats: a wave
that is not full costs as much as a full one (tile and wave quantisation; NVIDIA's Matrix
Multiplication Background guide). The library is assumed to choose the fastest tile, so the time
never falls as m, n or k grows, with one exception: tensor cores are faster where rows become a
multiple of 16 bytes (`TensorKernels.unaligned_share`). Operands and result cross HBM once. A GPU
overlaps that with arithmetic; a CPU core waits for its loads, so the two times add.

Loading operands can keep tensor cores below their peak: an SM takes in 64 bytes a clock, more where
SMs of a cluster share what one of them loads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from predictor import units
from predictor.errors import ProfileError
from predictor.hardware.schema import Gemm, HardwareProfile, TensorKernels

Array = NDArray[np.float64]

DATA_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
SMALL_TILE = 16
"""Tile of a small product: its sides are rounded up to one AVX-512 vector. None of five tile sizes
that were tried fits better."""
RESULT_BYTES = DATA_BYTES | {"fp8": 2}
"""Products of fp8 are written as bf16."""


def gemm_ms(
    hw: HardwareProfile, m: float, n: float, k: float, dtype: str, layout: str = "nn"
) -> float:
    """Return the time in ms of ``[m, k] @ [k, n] -> [m, n]``.

    Args:
        dtype: fp32, tf32, fp16, bf16 or fp8.
        layout: see `batched_ms`.
    """
    return float(products_ms(hw, (m, n, k), dtype, layout))


def products_ms(
    hw: HardwareProfile,
    shape: tuple[ArrayLike, ArrayLike, ArrayLike],
    dtype: str,
    layout: str = "nn",
) -> Array:
    """Return the times in ms of many products ``[m, k] @ [k, n]``, given as to `gemm_ms`."""
    times = gemm_times(hw.gemm, hw.sms, hw.memory.hbm, shape, dtype, hw.name, layout)
    if hw.gemm.vector_us is None:
        return times
    m, n, k = _arrays(shape)
    alone = np.minimum(np.minimum(m, n), k) == 1
    return np.where(alone, _vector_ms(hw, m, n, k, dtype), times)


def _vector_ms(hw: HardwareProfile, m: Array, n: Array, k: Array, dtype: str) -> Array:
    """Price a matrix-vector or an outer product (cuBLAS' gemv, and kernels for k = 1)."""
    gemm, item = hw.gemm, DATA_BYTES[dtype]
    moving = (item * (m * k + k * n) + RESULT_BYTES[dtype] * m * n) / hw.streaming
    writing = units.us(1e-3 * gemm.outer_ns_per_element) * m * n * (k == 1)
    return np.asarray(units.us(gemm.vector_us or 0.0) + np.maximum(moving, writing))


def batched_ms(
    hw: HardwareProfile, count: int, m: float, n: float, k: float, dtype: str, layout: str = "nn"
) -> float:
    """Return the time in ms of ``count`` products ``[m, k] @ [k, n]``, given as to `gemm_ms`.

    Libraries for GPUs run them as one kernel. Libraries for CPUs run them one by one (MKL's
    gemm_batch), large ones as fast as a single product.

    Args:
        layout: ``n`` (rows contiguous) or ``t`` (columns contiguous) for each operand.
    """
    gemm = hw.gemm
    cores = gemm.cores(dtype, batched=count > 1)
    if cores is not None:
        rate = _peak_tflops(gemm, dtype, hw.name)
        shape = _arrays((m, n, k))
        device = hw.sms, hw.memory.hbm
        times = tensor_times(gemm, cores, rate, device, shape, dtype, count, layout)
        return float(times)
    fitted = {str(key): costs for key, costs in gemm.batches.items()}
    costs = fitted.get("outer" if k == 1 else layout)
    if costs is not None:
        return units.us(gemm.floor_us) + count * small_product_ms(costs, m, n, k)
    if not gemm.batched_us:
        return gemm_ms(hw, count * m, n, k, dtype)
    rate = product_rate(gemm, dtype, hw.name) * gemm.batched_share
    floor = units.us(gemm.floor_us)
    alone = gemm_ms(hw, m, n, k, dtype) - floor
    return floor + count * (units.us(gemm.batched_us) + min(2 * m * n * k / rate, alone))


def attention_ms(
    hw: HardwareProfile,
    heads: int,
    shape: tuple[int, int, float],
    dtype: str,
    *,
    backward: bool,
    causal: bool = False,
) -> float:
    """Return the time in ms of the arithmetic of fused attention.

    Blocks of queries run on the SMs in waves, and each block passes over all of its keys. The
    threads of a CPU take one row at a time.

    Args:
        heads: number of heads of all samples together.
        shape: queries, keys and columns of a head.
        causal: the last query sees all keys, the one before it one key less, and so on.
    """
    gemm, (queries, keys, width) = hw.gemm, shape
    rows, step = (1, 1) if hw.inline else gemm.attention_tile
    tiles = math.ceil(queries / rows)
    blocks = heads * tiles
    waves = 1.0 if hw.inline else math.ceil(blocks / hw.sms) * hw.sms / max(1, blocks)
    last = keys - queries + rows * np.arange(1, tiles + 1) if causal else np.full(tiles, keys)
    visible = np.ceil(np.minimum(last, keys) / step) * step
    pairs = rows * heads * waves * float((visible + gemm.attention_prologue).sum())
    share = gemm.attention_backward if backward else gemm.attention_forward
    flop = (10 if backward else 4) * pairs * width
    floor = gemm.floor_us + heads * gemm.attention_head_us[backward]
    return units.us(floor) + flop / (share * product_rate(gemm, dtype, hw.name))


def small_product_ms(costs: Sequence[float], m: float, n: float, k: float) -> float:
    """Return the time in ms of one product of a batch.

    Its operands are packed, whatever its depth (Goto and van de Geijn 2008), and its result is
    computed in whole tiles.
    """
    return units.us(1e-3 * float(np.dot(costs, small_product_work(m, n, k))))


def small_product_work(m: float, n: float, k: float) -> tuple[float, float, float, float]:
    """Count the elements of operands and result, and the multiplications of whole tiles."""
    rows, columns = (math.ceil(side / SMALL_TILE) * SMALL_TILE for side in (m, n))
    return m * k, k * n, m * n, rows * columns * k


def product_rate(gemm: Gemm, dtype: str, name: str) -> float:
    """Return the FLOP/ms of large products of a data type."""
    return units.tflops(_peak_tflops(gemm, dtype, name))


def _peak_tflops(gemm: Gemm, dtype: str, name: str) -> float:
    peak = {str(key): value for key, value in gemm.tflops.items()}.get(dtype)
    if peak is None:
        raise ProfileError(
            f"hardware {name} has no gemm.tflops for {dtype}; it has {', '.join(gemm.tflops)}"
        )
    return peak


def gemm_times(
    gemm: Gemm,
    sms: int,
    hbm: float,
    shape: tuple[ArrayLike, ArrayLike, ArrayLike],
    dtype: str,
    name: str = "profile",
    layout: str = "nn",
) -> Array:
    """Return the times in ms of many multiplications.

    Args:
        hbm: achieved bandwidth in bytes/ms.
        shape: m, n and k, each of one shape ``[...]``.
        layout: layout of all of them, see `batched_ms`.
    """
    peak = _peak_tflops(gemm, dtype, name)
    m, n, k = _arrays(shape)
    cores = gemm.cores(dtype)
    if cores is not None:
        return tensor_times(gemm, cores, peak, (sms, hbm), (m, n, k), dtype, layout=layout)
    compute = tiled_flops(gemm, sms, m, n, k).min(axis=(-2, -1)) / units.tflops(peak)
    compute = compute * (
        1 + gemm.wide_cost * np.minimum(n / gemm.wide_columns, 1) ** gemm.wide_power
    )
    traffic = DATA_BYTES[dtype] * (m * k + k * n + m * n) / hbm
    both = np.maximum(compute, traffic) if gemm.overlaps else compute + traffic
    return np.asarray(units.us(gemm.floor_us) + both)


def _arrays(shape: tuple[ArrayLike, ArrayLike, ArrayLike]) -> tuple[Array, Array, Array]:
    m, n, k = (np.asarray(size, dtype=np.float64) for size in shape)
    return m, n, k


def tensor_times(
    gemm: Gemm,
    cores: TensorKernels,
    tflops: float,
    device: tuple[int, float],
    shape: tuple[Array, Array, Array],
    dtype: str,
    count: float = 1,
    layout: str = "nn",
) -> Array:
    """Price batches of ``count`` products in ms by the tensor-core kernels of a data type.

    Args:
        device: SMs, and achieved HBM bandwidth in bytes/ms.
        shape: m, n and k, each of one shape ``[...]``.
    """
    sms, hbm = device
    item = DATA_BYTES[dtype]
    by_layout = {str(key): rate for key, rate in cores.layout_rate.items()}.get(layout, 1.0)
    m, n, k = shape
    traffic = count * (item * (m * k + k * n) + RESULT_BYTES[dtype] * m * n) / hbm
    sides = np.array(gemm.tiles, dtype=np.float64)
    rows, columns = sides[:, :1], sides[:, 1:]
    pieces = 2.0 ** np.arange(int(np.log2(cores.split_k)) + 1)
    m, n, k = (size[..., None, None] for size in (m, n, k))
    tiles = np.ceil(m / rows) * np.ceil(n / columns) * count * pieces
    depth = np.ceil(k / pieces / cores.k_step) * cores.k_step
    filling = cores.prologue_k + np.where(pieces > 1, cores.split_cost_k, 0.0)
    operands = item * (rows + columns)
    # length of a row in memory, of the result and of each operand by its layout
    rows_of = (n, m if layout[0] == "t" else k, k if layout[1] == "t" else n)
    unaligned = np.logical_or.reduce([(item * row) % 16 > 0 for row in rows_of])
    full = 2 * rows * columns / (units.tflops(tflops) / sms)
    share = np.where(pieces > 1, cores.split_share, 1.0) * by_layout
    element = full / np.where(unaligned, cores.unaligned_share, share)
    if cores.sm_gb_s is not None:
        loading = operands / units.gb_per_s(cores.sm_gb_s)
        element, full = np.maximum(element, loading), np.maximum(full, loading)
    # filling the pipeline is latency: kernels for unaligned rows have a lower rate, no longer fill
    wave = depth * element + filling * np.where(unaligned, full, element)
    busy = np.ceil(tiles / sms) * wave
    if cores.l2_gb_s is not None:
        each = depth * operands / units.gb_per_s(cores.l2_gb_s)
        wave = np.maximum(wave, np.minimum(tiles, sms) * each)
        busy = np.maximum(busy, tiles * each)
    traffic = traffic[..., None, None] / np.where(unaligned, cores.unaligned_memory_share, 1.0)
    exposed = cores.exposed * wave * np.minimum(1.0, traffic / busy)
    times = (np.maximum(busy, traffic) + exposed).min(axis=(-2, -1))
    return np.asarray(units.us(cores.floor_us) + times)


def tiled_flops(gemm: Gemm, sms: int, m: Array, n: Array, k: Array) -> Array:
    """Return the FLOP that the device could do in the time of each tile and split,
    ``[..., tiles, splits]``."""
    sides = np.array(gemm.tiles, dtype=np.float64)
    rows, columns = sides[:, :1], sides[:, 1:]
    pieces = 2.0 ** np.arange(int(np.log2(gemm.split_k)) + 1)
    m, n, k = (size[..., None, None] for size in (m, n, k))
    tiles = np.ceil(m / rows) * np.ceil(n / columns) * pieces
    slots = sms * gemm.tiles_per_sm
    # the last wave occupies its SMs for as long as a full one
    waves = np.ceil(tiles / slots)
    depth = np.ceil(k / pieces / gemm.k_step) * gemm.k_step + gemm.prologue_k
    # partial sums of a split K are written, read and added
    depth = depth + np.where(pieces > 1, gemm.prologue_k, 0.0)
    per_tile = 2.0 * rows * columns * depth * (1 + gemm.tile_overhead * (1 / rows + 1 / columns))
    return np.asarray(waves * slots * per_tile)
