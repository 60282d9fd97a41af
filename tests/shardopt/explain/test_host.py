"""Host-bound iterations, and the evidence that settles it."""

from __future__ import annotations

from pathlib import Path

import pytest

from predictor.hardware.loader import load_hardware
from predictor.model.topology import Topology
from predictor.predict import Prediction, predict
from shardopt.calibrate.host import near_empty
from shardopt.explain.host import host_bound


def near_empty_on(name: str) -> Prediction:
    params = {"plan": "tw", "tables": 8, "layers": 0, "pipeline": "base", "ranks": 1}
    workload, plan = near_empty(params)
    hw = load_hardware(name)
    topology = Topology.uniform(1, 1, hbm_bytes=hw.hbm_bytes, ddr_bytes=hw.ddr_bytes)
    return predict(workload, topology, hw, plan)


def test_a_host_that_was_not_measured() -> None:
    bound = host_bound(near_empty_on("h100-sxm"), load_hardware("h100-sxm"))
    assert bound is not None
    assert bound.share > 0.9
    assert "calibrate --only host" in bound.remedy


def test_a_host_that_was_measured(tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    group = load_hardware("h200-sxm").overheads.model_dump_json(exclude_none=True)
    profile.write_text(f"base: h100-sxm\noverheads: {group}\n")
    bound = host_bound(near_empty_on(str(profile)), load_hardware(str(profile)))
    assert bound is not None
    assert "calibrate" not in bound.remedy


def test_a_captured_dense_part_is_not_to_be_captured() -> None:
    prediction, hardware = near_empty_on("h100-sxm"), load_hardware("h100-sxm")
    remedies = [
        bound.remedy
        for captured in (False, True)
        if (bound := host_bound(prediction, hardware, cuda_graphs=captured))
    ]
    assert ["CUDA graphs" in remedy for remedy in remedies] == [True, False]


@pytest.mark.parametrize("name", ["cpu-gloo"])
def test_ranks_on_cpus_wait_for_no_host(name: str) -> None:
    assert host_bound(near_empty_on(name), load_hardware(name)) is None
