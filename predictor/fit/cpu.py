"""Fits the constants of CPU ranks to rows of `shardopt calibrate`, with errors held out.

Pure functions from rows to constants; scipy only here. The embedding model is linear in its
coefficients (`predictor.cost.lookup.cpu`), so non-negative least squares on relative errors
finds them; the few constants inside logarithms are tried on a grid, on the fitted rows alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from predictor import units
from predictor.fit.collectives import TRUSTED_ERROR
from predictor.fit.gemm import GemmRows, fit_gemm, gemm_errors
from predictor.fit.scores import mape
from predictor.hardware.schema import CpuEmbedding, Gemm

Array = NDArray[np.float64]

NS = 1e-6
"""One nanosecond in ms."""
REWEIGHTINGS = 20
"""From least squares towards least absolute errors: timings have a tail on one side only."""
PAGE_KIB = (4.0, 16.0, 64.0)
TLB_MIB = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
GEMM_TILES = ((8, 16), (16, 16), (16, 32), (32, 32), (64, 32), (64, 64))
"""Register and cache blocks of CPU libraries: sizes are rounded up to them."""


@dataclass(frozen=True)
class TableCounts:
    """Lookups of one table of a TBE; ids and distinct rows are counted, not expected."""

    rows: float
    dim: float
    bags: float
    ids: float
    distinct: float


@dataclass(frozen=True)
class TbeRows:
    """Timings of one pass of many TBEs: a list of tables and a time in ms each."""

    tables: Sequence[Sequence[TableCounts]]
    time_ms: Array

    def where(self, keep: NDArray[np.bool_]) -> TbeRows:
        """The rows for which ``keep`` holds."""
        kept = [tables for tables, kept in zip(self.tables, keep, strict=True) if kept]
        return TbeRows(kept, self.time_ms[keep])


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


def lookup_columns(constants: CpuEmbedding, rows: TbeRows, names: Sequence[str]) -> Array:
    """``[rows, names]``: time in ms that one unit of each coefficient adds."""
    return np.array(
        [np.sum([_terms(constants, t, names) for t in tables], axis=0) for tables in rows.tables]
    ) * _once(rows, names)


def _terms(constants: CpuEmbedding, t: TableCounts, names: Sequence[str]) -> list[float]:
    touched = t.distinct * 1024 * constants.page_kib
    tlb = math.log1p(min(t.rows * t.dim * 4, touched) / units.mib(constants.tlb_mib))
    digits = math.ceil(math.log2(max(t.rows, 2)) / constants.sort_digit_bits)
    terms = {
        "us": units.us(1.0),
        "table_us": units.us(1.0),
        "ns_per_lookup": NS * t.ids,
        "ns_per_lookup_dim": NS * t.ids * t.dim,
        "ns_per_row": NS * t.distinct,
        "ns_per_row_dim": NS * t.distinct * t.dim,
        "ns_per_row_tlb": NS * t.distinct * tlb,
        "ns_per_output": NS * t.bags * t.dim,
        "ns_per_lookup_pass": NS * t.ids * digits,
        "ns_per_weight": NS * t.rows * t.dim,
    }
    return [terms[name.split("_", 1)[1].removeprefix("dense_")] for name in names]


def _once(rows: TbeRows, names: Sequence[str]) -> Array:
    """The cost of a launch counts once for all its tables."""
    counts = np.array([[len(tables)] for tables in rows.tables], dtype=np.float64)
    launch = np.array([name in ("forward_us", "backward_us") for name in names])
    return np.where(launch, 1.0 / counts, 1.0)


def predict_lookups(constants: CpuEmbedding, rows: TbeRows, names: Sequence[str]) -> Array:
    """Times ``[rows]`` in ms, as the kernel model gives them."""
    coefficients = np.array([getattr(constants, name) for name in names])
    return np.asarray(lookup_columns(constants, rows, names) @ coefficients)


def lookup_errors(constants: CpuEmbedding, rows: TbeRows, names: Sequence[str]) -> Array:
    """Relative errors ``[rows]``."""
    return predict_lookups(constants, rows, names) / rows.time_ms - 1.0


def fit_lookups(forward: TbeRows, backward: TbeRows, base: CpuEmbedding) -> CpuEmbedding:
    """``base`` with every coefficient fitted, at the grid point with the smallest loss."""
    best, least = base, math.inf
    for page, tlb in itertools.product(PAGE_KIB, TLB_MIB):
        constants = base.model_copy(update={"page_kib": page, "tlb_mib": tlb})
        constants = constants.model_copy(
            update=_coefficients(constants, forward, FORWARD)
            | _coefficients(constants, backward, BACKWARD)
        )
        loss = mape(lookup_errors(constants, forward, FORWARD)) + mape(
            lookup_errors(constants, backward, BACKWARD)
        )
        if loss < least - 1e-12:
            best, least = constants, loss
    return best


def fit_dense(rows: TbeRows, base: CpuEmbedding) -> tuple[CpuEmbedding, float]:
    """``base`` with the constants of dense gradients, and what a launch takes beside them, us.

    A launch in these rows is a call of cold code; among other kernels it costs what a fused one
    does, so that it is no constant of its own.
    """
    launch = np.full((len(rows.tables), 1), units.us(1.0))
    columns = np.hstack((launch, lookup_columns(base, rows, DENSE)))
    launch_us, *found = non_negative(columns, rows.time_ms).tolist()
    return base.model_copy(update=dict(zip(DENSE, found, strict=True))), launch_us


def dense_errors(constants: CpuEmbedding, launch_us: float, rows: TbeRows) -> Array:
    """Relative errors ``[rows]`` of backwards with dense gradients, launches included."""
    predicted = predict_lookups(constants, rows, DENSE) + units.us(launch_us)
    return np.asarray(predicted / rows.time_ms - 1.0)


def _coefficients(constants: CpuEmbedding, rows: TbeRows, names: Sequence[str]) -> dict[str, float]:
    solution = non_negative(lookup_columns(constants, rows, names), rows.time_ms)
    return dict(zip(names, solution.tolist(), strict=True))


def non_negative(columns: Array, time: Array) -> Array:
    """Coefficients >= 0 of ``columns [rows, terms]`` with the least absolute relative errors."""
    from scipy.optimize import nnls

    relative = columns / time[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    weight = np.ones_like(time)
    solution = np.zeros(columns.shape[1])
    for _ in range(1 + REWEIGHTINGS):
        solution, _ = nnls(relative / scale * weight[:, None], weight)
        off = np.abs(relative / scale @ solution - 1.0)
        weight = 1.0 / np.sqrt(np.maximum(off, TRUSTED_ERROR))
    return np.asarray(solution / scale)


@dataclass(frozen=True)
class MemoryRows:
    """Timings of memory-bound kernels: bytes read and written, ms; two arrays ``[rows]``."""

    bytes_moved: Array
    time_ms: Array


def fit_memory(rows: MemoryRows) -> tuple[float, float]:
    """``(floor_us, gb_s)`` of ``t = floor + bytes / bandwidth``."""
    floor, per_byte = non_negative(
        np.column_stack((np.ones_like(rows.time_ms), rows.bytes_moved)), rows.time_ms
    )
    bandwidth = 1.0 / max(float(per_byte), 1e-15)
    return float(floor) / units.us(1.0), bandwidth / units.gb_per_s(1.0)


def memory_errors(floor_us: float, gb_s: float, rows: MemoryRows) -> Array:
    """Relative errors ``[rows]``."""
    predicted = units.us(floor_us) + rows.bytes_moved / units.gb_per_s(gb_s)
    return np.asarray(predicted / rows.time_ms - 1.0)


def fit_cpu_gemm(rows: GemmRows, hbm: float, base: Gemm, dtype: str = "fp32") -> Gemm:
    """The tile model for one core: the tile that fits best, rate, prologue and floor.

    Args:
        hbm: achieved bandwidth in bytes/ms.
    """
    found = []
    for tile in GEMM_TILES:
        fitted = fit_gemm(rows, 1, hbm, base.model_copy(update={"tiles": (tile,)}), dtype)
        # on a CPU the floor of the rows belongs to the call, no event timer adds to it
        fitted = fitted.model_copy(
            update={"floor_us": fitted.timing_floor_us, "timing_floor_us": fitted.timing_floor_us}
        )
        found.append((mape(gemm_errors(fitted, 1, hbm, rows, dtype)), fitted))
    best = min(found, key=lambda pair: pair[0])[1]
    return best.model_copy(update={"timing_floor_us": 0.0, "floor_us": best.floor_us})


def cpu_gemm_errors(gemm: Gemm, hbm: float, rows: GemmRows, dtype: str = "fp32") -> Array:
    """Relative errors ``[rows]`` of times that include the floor."""
    whole = gemm.model_copy(update={"timing_floor_us": gemm.floor_us})
    return gemm_errors(whole, 1, hbm, rows, dtype)


def fit_gemm_rate(rows: GemmRows, hbm: float, gemm: Gemm, dtype: str) -> Gemm:
    """``gemm`` with the rate of one more data type; all else stays as fitted."""
    from scipy.optimize import minimize_scalar

    def at(log_rate: float) -> Gemm:
        rates = {str(key): value for key, value in gemm.tflops.items()}
        return gemm.model_copy(update={"tflops": rates | {dtype: math.exp(log_rate)}})

    loss: Callable[[float], float] = lambda x: float(  # noqa: E731
        np.mean(np.abs(np.log1p(cpu_gemm_errors(at(x), hbm, rows, dtype))))
    )
    found = minimize_scalar(loss, bounds=(math.log(1e-3), math.log(1e3)), method="bounded")
    return at(float(found.x))
