"""Fits the tile model of `predictor.cost.gemm` to rows of one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from predictor.cost.gemm import gemm_times
from predictor.hardware.schema import Gemm

Array = NDArray[np.float64]

ROWS_PER_FIT = 900
"""A sample suffices for five constants; it is drawn with a fixed seed."""


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

    def sample(self, count: int = ROWS_PER_FIT) -> GemmRows:
        """At most ``count`` of the rows, always the same ones."""
        size = len(self.m)
        if size <= count:
            return self
        chosen = np.random.default_rng(0).choice(size, count, replace=False)
        return GemmRows(self.m[chosen], self.n[chosen], self.k[chosen], self.time_ms[chosen])


def predict_ms(gemm: Gemm, sms: int, hbm: float, rows: GemmRows, dtype: str = "fp32") -> Array:
    """Times ``[rows]`` as the rows' own timing would show them."""
    timing = (gemm.timing_floor_us - gemm.floor_us) * 1e-3
    return timing + gemm_times(gemm, sms, hbm, (rows.m, rows.n, rows.k), dtype)


def gemm_errors(gemm: Gemm, sms: int, hbm: float, rows: GemmRows, dtype: str = "fp32") -> Array:
    """Relative errors ``[rows]``."""
    return predict_ms(gemm, sms, hbm, rows, dtype) / rows.time_ms - 1.0


def fit_gemm(rows: GemmRows, sms: int, hbm: float, base: Gemm, dtype: str = "fp32") -> Gemm:
    """``base`` with achieved TFLOP/s, prologue and timing floor fitted to a sample of ``rows``.

    Nelder-Mead on the mean absolute log error: the model has ceilings and minima, and rows that a
    library ran with an unusual kernel must not pull it.
    """
    from scipy.optimize import minimize

    sample = rows.sample()
    peak = float((2.0 * rows.m * rows.n * rows.k / rows.time_ms).max() * 1e-9)

    def candidate(x: Array) -> Gemm:
        tflops, prologue, timing = np.abs(x)
        return base.model_copy(
            update={
                "tflops": dict(base.tflops) | {dtype: float(tflops)},
                "prologue_k": float(prologue),
                "timing_floor_us": float(timing),
            }
        )

    def loss(x: Array) -> float:
        error = gemm_errors(candidate(x), sms, hbm, sample, dtype)
        return float(np.mean(np.abs(np.log(np.maximum(1.0 + error, 1e-9)))))

    start = np.array([0.9 * peak, 50.0, 1e3 * float(rows.time_ms.min())])
    found = minimize(
        loss,
        start,
        method="Nelder-Mead",
        options={"maxiter": 250, "xatol": 0.01, "fatol": 1e-4},
    )
    return candidate(found.x)
