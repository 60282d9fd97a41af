"""Synthetic rows of a GPU whose constants are known become a profile over a base."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from predictor.cost.collectives import OPS, Collectives
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.topology import Topology
from predictor.predict import predict
from shardopt.calibrate import families, run
from shardopt.calibrate import points as design
from shardopt.calibrate.fitting import CalibratedProfile, FreeConstant
from shardopt.calibrate.gpu_lookups import launch_ms, launch_rows, predict_launches
from shardopt.calibrate.host import near_empty
from shardopt.calibrate.moves import predict_copies, predict_moves, predict_streaming
from shardopt.calibrate.points import Device, Point
from shardopt.calibrate.products import predict_gemms
from shardopt.calibrate.profile import build_profile, profile_text
from shardopt.calibrate.rows import (
    PARTS,
    CalibrationRows,
    Measurement,
    Origin,
    read_rows,
    row_of_samples,
)
from shardopt.cli.app import main
from shardopt.measure.sampling import Samples

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
DEVICE = {"sms": 114, "memory_gib": 79.1, "l2_mib": 50.0}


def machine() -> HardwareProfile:
    hw = BASE
    for group, constants in HIDDEN.items():
        for key, value in constants.items():
            hw = FreeConstant(group, key, 0.0, 0.0).put(hw, value)
    return hw.model_copy(update={"sms": DEVICE["sms"]})


TRUE = machine()


class Draws:
    """Rows with 3 % noise."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def row(
        self, point: Point, time_ms: float, part: str = "", noise: float = 0.03, **facts: object
    ) -> Measurement:
        seconds = float(time_ms * 1e-3 * np.exp(self.rng.normal(0.0, noise)))
        made = row_of_samples(point, Samples((seconds,) * 3), part, **facts)
        return replace(made, date="2026-01-02T03:04:05Z")

    def alone(self, points: list[Point]) -> Iterator[Measurement]:
        for point in points:
            p = point.params
            if "tables" in p:
                yield from self.lookup(point)
            elif point.family == "gemm":
                yield self.row(point, predict_gemms(TRUE, [self.row(point, 1.0)])[0])
            elif point.family == "elementwise":
                moved = (3 if p["op"] == "add" else 2) * p["bytes"]
                blank = self.row(point, 1.0, bytes_moved=moved)
                yield self.row(point, predict_moves(TRUE, [blank])[0], bytes_moved=moved)
            elif point.family in ("copy_h2d", "streaming"):
                law = predict_copies if point.family == "copy_h2d" else predict_streaming
                yield self.row(point, law(TRUE, [self.row(point, 1.0)])[0])
            else:
                yield self.host(point)

    def host(self, point: Point) -> Measurement:
        cost, what = TRUE.overheads, point.params["what"]
        ways = 2 * cost.launch_latency_us + TRUE.elementwise.floor_us
        us = {
            "op": OP_ON_HOST_US + 0.6 * cost.launch_us,
            "op_on_host": OP_ON_HOST_US,
            "round_trip": OP_ON_HOST_US + cost.launch_us + ways,
            "sync": cost.sync_us,
        }[what]
        return replace(
            row_of_samples(
                point, Samples((us * 1e-6,) * 3), **({"device": DEVICE} if what == "op" else {})
            ),
            date="2026-01-02T03:04:05Z",
        )

    def lookup(self, point: Point) -> Iterator[Measurement]:
        facts = []
        for table in point.params["tables"]:
            ids = point.params["batch"] * table["pooling"]
            facts.append([table["rows"], table["dim"], point.params["batch"], ids, ids / 2])
        for part in PARTS[point.family]:
            blank = self.row(point, 1.0, part, tables=facts)
            yield self.row(
                point, predict_launches(TRUE, launch_rows([blank]))[0], part, tables=facts
            )

    def together(self, ranks: int, hosts: int = 1) -> Iterator[Measurement]:
        for point in families.together(design.QUICK, ranks, hosts=hosts):
            p = point.params
            if point.family == "collective":
                yield self.collective(point)
            elif point.family == "iteration":
                workload, plan = near_empty(p)
                topology = Topology.uniform(
                    plan.world_size, plan.local_world_size, hbm_bytes=2**36, ddr_bytes=2**36
                )
                time = predict(workload, topology, TRUE, plan).iteration_ms
                for part in PARTS["iteration"]:
                    yield self.row(point, time, part)
            else:
                yield self.row(point, 1.0)

    def collective(self, point: Point) -> Measurement:
        p = point.params
        op = p["op"].removesuffix("_uneven")
        if op == "issue":
            return self.row(point, TRUE.overheads.collective_us * 1e-3)
        local = p["ranks"] // p.get("hosts", 1)
        topology = Topology.uniform(p["ranks"], local, hbm_bytes=2**36, ddr_bytes=2**36)
        return self.row(point, float(Collectives(TRUE, topology)._time(op, p["bytes"], "world")))


@pytest.fixture(scope="module")
def rows() -> list[Measurement]:
    draws = Draws()
    alone = draws.alone(families.alone(SIZE, gpu=GPU))
    return [*alone, *draws.together(ranks=4)]


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
            made = FreeConstant(group, key, 0.0, 0.0).value(found.profile)
            assert made == pytest.approx(value, rel=0.2), key
    cost = found.profile.overheads
    known = {"launch_us": 6.0, "launch_latency_us": 3.0, "sync_us": 11.0, "collective_us": 45.0}
    assert {key: getattr(cost, key) for key in known} == pytest.approx(known, rel=0.06)
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
            said = group.provenance
            assert said.kind == "measured", name
            assert said.versions == ORIGIN.versions
            assert said.n
            assert said.error is not None
            assert said.error.n
        else:
            assert group == BASE.groups[name], name
    assert "inter" not in text


