"""The tile model fitted on rows of the public table."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.validate.public_tables import GEMM_FILE, by_split, read_gemm
from predictor.hardware.loader import load_hardware
from shardopt.calibrate.fitting import gmae
from shardopt.calibrate.products import fit_gemm, gemm_errors
from tests.public_data import every_table


@every_table
def test_gemm_on_test_rows_of_devices_it_was_fitted_on(folder: Path) -> None:
    tables = by_split(read_gemm(folder / GEMM_FILE).rows)
    hw = load_hardware("a100-40gb")
    device = "NVIDIA A100-PCIE-40GB"
    fitted = fit_gemm(tables[device, "train"], hw.sms, hw.memory.hbm, hw.gemm)
    assert fitted.tflops["fp32"] == pytest.approx(hw.gemm.tflops["fp32"], rel=0.02)
    for gemm in (fitted, hw.gemm):
        assert gmae(gemm_errors(gemm, hw.sms, hw.memory.hbm, tables[device, "test"])) < 0.08
