"""Memory-bound kernels and host copies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.cost.elementwise import columns_ms, copy_h2d_ms, decode_ms, memory_ms
from predictor.hardware.loader import list_hardware, load_hardware


@given(st.sampled_from(list_hardware()), st.floats(0, 1e11), st.floats(1, 100))
def test_never_falls_and_is_concave(name: str, size: float, factor: float) -> None:
    hw = load_hardware(name)
    for cost in (memory_ms, columns_ms, decode_ms, copy_h2d_ms):
        low, high = cost(hw, np.array([size, size * factor]))
        middle = float(cost(hw, (size + size * factor) / 2))
        assert 0 < low <= high * (1 + 1e-12)
        assert middle >= (low + high) / 2 * (1 - 1e-9)


@pytest.mark.parametrize("name", list_hardware())
def test_large_sizes_stream_at_the_achieved_bandwidth(name: str) -> None:
    hw = load_hardware(name)
    ideal = 1e11 / (hw.memory.hbm * hw.elementwise.efficiency)
    assert float(memory_ms(hw, 1e11)) == pytest.approx(ideal, rel=0.01)
    assert float(copy_h2d_ms(hw, 1e11)) == pytest.approx(1e11 / hw.memory.host_link, rel=0.01)
