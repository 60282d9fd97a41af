"""Rows of products that leave a constant at its bound, or do not determine it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from shardopt.calibrate.points import QUICK, Point
from shardopt.calibrate.products import _batched, _gathers, interaction_points, measure_gemm
from shardopt.calibrate.rows import Measurement
from shardopt.measure.sampling import CLEAN_ENOUGH, CpuTimer
from tests.shardopt.calibrate.synthetic import CALL_US, cpu_rows, with_groups

pytest.importorskip("scipy")

QUICK_ONES = interaction_points(QUICK)


def rows(hw: HardwareProfile, op: str) -> list[Measurement]:
    return cpu_rows(hw, [p for p in QUICK_ONES if p.params["op"] == op])


def batched(rate: float) -> HardwareProfile:
    known = {"batched_us": 0.2, "batched_share": 0.5, "tflops": {"fp32": rate}}
    return with_groups(load_hardware("cpu-gloo"), gemm={**known, "floor_us": 0.0})


def test_a_rate_above_that_of_large_products_is_cut_to_it() -> None:
    assert _batched(rows(batched(1.0), "bmm"), batched(0.1))["batched_share"] == 1.0


def test_a_layer_faster_than_its_parts_picks_for_nothing() -> None:
    hw = batched(1.0)
    slower = [replace(r, median_us=10 * r.median_us) for r in rows(hw, "bmm")]
    found = _gathers([*slower, *rows(hw, "dot")], hw, CALL_US)
    assert found == {"gather_ns_per_element": 0.0}


def test_what_was_not_measured_is_not_found() -> None:
    hw = batched(1.0)
    assert _batched([], hw) == {}
    assert _gathers(rows(hw, "bmm"), hw, CALL_US) == {}, "no whole layers"
    assert _gathers(rows(hw, "dot"), hw, CALL_US) == {}, "no products to take off"


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_every_type_is_multiplied_and_none_changes_the_next(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_float32_matmul_precision()
    params = {"m": 64, "n": 8, "k": 16, "dtype": dtype, "layout": "nt"}
    (found,) = measure_gemm(Point("gemm", params), CpuTimer(2**16), 0.0)
    assert found.n >= CLEAN_ENOUGH
    assert torch.get_float32_matmul_precision() == before == "highest"
