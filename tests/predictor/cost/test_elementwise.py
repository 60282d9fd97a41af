"""Memory-bound kernels and host copies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.cost.elementwise import column_sums_ms, columns_ms, copy_h2d_ms, decode_ms, memory_ms
from predictor.hardware.loader import list_hardware, load_hardware


@given(st.sampled_from(list_hardware()), st.floats(0, 1e11), st.floats(1, 100))
def test_never_falls(name: str, size: float, factor: float) -> None:
    hw = load_hardware(name)
    for cost in (memory_ms, columns_ms, decode_ms, copy_h2d_ms):
        low, high = cost(hw, np.array([size, size * factor]))
        assert 0 < low <= high * (1 + 1e-12)


def test_operands_that_the_l2_holds_move_faster() -> None:
    """Relus of training steps on one H100, measured: 16.8 MB took 4.2 us, 268 MB took 88 us."""
    hw = load_hardware("h100-sxm")
    small, large = 2**24, 2**28
    assert float(memory_ms(hw, small)) == pytest.approx(0.0042, rel=0.15)
    assert float(memory_ms(hw, large)) == pytest.approx(0.088, rel=0.1)
    assert small / float(memory_ms(hw, small)) > 1.2 * large / float(memory_ms(hw, large))


def test_sums_over_rows_take_time_by_rows() -> None:
    hw = load_hardware("h100-sxm")
    few, many = (column_sums_ms(hw, rows, 2**25) for rows in (2**13, 2**15))
    assert many - few == pytest.approx(0.9e-6 * (2**15 - 2**13), rel=1e-6)


@pytest.mark.parametrize("name", list_hardware())
def test_large_sizes_stream_at_the_achieved_bandwidth(name: str) -> None:
    hw = load_hardware(name)
    ideal = 1e11 / (hw.memory.hbm * hw.elementwise.efficiency)
    assert float(memory_ms(hw, 1e11)) == pytest.approx(ideal, rel=0.01)
    assert float(copy_h2d_ms(hw, 1e11)) == pytest.approx(1e11 / hw.memory.host_link, rel=0.01)
