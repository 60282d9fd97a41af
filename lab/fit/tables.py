"""Prints constants fitted to the public tables: ``python -m lab fit tables --data DIR``.

For every platform and collective in the tables that docs/data.md names, and for GEMM on every
device that a profile takes its rate from: the constants as the profiles hold them, and the error
at the sizes left out of the fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lab.programs import existing_folder, make_parser
from lab.validate.curves import Score, score_every_second, score_ranks
from lab.validate.gemm import PROFILES, RATED, rate_rows, taken
from lab.validate.public_tables import GEMM_FILE, by_split, read_collectives, read_gemm
from predictor.cost.gemm import product_rate
from predictor.csv_rows import skipped_lines
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import Curve
from predictor.units import tflops
from shardopt.calibrate.collectives import fit_curve
from shardopt.calibrate.fitting import gmae, mape
from shardopt.calibrate.products import fit_gemm, gemm_errors

FEWEST_ROWS = 8
"""Fewer sizes than this are not worth a fit."""
FITTED_DEVICES = {
    # device of the table: (profile whose SMs, memory and tiles it shares)
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "Tesla V100-PCIE-32GB": "v100-32gb",
}

LARGE_GFLOP = 10.0
"""Products that show the rate of a device without a train split."""


def fit_lines(folder: Path) -> Iterator[str]:
    """Lines of text: fitted constants and held-out errors of everything in ``folder``."""
    found = read_collectives(folder)
    for (platform, wiring, op), rows in found.tables.items():
        if len(set(rows.size_bytes)) < FEWEST_ROWS:
            continue
        yield f"{platform} {wiring} {op}: {_errors(score_every_second(rows, op))}"
        yield f"    {_constants(fit_curve(rows, op))}"
        if len(set(rows.ranks)) > 3:
            held_out = score_ranks(rows, op, (2, 4, 8))
            yield f"    fitted at 2, 4, 8 ranks, other rank counts: {_errors(held_out)}"
    yield from skipped_lines(found.problems)
    yield from _gemm_lines(folder / GEMM_FILE)


def _errors(score: Score) -> str:
    return (
        f"{score.n} rows held out, above 64 KiB GMAE {score.gmae:.1%}, MAPE {score.mape:.1%}; "
        f"up to 64 KiB GMAE {score.gmae_small:.1%}"
    )


def _constants(curve: Curve) -> str:
    costs = ", ".join(f"{c:.4g}" for c in curve.us_per_mib)
    edges = ", ".join(f"{e:g}" for e in curve.edge_mib)
    return (
        f"latency_us: {curve.latency_us:.4g}, "
        f"latency_per_doubling_us: {curve.latency_per_doubling_us:.4g}, "
        f"edge_mib: [{edges}], us_per_mib: [{costs}]"
    )


def _gemm_lines(path: Path) -> Iterator[str]:
    """Fitted constants and test-split errors of the devices that profiles take them from."""
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
    for device in sorted(RATED & {device for device, _ in tables}):
        hw = load_hardware(PROFILES[device])
        rows = tables[device, "test"]
        rows = taken(rows, rate_rows(rows))
        large = rows.m * rows.n * rows.k > 0.5e9 * LARGE_GFLOP
        found = 1 + gemm_errors(hw.gemm, hw.sms, hw.memory.hbm, rows)[large]
        rate = float(np.median(found)) * product_rate(hw.gemm, "fp32", hw.name) / tflops(1)
        yield f"{device} fp32: {large.sum()} rows, tflops: {rate:.3g}"
    yield from read.skipped


def main(argv: Sequence[str] | None = None) -> int:
    """Print every fit as the profiles hold it."""
    parser = make_parser("fit tables", __doc__)
    parser.add_argument(
        "--data", type=existing_folder, required=True, help="folder of the public tables"
    )
    folder = parser.parse_args(argv).data
    for line in fit_lines(folder):
        print(line)
    return 0
