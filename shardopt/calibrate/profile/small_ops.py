"""Constants of CPU kernels that move or multiply little at a time, from their own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from predictor import units
from predictor.cost.gemm import gemm_ms
from predictor.fit.cpu import non_negative
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.torchrec.sparse import COPY_PASSES, OUTPUT_BYTES
from predictor.model.workload import INDEX_BYTES
from shardopt.calibrate.rows import Measurement

COLUMN_COPIES = (("forward", "cat"), ("backward", "split"))
"""The ways in which TorchRec and the interaction copy columns."""
BUCKET_PASSES = 4
"""Reading and writing ids twice, as the iteration graph has it."""
ADDED_PASSES = 5
"""Of the gradients of both operands, which are written and added."""
CALLS_OF_DOT = 3
"""Stacking, picking and concatenating, apart from the product."""


def copies(
    pooled: Sequence[Measurement], jagged: Sequence[Measurement], gb_s: float, call_us: float
) -> dict[str, float]:
    """Constants of the elementwise group; rows of families ``pooled`` and ``jagged``.

    Args:
        gb_s: bandwidth of streaming kernels.
        call_us: what a row has beyond its data: a call of code that lies in no cache.
    """
    found = {}
    moved = [r for r in pooled if (r.part, r.point.params["op"]) in COLUMN_COPIES]
    if moved:
        # a call, a piece, a byte; the facts count what is copied, not its reading and writing
        shape = [(1.0, r.facts["pieces"], COPY_PASSES * r.facts["bytes"]) for r in moved]
        per_byte = non_negative(np.array(shape), np.array([r.median_us for r in moved]))[2]
        found["columns"] = float(np.clip(1e-3 / max(per_byte, 1e-9) / gb_s, 1e-3, 1.0))
    each = [
        (r.median_us - call_us) * 1e3 / r.facts["ids"] - BUCKET_PASSES * INDEX_BYTES / gb_s
        for r in jagged
        if r.point.params["op"] == "bucketize"
    ]
    if each:
        found["bucketize_ns_per_id"] = max(0.0, float(np.median(each)))
    return found


def batched_products(rows: Sequence[Measurement], profile: HardwareProfile) -> dict[str, float]:
    """Constants of the gemm group, from rows of ``bmm``: a product forward, two backward."""
    bytes_per_us = profile.streaming * units.us(1.0)
    columns, times, alone = [], [], []
    for row in rows:
        p, products = row.point.params, 2 if row.part == "backward" else 1
        if p["op"] == "bmm":
            count = products * p["batch"]
            flop = 2.0 * p["vectors"] ** 2 * p["dim"]
            columns.append((count, count * flop, products))
            added = ADDED_PASSES * (products - 1) * p["batch"] * p["vectors"] * p["dim"]
            times.append(max(row.median_us - OUTPUT_BYTES * added / bytes_per_us, 1.0))
            alone.append(_alone_us(row, profile) / flop)
    if not times:
        return {}
    per_us = units.tflops(profile.gemm.tflops["fp32"]) * units.us(1.0)
    work, measured, limit = np.array(columns), np.array(times), np.array(alone)
    each, per_flop, _ = non_negative(work, measured)
    for _ in range(len(limit)):
        # large products are as fast as alone, which says nothing of the rate of small ones
        small = per_flop <= limit * (1 + 1e-6)
        if small.all() or small.sum() < work.shape[1]:
            break
        work, measured, limit = work[small], measured[small], limit[small]
        each, per_flop, _ = non_negative(work, measured)
    share = 1.0 / (max(per_flop, 1e-12) * per_us)
    return {"batched_us": float(each), "batched_share": float(np.clip(share, 1e-3, 1.0))}


def _alone_us(row: Measurement, profile: HardwareProfile) -> float:
    """Time of one product of a row's batch if it ran alone, without its launch."""
    p = row.point.params
    vectors, dim = p["vectors"], p["dim"]
    n, k = (dim, vectors) if row.part == "backward" else (vectors, dim)
    return gemm_ms(profile, vectors, n, k, "fp32") / units.us(1.0) - profile.gemm.floor_us


def gathers(
    rows: Sequence[Measurement], profile: HardwareProfile, call_us: float
) -> dict[str, float]:
    """What picking pairs takes: the interaction's time beyond its products and its stacking."""
    bmm = {_shape(r): r.median_us for r in rows if r.point.params["op"] == "bmm"}
    pairs, beyond = [], []
    columns = profile.elementwise.columns
    for row in (r for r in rows if r.point.params["op"] == "dot" and _shape(r) in bmm):
        p = row.point.params
        times = 2 if row.part == "backward" else 1  # gradients are picked and added
        picked = times * p["batch"] * p["vectors"] * (p["vectors"] - 1) / 2
        stacked = p["batch"] * p["vectors"] * p["dim"]
        moved = COPY_PASSES * OUTPUT_BYTES * (stacked / columns + picked) / profile.streaming
        pairs.append(picked)
        calls = CALLS_OF_DOT * call_us
        beyond.append(row.median_us - bmm[_shape(row)] - moved / units.us(1.0) - calls)
    if not pairs:
        return {}
    count = np.array(pairs)
    return {"gather_ns_per_element": max(0.0, 1e3 * float(count @ beyond) / float(count @ count))}


def _shape(row: Measurement) -> tuple[Any, ...]:
    p = row.point.params
    return (row.part, p["batch"], p["vectors"], p["dim"])
