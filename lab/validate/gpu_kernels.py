"""Single kernels on one GPU: FBGEMM's lookups as `calibrate` times them, and products of layers.

Each machine has a folder, as in `lab.validate.gpu_steps`. Products are those of a linear layer,
forward and both backward, replayed as a CUDA graph. The shipped profile predicts all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lab.suites import SUITES, ComparedRow, Report
from lab.validate.gpu_steps import machines, objects_of, place_of, positive
from lab.validate.tables import kernel_interval
from predictor.cost.gemm import gemm_ms
from predictor.errors import ShardoptError
from predictor.hardware.schema import HardwareProfile
from shardopt.calibrate.gpu_lookups import launches_of, predict_launches
from shardopt.calibrate.rows import Measurement, accept, read_rows, times_ms

CALIBRATION = "calibration.rows.csv"
OPS = "ops.jsonl"
LOOKUPS = ("lookup", "lookup_cached")
"""Families of calibration rows that are launches of FBGEMM."""
PRODUCTS = {
    "forward_ms": ("forward", "mnk"),
    "grad_input_ms": ("gradient of the input", "mkn"),
    "grad_weight_ms": ("gradient of the weights", "nkm"),
}
"""Key of a layer's line -> its product, and the product's sides by those of the layer."""
LARGE_GFLOP = 2.0
LARGE, SMALL = "products of 2 GFLOP or more", "products below 2 GFLOP"
ALIGNED = 8
"""cuBLAS uses its fast kernels where all sides are multiples of this."""


def validate_gpu_kernels(folder: Path) -> Report:
    rows: list[ComparedRow] = []
    skipped: list[str] = []
    for place, hardware in machines(folder, (CALIBRATION, OPS), skipped.append):
        for file, read in ((CALIBRATION, _lookups), (OPS, _products)):
            if (place / file).is_file():
                rows += read(place / file, hardware, skipped.append)
    return SUITES["gpu-kernels"].report(rows, skipped)


def _lookups(
    path: Path, hardware: HardwareProfile, skip: Callable[[str], None]
) -> Iterator[ComparedRow]:
    """Yield a row for each pass of each launch."""
    try:
        accepted = accept(read_rows(path)[1]).rows
    except ShardoptError as error:
        skip(str(error))
        return
    rows = [row for row in accepted if row.point.family in LOOKUPS]
    if not rows:
        return
    predicted = predict_launches(hardware, launches_of(rows)).tolist()
    for row, measured_ms, predicted_ms in zip(rows, times_ms(rows), predicted, strict=True):
        yield ComparedRow(
            {"gpu": path.parent.name, "kernel": _kernel(row), "point": row.key},
            float(measured_ms),
            predicted_ms,
            family=f"{path.parent.name}, {_kernel(row)}",
            part=_place(row),
            source=f"{path.parent.name}/{path.name}",
            interval_ms=kernel_interval(hardware, ["embedding"], predicted_ms),
        )


def _kernel(row: Measurement) -> str:
    return f"lookup, {row.part}"


def _place(row: Measurement) -> str:
    if row.point.family == "lookup_cached":
        return "cached lookups"
    kernel = row.point.params.get("kernel", "fused")
    return "lookups over UVM" if kernel == "fused_uvm" else "lookups in HBM"


def _products(
    path: Path, hardware: HardwareProfile, skip: Callable[[str], None]
) -> Iterator[ComparedRow]:
    """Yield three rows for each layer."""
    for number, entry in objects_of(path, skip):
        try:
            if entry.get("kind") == "linear":
                yield from list(_layer(path, hardware, entry))
        except (ShardoptError, ValueError) as error:
            skip(f"{place_of(path, number)}: {error}")


def _layer(
    path: Path, hardware: HardwareProfile, entry: Mapping[str, Any]
) -> Iterator[ComparedRow]:
    dtype = str(entry.get("dtype"))
    for key, (product, sides) in PRODUCTS.items():
        m, n, k = (int(positive(entry, side)) for side in sides)
        measured_ms = positive(entry, key)
        predicted_ms = float(gemm_ms(hardware, m, n, k, dtype))
        large = 2e-9 * m * n * k >= LARGE_GFLOP
        odd = "" if all(side % ALIGNED == 0 for side in (m, n, k)) else ", odd sides"
        yield ComparedRow(
            {"gpu": path.parent.name, "kernel": product, "point": f"{m}x{n}x{k} {dtype}"},
            measured_ms,
            predicted_ms,
            family=f"{path.parent.name}, {dtype}{odd}",
            part=LARGE if large else SMALL,
            source=f"{path.parent.name}/{path.name}",
            interval_ms=kernel_interval(hardware, ["gemm"], predicted_ms),
        )
