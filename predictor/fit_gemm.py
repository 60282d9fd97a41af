"""Fitting the tile model of `predictor.kernels.gemm` to rows of one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from predictor.fit import gmae, mape
from predictor.kernels.gemm import gemm_times
from predictor.profile_groups import Gemm

Array = NDArray[np.float64]

ROWS_PER_FIT = 900
"""A sample suffices for five constants; it is drawn with a fixed seed."""
TILES = (
    (256, 128),
    (128, 256),
    (128, 128),
    (128, 64),
    (64, 128),
    (64, 64),
    (128, 32),
    (32, 128),
    (64, 32),
    (32, 64),
    (32, 32),
)
"""Output tiles of the kernels that the rows name (ampere_sgemm_128x64_tn, ...)."""


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


def read_gemm(rows: Sequence[dict[str, str]]) -> dict[tuple[str, str], GemmRows]:
    """(device, split) -> rows of the NeuSight table; a batch multiplies m."""
    found: dict[tuple[str, str], list[tuple[float, float, float, float]]] = {}
    for row in rows:
        m = float(row["B"]) * float(row["M"])
        values = (m, float(row["N"]), float(row["K"]), float(row["latency_ms"]))
        found.setdefault((row["device"], row["split"]), []).append(values)
    return {key: GemmRows.of(values) for key, values in sorted(found.items())}


FITTED_DEVICES = {
    # device of the table: (profile whose SMs, memory and tiles it shares)
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "Tesla V100-PCIE-32GB": "v100-32gb",
}


def report_gemm(path: Path) -> list[str]:
    """Fitted constants and test-split errors of the devices that profiles take them from."""
    from predictor.fit_data import read_csv
    from predictor.hardware import load_hardware

    if not path.is_file():
        return []
    tables, lines = read_gemm(read_csv(path)), []
    for device, name in FITTED_DEVICES.items():
        hw = load_hardware(name)
        fitted = fit_gemm(tables[device, "train"], hw.sms, hw.memory.hbm, hw.gemm)
        error = gemm_errors(fitted, hw.sms, hw.memory.hbm, tables[device, "test"])
        lines += [
            f"{device} fp32: {len(error)} test rows, GMAE {gmae(error):.1%}, "
            f"MAPE {mape(error):.1%}",
            f"    tflops: {fitted.tflops['fp32']:.4g}, prologue_k: {fitted.prologue_k:.4g}, "
            f"timing_floor_us: {fitted.timing_floor_us:.4g}, split_k: {fitted.split_k}",
        ]
    return lines
