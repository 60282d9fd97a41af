"""Products of matrices: one by one, in batches as the interaction and attention have them, fused.

They give the gemm group, and what picking pairs from an interaction takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    Device,
    Point,
    Size,
    choice,
    is_test,
    logarithmic,
    sobol,
    sobol_points,
    whole,
)
from shardopt.calibrate.rows import PASSES, Measurement, row_of_samples, rows_of_passes, times_ms
from shardopt.measure.sampling import Timer, sample_gradients

CPU_SIZES = ((256, 8192), (1, 1024), (13, 2048))
GPU_SIZES = ((256, 65_536), (1, 4096), (13, 4096))
"""Ranges of m, n, k."""
MAX_CPU_FLOP, MAX_GPU_FLOP = 8e9, 1e12
CPU_DTYPES = ("fp32", "fp32", "bf16")
GPU_DTYPES = ("fp32", "tf32", "fp16", "bf16")
TORCH_DTYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
LAYOUTS = ("nn", "nt", "tn")
"""Of forward and backward."""
MAX_DOTS = 2**22
"""Of the dot products of an interaction's batch, both halves of the square."""
COUNT = (32, 1024)
"""Of products in a batch: samples times heads."""
MAX_BATCHED_MACS = 1e8
BATCH_LAYOUTS = (*LAYOUTS, "outer")
TILES = ((8, 16), (16, 16), (16, 32), (32, 32), (64, 32), (64, 64))
"""Register and cache blocks of CPU libraries: sizes are rounded up to them."""
ROWS_PER_FIT = 900
"""A sample suffices for five constants; it is drawn with a fixed seed."""
FREE = (
    FreeConstant("gemm", "prologue_k", 1.0, 2000.0),
    FreeConstant("gemm", "floor_us", 0.2, 50.0),
)
"""Constants of a GPU's products, besides a rate for every data type in the rows."""
TFLOPS = (0.1, 20_000.0)
ADDED_PASSES = 5
"""Of the gradients of both operands, which are written and added."""
CALLS_OF_DOT = 3
"""Stacking, picking and concatenating, apart from the product."""
ATTENTION_FLOP = (4, 10)
"""Over a score and an element of a head's width, as the cost model counts them."""


# What is measured.


