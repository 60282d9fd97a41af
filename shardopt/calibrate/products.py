"""Products of matrices: single, fused, and in batches as in the interaction and in attention.

They determine the gemm group, and the cost of picking pairs in an interaction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from predictor import units
from predictor.cost.gemm import (
    DATA_BYTES,
    gemm_ms,
    gemm_times,
    product_rate,
    products_ms,
    small_product_work,
)
from predictor.cost.ops.op_time import PRODUCTS, plain_name, product_of
from predictor.hardware.schema import Gemm, HardwareProfile
from predictor.iteration.torchrec.sparse import COPY_PASSES, OUTPUT_BYTES
from predictor.model.dlrm_program import dense_program
from predictor.model.op_calls import OpCall
from predictor.model.workload import MeasuredDense, Workload
from shardopt.calibrate import Group
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
    mape,
    non_negative,
    rows_of,
    total,
)
from shardopt.calibrate.moves import cold_call_us
from shardopt.calibrate.points import (
    TEST_EVERY,
    Coordinates,
    Family,
    Point,
    Size,
    choice,
    is_test,
    logarithmic,
    sobol,
    sobol_points,
    whole,
)
from shardopt.calibrate.rows import PASSES, Measurement, times_ms

CPU_SIZES = ((256, 8192), (1, 1024), (13, 2048))
GPU_SIZES = ((256, 65_536), (1, 4096), (13, 4096))
"""Ranges of m, n, k."""
MAX_CPU_FLOP, MAX_GPU_FLOP = 8e9, 1e12
CPU_DTYPES = ("fp32", "fp32", "bf16")
GPU_DTYPES = ("fp32", "tf32", "fp16", "bf16")
LAYOUTS = ("nn", "nt", "tn")
"""Layouts of forward and backward."""
MAX_DOTS = 2**22
"""Most dot products of an interaction's batch, counting both halves of the square."""
COUNT = (32, 1024)
"""Range of products in a batch: samples times heads."""
MAX_BATCHED_MACS = 1e8
BATCH_LAYOUTS = (*LAYOUTS, "outer")
TILES = ((8, 16), (16, 16), (16, 32), (32, 32), (64, 32), (64, 64))
"""Register and cache blocks of CPU libraries: sizes are rounded up to them."""
FREE = (
    FreeConstant("gemm", "prologue_k", 1.0, 2000.0),
    FreeConstant("gemm", "floor_us", 0.2, 50.0),
)
"""Constants of a GPU's products, besides a rate for every data type in the rows."""
TFLOPS = (0.1, 20_000.0)
ADDED_PASSES = 5
"""Passes to write and add the gradients of both operands."""
CALLS_OF_DOT = 3
"""Calls beside the product: stacking, picking and concatenating."""
ATTENTION_FLOP = (4, 10)
"""Operations per score and element of a head's width, as the cost model counts them."""


# Points.


