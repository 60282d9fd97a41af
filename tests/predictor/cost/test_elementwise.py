"""Memory-bound kernels and host copies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from predictor.cost.elementwise import Array, columns_ms, copy_h2d_ms, decode_ms, memory_ms
from predictor.hardware.loader import list_hardware, load_hardware
from predictor.hardware.schema import HardwareProfile


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


@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
@pytest.mark.parametrize(("key", "cost"), [("columns", columns_ms), ("decode", decode_ms)])
def test_some_kernels_move_at_a_share_of_the_bandwidth(
    share: float, key: str, cost: Callable[[HardwareProfile, ArrayLike], Array]
) -> None:
    hw = load_hardware("cpu-gloo")
    moves = hw.elementwise.model_copy(update={key: share})
    changed = hw.model_copy(update={"elementwise": moves})
    floor, sizes = float(memory_ms(hw, 0)), np.array([[1e6], [1e9]])
    assert cost(changed, 0.0) == pytest.approx(floor)
    beyond = (cost(changed, sizes) - floor) / (memory_ms(hw, sizes) - floor)
    assert beyond == pytest.approx(np.full((2, 1), 1 / share))
