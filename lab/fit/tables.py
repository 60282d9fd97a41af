"""Constants of the profiles, fitted to the public tables.

Prints the curve of every platform and collective, and the rates of matrix products of every device
behind a profile, with the error on the test split. `python -m lab validate collectives` prints the
error of the curves at held-out sizes and rank counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lab.validate.gemm import RATED, by_split, rate_rows, read_gemm, taken
from lab.validate.links import read_collectives
from lab.validate.tables import profile_of_row
from predictor.cost.gemm import product_rate
from predictor.csv_rows import skipped_lines
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import Curve
from predictor.units import tflops
from shardopt.calibrate.collectives import fit_curve
from shardopt.calibrate.fitting import gmae, mape
from shardopt.calibrate.products import fit_gemm, gemm_errors

FEWEST_ROWS = 8
"""Least number of sizes for a fit."""
FITTED_DEVICES = {
    # device of the table: profile whose SMs, memory and tiles it shares
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "Tesla V100-PCIE-32GB": "v100-32gb",
}
ROWS_PER_FIT = 900
"""Most rows of a fit of products; the sample is drawn with a fixed seed."""
LARGE_GFLOP = 10.0
"""Least size of the products that give the rate of a device without a train split."""


def run(data: Path) -> Iterator[str]:
    """Yield lines with the constants, and with the rows that cannot be read."""
    tables, problems = read_collectives(data)
    for (platform, wiring, op), rows in tables.items():
        if len(set(rows.size_bytes)) >= FEWEST_ROWS:
            yield f"{platform} {wiring} {op}: {_constants(fit_curve(rows, op))}"
    yield from skipped_lines(problems)
    yield from _gemm_lines(data)


def _constants(curve: Curve) -> str:
    costs = ", ".join(f"{c:.4g}" for c in curve.us_per_mib)
    edges = ", ".join(f"{e:g}" for e in curve.edge_mib)
    return (
        f"latency_us: {curve.latency_us:.4g}, "
        f"latency_per_doubling_us: {curve.latency_per_doubling_us:.4g}, "
        f"edge_mib: [{edges}], us_per_mib: [{costs}]"
    )


def _gemm_lines(data: Path) -> Iterator[str]:
    read = read_gemm(data)
    tables = by_split(read)
    for device, name in FITTED_DEVICES.items():
        if not {(device, "train"), (device, "test")} <= tables.keys():
            continue
        hw = load_hardware(name)
        train = tables[device, "train"]
        rng, size = np.random.default_rng(0), len(train.m)
        chosen = (
            rng.choice(size, ROWS_PER_FIT, replace=False) if size > ROWS_PER_FIT else slice(None)
        )
        fitted = fit_gemm(taken(train, chosen), hw.sms, hw.memory.hbm, hw.gemm)
        error = gemm_errors(fitted, hw.sms, hw.memory.hbm, tables[device, "test"])
        yield (
            f"{device} fp32: {len(error)} test rows, GMAE {gmae(error):.1%}, MAPE {mape(error):.1%}"
        )
        yield (
            f"    tflops: {fitted.tflops['fp32']:.4g}, prologue_k: {fitted.prologue_k:.4g}, "
            f"timing_floor_us: {fitted.timing_floor_us:.4g}, split_k: {fitted.split_k}"
        )
    for device in sorted(RATED & {device for device, _ in tables}):
        hw = profile_of_row({"device": device}, "device")
        rows = tables[device, "test"]
        rows = taken(rows, rate_rows(rows))
        large = rows.m * rows.n * rows.k > 0.5e9 * LARGE_GFLOP
        time_ratios = 1 + gemm_errors(hw.gemm, hw.sms, hw.memory.hbm, rows)[large]
        rate = float(np.median(time_ratios)) * product_rate(hw.gemm, "fp32", hw.name) / tflops(1)
        yield f"{device} fp32: {large.sum()} rows, tflops: {rate:.3g}"
    yield from read.skipped
