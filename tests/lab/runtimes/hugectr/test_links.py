"""Links that only HugeCTR uses, and the load of PCIe switches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.runtimes.hugectr import direct, switches_of, uplink_size
from predictor.cost.collectives import Collectives
from predictor.hardware.loader import list_hardware, load_hardware
from predictor.model.topology import Topology


@pytest.mark.parametrize("name", ["a100-80gb", "h100-pcie", "gb200"])
def test_direct_access_has_the_latency_and_the_bandwidth_of_an_all_to_all(name: str) -> None:
    ranks = Topology.uniform(8, 8, hbm_bytes=1, ddr_bytes=1)
    engine = Collectives(load_hardware(name), ranks)
    size = 2.0**37
    assert direct(engine, 0.0) == engine.floor_ms("all_to_all", "intra")
    assert direct(engine, size) == pytest.approx(engine.all_to_all(size, "intra"), rel=0.02)
    assert direct(engine, 1e6) <= engine.all_to_all(1e6, "intra") * (1 + 1e-9)


def test_only_cards_without_nvlink_have_uplinks() -> None:
    found = {
        name: switches_of(load_hardware(name).collectives.intra.all_to_all, 8)
        for name in list_hardware()
    }
    assert found["l40"] == found["h100-pcie"] == (4, 4)
    assert not any(found[name] for name in ("a100-80gb", "h100-sxm", "gb200", "v100-32gb"))
    assert switches_of(load_hardware("l40").collectives.intra.all_to_all, 4) == ()


@given(st.floats(0, 1e9))
def test_equal_parts_are_those_of_the_curve(size: float) -> None:
    assert uplink_size(np.full((2, 8), size), (4, 4), 4) == pytest.approx(np.full((2, 1), size))


@given(st.lists(st.floats(0, 1e9), min_size=8, max_size=8), st.sampled_from([(4, 4), (5, 3)]))
def test_the_load_is_at_most_that_of_all_sending_as_much_as_the_busiest(
    sent: list[float], switches: tuple[int, ...]
) -> None:
    size = float(uplink_size(np.array([sent]), switches, 4)[0, 0])
    assert size <= max(sent) * (1 + 1e-9)
    assert size >= float(uplink_size(np.array([sent]) / 2, switches, 4)[0, 0])


def test_the_fuller_switch_counts_in_either_direction() -> None:
    right = np.array([[0.0] * 4 + [1.0] * 4])
    assert uplink_size(right, (4, 4), 4) == pytest.approx(1.0)
    assert uplink_size(right[:, ::-1], (4, 4), 4) == pytest.approx(1.0)
    # three cards take in five parts of eight from the other switch
    assert uplink_size(np.ones((1, 8)), (5, 3), 4) == pytest.approx(15 / 16)