def _cpu_gemm(u: Coordinates, i: int) -> dict[str, Any]:
    """Describe a product of an MLP, in a layout of forward or backward."""
    # a stride prime to the layouts and to the test points
    dtype = CPU_DTYPES[(i // TEST_EVERY) % len(CPU_DTYPES)]
    return {**_shape(u, CPU_SIZES, MAX_CPU_FLOP), "dtype": dtype, "layout": LAYOUTS[i % 3]}


def _gpu_gemm(u: Coordinates, _: int) -> dict[str, Any]:
    """Describe a product in some data type; tf32 is fp32 with the tensor cores allowed."""
    how = {"dtype": choice(GPU_DTYPES, u[3]), "layout": choice(LAYOUTS, u[4])}
    return {**_shape(u[:3], GPU_SIZES, MAX_GPU_FLOP), **how}


def model_points(model: Workload) -> list[Point]:
    """Return the products of a model's dense part, forward and backward; half are held out."""
    if isinstance(model.dense, MeasuredDense):
        return []
    program, data_type = dense_program(model), model.dense.data_type
    products = dict.fromkeys(
        product_of(call, data_type)
        for call in (*program.forward, *program.backward)
        if isinstance(call, OpCall) and plain_name(call) in PRODUCTS
    )
    return [
        Point(
            "gemm",
            {"m": p.m, "n": p.n, "k": p.k, "dtype": p.data_type, "layout": p.layout},
            test=i % 2 == 1,
        )
        for i, p in enumerate(products)
        if p.batch == 1 and p.layout in LAYOUTS and p.data_type in GPU_DTYPES
    ]


def _shape(u: Coordinates, sizes: Sequence[tuple[int, int]], most_flop: float) -> dict[str, int]:
    m, n, k = map(whole, u, sizes)
    return {"m": max(64, min(m, int(most_flop / (2 * n * k)))), "n": n, "k": k}


def interaction_points(size: Size) -> list[Point]:
    """Return the points of interactions: the batched product alone, and the whole layer."""
    return [
        point
        for op in ("bmm", "dot")
        for point in sobol_points("interaction", size.ops, 3, partial(_interaction, op))
    ]


def _interaction(op: str, u: Coordinates, _: int) -> dict[str, Any]:
    vectors = whole(u[0], (2, 40))
    batch = round(min(logarithmic(u[2], (64, 4096)), MAX_DOTS / vectors**2))
    return {"op": op, "vectors": vectors, "dim": choice((16, 32, 64, 128), u[1]), "batch": batch}


def _history(u: Coordinates) -> tuple[float, int, int]:
    """Return samples times heads, items of a history, and width of a head."""
    length, width = whole(u[1], (8, 64)), whole(u[2], (8, 64))
    return min(logarithmic(u[0], COUNT), MAX_BATCHED_MACS / (length**2 * width)), length, width


def batch_points(count: int) -> list[Point]:
    """Return the batched products of attention and of mixtures of experts.

    They are scores and values of attention and their gradients, and the same for mixtures, whose
    products have one row each.
    """
    shapes = []
    for i, u in enumerate(sobol(count, dims=3)):
        heads, length, width = _history(u)
        shapes += [
            (i, round(heads), "nt", length, length, width),
            (i, round(heads), "nn", length, width, length),
            (i, round(heads), "tn", length, width, length),
        ]
    for i, u in enumerate(sobol(count // 2, dims=3)):
        samples, experts, width = map(whole, u, (COUNT, (2, 12), (16, 256)))
        shapes += [
            (i, samples, "nn", 1, width, experts),
            (i, samples, "nt", 1, experts, width),
            (i, samples, "outer", experts, width, 1),
        ]
    return [
        Point("product", {"count": c, "m": m, "n": n, "k": k, "layout": layout}, is_test(i))
        for i, c, layout, m, n, k in shapes
    ]


def _attention(u: Coordinates, _: int) -> dict[str, int]:
    """Describe fused attention with a mask."""
    heads = choice((1, 2, 4), u[3])
    together, length, width = _history(u)
    batch = max(1, round(together / heads))
    return {"batch": batch, "heads": heads, "length": length, "width": width}


FAMILIES = (
    Family(
        "gemm",
        (Group.GEMM,),
        cpu=lambda size: sobol_points("gemm", size.gemms, 3, _cpu_gemm),
        gpu=lambda size, _: sobol_points("gemm", 2 * size.gemms, 5, _gpu_gemm),
    ),
    Family("interaction", cpu=interaction_points),
    Family("product", cpu=lambda size: batch_points(size.ops)),
    Family("attention", cpu=lambda size: sobol_points("attention", size.ops, 4, _attention)),
)


# Fit of CPU ranks.


@dataclass(frozen=True)
class GemmRows:
    """Timings of ``[m, k] @ [k, n]`` on one device: four arrays of shape ``[rows]``."""

    m: Array
    n: Array
    k: Array
    time_ms: Array

    @classmethod
    def of(cls, rows: Sequence[tuple[float, float, float, float]]) -> GemmRows:
        """Build from (m, n, k, time_ms)."""
        table = np.array(rows, dtype=np.float64).reshape(-1, 4)
        return cls(*table.T)

    @property
    def fastest_tflops(self) -> float:
        return float((2.0 * self.m * self.n * self.k / self.time_ms).max() * 1e-9)


def predict_ms(gemm: Gemm, sms: int, hbm: float, rows: GemmRows, dtype: str = "fp32") -> Array:
    """Predict times ``[rows]`` with the rows' own timing floor."""
    timing = (gemm.timing_floor_us - gemm.floor_us) * 1e-3
    return timing + gemm_times(gemm, sms, hbm, (rows.m, rows.n, rows.k), dtype)


def gemm_errors(gemm: Gemm, sms: int, hbm: float, rows: GemmRows, dtype: str = "fp32") -> Array:
    """Return the relative errors ``[rows]``."""
    return predict_ms(gemm, sms, hbm, rows, dtype) / rows.time_ms - 1.0


def fit_gemm(rows: GemmRows, sms: int, hbm: float, base: Gemm) -> Gemm:
    """Return ``base`` with TFLOP/s, prologue and timing floor fitted to ``rows``.

    Nelder-Mead minimises the mean absolute log error: the model has ceilings and minima, and rows
    with an unusual kernel of the library must not dominate.

    Args:
        hbm: achieved bandwidth in bytes/ms.
    """
    from scipy.optimize import minimize

    def candidate(x: Array) -> Gemm:
        tflops, prologue, timing = np.abs(x)
        return base.model_copy(
            update={
                "tflops": dict(base.tflops) | {"fp32": float(tflops)},
                "prologue_k": float(prologue),
                "timing_floor_us": float(timing),
            }
        )

    def loss(x: Array) -> float:
        error = gemm_errors(candidate(x), sms, hbm, rows)
        return float(np.mean(np.abs(np.log(np.maximum(1.0 + error, 1e-9)))))

    start = np.array([0.9 * rows.fastest_tflops, 50.0, 1e3 * float(rows.time_ms.min())])
    solution = minimize(
        loss, start, method="Nelder-Mead", options={"maxiter": 250, "xatol": 0.01, "fatol": 1e-4}
    )
    return candidate(solution.x)


def fit_cpu(draft: CalibratedProfile) -> CalibratedProfile:
    """Fit products: single, in small batches and fused; needs the bandwidth."""
    draft = _fit_cpu_gemm(draft)
    rows = [row for part in PASSES for row in draft.of("interaction", part)]
    if rows:
        draft = draft.constants("gemm", **_batched(rows, draft.profile))
        draft = draft.constants("elementwise", **_gathers(rows, draft.profile, cold_call_us(draft)))
    return _fit_attention(_fit_batches(draft))


def _fit_cpu_gemm(draft: CalibratedProfile) -> CalibratedProfile:
    """Fit tile, rate, prologue and floor to fp32, and the rate alone to bf16."""
    fit, test = (_by_dtype(rows) for rows in draft.fit_and_test("gemm"))
    if len(fit.get("fp32", ())) < FEWEST:
        return draft
    profile, hbm = draft.profile, draft.profile.memory.hbm
    rows, tested = gemm_rows(fit["fp32"]), gemm_rows(test.get("fp32", []))
    gemm = _best_tile(rows, hbm, profile.gemm)
    held_out = HeldOut(_whole_errors(gemm, hbm, tested), len(fit["fp32"]), tested.time_ms)
    shipped = draft.base.gemm.model_copy(update={"floor_us": gemm.floor_us})
    errors = _whole_errors(shipped, draft.base.memory.hbm, tested)
    draft = draft.error("gemm fp32", held_out, errors)
    if fit.get("bf16"):
        gemm = _with_rate(gemm_rows(fit["bf16"]), hbm, gemm, "bf16")
        errors = _whole_errors(gemm, hbm, gemm_rows(test.get("bf16", [])), "bf16")
        draft = draft.error("gemm bf16", HeldOut(errors, len(fit["bf16"])))
    # a CPU runs fp32 kernels for tf32; other types without rows keep the base's rate
    rates = {str(k): v for source in (profile.gemm, gemm) for k, v in source.tflops.items()}
    rates |= {"tf32": rates["fp32"]}
    gemm = gemm.model_copy(update={"tflops": rates, "floor_us": profile.elementwise.floor_us})
    shapes = (row.point.params for row in fit["fp32"] + test.get("fp32", []))
    flop = [2.0 * p["m"] * p["n"] * p["k"] for p in shapes]
    return draft.update(gemm=gemm).measured("gemm", fit["fp32"], held_out, {"flop": flop})


def gemm_rows(rows: Sequence[Measurement]) -> GemmRows:
    """Collect the rows of gemm points of one data type."""
    shapes = [(p["m"], p["n"], p["k"]) for p in (row.point.params for row in rows)]
    return GemmRows.of([(*s, ms) for s, ms in zip(shapes, times_ms(rows).tolist(), strict=True)])


def _by_dtype(rows: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """Group rows by data type, without the linear layers with a bias of older files.

    Their bias is a separate copy.
    """
    by_dtype: dict[str, list[Measurement]] = {}
    for row in rows:
        if row.point.params["layout"] != "addmm":
            by_dtype.setdefault(row.point.params["dtype"], []).append(row)
    return by_dtype


def _best_tile(rows: GemmRows, hbm: float, base: Gemm) -> Gemm:
    """Fit the tile model of one core, with the tile that fits best."""
    base = base.model_copy(update={"tflops": {"fp32": 0.1}, "overlaps": False})
    candidates = []
    for tile in TILES:
        gemm = fit_gemm(rows, 1, hbm, base.model_copy(update={"tiles": (tile,)}))
        # on a CPU the floor of the rows belongs to the call: no event timer adds to it
        gemm = gemm.model_copy(update={"floor_us": gemm.timing_floor_us})
        candidates.append((mape(gemm_errors(gemm, 1, hbm, rows)), gemm))
    best = min(candidates, key=lambda pair: pair[0])[1]
    return best.model_copy(update={"timing_floor_us": 0.0})


def _whole_errors(gemm: Gemm, hbm: float, rows: GemmRows, dtype: str = "fp32") -> Array:
    """Return the relative errors ``[rows]`` of times that include the floor."""
    whole = gemm.model_copy(update={"timing_floor_us": gemm.floor_us})
    return gemm_errors(whole, 1, hbm, rows, dtype)


def _with_rate(rows: GemmRows, hbm: float, gemm: Gemm, dtype: str) -> Gemm:
    """Return ``gemm`` with the fitted rate of one more data type."""
    from scipy.optimize import minimize_scalar

    def at(log_rate: float) -> Gemm:
        rates = {str(key): value for key, value in gemm.tflops.items()}
        return gemm.model_copy(update={"tflops": rates | {dtype: math.exp(log_rate)}})

    def loss(log_rate: float) -> float:
        return float(np.mean(np.abs(np.log1p(_whole_errors(at(log_rate), hbm, rows, dtype)))))

    solution = minimize_scalar(loss, bounds=(math.log(1e-3), math.log(1e3)), method="bounded")
    return at(float(solution.x))


def _batched(rows: Sequence[Measurement], profile: HardwareProfile) -> dict[str, float]:
    """Fit constants of batches to rows of ``bmm``: a product forward, two backward."""
    bytes_per_us = profile.streaming * units.us(1.0)
    columns, times, alone = [], [], []
    for row in (row for row in rows if row.point.params["op"] == "bmm"):
        batch, vectors, dim = (row.point.params[key] for key in ("batch", "vectors", "dim"))
        products, n, k = (2, dim, vectors) if row.part == "backward" else (1, vectors, dim)
        flop = 2.0 * vectors**2 * dim
        columns.append((products * batch, products * batch * flop, products))
        added = ADDED_PASSES * (products - 1) * batch * vectors * dim
        times.append(max(row.median_us - OUTPUT_BYTES * added / bytes_per_us, 1.0))
        # time of one product alone, without its launch
        once_us = gemm_ms(profile, vectors, n, k, "fp32") / units.us(1.0) - profile.gemm.floor_us
        alone.append(once_us / flop)
    if not times:
        return {}
    per_us = units.tflops(profile.gemm.tflops["fp32"]) * units.us(1.0)
    work, measured, limit = np.array(columns), np.array(times), np.array(alone)
    each, per_flop, _ = non_negative(work, measured)
    for _ in range(len(limit)):
        # large products are as fast as alone, so they do not show the rate of small ones
        small = per_flop <= limit * (1 + 1e-6)
        if small.all() or small.sum() < work.shape[1]:
            break
        work, measured, limit = work[small], measured[small], limit[small]
        each, per_flop, _ = non_negative(work, measured)
    share = 1.0 / (max(per_flop, 1e-12) * per_us)
    return {"batched_us": float(each), "batched_share": float(np.clip(share, 1e-3, 1.0))}


def _gathers(
    rows: Sequence[Measurement], profile: HardwareProfile, call_us: float
) -> dict[str, float]:
    """Fit the cost of picking pairs: the interaction's time beyond products and stacking."""

    def shape(row: Measurement) -> tuple[Any, ...]:
        p = row.point.params
        return (row.part, p["batch"], p["vectors"], p["dim"])

    bmm = {shape(r): r.median_us for r in rows if r.point.params["op"] == "bmm"}
    pairs, beyond = [], []
    for row in (r for r in rows if r.point.params["op"] == "dot" and shape(r) in bmm):
        part, batch, vectors, dim = shape(row)
        times = 2 if part == "backward" else 1  # gradients are picked and added
        picked = times * batch * vectors * (vectors - 1) / 2
        stacked = batch * vectors * dim / profile.elementwise.columns
        moved = COPY_PASSES * OUTPUT_BYTES * (stacked + picked) / profile.streaming
        pairs.append(picked)
        calls = CALLS_OF_DOT * call_us
        beyond.append(row.median_us - bmm[shape(row)] - moved / units.us(1.0) - calls)
    if not pairs:
        return {}
    count = np.array(pairs)
    return {"gather_ns_per_element": max(0.0, 1e3 * float(count @ beyond) / float(count @ count))}


def _fit_batches(draft: CalibratedProfile) -> CalibratedProfile:
    """Fit batches of small products: terms of all layouts, then the products of each layout."""
    rows = [row for row in draft.of("product") if row.point.params["count"] > 1]
    if {row.point.params["layout"] for row in rows if not row.point.test} < set(BATCH_LAYOUTS):
        return draft.kept("small products") if rows else draft
    columns = []
    for p in (row.point.params for row in rows):
        *shared, products = small_product_work(p["m"], p["n"], p["k"])
        own = [products * (p["layout"] == layout) for layout in BATCH_LAYOUTS]
        columns.append([p["count"] * work for work in (*shared, *own)])
    draft, costs = after_call(draft, "small products", rows, columns)
    if costs is None:
        return draft
    *first, nn, nt, tn, outer = (costs / NS).tolist()
    layouts = zip(BATCH_LAYOUTS, (nn, nt, tn, outer), strict=True)
    return draft.constants("gemm", batches={layout: (*first, cost) for layout, cost in layouts})


def _fit_attention(draft: CalibratedProfile) -> CalibratedProfile:
    """Fit the time of a sample's head, and the share of the rate that its products reach."""
    rate = product_rate(draft.profile.gemm, "fp32", draft.profile.name)
    heads_us: list[float] = []
    shares: list[float] = []
    for part, flop in zip(PASSES, ATTENTION_FLOP, strict=True):
        rows = draft.of("attention", part)
        columns = []
        for p in (row.point.params for row in rows):
            heads = p["batch"] * p["heads"]
            columns.append([heads, heads * p["length"] ** 2 * p["width"]])
        draft, costs = after_call(draft, f"attention {part}", rows, columns)
        if costs is None:
            return draft
        heads_us.append(float(costs[0]) / units.us(1.0))
        shares.append(float(np.clip(flop / rate / max(costs[1], 1e-18), 1e-3, 1.0)))
    return draft.constants(
        "gemm",
        attention_head_us=tuple(heads_us),
        attention_forward=shares[0],
        attention_backward=shares[1],
    )


# Fit of a GPU.


def predict_gemms(hw: HardwareProfile, rows: Sequence[Measurement]) -> Array:
    """Predict times ``[rows]`` in ms."""
    times = np.zeros(len(rows))
    kinds = [(row.point.params["dtype"], row.point.params["layout"]) for row in rows]
    for dtype, layout in set(kinds):
        chosen = [i for i, kind in enumerate(kinds) if kind == (dtype, layout)]
        shapes = gemm_rows([rows[i] for i in chosen])
        times[chosen] = products_ms(hw, (shapes.m, shapes.n, shapes.k), dtype, layout)
    return times


def _is_aligned(row: Measurement, dtype: str) -> bool:
    """Return True if rows of both operands and of the result are multiples of 16 bytes."""
    sides = (row.point.params[side] for side in ("n", "k"))
    return all(side * DATA_BYTES[dtype] % 16 == 0 for side in sides)


def fit_gpu(draft: CalibratedProfile) -> CalibratedProfile:
    """Fit a rate for each data type, and prologue and floor of those without own kernels.

    Data types without rows keep the base's rate. Parts that share no constant are fitted and held
    out separately: the rows of one say nothing of another. If prologue and floor make theirs worse
    than before, the rates alone are fitted there, each separately.
    """
    fit, test = (_by_dtype(rows) for rows in draft.fit_and_test("gemm"))
    fit = {dtype: rows for dtype, rows in fit.items() if len(rows) >= FEWEST}
    if not fit:
        return draft
    used = [row for rows in fit.values() for row in rows]

    def part(
        before: HardwareProfile, dtypes: Sequence[str], free: Sequence[FreeConstant]
    ) -> FittedProfile:
        rates = [FreeConstant("gemm", f"tflops.{dtype}", *TFLOPS) for dtype in dtypes]
        start = before
        for rate, dtype in zip(rates, dtypes, strict=True):
            # kernels of unaligned rows do not show the rate
            aligned = [row for row in fit[dtype] if _is_aligned(row, dtype)]
            if aligned:
                start = rate.put(start, gemm_rows(aligned).fastest_tflops)
        rows, tests = ([r for d in dtypes for r in of.get(d, [])] for of in (fit, test))
        result = fit_free(start, (*rates, *free), *rows_of(predict_gemms, rows))
        name = f"gemm {', '.join(dtypes)}"
        return result.unless_worse(name, before, *rows_of(predict_gemms, tests))

    shared = [dtype for dtype in fit if draft.profile.gemm.cores(dtype) is None]
    result, left = FittedProfile(draft.profile, (), FREE), list(fit)
    if shared:
        joint = part(draft.profile, shared, FREE)
        if not joint.worse:
            result, left = joint, [dtype for dtype in fit if dtype not in shared]
    for dtype in left:
        result = result.then(part(result.hw, [dtype], ()))
    draft = draft.take(result)
    for dtype, rows in fit.items():
        draft = draft.score(f"gemm {dtype}", rows, test.get(dtype, []), predict_gemms)
    error = total([draft.errors[f"gemm {dtype}"] for dtype in fit])
    if not result.fitted:
        return draft
    # the floor includes the event timer's part
    draft = draft.constants("gemm", timing_floor_us=result.hw.gemm.floor_us)
    sizes = {side: [row.point.params[side] for row in used] for side in ("m", "n", "k")}
    return draft.measured("gemm", used, error, sizes, result.kept_text)
