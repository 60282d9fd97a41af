"""Rows of products that leave a constant at its bound, or do not determine it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from shardopt.calibrate import families
from shardopt.calibrate.fitting import CalibratedProfile, Wiring
from shardopt.calibrate.points import QUICK, Device
from shardopt.calibrate.products import (
    _batched,
    _gathers,
    fit_gpu,
    interaction_points,
    predict_gemms,
)
from shardopt.calibrate.rows import Measurement, Origin
from tests.shardopt.calibrate.synthetic import CALL_US, changed, cpu_rows, row, with_groups

pytest.importorskip("scipy")

GPU = Device(80 * 2**30, 1024 * 2**30)


def rows(hw: HardwareProfile, op: str) -> list[Measurement]:
    return cpu_rows(hw, [p for p in interaction_points(QUICK) if p.params["op"] == op])


def batched(rate: float) -> HardwareProfile:
    constants = {"batched_us": 0.2, "batched_share": 0.5, "tflops": {"fp32": rate}}
    return with_groups(load_hardware("cpu-gloo"), gemm={**constants, "floor_us": 0.0})


def test_a_rate_above_that_of_large_products_is_cut_to_it() -> None:
    assert _batched(rows(batched(1.0), "bmm"), batched(0.1))["batched_share"] == 1.0


def test_a_layer_faster_than_its_parts_picks_for_nothing() -> None:
    hw = batched(1.0)
    slower = [replace(r, median_us=10 * r.median_us) for r in rows(hw, "bmm")]
    constants = _gathers([*slower, *rows(hw, "dot")], hw, CALL_US)
    assert constants == {"gather_ns_per_element": 0.0}


def test_what_was_not_measured_is_not_found() -> None:
    hw = batched(1.0)
    assert _batched([], hw) == {}
    assert _gathers(rows(hw, "bmm"), hw, CALL_US) == {}, "no whole layers"
    assert _gathers(rows(hw, "dot"), hw, CALL_US) == {}, "no products to take off"


def test_a_data_type_with_kernels_of_its_own_keeps_no_constant_of_others() -> None:
    """Half-precision rows whose fitted half is slower than those held out: their rate stays."""
    base = load_hardware("h100-sxm")
    true = changed(base, "gemm", **{"tflops.fp32": 48.0, "floor_us": 4.0})
    points = [p for p in families.alone(QUICK, gpu=GPU) if p.family == "gemm"]
    rows = []
    for point in points:
        half = point.params["dtype"] == "fp16"
        if half or point.params["dtype"] == "fp32":
            ms = float(predict_gemms(true, [row(point, 1.0)])[0])
            rows.append(row(point, ms * (1.2 if half and not point.test else 1.0)))
    draft = fit_gpu(CalibratedProfile(rows, Origin("m", "t"), Wiring(1), base, base))
    assert draft.profile.gemm.floor_us == pytest.approx(4.0, rel=0.05)
    assert draft.profile.gemm.tflops["fp32"] == pytest.approx(48.0, rel=0.05)
    assert draft.profile.gemm.tflops["fp16"] == base.gemm.tflops["fp16"]
    assert draft.errors["gemm fp32"].mape < 0.01
