"""Matrix multiplication: the shipped constants on three public tables.

``gemm_bf16_measured.csv`` times bf16 products of warm operands, as in a training step; it is the
headline. ``xla_matmul_measured.csv`` times batched products on tensor cores. The table of
NeuSight times linear layers in fp32: devices of its train split gave the constants of a profile,
the others (``unseen``) are predicted from their datasheets alone. One of the files is enough.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.statistics import grouped
from lab.suites import GAVE, SUITES, ComparedRow, Report, noise_of
from lab.validate.tables import (
    compare_tables,
    kernel_interval,
    known,
    no_profile,
    profile_of_row,
    read,
)
from predictor.cost.gemm import batched_ms, gemm_ms
from predictor.csv_rows import ParsedRows, Row, count, number
from predictor.hardware.device_names import profile_of_device
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.units import us
from shardopt.calibrate.products import GemmRows, predict_ms

BF16_FILE = "gemm_bf16_measured.csv"
MATMUL_FILE = "xla_matmul_measured.csv"
GEMM_FILE = "neusight_linear_gemm_measured.csv"

WARM = "tensor cores: bf16, warm operands"
TENSOR = "tensor cores: tf32"
COLD = "tensor cores: bf16, cold operands"
FP8 = "tensor cores: fp8"
SEEN = "devices of the train split"
UNSEEN = "unseen devices"
DATA_TYPE = "fp32"

A100_PCIE = "NVIDIA A100-PCIE-40GB"
"""Its rows gave the constants of A100-40GB."""
TRAINED = frozenset({A100_PCIE, "Tesla V100-PCIE-32GB", "Tesla P100-PCIE-16GB"})
"""Devices whose train rows the constants were fitted to."""
RATED = frozenset({"NVIDIA H100 80GB HBM3", "NVIDIA L4", "Tesla T4"})
"""Devices without a train split, where a third of the rows gave the rate, and nothing else."""
SHAPE = ("gpu", "operands", "b", "m", "n", "k")
"""Keys that repeats of a product share."""
FITTED_COUNTS: dict[tuple[str, str], tuple[int, ...]] = {
    ("H100", "bf16"): (1,),
    ("H100", "tf32"): (1, 2),
    ("B200", "bf16"): (1,),
    ("B200", "tf32"): (1,),
}
"""GPU and type -> batches whose rows gave constants, where log2(m n k) is an even number."""
CLOCK_US: dict[tuple[str, str], float] = {
    ("H100", "bf16"): 2.0,
    ("H100", "tf32"): 3.0,
    ("B200", "bf16"): 3.0,
}
"""GPU and type -> time that XLA's timer adds to each product: its operands are cold, while the
floors of these types are for warm ones, as in a training step. From the rows that gave constants;
other types keep floors of cold operands."""
OPERANDS = {
    **{"f32": "tf32", "bf16": "bf16", "f16": "fp16"},
    **{"f8e4m3fn": "fp8", "f8e5m2": "fp8", "f8e4m3fnuz": "fp8"},
}
"""Type of an operand in XLA -> name in a profile; a float of four bytes is multiplied as tf32."""


def validate_gemm(folder: Path) -> Report:
    rows, skipped = compare_tables(folder, {BF16_FILE: bf16_row, MATMUL_FILE: _product})
    products = [row for row in rows if row.part != WARM]
    linears, problems = _linears(read_gemm(folder))
    noise = {
        f"{family}, other dates": noise_of(
            (tuple(row.name[key] for key in SHAPE), row.measured_ms) for row in family_rows
        )
        for family, family_rows in grouped(products, lambda row: row.family).items()
    }
    return SUITES["gemm"].report(
        [*rows, *linears],
        [*skipped, *problems],
        headline=WARM if len(products) < len(rows) else TENSOR if products else SEEN,
        noise={name: spread for name, spread in noise.items() if spread.n},
    )


def bf16_row(row: Row) -> ComparedRow:
    """Predict a bf16 product ``[m, k] @ [k, n]``, a row of `BF16_FILE`."""
    hw = profile_of_row(row)
    m, n, k = (count(row, column, 2**40) for column in "mnk")
    time = gemm_ms(hw, m, n, k, "bf16")
    return ComparedRow(
        {"profile": hw.name, "m": m, "n": n, "k": k},
        us(number(row, "time_us")),
        time,
        family=hw.name,
        part=WARM,
        source="ai-dynamo/aiconfigurator",
        interval_ms=kernel_interval(hw, ["gemm"], time),
    )


def _product(row: Row) -> ComparedRow:
    """Predict a product ``[b, m, k] @ [b, k, n]`` that XLA timed."""
    operand, other = (known(row, side, OPERANDS) for side in ("lhs", "rhs"))
    if operand != other:
        raise ValueError(f"lhs is {row['lhs']} and rhs is {row['rhs']}; no kernel multiplies them")
    b, m, n, k = sizes = [count(row, column) for column in SHAPE[2:]]
    measured_ms = number(row, "time_us") * 1e-3
    if "not credible" in row["flag"]:
        raise ValueError(f"flag is '{row['flag']}'")
    hw = profile_of_row(row)
    if hw.name == "mi300x" and row["lhs"] == "f8e4m3fn":
        raise ValueError("lhs is f8e4m3fn, which MI300X does not multiply without converting it")
    if operand not in hw.gemm.tflops:
        raise ValueError(f"lhs is {row['lhs']}, and {hw.name} has no rate of {operand}")
    even = float(math.log2(m * n * k) % 2) == 0.0
    if hw.name == "mi300x":
        part = GAVE
    elif operand == "fp8":
        part = FP8
    elif even and b in FITTED_COUNTS.get((row["gpu"], operand), ()):
        part = GAVE
    else:
        part = COLD if operand == "bf16" else TENSOR
    predicted_ms = batched_ms(hw, b, m, n, k, operand) + us(
        CLOCK_US.get((row["gpu"], operand), 0.0)
    )
    operands = f"{row['lhs']} x {row['rhs']} -> {row['out']}"
    return ComparedRow(
        {
            **{"gpu": row["gpu"], "profile": hw.name, "operands": operands},
            **dict(zip(SHAPE[2:], sizes, strict=True)),
            **{"date": row["date"], "flag": row["flag"]},
        },
        measured_ms,
        predicted_ms,
        family=f"{row['gpu']} {operand}",
        part=part,
        source="ROCm/xla xla/service/gpu/model",
        interval_ms=kernel_interval(hw, ["gemm"], predicted_ms),
    )


Linear = tuple[str, str, float, float, float, float]
"""Device, split, m, n, k and ms of a linear layer; its batch multiplies m."""


def read_gemm(folder: Path) -> ParsedRows[Linear]:

    def linear(row: Row) -> Linear:
        m = number(row, "B") * number(row, "M")
        n, k, time = (number(row, column) for column in ("N", "K", "latency_ms"))
        return row["device"], row["split"], m, n, k, time

    return read(folder, GEMM_FILE, linear)


def by_split(table: ParsedRows[Linear]) -> dict[tuple[str, str], GemmRows]:
    """Group the rows by (device, split), in the order of the table."""
    groups = grouped(table.rows, lambda row: row[:2])
    return {key: GemmRows.of([row[2:] for row in rows]) for key, rows in groups.items()}


def _linears(table: ParsedRows[Linear]) -> tuple[list[ComparedRow], list[str]]:
    """Predict the rows of the test split; return them and those left out."""
    tables, skipped = by_split(table), list(table.problems)
    trained = {device for device, split in tables if split == "train"} | TRAINED
    rows: list[ComparedRow] = []
    for (device, _), shapes in (
        (key, table_rows) for key, table_rows in tables.items() if key[1] == "test"
    ):
        profile = "a100-40gb" if device == A100_PCIE else profile_of_device(device)
        if profile is None:
            why = no_profile(device, "device")
            skipped.append(f"{GEMM_FILE}: {len(shapes.m)} rows: {why}")
            continue
        hw = load_hardware(profile)
        if device in RATED:
            rated = rate_rows(shapes)
            rows += _linear_rows(device, hw, taken(shapes, rated), GAVE)
            rows += _linear_rows(device, hw, taken(shapes, ~rated), UNSEEN)
        else:
            rows += _linear_rows(device, hw, shapes, SEEN if device in trained else UNSEEN)
    return rows, skipped


def rate_rows(rows: GemmRows) -> NDArray[np.bool_]:
    """Return a mask of the rows behind the rate of a `RATED` device, by shape alone."""
    return np.asarray((rows.m + rows.n + rows.k) % 3 == 0)


def taken(rows: GemmRows, which: NDArray[Any] | slice) -> GemmRows:
    return GemmRows(*(column[which] for column in (rows.m, rows.n, rows.k, rows.time_ms)))


def _linear_rows(
    device: str, hw: HardwareProfile, shapes: GemmRows, part: str
) -> list[ComparedRow]:
    predicted = np.asarray(predict_ms(hw.gemm, hw.sms, hw.memory.hbm, shapes, DATA_TYPE))
    return [
        ComparedRow(
            {"device": device, "profile": hw.name, "m": int(m), "n": int(n), "k": int(k)},
            float(measured),
            float(time),
            family=device,
            part=part,
            source="sitar-lab/NeuSight scripts/asplos/data/dataset",
            interval_ms=kernel_interval(hw, ["gemm"], float(time)),
        )
        for m, n, k, measured, time in zip(
            shapes.m, shapes.n, shapes.k, shapes.time_ms, predicted, strict=True
        )
    ]