def test_a_family_without_rows_is_the_bases_and_not_in_the_file(
    rows: list[Measurement], tmp_path: Path
) -> None:
    few = [r for r in rows if r.point.family in ("streaming", "elementwise", "gemm")]
    made = built(few)
    assert made.groups == {"memory", "elementwise", "gemm"}
    path = tmp_path / "few.yaml"
    path.write_text(profile_text(made, "h100-sxm"))
    loaded = load_hardware(str(path))
    assert loaded.embedding == BASE.embedding
    assert loaded.overheads == BASE.overheads
    assert loaded.collectives == BASE.collectives


def test_constants_that_no_row_tells_are_named(rows: list[Measurement]) -> None:
    fused = [r for r in rows if r.point.family == "lookup" and "kernel" not in r.point.params]
    made = built(fused)
    said = made.profile.embedding.provenance.source
    host = ("prefetch_ns_per_lookup", "uvm_both_ways", "uvm_efficiency", "uvm_l1_kib")
    assert ", ".join(f"embedding.{name}" for name in host) in said
    base = load_hardware("h100-sxm").embedding.model_dump()
    assert made.profile.embedding.model_dump()["uvm_efficiency"] == base["uvm_efficiency"]


def test_the_command_writes_a_file_over_the_base_of_its_device(
    rows: list[Measurement],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("fbgemm_gpu")
    few = [r for r in rows if r.point.family in ("streaming", "elementwise", "gemm")]

    def measure(asked: run.CalibrationSettings, say: run.Say) -> CalibrationRows:
        assert (asked.backend, asked.ranks, asked.hosts) == ("nccl", 2, 1)
        file = CalibrationRows(asked.rows, ORIGIN)
        file.rows = few
        return file

    monkeypatch.setattr(run, "check_calibration", lambda *_: None)
    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(run, "points_of", lambda _: ([r.point for r in few], []))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")
    path = tmp_path / "here.yaml"
    assert main(["calibrate", "--backend", "nccl", "-o", str(path), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["errors"]) >= {"streaming", "gemm bf16"}
    made, base = load_hardware(str(path)), load_hardware("h200-sxm")
    assert made.memory.hbm_gb_s == pytest.approx(2700.0, rel=0.05)
    assert made.embedding == base.embedding
    assert made.collectives == base.collectives


def test_no_rows_make_no_profile() -> None:
    with pytest.raises(InputError, match="no point is measured"):
        built([])


@pytest.mark.slow
def test_lookups_of_the_users_model_join_the_fit(rows: list[Measurement]) -> None:
    """Half of them: the others are held out, and predicted better for it."""
    draws = Draws()
    own = []
    for i in range(12):
        point = Point("model_lookup", {"table": f"t{i}", "ranks": 4}, test=i % 2 == 1)
        facts = {"tables": [[200_000, 64, 4096, 40_960.0, 30_000.0]], "dtype": "fp32"}
        for part in PARTS["model_lookup"]:
            blank = draws.row(point, 1.0, part, **facts)
            slow = 1.2 * predict_launches(TRUE, launch_rows([blank]))[0]
            own.append(draws.row(point, slow, part, **facts))
    plain = [r for r in rows if r.point.family == "lookup" and "kernel" not in r.point.params]
    made = built([*plain, *own])
    assert made.errors["model's lookup forward"].n == 6
    assert {r.point.test for r in own} == {False, True}
    without = built([*plain, *(r for r in own if r.point.test)])
    for part in PARTS["model_lookup"]:
        label = f"model's lookup {part}"
        assert made.errors[label].mape < without.errors[label].mape


def test_hosts_of_several_ranks_tell_both_links() -> None:
    draws = Draws()
    made = built(list(draws.together(ranks=8, hosts=2)), ranks=8, hosts=2)
    assert made.groups == {"collectives.intra", "collectives.inter"}
    topology = Topology.uniform(8, 4, hbm_bytes=2**36, ddr_bytes=2**36)
    sizes = np.array([2.0**14, 2.0**20, 2.0**24])
    for op in OPS:
        times = [Collectives(hw, topology)._time(op, sizes, "world") for hw in (made.profile, TRUE)]
        assert times[0] == pytest.approx(times[1], rel=0.15), op


@pytest.mark.parametrize("wrong", ["nan", "0.000", "-3.000", "inf"])
def test_a_wrong_time_is_refused_with_its_line(
    rows: list[Measurement], tmp_path: Path, wrong: str
) -> None:
    file = CalibrationRows(tmp_path / "gpu.rows.csv", ORIGIN)
    for row in rows[:4]:
        file.append(row)
    lines = file.path.read_text().splitlines()
    lines[2] = lines[2].replace(f"{rows[1].median_us:.3f}", wrong, 1)
    file.path.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=r"gpu\.rows\.csv:3: .*time is not above 0"):
        read_rows(file.path)


@pytest.mark.parametrize("wrong", ["NaN", "0", "-5"])
def test_a_wrong_fact_is_refused_with_its_line(
    rows: list[Measurement], tmp_path: Path, wrong: str
) -> None:
    row = next(r for r in rows if r.point.family == "lookup")
    file = CalibrationRows(tmp_path / "gpu.rows.csv", ORIGIN)
    file.append(row)
    size = str(row.facts["tables"][0][0])
    text = file.path.read_text().replace(f"[[{size},", f"[[{wrong},")
    file.path.write_text(text)
    with pytest.raises(InputError, match=r"gpu\.rows\.csv:2: not a calibration row: .*facts hold"):
        read_rows(file.path)


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
