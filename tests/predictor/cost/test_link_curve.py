"""The curve of one link over sizes and ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.cost.collectives import (
    bands,
    bus_factor,
    hyperbola,
    latency_ms,
    rank_cost,
    transfer_ms,
)
from predictor.hardware.schema import Curve
from predictor.units import us


def test_hyperbola_is_flat_then_slope_one_without_cancellation() -> None:
    w = np.array([0.0, 1.0, 1e3, 1e12])
    assert hyperbola(w, 0.0) == pytest.approx(w)
    assert hyperbola(w, 1e9)[1] == pytest.approx(0.5e-9, rel=1e-6)
    assert hyperbola(w, 1e9)[3] == pytest.approx(1e12 - 1e9, rel=1e-3)


@given(
    st.lists(st.floats(1, 1e9), min_size=1, max_size=6, unique=True),
    st.floats(0, 1e12),
)
def test_bands_share_out_every_byte(edges: list[float], size: float) -> None:
    parts = bands(np.array([size]), [0.0, *sorted(edges)])
    assert parts.min() >= -1e-6 * size
    assert parts.sum() == pytest.approx(size, rel=1e-9)


def test_bus_factors_of_nccl_tests() -> None:
    assert bus_factor("all_to_all", 8) == 7 / 8
    assert bus_factor("all_reduce", 8) == 14 / 8


CURVE = Curve(
    latency_us=3.0,
    latency_per_doubling_us=2.0,
    latency_per_rank_us=1.5,
    edge_mib=(0.0, 1.0),
    us_per_mib=(4.0, 2.0),
    own_part=1.0,
)


def test_a_ring_hops_once_more_for_each_rank() -> None:
    assert latency_ms(CURVE, 8) == pytest.approx(us(3 + 2 * 3 + 1.5 * 7))


def test_an_own_part_that_costs_as_much_makes_the_time_the_same_for_all_ranks() -> None:
    """``2 (n-1)/n`` of the buffer and ``1/n`` twice are ``2`` of it: a reduction in the switch."""
    flat = CURVE.model_copy(update={"edge_mib": (0.0,), "us_per_mib": (2.0,)})
    size = 2.0**30
    times = [
        float(transfer_ms(flat, np.array(size * bus_factor("all_reduce", n)), n))
        for n in (2, 3, 8, 72)
    ]
    assert times == pytest.approx([times[0]] * 4)


def test_factors_of_wiring_and_own_part_multiply() -> None:
    curve = CURVE.model_copy(update={"rank_cost": {2: 3.0, 8: 1.0}})
    assert rank_cost(curve, 2) == pytest.approx(2 * 3.0)
    assert rank_cost(curve, 4) == pytest.approx((1 + 1 / 3) * 2.0)
    assert rank_cost(curve, 64) == pytest.approx(1 + 1 / 63)
