"""Memory-bound ops: streaming kernels, copies to the device, ids into buckets, columns side by
side, functions of every element.

They determine the memory and elementwise groups. A CPU has one bandwidth for all levels of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from predictor import units
from predictor.cost.elementwise import copy_h2d_ms, memory_ms
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.torchrec.sparse import COPY_PASSES
from predictor.model.workload import INDEX_BYTES
from predictor.units import MIB
from shardopt.calibrate.fitting import (
    FEWEST,
    NS,
    Array,
    CalibratedProfile,
    FittedProfile,
    FreeConstant,
    HeldOut,
    after_call,
    fit_free,
    non_negative,
    rows_of,
)
from shardopt.calibrate.points import (
    Coordinates,
    Device,
    Family,
    Point,
    Size,
    choice,
    is_test,
    logarithmic,
    sobol_points,
    whole,
)
from shardopt.calibrate.rows import PASSES, Measurement, times_ms

ELEMENTWISE_OPS = ("clone", "relu", "add", "cat")
GPU_OCTAVES = 3
"""Octaves of elementwise kernels beyond a CPU's: GPUs have more memory to fill."""
COPY_OCTAVES = (10, 29)
STREAMED_MIB = (384, 512, 640, 768, 896, 1024)
"""Sizes of memory read once: several times any L2."""
BATCH = (64, 4096)
"""Samples of a rank."""
MAX_IDS = 200_000
WIDTHS = (8, 16, 32, 64, 128, 256)
MAX_POOLED, MAX_JOINED = 2**23, 2**21
"""Floats of the pooled embeddings of a rank, and of what is concatenated."""
POOLED = ("cat", "split")
FUNCTIONS = {
    "silu": ("silu", "silu_backward"),
    "gelu": ("gelu", "gelu_backward"),
    "sigmoid": ("sigmoid", "sigmoid_backward"),
    "tanh": ("tanh", "tanh_backward"),
    "softmax": ("_softmax", "_softmax_backward_data"),
}
"""Function -> PyTorch's ops of its forward and backward."""
FUNCTION_OCTAVES = (14, 17, 20)
"""Octaves of elements: within the core's own caches and beyond them."""
FUNCTION_BYTES = (8, 12)
"""Bytes read and written an element, forward and backward."""
SOFTMAX_WIDTH = 32
FORMS = ("whole", "sliced", "turned")
"""Operands of a concatenation: separate, columns of a wider matrix, or transposed."""
JOINED_BYTES = 8
BUCKET_PASSES = 4
"""Passes over ids: they are read and written twice, as in the iteration graph."""
HBM = FreeConstant("memory", "hbm_gb_s", 1.0, 1e6)
DDR = FreeConstant("memory", "ddr_gb_s", 0.5, 1e6)
MOVES = (
    FreeConstant("elementwise", "efficiency", 0.05, 1.0),
    FreeConstant("elementwise", "floor_us", 0.2, 50.0),
    FreeConstant("elementwise", "ramp_us", 0.01, 100.0),
    FreeConstant("elementwise", "ramp_half_mib", 0.01, 100.0),
)
COPIES = (
    FreeConstant("memory", "host_link_gb_s", 0.5, 2000.0),
    FreeConstant("memory", "host_link_latency_us", 0.05, 100.0),
)


# Points.


def _streaming_points(size: Size, device: Device) -> list[Point]:
    return [
        Point("streaming", {"bytes": mib * MIB}, i % 3 == 2)
        for i, mib in enumerate(STREAMED_MIB)
        if mib * MIB <= device.memory_bytes / 8
    ]


def elementwise_points(size: Size, device: Device | None = None) -> list[Point]:
    """Return the points of memory-bound kernels; a GPU's go further, within its memory."""
    low, high = size.elementwise_octaves
    if device is not None:
        high += GPU_OCTAVES
    return [
        Point("elementwise", {"op": op, "bytes": 2**octave}, is_test(i + octave))
        for i, op in enumerate(ELEMENTWISE_OPS)
        for octave in range(low, high + 1)
        if device is None or 2**octave <= device.memory_bytes / 16
    ]


