"""The fit of free constants: finds what rows tell, and leaves what they do not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.fit.constants import FreeConstant, fit_free
from predictor.fit.cpu import MemoryRows
from predictor.fit.cuda import predict_moves
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile

pytest.importorskip("scipy")

BASE = load_hardware("h100-sxm")
EFFICIENCY = FreeConstant("elementwise", "efficiency", 0.05, 1.0)
FLOOR = FreeConstant("elementwise", "floor_us", 0.2, 50.0)
BANDWIDTH = FreeConstant("memory", "hbm_gb_s", 100.0, 1e5)
SIZES = 2.0 ** np.arange(10, 31, 0.5)


def times(hw: HardwareProfile, noise: float = 0.0) -> MemoryRows:
    exact = predict_moves(hw, MemoryRows(SIZES, SIZES))
    scatter = np.random.default_rng(0).normal(0.0, noise, len(SIZES))
    return MemoryRows(SIZES, exact * np.exp(scatter))


@settings(max_examples=20, deadline=None)
@given(efficiency=st.floats(0.1, 0.98), floor_us=st.floats(0.5, 40.0))
def test_hidden_constants_come_back(efficiency: float, floor_us: float) -> None:
    rows = times(FLOOR.put(EFFICIENCY.put(BASE, efficiency), floor_us))
    found = fit_free(BASE, (EFFICIENCY, FLOOR), lambda hw: predict_moves(hw, rows), rows.time_ms)
    assert found.fitted == (EFFICIENCY, FLOOR)
    assert EFFICIENCY.value(found.hw) == pytest.approx(efficiency, rel=0.01)
    assert FLOOR.value(found.hw) == pytest.approx(floor_us, rel=0.01)


def test_constants_that_only_their_product_tells_are_not_both_fitted() -> None:
    """Time follows ``efficiency x bandwidth``: one of the two has to stay."""
    rows = times(BASE, 0.03)
    free = (EFFICIENCY, BANDWIDTH)
    found = fit_free(BASE, free, lambda hw: predict_moves(hw, rows), rows.time_ms)
    assert len(found.fitted) == len(found.kept) == 1
    assert found.kept[0].value(found.hw) == found.kept[0].value(BASE)


def test_a_constant_that_no_row_answers_to_stays() -> None:
    rows, silent = times(BASE, 0.03), FreeConstant("embedding", "kernel_us", 0.2, 50.0)
    found = fit_free(BASE, (FLOOR, silent), lambda hw: predict_moves(hw, rows), rows.time_ms)
    assert (found.fitted, found.kept) == ((FLOOR,), (silent,))
    assert found.hw.embedding == BASE.embedding


def test_few_rows_fit_few_constants() -> None:
    rows = MemoryRows(SIZES[:2], times(BASE).time_ms[:2])
    free = (FLOOR, EFFICIENCY)
    found = fit_free(BASE, free, lambda hw: predict_moves(hw, rows), rows.time_ms)
    assert found.fitted == (FLOOR,)


def test_constants_stay_within_their_bounds() -> None:
    rows = times(FLOOR.put(BASE, 55.0))
    found = fit_free(BASE, (FLOOR,), lambda hw: predict_moves(hw, rows), rows.time_ms)
    assert FLOOR.value(found.hw) == pytest.approx(FLOOR.high, rel=1e-3)


def test_a_constant_that_explains_next_to_nothing_stays() -> None:
    """Far from any value within the bounds, what remains drowns what the rows tell."""
    rows = times(FLOOR.put(BASE, 2000.0))
    found = fit_free(BASE, (FLOOR,), lambda hw: predict_moves(hw, rows), rows.time_ms)
    assert found.kept == (FLOOR,)
    assert found.hw == BASE


def test_a_constant_may_be_one_of_a_mapping_and_may_be_absent() -> None:
    rate = FreeConstant("gemm", "tflops.bf16", 1.0, 1e4)
    assert rate.value(rate.put(BASE, 321.0)) == 321.0
    assert rate.put(BASE, 321.0).gemm.tflops["fp32"] == BASE.gemm.tflops["fp32"]
    assert FreeConstant("gemm", "tflops.int8", 1.0, 1e4).value(BASE) == 0.0
    absent = BASE.overheads.model_copy(update={"layer_op_us": None})
    bare = BASE.model_copy(update={"overheads": absent})
    assert FreeConstant("overheads", "layer_op_us", 0.5, 500.0).value(bare) == 0.0
