"""Matrix multiplication: the shipped constants on three public tables.

``gemm_bf16_measured.csv`` times bf16 products whose operands are warm, as in a training step; it
makes the headline. ``xla_matmul_measured.csv`` times batched products on tensor cores. The table of
NeuSight times linear layers in fp32: devices of its train split gave the constants of a profile,
the others (``unseen``) are predicted from their datasheets alone. One of the files is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.validate.public_tables import (
    GEMM_FILE,
    MATMUL_FILE,
    Product,
    by_split,
    read_gemm,
    read_matmul,
)
from lab.validate.report import (
    ComparedRow,
    Report,
    Summary,
    compare_tables,
    data_folder,
    kernel_interval,
    merged_lines,
    no_profile,
    noise_of,
)
from predictor.cost.gemm import batched_ms, gemm_ms
from predictor.csv_rows import Row, count, number
from predictor.hardware.device_names import profile_of_device
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.units import us
from shardopt.calibrate.products import GemmRows, predict_ms

WARM = "tensor cores: bf16, warm operands"
TENSOR = "tensor cores: tf32"
COLD = "tensor cores: bf16, cold operands"
GAVE = "gave constants"
FP8 = "tensor cores: fp8"
SEEN = "devices of the train split"
UNSEEN = "unseen devices"
DATA_TYPE = "fp32"
GFLOP = 1e9
BF16_FILE = "gemm_bf16_measured.csv"
BF16_COLUMNS = ("gpu", "m", "n", "k", "time_us")

PROFILES = {
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA L4": "l4",
    "NVIDIA L40": "l40",
    "NVIDIA L40S": "l40s",
    "NVIDIA A30": "a30",
    "NVIDIA A40": "a40",
    "NVIDIA H200": "h200-sxm",
    "Tesla P100-PCIE-16GB": "p100-pcie-16gb",
    "Tesla P4": "p4",
    "Tesla T4": "t4",
    "Tesla V100-PCIE-32GB": "v100-32gb",
    "Tesla V100-SXM2-32GB": "v100-32gb",
}
"""Name that CUDA gives a device -> the profile that predicts it."""

TRAINED = frozenset({"NVIDIA A100-PCIE-40GB", "Tesla V100-PCIE-32GB", "Tesla P100-PCIE-16GB"})
"""Devices whose train rows the constants were fitted to."""
RATED = frozenset({"NVIDIA H100 80GB HBM3", "NVIDIA L4", "Tesla T4"})
"""Devices without a train split, of which a third of the rows gave the rate, and nothing else."""
SHAPE = ("gpu", "operands", "b", "m", "n", "k")
"""What a product timed again on another day has in common."""
FITTED_COUNTS: dict[tuple[str, str], tuple[int, ...]] = {
    ("H100", "bf16"): (1,),
    ("H100", "tf32"): (1, 2),
    ("B200", "bf16"): (1,),
    ("B200", "tf32"): (1,),
}
"""GPU and type -> batches whose rows gave constants, where log2(m n k) is an even number."""
NOTES = {
    TENSOR: "rows of XLA are times of kernels alone; on NVIDIA its f32 is tf32",
    COLD: "XLA reads operands from device memory; in a step most come from the L2 cache, and a "
    "prediction is 2 to 3 us faster",
    SEEN: f"{DATA_TYPE}: NeuSight's way of timing adds a fixed time to every row, and so does the "
    "prediction of its rows",
}


def validate_gemm(folder: Path) -> Report:
    """Predict every row in ``folder`` with the shipped constants.

    Raises:
        InputError: the folder is not there, or neither table, or one cannot be read.
    """
    data_folder(folder, [BF16_FILE, MATMUL_FILE, GEMM_FILE])
    warm: list[ComparedRow] = []
    products: list[ComparedRow] = []
    linears: list[ComparedRow] = []
    skipped: list[str] = []
    if (folder / BF16_FILE).is_file():
        rows, skipped = compare_tables(folder, {BF16_FILE: (BF16_COLUMNS, bf16_row)})
        warm = [replace(row, part=WARM) for row in rows]
    if (folder / MATMUL_FILE).is_file():
        table = read_matmul(folder / MATMUL_FILE, _usable)
        products = [_predict_product(product) for product in table.rows]
        skipped += merged_lines(table.problems)
    if (folder / GEMM_FILE).is_file():
        linears, problems = _neusight(folder / GEMM_FILE)
        skipped += problems
    headline = WARM if warm else TENSOR if products else SEEN
    return Report(
        "gemm",
        (*warm, *products, *linears),
        headline,
        tuple(skipped),
        tuple(NOTES.values()),
        held_out=tuple(
            part for part in (WARM, TENSOR, COLD, FP8, SEEN, UNSEEN) if part != headline
        ),
        noise={name: found for name, found in _noise(products) if found.n},
    )


def compare_bf16(
    hw: HardwareProfile, shape: tuple[int, int, int], measured_ms: float
) -> ComparedRow:
    """A measured product ``[m, k] @ [k, n]`` in bf16 with its prediction; the part is its size."""
    m, n, k = shape
    work = 2 * m * n * k / GFLOP
    time = gemm_ms(hw, m, n, k, "bf16")
    band = "below 2 GFLOP" if work < 2 else "2 to 50 GFLOP" if work < 50 else "from 50 GFLOP"
    return ComparedRow(
        {"profile": hw.name, "m": m, "n": n, "k": k},
        measured_ms,
        time,
        family=hw.name,
        part=f"bf16 products, {band}",
        source="ai-dynamo/aiconfigurator",
        interval_ms=kernel_interval(hw, ["gemm"], time),
    )


def bf16_row(row: Row) -> ComparedRow:
    """A row of `BF16_FILE` with its prediction.

    Raises:
        ValueError: a column cannot be read, or no profile describes the GPU.
    """
    m, n, k = (count(row, column, 2**40) for column in "mnk")
    return compare_bf16(profile_of_row(row), (m, n, k), us(number(row, "time_us")))


def profile_of_row(row: Row) -> HardwareProfile:
    """Profile of the column ``gpu``.

    Raises:
        ValueError: none describes it.
    """
    name = profile_of_device(row["gpu"])
    if name is None:
        raise ValueError(no_profile(row["gpu"], "gpu"))
    return load_hardware(name)


def _noise(rows: Sequence[ComparedRow]) -> Iterator[tuple[str, Summary]]:
    """Family -> how far its products lie apart that were timed again on another day."""
    for family in dict.fromkeys(row.family for row in rows):
        of = [row for row in rows if row.family == family]
        timed = ((tuple(row.name[key] for key in SHAPE), row.measured_ms) for row in of)
        yield f"{family}, other dates", noise_of(timed)


def _usable(product: Product) -> str:
    if "not credible" in product.doubt:
        return f"flag is '{product.doubt}'"
    profile = profile_of_device(product.gpu)
    if profile is None:
        return no_profile(product.gpu)
    given = product.operands.split()[0]
    if profile == "mi300x" and given == "f8e4m3fn":
        return f"lhs is {given}, which MI300X does not multiply without converting it"
    if product.data_type not in load_hardware(profile).gemm.tflops:
        return f"lhs is {given}, and {profile} has no rate of {product.data_type}"
    return ""


def _predict_product(product: Product) -> ComparedRow:
    hw = load_hardware(str(profile_of_device(product.gpu)))
    sizes = (product.count, product.m, product.n, product.k)
    predicted_ms = batched_ms(hw, *sizes, product.data_type)
    return ComparedRow(
        {
            **{"gpu": product.gpu, "profile": hw.name, "operands": product.operands},
            **dict(zip(SHAPE[2:], sizes, strict=True)),
            **{"date": product.date, "flag": product.doubt},
        },
        product.time_ms,
        predicted_ms,
        family=f"{product.gpu} {product.data_type}",
        part=_part(product),
        source="ROCm/xla xla/service/gpu/model",
        interval_ms=kernel_interval(hw, ["gemm"], predicted_ms),
    )


def _part(product: Product) -> str:
    if profile_of_device(product.gpu) == "mi300x":
        return GAVE
    if product.data_type == "fp8":
        return FP8
    gpu = product.gpu, product.data_type
    even = float(math.log2(product.m * product.n * product.k) % 2) == 0.0
    if even and product.count in FITTED_COUNTS.get(gpu, ()):
        return GAVE
    return COLD if product.data_type == "bf16" else TENSOR


def _neusight(path: Path) -> tuple[list[ComparedRow], list[str]]:
    """Rows of the test split, and what was left out."""
    table = read_gemm(path)
    tables = by_split(table.rows)
    trained = {device for device, split in tables if split == "train"} | TRAINED
    rows: list[ComparedRow] = []
    skipped = list(table.problems)
    for (device, split), shapes in tables.items():
        if split == "test" and device not in PROFILES:
            skipped.append(f"{path.name}: {len(shapes.m)} rows: {no_profile(device, 'device')}")
        elif split == "test" and device in RATED:
            rated = rate_rows(shapes)
            rows += _predict(device, taken(shapes, rated), GAVE)
            rows += _predict(device, taken(shapes, ~rated), UNSEEN)
        elif split == "test":
            rows += _predict(device, shapes, SEEN if device in trained else UNSEEN)
    return rows, skipped


def rate_rows(rows: GemmRows) -> NDArray[np.bool_]:
    """Which rows give the rate of a device of `RATED`: by shape, so alike in every excerpt."""
    return np.asarray((rows.m + rows.n + rows.k) % 3 == 0)


def taken(rows: GemmRows, which: NDArray[np.bool_]) -> GemmRows:
    """Some of the rows."""
    return GemmRows(*(column[which] for column in (rows.m, rows.n, rows.k, rows.time_ms)))


def _predict(device: str, shapes: GemmRows, part: str) -> list[ComparedRow]:
    hw = load_hardware(PROFILES[device])
    predicted = predict_ms(hw.gemm, hw.sms, hw.memory.hbm, shapes, DATA_TYPE)
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
            shapes.m, shapes.n, shapes.k, shapes.time_ms, np.asarray(predicted), strict=True
        )
    ]
