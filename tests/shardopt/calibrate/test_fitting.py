"""Fits find what rows tell, and leave what they do not; errors on rows held out add up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.cost.elementwise import memory_ms
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from shardopt.calibrate.fitting import FreeConstant, HeldOut, fit_free, total

pytest.importorskip("scipy")

BASE = load_hardware("h100-sxm")
EFFICIENCY = FreeConstant("elementwise", "efficiency", 0.05, 1.0)
FLOOR = FreeConstant("elementwise", "floor_us", 0.2, 50.0)
BANDWIDTH = FreeConstant("memory", "hbm_gb_s", 100.0, 1e5)
SIZES = 2.0 ** np.arange(10, 31, 0.5)


def predict(hw: HardwareProfile) -> np.ndarray:
    return memory_ms(hw, SIZES)


def times(hw: HardwareProfile, noise: float = 0.0) -> np.ndarray:
    return predict(hw) * np.exp(np.random.default_rng(0).normal(0.0, noise, len(SIZES)))


@settings(max_examples=20, deadline=None)
@given(efficiency=st.floats(0.1, 0.98), floor_us=st.floats(0.5, 40.0))
def test_hidden_constants_come_back(efficiency: float, floor_us: float) -> None:
    rows = times(FLOOR.put(EFFICIENCY.put(BASE, efficiency), floor_us))
    fit = fit_free(BASE, (EFFICIENCY, FLOOR), predict, rows)
    assert fit.fitted == (EFFICIENCY, FLOOR)
    assert EFFICIENCY.value(fit.hw) == pytest.approx(efficiency, rel=0.01)
    assert FLOOR.value(fit.hw) == pytest.approx(floor_us, rel=0.01)


def test_constants_that_only_their_product_tells_are_not_both_fitted() -> None:
    """Time follows ``efficiency x bandwidth``: one of the two has to stay."""
    rows = times(BASE, 0.03)
    free = (EFFICIENCY, BANDWIDTH)
    fit = fit_free(BASE, free, predict, rows)
    assert len(fit.fitted) == len(fit.kept) == 1
    assert fit.kept[0].value(fit.hw) == fit.kept[0].value(BASE)


def test_a_constant_that_no_row_answers_to_stays() -> None:
    rows, silent = times(BASE, 0.03), FreeConstant("embedding", "kernel_us", 0.2, 50.0)
    fit = fit_free(BASE, (FLOOR, silent), predict, rows)
    assert (fit.fitted, fit.kept) == ((FLOOR,), (silent,))
    assert fit.hw.embedding == BASE.embedding


def test_few_rows_fit_few_constants() -> None:
    free, rows = (FLOOR, EFFICIENCY), times(BASE)[:2]
    fit = fit_free(BASE, free, lambda hw: predict(hw)[:2], rows)
    assert fit.fitted == (FLOOR,)


def test_constants_stay_within_their_bounds() -> None:
    rows = times(FLOOR.put(BASE, 55.0))
    fit = fit_free(BASE, (FLOOR,), predict, rows)
    assert FLOOR.value(fit.hw) == pytest.approx(FLOOR.high, rel=1e-3)


def test_a_constant_that_explains_next_to_nothing_stays() -> None:
    """Far from any value within the bounds, what remains drowns what the rows tell."""
    rows = times(FLOOR.put(BASE, 2000.0))
    fit = fit_free(BASE, (FLOOR,), predict, rows)
    assert fit.kept == (FLOOR,)
    assert fit.hw == BASE


def test_a_constant_may_be_one_of_a_mapping_and_may_be_absent() -> None:
    rate = FreeConstant("gemm", "tflops.bf16", 1.0, 1e4)
    assert rate.value(rate.put(BASE, 321.0)) == 321.0
    assert rate.put(BASE, 321.0).gemm.tflops["fp32"] == BASE.gemm.tflops["fp32"]
    assert FreeConstant("gemm", "tflops.int8", 1.0, 1e4).value(BASE) == 0.0
    absent = BASE.overheads.model_copy(update={"layer_op_us": None})
    bare = BASE.model_copy(update={"overheads": absent})
    assert FreeConstant("overheads", "layer_op_us", 0.5, 500.0).value(bare) == 0.0


def test_held_out_errors_add_up() -> None:
    both = total([HeldOut(np.array([0.1, -0.1]), 5), HeldOut(np.array([0.3]), 6)])
    assert (both.n, both.fitted) == (3, 11)
    assert both.mape == pytest.approx(0.5 / 3)
    assert both.bias == pytest.approx(0.1)
    assert np.isnan(HeldOut(np.zeros(0), 3).mape)


def test_a_group_is_as_wrong_as_the_kernels_that_take_its_time() -> None:
    errors = np.array([0.5, 0.1])
    assert HeldOut(errors, 2).rms == pytest.approx(np.sqrt(0.13))
    timed = HeldOut(errors, 2, np.array([1.0, 99.0]))
    assert timed.rms == pytest.approx(np.sqrt((0.25 + 99 * 0.01) / 100))
    assert timed.mape == HeldOut(errors, 2).mape
    assert total([timed, HeldOut(errors, 2)]).times == pytest.approx([1.0, 99.0, 1.0, 1.0])