def _copy_points(size: Size, device: Device) -> list[Point]:
    return [
        Point("copy_h2d", {"bytes": 2**octave}, is_test(octave))
        for octave in range(*COPY_OCTAVES)
        if octave <= size.elementwise_octaves[1] + 2
    ]


def _function_points(size: Size) -> list[Point]:
    return [
        Point("function", {"op": op, "elements": 2**octave}, is_test(i + j))
        for i, op in enumerate(FUNCTIONS)
        for j, octave in enumerate(FUNCTION_OCTAVES)
    ]


def _pooled_points(size: Size) -> list[Point]:
    return [p for op in POOLED for p in sobol_points("pooled", size.ops, 3, partial(_pooled, op))]


def _concatenation_points(size: Size) -> list[Point]:
    return [
        point
        for form in FORMS
        for point in sobol_points("concatenation", size.ops, 3, partial(_joined, form))
    ]


def _jagged(u: Coordinates, _: int) -> dict[str, Any]:
    features, batch = whole(u[0], (1, 32)), whole(u[1], BATCH)
    pooling = round(max(min(logarithmic(u[2], (1.0, 40.0)), MAX_IDS / (features * batch)), 0.1), 2)
    shape = {"features": features, "batch": batch, "pooling": pooling}
    return {"op": "bucketize", **shape, "buckets": choice((2, 4, 8), u[3])}


def _pooled(op: str, u: Coordinates, _: int) -> dict[str, Any]:
    # the golden ratio spreads widths evenly
    dims = [choice(WIDTHS, (u[1] + i * 0.618034) % 1.0) for i in range(whole(u[0], (2, 26)))]
    batch = round(min(logarithmic(u[2], BATCH), MAX_POOLED / sum(dims)))
    return {"op": op, "dims": dims, "batch": batch}


def _joined(form: str, u: Coordinates, _: int) -> dict[str, Any]:
    pieces, width = whole(u[0], (2, 16)), whole(u[2], (8, 128))
    rows = round(min(logarithmic(u[1], (128, 8192)), MAX_JOINED / (pieces * width)))
    return {"form": form, "pieces": pieces, "rows": rows, "width": width}


FAMILIES = (
    Family("streaming", gpu=_streaming_points),
    Family("elementwise", cpu=elementwise_points, gpu=elementwise_points),
    Family("copy_h2d", gpu=_copy_points),
    Family("jagged", cpu=lambda size: sobol_points("jagged", size.ops, 4, _jagged)),
    Family("pooled", cpu=_pooled_points),
    Family("function", cpu=_function_points),
    Family("concatenation", cpu=_concatenation_points),
)


# Fit of CPU ranks.


def fit_cpu(draft: CalibratedProfile) -> CalibratedProfile:
    """Fit floor and bandwidth, the same for every level of memory, and costs beyond streaming.

    The latter are those of columns, of ids in buckets, and of functions.
    """
    fit, test = draft.fit_and_test("elementwise")
    if len(fit) < FEWEST:
        return _fit_dense_parts(draft)
    floor_us, gb_s = _stream(fit)

    def errors(gb_s: float) -> Array:
        predicted = units.us(floor_us) + moved_bytes(test) / units.gb_per_s(gb_s)
        return np.asarray(predicted / times_ms(test) - 1.0)

    held_out = HeldOut(errors(gb_s), len(fit))
    draft = draft.error("elementwise", held_out, errors(draft.profile.memory.hbm_gb_s))
    # the rows' own floor is that of a call after other memory was read, which displaces code too:
    # among similar kernels a kernel takes at most as long as a small op in a loop
    small = draft.of("host")
    levels = dict.fromkeys(("hbm_gb_s", "l2_gb_s", "host_link_gb_s", "ddr_gb_s"), gb_s)
    draft = draft.constants("memory", **levels).constants(
        "elementwise",
        efficiency=1.0,
        floor_us=min(floor_us, small[0].median_us) if small else floor_us,
        ramp_us=0.0,
        fused_bias=False,
        **_small_moves(draft, gb_s, floor_us),
    )
    sizes = {"bytes_moved": moved_bytes(fit + test)}
    draft = draft.measured("elementwise", fit, held_out, sizes)
    return _fit_dense_parts(draft.measured("memory", fit, held_out, sizes))