def cpu_points(size: Size) -> list[Point]:
    """Of one core: multiplications of MLPs in the layouts of forward and backward; interactions,
    the batched products of attention and mixtures, and fused attention."""

    def gemm(u: Coordinates, i: int) -> dict[str, Any]:
        # a stride prime to the layouts and to the test points
        dtype = CPU_DTYPES[(i // TEST_EVERY) % len(CPU_DTYPES)]
        return {**_shape(u, CPU_SIZES, MAX_CPU_FLOP), "dtype": dtype, "layout": LAYOUTS[i % 3]}

    return [
        *sobol_points("gemm", size.gemms, 3, gemm),
        *(
            point
            for op in ("bmm", "dot")
            for point in sobol_points("interaction", size.ops, 3, partial(_interaction, op))
        ),
        *_batch_points(size.ops),
        *sobol_points("attention", size.ops, 4, _attention),
    ]


def gpu_points(size: Size, device: Device) -> list[Point]:
    """Multiplications in every data type; tf32 is fp32 with the tensor cores allowed."""

    def params(u: Coordinates, _: int) -> dict[str, Any]:
        how = {"dtype": choice(GPU_DTYPES, u[3]), "layout": choice(LAYOUTS, u[4])}
        return {**_shape(u[:3], GPU_SIZES, MAX_GPU_FLOP), **how}

    return sobol_points("gemm", 2 * size.gemms, 5, params)


def model_points(model: Workload) -> list[Point]:
    """Products of a model's dense part, of forward and backward; every other one is held out."""
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


def _interaction(op: str, u: Coordinates, _: int) -> dict[str, Any]:
    vectors = whole(u[0], (2, 40))
    batch = round(min(logarithmic(u[2], (64, 4096)), MAX_DOTS / vectors**2))
    return {"op": op, "vectors": vectors, "dim": choice((16, 32, 64, 128), u[1]), "batch": batch}


def _history(u: Coordinates) -> tuple[float, int, int]:
    """Samples times heads, items of a history, width of a head."""
    length, width = whole(u[1], (8, 64)), whole(u[2], (8, 64))
    return min(logarithmic(u[0], COUNT), MAX_BATCHED_MACS / (length**2 * width)), length, width


def _batch_points(count: int) -> list[Point]:
    """Scores and values of attention, and the gradients of both; the same of mixtures of experts,
    whose products have one row each."""
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
    """Fused, with a mask."""
    heads = choice((1, 2, 4), u[3])
    together, length, width = _history(u)
    batch = max(1, round(together / heads))
    return {"batch": batch, "heads": heads, "length": length, "width": width}


# How it is measured.


def measure_gemm(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """``[m, k] @ [k, n]``, operands laid out as a linear layer's forward or backward has them."""
    import torch

    a, b = _operands(point.params, (), timer.device)
    # tf32 is how a GPU multiplies fp32 when it is told to
    narrow = point.params["dtype"] == "tf32"
    torch.set_float32_matmul_precision("high" if narrow else "highest")
    taken = timer.samples(lambda: torch.mm(a, b), seconds)
    torch.set_float32_matmul_precision("highest")
    return [row_of_samples(point, taken)]


def measure_product(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """``count`` products ``[m, k] @ [k, n]``."""
    import torch

    a, b = _operands(point.params, (point.params["count"],), timer.device)
    return [row_of_samples(point, timer.samples(lambda: torch.bmm(a, b), seconds))]


def _operands(p: Mapping[str, Any], batch: tuple[int, ...], device: str) -> tuple[Any, Any]:
    """Both of a product; what the layout turns lies with rows and columns exchanged."""
    import torch

    dtype = getattr(torch, TORCH_DTYPES[p.get("dtype", "fp32")])

    def operand(rows: int, columns: int, turned: bool) -> Any:
        shape = (columns, rows) if turned else (rows, columns)
        made = torch.randn((*batch, *shape), device=device).to(dtype)
        return made.transpose(-1, -2) if turned else made

    m, n, k, layout = p["m"], p["n"], p["k"], p["layout"]
    return operand(m, k, layout == "tn"), operand(k, n, layout == "nt")


def measure_interaction(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Dot products of all pairs of vectors: the batched product alone, or the whole layer."""
    import torch

    from shardopt.training.model import Dot

    p = point.params
    batch, vectors, dim = p["batch"], p["vectors"], p["dim"]
    stacked = torch.ones(batch, vectors, dim, device=timer.device, requires_grad=True)
    single = [
        torch.ones(batch, dim, device=timer.device, requires_grad=True) for _ in range(vectors)
    ]
    width = dim + vectors * (vectors - 1) // 2
    dot = Dot(vectors, torch.device(timer.device), "index", width)
    forward, inputs = {
        "bmm": (lambda: torch.bmm(stacked, stacked.transpose(1, 2)), [stacked]),
        "dot": (lambda: dot(single), single),
    }[p["op"]]
    return rows_of_passes(point, sample_gradients(timer, forward, inputs, seconds))


def measure_attention(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """`scaled_dot_product_attention` with a causal mask, as attention over a history has it."""
    import torch
    from torch.nn import functional

    p = point.params
    shape = (p["batch"], p["heads"], p["length"], p["width"])
    given = [torch.full(shape, 0.1, device=timer.device, requires_grad=True) for _ in range(3)]
    future = torch.full((p["length"], p["length"]), float("-inf"), device=timer.device).triu(1)

    def forward() -> Any:
        return functional.scaled_dot_product_attention(*given, attn_mask=future)

    return rows_of_passes(point, sample_gradients(timer, forward, given, seconds))


# What the rows of CPU ranks say.


@dataclass(frozen=True)
class GemmRows:
    """Timings of ``[m, k] @ [k, n]`` on one device: four arrays of shape ``[rows]``."""

    m: Array
    n: Array
    k: Array
    time_ms: Array

    @classmethod
    def of(cls, rows: Sequence[tuple[float, float, float, float]]) -> GemmRows:
        """From (m, n, k, time_ms)."""
        table = np.array(rows, dtype=np.float64).reshape(-1, 4)
        return cls(*table.T)

    @property
    def fastest_tflops(self) -> float:
        return float((2.0 * self.m * self.n * self.k / self.time_ms).max() * 1e-9)

    def sample(self) -> GemmRows:
        """At most `ROWS_PER_FIT` of the rows, always the same ones."""
        size = len(self.m)
        if size <= ROWS_PER_FIT:
            return self
        chosen = np.random.default_rng(0).choice(size, ROWS_PER_FIT, replace=False)
        return GemmRows(self.m[chosen], self.n[chosen], self.k[chosen], self.time_ms[chosen])


def predict_ms(gemm: Gemm, sms: int, hbm: float, rows: GemmRows, dtype: str = "fp32") -> Array:
    """Times ``[rows]`` as the rows' own timing would show them."""
    timing = (gemm.timing_floor_us - gemm.floor_us) * 1e-3
    return timing + gemm_times(gemm, sms, hbm, (rows.m, rows.n, rows.k), dtype)


def gemm_errors(gemm: Gemm, sms: int, hbm: float, rows: GemmRows, dtype: str = "fp32") -> Array:
    """Relative errors ``[rows]``."""
    return predict_ms(gemm, sms, hbm, rows, dtype) / rows.time_ms - 1.0


def fit_gemm(rows: GemmRows, sms: int, hbm: float, base: Gemm) -> Gemm:
    """``base`` with achieved TFLOP/s, prologue and timing floor fitted to a sample of ``rows``.

    Nelder-Mead on the mean absolute log error: the model has ceilings and minima, and rows that a
    library ran with an unusual kernel must not pull it.

    Args:
        hbm: achieved bandwidth in bytes/ms.
    """
    from scipy.optimize import minimize

    sample = rows.sample()

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
        error = gemm_errors(candidate(x), sms, hbm, sample)
        return float(np.mean(np.abs(np.log(np.maximum(1.0 + error, 1e-9)))))

    start = np.array([0.9 * rows.fastest_tflops, 50.0, 1e3 * float(rows.time_ms.min())])
    found = minimize(
        loss, start, method="Nelder-Mead", options={"maxiter": 250, "xatol": 0.01, "fatol": 1e-4}
    )
    return candidate(found.x)


def fit_cpu(made: CalibratedProfile) -> CalibratedProfile:
    """Products one by one, in small batches and fused; needs the bandwidth."""
    made = _fit_cpu_gemm(made)
    rows = [row for part in PASSES for row in made.of("interaction", part)]
    if rows:
        made = made.constants("gemm", **_batched(rows, made.profile))
        made = made.constants("elementwise", **_gathers(rows, made.profile, cold_call_us(made)))
    return _fit_attention(_fit_batches(made))


def _fit_cpu_gemm(made: CalibratedProfile) -> CalibratedProfile:
    """Tile, rate, prologue and floor from fp32; the rate alone of bf16."""
    fit, test = (_by_dtype(rows) for rows in made.fit_and_test("gemm"))
    if len(fit.get("fp32", ())) < FEWEST:
        return made
    profile, hbm = made.profile, made.profile.memory.hbm
    rows, tested = gemm_rows(fit["fp32"]), gemm_rows(test.get("fp32", []))
    gemm = _best_tile(rows, hbm, profile.gemm)
    held_out = HeldOut(_whole_errors(gemm, hbm, tested), len(fit["fp32"]), tested.time_ms)
    shipped = made.base.gemm.model_copy(update={"floor_us": gemm.floor_us})
    errors = _whole_errors(shipped, made.base.memory.hbm, tested)
    made = made.error("gemm fp32", held_out, errors)
    if fit.get("bf16"):
        gemm = _with_rate(gemm_rows(fit["bf16"]), hbm, gemm, "bf16")
        errors = _whole_errors(gemm, hbm, gemm_rows(test.get("bf16", [])), "bf16")
        made = made.error("gemm bf16", HeldOut(errors, len(fit["bf16"])))
    # a CPU has no tf32: the same kernels run; other types that no row has keep the base's rate
    rates = {str(k): v for of in (profile.gemm, gemm) for k, v in of.tflops.items()}
    rates |= {"tf32": rates["fp32"]}
    gemm = gemm.model_copy(update={"tflops": rates, "floor_us": profile.elementwise.floor_us})
    shapes = (row.point.params for row in fit["fp32"] + test.get("fp32", []))
    flop = [2.0 * p["m"] * p["n"] * p["k"] for p in shapes]
    return made.update(gemm=gemm).measured("gemm", fit["fp32"], held_out, {"flop": flop})


def gemm_rows(rows: Sequence[Measurement]) -> GemmRows:
    """Of gemm points of one data type."""
    shapes = [(p["m"], p["n"], p["k"]) for p in (row.point.params for row in rows)]
    return GemmRows.of([(*s, ms) for s, ms in zip(shapes, times_ms(rows).tolist(), strict=True)])


def _by_dtype(rows: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """Older files also hold linear layers with a bias, which is a separate copy."""
    found: dict[str, list[Measurement]] = {}
    for row in rows:
        if row.point.params["layout"] != "addmm":
            found.setdefault(row.point.params["dtype"], []).append(row)
    return found


def _best_tile(rows: GemmRows, hbm: float, base: Gemm) -> Gemm:
    """The tile model of one core, with the tile that fits best."""
    base = base.model_copy(update={"tflops": {"fp32": 0.1}, "overlaps": False})
    found = []
    for tile in TILES:
        gemm = fit_gemm(rows, 1, hbm, base.model_copy(update={"tiles": (tile,)}))
        # on a CPU the floor of the rows belongs to the call, no event timer adds to it
        gemm = gemm.model_copy(update={"floor_us": gemm.timing_floor_us})
        found.append((mape(gemm_errors(gemm, 1, hbm, rows)), gemm))
    best = min(found, key=lambda pair: pair[0])[1]
    return best.model_copy(update={"timing_floor_us": 0.0})


def _whole_errors(gemm: Gemm, hbm: float, rows: GemmRows, dtype: str = "fp32") -> Array:
    """Relative errors ``[rows]`` of times that include the floor."""
    whole = gemm.model_copy(update={"timing_floor_us": gemm.floor_us})
    return gemm_errors(whole, 1, hbm, rows, dtype)


def _with_rate(rows: GemmRows, hbm: float, gemm: Gemm, dtype: str) -> Gemm:
    """``gemm`` with the rate of one more data type; all else stays as fitted."""
    from scipy.optimize import minimize_scalar

    def at(log_rate: float) -> Gemm:
        rates = {str(key): value for key, value in gemm.tflops.items()}
        return gemm.model_copy(update={"tflops": rates | {dtype: math.exp(log_rate)}})

    def loss(log_rate: float) -> float:
        return float(np.mean(np.abs(np.log1p(_whole_errors(at(log_rate), hbm, rows, dtype)))))

    found = minimize_scalar(loss, bounds=(math.log(1e-3), math.log(1e3)), method="bounded")
    return at(float(found.x))


def _batched(rows: Sequence[Measurement], profile: HardwareProfile) -> dict[str, float]:
    """Constants of the gemm group, from rows of ``bmm``: a product forward, two backward."""
    bytes_per_us = profile.streaming * units.us(1.0)
    columns, times, alone = [], [], []
    for row in (row for row in rows if row.point.params["op"] == "bmm"):
        batch, vectors, dim = (row.point.params[of] for of in ("batch", "vectors", "dim"))
        products, n, k = (2, dim, vectors) if row.part == "backward" else (1, vectors, dim)
        flop = 2.0 * vectors**2 * dim
        columns.append((products * batch, products * batch * flop, products))
        added = ADDED_PASSES * (products - 1) * batch * vectors * dim
        times.append(max(row.median_us - OUTPUT_BYTES * added / bytes_per_us, 1.0))
        # one product if it ran alone, without its launch
        once_us = gemm_ms(profile, vectors, n, k, "fp32") / units.us(1.0) - profile.gemm.floor_us
        alone.append(once_us / flop)
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


def _gathers(
    rows: Sequence[Measurement], profile: HardwareProfile, call_us: float
) -> dict[str, float]:
    """What picking pairs takes: the interaction's time beyond its products and its stacking."""

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


def _fit_batches(made: CalibratedProfile) -> CalibratedProfile:
    """Batches of small products: what every layout shares, then the products of each layout."""
    rows = [row for row in made.of("product") if row.point.params["count"] > 1]
    if {row.point.params["layout"] for row in rows if not row.point.test} < set(BATCH_LAYOUTS):
        return made.kept("small products") if rows else made
    columns = []
    for p in (row.point.params for row in rows):
        *shared, products = small_product_work(p["m"], p["n"], p["k"])
        own = [products * (p["layout"] == layout) for layout in BATCH_LAYOUTS]
        columns.append([p["count"] * work for work in (*shared, *own)])
    made, costs = after_call(made, "small products", rows, columns)
    if costs is None:
        return made
    *first, nn, nt, tn, outer = (costs / NS).tolist()
    layouts = zip(BATCH_LAYOUTS, (nn, nt, tn, outer), strict=True)
    return made.constants("gemm", batches={layout: (*first, cost) for layout, cost in layouts})


def _fit_attention(made: CalibratedProfile) -> CalibratedProfile:
    """Time of a sample's head, and the share of the rate that its products reach."""
    rate = product_rate(made.profile.gemm, "fp32", made.profile.name)
    heads_us: list[float] = []
    shares: list[float] = []
    for part, flop in zip(PASSES, ATTENTION_FLOP, strict=True):
        rows = made.of("attention", part)
        columns = []
        for p in (row.point.params for row in rows):
            heads = p["batch"] * p["heads"]
            columns.append([heads, heads * p["length"] ** 2 * p["width"]])
        made, costs = after_call(made, f"attention {part}", rows, columns)
        if costs is None:
            return made
        heads_us.append(float(costs[0]) / units.us(1.0))
        shares.append(float(np.clip(flop / rate / max(costs[1], 1e-18), 1e-3, 1.0)))
    return made.constants(
        "gemm",
        attention_head_us=tuple(heads_us),
        attention_forward=shares[0],
        attention_backward=shares[1],
    )


# What the rows of a GPU say.


def predict_gemms(hw: HardwareProfile, rows: Sequence[Measurement]) -> Array:
    """Times ``[rows]`` in ms."""
    found = np.zeros(len(rows))
    kinds = [(row.point.params["dtype"], row.point.params["layout"]) for row in rows]
    for dtype, layout in set(kinds):
        chosen = [i for i, kind in enumerate(kinds) if kind == (dtype, layout)]
        of = gemm_rows([rows[i] for i in chosen])
        found[chosen] = products_ms(hw, (of.m, of.n, of.k), dtype, layout)
    return found


def _is_aligned(row: Measurement, dtype: str) -> bool:
    """Rows of both operands and of the result are multiples of 16 bytes."""
    sides = (row.point.params[side] for side in ("n", "k"))
    return all(side * DATA_BYTES[dtype] % 16 == 0 for side in sides)


def fit_gpu(made: CalibratedProfile) -> CalibratedProfile:
    """A rate for each data type, prologue and floor for all; what no row has keeps the base's.

    Where a data type is then predicted worse than before, rates alone are fitted, each for itself.
    """
    fit, test = (_by_dtype(rows) for rows in made.fit_and_test("gemm"))
    fit = {dtype: rows for dtype, rows in fit.items() if len(rows) >= FEWEST}
    if not fit:
        return made
    used = [row for rows in fit.values() for row in rows]
    rates = tuple(FreeConstant("gemm", f"tflops.{dtype}", *TFLOPS) for dtype in fit)
    start = made.profile
    for rate, (dtype, rows) in zip(rates, fit.items(), strict=True):
        # kernels of unaligned rows say little of the rate
        aligned = [row for row in rows if _is_aligned(row, dtype)]
        if aligned:
            start = rate.put(start, gemm_rows(aligned).fastest_tflops)
    found = fit_free(start, (*rates, *FREE), partial(predict_gemms, rows=used), times_ms(used))
    tests = {dtype: rows_of(predict_gemms, test.get(dtype, [])) for dtype in fit}
    if any(found.unless_worse(dtype, made.profile, *tests[dtype]).worse for dtype in fit):
        found = FittedProfile(made.profile, (), FREE)
        for rate, (dtype, rows) in zip(rates, fit.items(), strict=True):
            begun = rate.put(found.hw, rate.value(start))
            alone = fit_free(begun, (rate,), *rows_of(predict_gemms, rows))
            before = rate.put(found.hw, rate.value(made.profile))
            found = found.then(alone.unless_worse(f"gemm {dtype}", before, *tests[dtype]))
    made = made.take(found)
    for dtype, rows in fit.items():
        made = made.score(f"gemm {dtype}", rows, test.get(dtype, []), predict_gemms)
    error = total([made.errors[f"gemm {dtype}"] for dtype in fit])
    if not found.fitted:
        return made
    # an event timer adds nothing that the floor has not
    made = made.constants("gemm", timing_floor_us=found.hw.gemm.floor_us)
    sizes = {side: [row.point.params[side] for row in used] for side in ("m", "n", "k")}
    return made.measured("gemm", used, error, sizes, found.kept_text)
