"""Matrix multiplication: the shipped constants on the test rows of the public table.

Devices of the table's train split gave the constants of a profile and make the headline; the others
(``unseen``) are predicted from their datasheets alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from predictor.fit.gemm import GemmRows, predict_ms
from predictor.fit.public_tables import GEMM_FILE, by_split, read_gemm
from predictor.hardware.loader import load_hardware
from shardopt.validate.report import ComparedRow, Report, data_folder

SEEN = "devices of the train split"
UNSEEN = "unseen devices"
DATA_TYPE = "fp32"

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


def validate_gemm(folder: Path) -> Report:
    """Predict every test row in ``folder`` with the shipped constants.

    Raises:
        InputError: the folder or the table is not there.
    """
    data_folder(folder, [GEMM_FILE], every=True)
    table = read_gemm(folder / GEMM_FILE)
    tables = by_split(table.rows)
    trained = {device for device, split in tables if split == "train"} | TRAINED
    rows: list[ComparedRow] = []
    skipped = list(table.problems)
    for (device, split), shapes in tables.items():
        if split == "test" and device not in PROFILES:
            skipped.append(f"{device}: no profile describes it ({len(shapes.m)} rows)")
        elif split == "test":
            rows += _predict(device, shapes, SEEN if device in trained else UNSEEN)
    notes = (
        f"{DATA_TYPE}; predicted with the shipped constants of each profile, plus the fixed time "
        "that the table's way of timing adds to every row",
    )
    return Report("gemm", tuple(rows), SEEN, tuple(skipped), notes, held_out=(UNSEEN,))


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
        )
        for m, n, k, measured, time in zip(
            shapes.m, shapes.n, shapes.k, shapes.time_ms, np.asarray(predicted), strict=True
        )
    ]