def cold_call_us(draft: CalibratedProfile) -> float:
    """Return the time of a small op beyond its data: a call of code that lies in no cache."""
    fit = draft.of("elementwise", test=False)
    return _stream(fit)[0] if len(fit) >= FEWEST else 0.0


def moved_bytes(rows: Sequence[Measurement]) -> Array:
    """Return the bytes read and written by elementwise points and copies, ``[rows]``."""
    moved = (row.facts.get("bytes_moved", row.point.params["bytes"]) for row in rows)
    return np.array(list(moved), dtype=np.float64)


def _stream(rows: Sequence[Measurement]) -> tuple[float, float]:
    """Fit ``(floor_us, gb_s)`` of ``t = floor + bytes / bandwidth``."""
    columns = np.column_stack((np.ones(len(rows)), moved_bytes(rows)))
    floor, per_byte = non_negative(columns, times_ms(rows))
    bandwidth = 1.0 / max(float(per_byte), 1e-15)
    return float(floor) / units.us(1.0), bandwidth / units.gb_per_s(1.0)


def _small_moves(draft: CalibratedProfile, gb_s: float, call_us: float) -> dict[str, float]:
    """Fit copies of columns, as TorchRec and the interaction make them, and ids into buckets."""
    constants = {}
    copied = [
        row
        for part, op in zip(PASSES, POOLED, strict=True)
        for row in draft.of("pooled", part)
        if row.point.params["op"] == op
    ]
    if len(copied) >= FEWEST:
        # a call, a piece, a byte; the facts count bytes once, reading and writing are passes
        shape = [(1.0, r.facts["pieces"], COPY_PASSES * r.facts["bytes"]) for r in copied]
        per_byte = non_negative(shape, np.array([r.median_us for r in copied]))[2]
        constants["columns"] = float(np.clip(1e-3 / max(per_byte, 1e-9) / gb_s, 1e-3, 1.0))
    each = [
        (row.median_us - call_us) * 1e3 / row.facts["ids"] - BUCKET_PASSES * INDEX_BYTES / gb_s
        for row in draft.of("jagged")
        if row.point.params["op"] == "bucketize"
    ]
    if each:
        constants["bucketize_ns_per_id"] = max(0.0, float(np.median(each)))
    return constants


def _fit_dense_parts(draft: CalibratedProfile) -> CalibratedProfile:
    """Fit functions and concatenations, for dense parts other than a DLRM's, where measured."""
    streaming = draft.profile.streaming
    each: dict[str, float] = {}
    for i, part in enumerate(PASSES):
        for name, ops in FUNCTIONS.items():
            rows = [r for r in draft.of("function", part) if r.point.params["op"] == name]
            times = {r.point.params["elements"]: r.median_us * units.us(1.0) for r in rows}
            if len(times) > 1:
                slope = (times[max(times)] - times[min(times)]) / (max(times) - min(times))
                each[ops[i]] = max(0.0, (slope - FUNCTION_BYTES[i] / streaming) / NS)
    if each:
        draft = draft.constants("elementwise", math_ns=each)
    streamed = JOINED_BYTES / (streaming * draft.profile.elementwise.columns)
    for form in ("sliced", "turned"):
        chosen = [r for r in draft.of("concatenation") if r.point.params["form"] == form]
        shapes = (r.point.params for r in chosen)
        elements = [[float(p["pieces"] * p["rows"] * p["width"])] for p in shapes]
        draft, costs = after_call(draft, f"concatenation, {form}", chosen, elements)
        if costs is not None:
            beyond = max(0.0, (costs[0] - streamed) / NS)
            draft = draft.constants("elementwise", **{f"{form}_ns_per_element": beyond})
    return draft


