"""Fitting the tile model of `predictor.cost.gemm` to rows of one device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from predictor.cost.gemm import gemm_times
from predictor.csv_rows import Row, Table, number, read_table
from predictor.fit.collectives import gmae, mape
from predictor.hardware.groups import Gemm

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


Key = tuple[str, str]
"""Device and split."""
Timing = tuple[float, float, float, float]
"""m, n, k and ms."""


def read_gemm(path: Path) -> Table[tuple[Key, Timing]]:
    """Rows of the NeuSight table; a batch multiplies m.

    Raises:
        InputError: the file cannot be read, or lacks a column.
    """
    return read_table(path, ("split", "device", "B", "M", "N", "K", "latency_ms"), _parse)


def _parse(row: Row) -> tuple[Key, Timing]:
    m = number(row, "B") * number(row, "M")
    timing = (m, number(row, "N"), number(row, "K"), number(row, "latency_ms"))
    return (row["device"], row["split"]), timing


def by_split(rows: Iterable[tuple[Key, Timing]]) -> dict[Key, GemmRows]:
    """(device, split) -> its rows, in the order of the table."""
    found: dict[Key, list[Timing]] = {}
    for key, timing in rows:
        found.setdefault(key, []).append(timing)
    return {key: GemmRows.of(timings) for key, timings in found.items()}


FITTED_DEVICES = {
    # device of the table: (profile whose SMs, memory and tiles it shares)
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "Tesla V100-PCIE-32GB": "v100-32gb",
}


def report_gemm(path: Path) -> Iterator[str]:
    """Fitted constants and test-split errors of the devices that profiles take them from."""
    from predictor.hardware.loader import load_hardware

    if not path.is_file():
        return
    read = read_gemm(path)
    tables = by_split(read.rows)
    for device, name in FITTED_DEVICES.items():
        if not {(device, "train"), (device, "test")} <= tables.keys():
            continue
        hw = load_hardware(name)
        fitted = fit_gemm(tables[device, "train"], hw.sms, hw.memory.hbm, hw.gemm)
        error = gemm_errors(fitted, hw.sms, hw.memory.hbm, tables[device, "test"])
        yield (
            f"{device} fp32: {len(error)} test rows, GMAE {gmae(error):.1%}, MAPE {mape(error):.1%}"
        )
        yield (
            f"    tflops: {fitted.tflops['fp32']:.4g}, prologue_k: {fitted.prologue_k:.4g}, "
            f"timing_floor_us: {fitted.timing_floor_us:.4g}, split_k: {fitted.split_k}"
        )
    yield from read.told
