"""Synthetic rows of a GPU whose constants are known become a profile over a base."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from predictor.cost.collectives import OPS, Collectives
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.predict import predict
from shardopt.calibrate import families, run
from shardopt.calibrate import points as design
from shardopt.calibrate.fitting import CalibratedProfile, FreeConstant
from shardopt.calibrate.gpu_lookups import launch_ms, launches_of, predict_launches
from shardopt.calibrate.host import near_empty
from shardopt.calibrate.moves import predict_copies, predict_moves, predict_streaming
from shardopt.calibrate.points import Device, Point
from shardopt.calibrate.products import predict_gemms
from shardopt.calibrate.profile import build_profile, profile_text
from shardopt.calibrate.rows import PARTS, CalibrationRows, Measurement, Origin
from shardopt.cli.app import main
from tests.shardopt.calibrate.synthetic import changed, facts_of, row, topology

pytest.importorskip("scipy")

ORIGIN = Origin("NVIDIA H100 80GB HBM3, made up", "torch 2.9, fbgemm 1.4")
BASE = load_hardware("h100-sxm")
GPU = Device(80 * 2**30, 1024 * 2**30)
SIZE = replace(design.QUICK, lookups=64)
HIDDEN = {
    "embedding": {
        **{"forward_efficiency": 0.7, "backward_efficiency": 0.5, "sort_efficiency": 0.6},
        **{"kernel_us": 4.0, "uvm_efficiency": 0.45, "prefetch_ns_per_lookup": 0.9},
    },
    "memory": {"hbm_gb_s": 2700.0, "l2_gb_s": 4200.0, "host_link_gb_s": 42.0},
    "elementwise": {"floor_us": 2.2, "efficiency": 0.8},
    "gemm": {"tflops.fp32": 48.0, "tflops.tf32": 350.0, "tflops.bf16": 640.0, "floor_us": 4.0},
    "overheads": {
        **{"op_us": 14.0, "launch_us": 6.0, "launch_latency_us": 3.0, "sync_us": 11.0},
        **{"collective_us": 45.0, "iteration_us": 1500.0},
    },
}
OP_ON_HOST_US = 7.0
CLOCK_MS = 3.6e-3
"""Between events around a kernel of 1.2 us."""
DEVICE = {"sms": 114, "memory_gib": 79.1, "l2_mib": 50.0}


def machine() -> HardwareProfile:
    hw = BASE
    for group, constants in HIDDEN.items():
        hw = changed(hw, group, **constants)
    return hw.model_copy(update={"sms": DEVICE["sms"]})


TRUE = machine()


def true_ms(point: Point, blank: Measurement) -> float:
    """Return the true time on the machine."""
    p, cost = point.params, TRUE.overheads
    if point.family.startswith("lookup"):
        return predict_launches(TRUE, launches_of([blank]))[0]
    if point.family == "host":
        ways = 2 * cost.launch_latency_us + TRUE.elementwise.floor_us
        us = {
            "op": OP_ON_HOST_US + 0.6 * cost.launch_us,
            "op_on_host": OP_ON_HOST_US,
            "round_trip": OP_ON_HOST_US + cost.launch_us + ways,
            "sync": cost.sync_us,
        }
        return us[p["what"]] * 1e-3
    if point.family == "iteration":
        workload, plan = near_empty(p)
        where = topology(plan.world_size, plan.local_world_size)
        return predict(workload, where, TRUE, plan).iteration_ms
    if point.family == "collective" and p["op"] == "issue":
        return cost.collective_us * 1e-3
    if point.family == "collective":
        links = Collectives(TRUE, topology(p["ranks"], p["ranks"] // p.get("hosts", 1)))
        return float(links._time(p["op"], p["bytes"], "world"))
    laws = {"gemm": predict_gemms, "elementwise": predict_moves, "copy_h2d": predict_copies}
    laws |= {"streaming": predict_streaming, "reference": lambda *_: [1.0]}
    laws |= {"clock": lambda *_: [CLOCK_MS]}
    return laws[point.family](TRUE, [blank])[0]


def drawn(points: list[Point]) -> list[Measurement]:
    """Rows with 3 % noise, but those of the host, which are one of a kind."""
    rng, rows = np.random.default_rng(0), []
    for point in points:
        facts = facts_of(point) | ({"device": DEVICE} if point.params.get("what") == "op" else {})
        for part in PARTS.get(point.family, ("",)):
            time = true_ms(point, row(point, 1.0, part, **facts))
            alone = point.family in ("host", "clock") or point.params.get("op") == "issue"
            noise = 0.0 if alone else rng.normal(0.0, 0.03)
            rows.append(row(point, float(time * np.exp(noise)), part, **facts))
    return rows


@pytest.fixture(scope="module")
def rows() -> list[Measurement]:
    return drawn([*families.alone(SIZE, gpu=GPU), *families.together(design.QUICK, 4)])


def built(rows: list[Measurement], **wiring: int) -> CalibratedProfile:
    return build_profile(rows, ORIGIN, BASE, "mine", wiring.pop("ranks", 4), 512.0, **wiring)


@pytest.fixture(scope="module")
def found(rows: list[Measurement]) -> CalibratedProfile:
    return built(rows)


@pytest.mark.slow
def test_rows_held_out_are_predicted(found: CalibratedProfile) -> None:
    families = {"lookup forward", "lookup backward", "cache prefetch", "streaming", "elementwise"}
    families |= {"gemm fp32", "gemm tf32", "gemm bf16", "lookup forward, fused_uvm", "host"}
    families |= {"lookup backward, cached", "copy_h2d"}
    assert families <= set(found.errors)
    for family in families:
        error = found.errors[family]
        assert error.n > 0, family
        assert error.gmae < 0.05, family
        assert error.mape < 0.08, family


@pytest.mark.slow
def test_hidden_constants_come_back(found: CalibratedProfile) -> None:
    for group, constants in HIDDEN.items():
        if group in ("gemm", "overheads"):
            continue
        for key, value in constants.items():
            fitted = FreeConstant(group, key, 0.0, 0.0).value(found.profile)
            assert fitted == pytest.approx(value, rel=0.2), key
    cost = found.profile.overheads
    hidden = {"launch_us": 6.0, "launch_latency_us": 3.0, "sync_us": 11.0, "collective_us": 45.0}
    assert {key: getattr(cost, key) for key in hidden} == pytest.approx(hidden, rel=0.06)
    assert found.profile.gemm.tflops["bf16"] == pytest.approx(640.0, rel=0.1)
    assert found.profile.sms == DEVICE["sms"]


@pytest.mark.slow
def test_the_file_holds_what_was_measured_and_takes_the_rest_from_its_base(
    found: CalibratedProfile, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    text = profile_text(found, "h100-sxm")
    path.write_text(text)
    assert "\nbase: h100-sxm\n" in text
    loaded = load_hardware(str(path))
    assert loaded.name == "mine"
    assert loaded.hbm_gib == DEVICE["memory_gib"]
    measured_groups = {"memory", "gemm", "embedding", "elementwise", "overheads"}
    measured_groups |= {"collectives.intra"}
    for name, group in loaded.groups.items():
        if name in measured_groups:
            provenance = group.provenance
            assert provenance.kind == "measured", name
            assert provenance.versions == ORIGIN.versions
            assert provenance.n
            assert provenance.error is not None
            assert provenance.error.n
        else:
            assert group == BASE.groups[name], name
    assert "inter" not in text


def test_a_family_without_rows_is_the_bases_and_not_in_the_file(
    rows: list[Measurement], tmp_path: Path
) -> None:
    few = [r for r in rows if r.point.family in ("streaming", "elementwise", "gemm")]
    calibrated = built(few)
    assert calibrated.groups == {"memory", "elementwise", "gemm"}
    path = tmp_path / "few.yaml"
    path.write_text(profile_text(calibrated, "h100-sxm"))
    loaded = load_hardware(str(path))
    assert loaded.embedding == BASE.embedding
    assert loaded.overheads == BASE.overheads
    assert loaded.collectives == BASE.collectives


@pytest.mark.slow
def test_constants_that_no_row_tells_are_named(rows: list[Measurement]) -> None:
    fused = [r for r in rows if r.point.family == "lookup" and "kernel" not in r.point.params]
    calibrated = built(fused)
    source = calibrated.profile.embedding.provenance.source
    host = ("prefetch_ns_per_lookup", "uvm_both_ways", "uvm_efficiency", "uvm_l1_kib")
    assert ", ".join(f"embedding.{name}" for name in host) in source
    base = load_hardware("h100-sxm").embedding.model_dump()
    assert calibrated.profile.embedding.model_dump()["uvm_efficiency"] == base["uvm_efficiency"]


def test_the_command_writes_a_file_over_the_base_of_its_device(
    rows: list[Measurement],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("fbgemm_gpu")
    few = [r for r in rows if r.point.family in ("streaming", "elementwise", "gemm")]

    def measure(settings: design.CalibrationSettings, *_: object) -> CalibrationRows:
        assert (settings.backend, settings.ranks, settings.hosts) == ("nccl", 2, 1)
        file = CalibrationRows(settings.rows, ORIGIN)
        file.rows = few
        return file

    monkeypatch.setattr(run, "check_calibration", lambda *_: None)
    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(run, "points_of", lambda _: ([r.point for r in few], []))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")
    path = tmp_path / "here.yaml"
    assert main(["calibrate", "--backend", "nccl", "-o", str(path), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["errors"]) >= {"streaming", "gemm bf16"}
    written, base = load_hardware(str(path)), load_hardware("h200-sxm")
    assert written.memory.hbm_gb_s == pytest.approx(2700.0, rel=0.05)
    assert written.embedding == base.embedding
    assert written.collectives == base.collectives


@pytest.mark.slow
def test_lookups_of_the_users_model_join_the_fit(rows: list[Measurement]) -> None:
    """Half of them: the others are held out, and predicted better for it."""
    rng, own = np.random.default_rng(0), []
    facts = {"tables": [[200_000, 64, 4096, 40_960.0, 30_000.0]], "dtype": "fp32"}
    for i in range(12):
        point = Point("model_lookup", {"table": f"t{i}", "ranks": 4}, test=i % 2 == 1)
        for part in PARTS["model_lookup"]:
            blank = row(point, 1.0, part, **facts)
            slow = 1.2 * np.exp(rng.normal(0.0, 0.03))
            time = slow * predict_launches(TRUE, launches_of([blank]))[0]
            own.append(row(point, float(time), part, **facts))
    plain = [r for r in rows if r.point.family == "lookup" and "kernel" not in r.point.params]
    calibrated = built([*plain, *own])
    assert calibrated.errors["model's lookup forward"].n == 6
    assert {r.point.test for r in own} == {False, True}
    without = built([*plain, *(r for r in own if r.point.test)])
    for part in PARTS["model_lookup"]:
        label = f"model's lookup {part}"
        assert calibrated.errors[label].mape < without.errors[label].mape


def test_hosts_of_several_ranks_tell_both_links() -> None:
    calibrated = built(drawn(families.together(design.QUICK, 8, hosts=2)), ranks=8, hosts=2)
    assert calibrated.groups == {"collectives.intra", "collectives.inter"}
    where = topology(8, 4)
    sizes = np.array([2.0**14, 2.0**20, 2.0**24])
    for op in OPS:
        times = [
            Collectives(hw, where)._time(op, sizes, "world") for hw in (calibrated.profile, TRUE)
        ]
        assert times[0] == pytest.approx(times[1], rel=0.15), op


def test_a_launch_takes_at_least_its_floor() -> None:
    from predictor.cost.lookup.cuda import CudaLookups
    from predictor.hardware.schema import CudaEmbedding

    assert isinstance(TRUE.embedding, CudaEmbedding)
    model = CudaLookups(TRUE, TRUE.embedding)
    floors: dict[str, Callable[[], float]] = {
        "forward": model.forward_floor_ms,
        "backward": model.backward_floor_ms,
        "prefetch": model.prefetch_floor_ms,
    }
    for part, floor in floors.items():
        assert launch_ms(model, [], part) == floor()


def test_no_family_is_worse_than_shipped_and_what_the_clock_adds_is_not_the_kernels() -> None:
    """Rows whose fitted half is of another machine; all hold what the events around them take."""
    clock = row(Point("clock", {}), CLOCK_MS, kernel_us=1.2)
    laws = {"gemm": predict_gemms, "elementwise": predict_moves, "copy_h2d": predict_copies}
    laws |= {"streaming": predict_streaming}
    rows = [clock]
    for point in families.alone(design.QUICK, gpu=GPU):
        if point.family in laws:
            facts = facts_of(point)
            ms = float(laws[point.family](BASE, [row(point, 1.0, **facts)])[0])
            measured = ms * (1.0 if point.test else 1.7) + CLOCK_MS - 1.2e-3
            rows.append(row(point, measured, **facts))
    calibrated = built(rows, ranks=1)
    assert {"streaming", "elementwise", "copy_h2d", "gemm fp32"} <= set(calibrated.shipped)
    for family, shipped in calibrated.shipped.items():
        assert shipped.mape < 0.01, family
        assert calibrated.errors[family].mape <= shipped.mape, family
    assert calibrated.profile.verdict is not None
    assert "worse" not in calibrated.profile.verdict.quality