# Fit of a GPU.


def predict_streaming(hw: HardwareProfile, rows: Sequence[Measurement]) -> Array:
    """Predict times ``[rows]`` in ms of kernels that only read memory much larger than the L2."""
    return moved_bytes(rows) / hw.memory.hbm


def predict_moves(hw: HardwareProfile, rows: Sequence[Measurement]) -> Array:
    """Predict times ``[rows]`` in ms of memory-bound kernels."""
    return memory_ms(hw, moved_bytes(rows))


def predict_copies(hw: HardwareProfile, rows: Sequence[Measurement]) -> Array:
    """Predict times ``[rows]`` in ms of copies to the device."""
    return copy_h2d_ms(hw, moved_bytes(rows))


def fit_gpu(draft: CalibratedProfile) -> CalibratedProfile:
    """Fit the memory's bandwidth, which all other kernels use; then kernels and copies."""
    fit, test = draft.fit_and_test("streaming")
    if fit:
        # the bandwidth of reading; efficiencies of other kernels are shares of it
        rate = float(np.median(moved_bytes(fit) / times_ms(fit))) / units.gb_per_s(1.0)
        result = FittedProfile(HBM.put(draft.profile, rate), (HBM,), ())
        result = result.unless_worse("hbm_gb_s", draft.profile, *rows_of(predict_streaming, test))
        draft = draft.take(result).score("streaming", fit, test, predict_streaming)
        if result.fitted:
            note = "; all as in the base profile but hbm_gb_s"
            draft = draft.measured("memory", fit, draft.errors["streaming"], also=note)
    fit, test = draft.fit_and_test("elementwise")
    if len(fit) >= FEWEST:
        result = fit_free(draft.profile, MOVES, partial(predict_moves, rows=fit), times_ms(fit))
        result = result.unless_worse("elementwise", draft.profile, *rows_of(predict_moves, test))
        draft = draft.take(result).score("elementwise", fit, test, predict_moves)
        error, sizes = draft.errors["elementwise"], {"bytes_moved": moved_bytes(fit + test)}
        if result.fitted:
            draft = draft.measured("elementwise", fit, error, sizes, result.kept_text)
    fit, test = draft.fit_and_test("copy_h2d")
    if len(fit) < FEWEST:
        return draft
    # host memory is at least as fast as the measured link, so its bandwidth is raised to it
    ddr_gb_s = DDR.value(draft.profile)
    unbound = DDR.put(draft.profile, COPIES[0].high)
    result = fit_free(unbound, COPIES, partial(predict_copies, rows=fit), times_ms(fit))
    link = COPIES[0].value(result.hw) if COPIES[0] in result.fitted else ddr_gb_s
    result = replace(result, hw=DDR.put(result.hw, max(ddr_gb_s, link)))
    result = result.unless_worse("host link", draft.profile, *rows_of(predict_copies, test))
    draft = draft.take(result).score("copy_h2d", fit, test, predict_copies)
    note = "host_link_gb_s and host_link_latency_us of copies"
    return extend_memory(draft, result, note, fit, draft.errors["copy_h2d"])


def extend_memory(
    draft: CalibratedProfile,
    result: FittedProfile,
    name: str,
    fit: Sequence[Measurement],
    held_out: HeldOut,
) -> CalibratedProfile:
    """Add constants to the memory group, whose error stays that of streaming kernels."""
    if not any(constant.group == "memory" for constant in result.fitted):
        return draft
    if "memory" not in draft.groups:
        return draft.measured(
            "memory", fit, held_out, also=f"; all as in the base profile but {name}"
        )
    provenance = draft.profile.memory.provenance
    extended = provenance.model_copy(update={"source": f"{provenance.source}, {name}"})
    return draft.constants("memory", provenance=extended)
