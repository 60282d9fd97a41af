"""Synthetic rows of a known machine become a profile that predicts that machine."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from predictor import fit_cpu, units
from predictor.collectives import bus_factor, latency_ms, transfer_ms
from predictor.errors import InputError
from predictor.hardware import CpuEmbedding, HardwareProfile, load_hardware
from predictor.kernels.gemm import gemm_ms
from shardopt.bench.timing import Samples
from shardopt.calibrate import design
from shardopt.calibrate.design import Point
from shardopt.calibrate.profile import GRAPH_OP_IN_SMALL_OPS, build_profile, profile_text
from shardopt.calibrate.rows import Measured, Origin, measured
from shardopt.cli.app import app

pytest.importorskip("scipy")

ORIGIN = Origin("a made-up machine", "torch 0")
TRUE = load_hardware("cpu-gloo").model_copy(
    update={"gemm": load_hardware("cpu-gloo").gemm.model_copy(update={"floor_us": 20.0})}
)
ISSUE_US = 60.0
MODEL = Path(__file__).parents[3] / "configs" / "models" / "dlrm_criteo_kaggle.yaml"


def row(point: Point, time_ms: float, part: str = "", **facts: object) -> Measured:
    made = measured(point, Samples((time_ms * 1e-3,) * 3), part, **facts)
    made.__dict__["date"] = "2026-01-02T03:04:05Z"
    return made


def synthetic_rows(true: HardwareProfile) -> list[Measured]:
    law = true.embedding
    assert isinstance(law, CpuEmbedding)
    rows = []
    rng = np.random.default_rng(0)
    for point in design.kernel_points(design.QUICK):
        p = point.params
        if point.family == "lookup":
            tables = []
            for t in p["tables"]:
                ids = p["batch"] * t["pooling"]
                distinct = min(ids, t["rows"]) * rng.uniform(0.1, 1.0)
                tables.append([t["rows"], t["dim"], p["batch"], ids, distinct])
            given = fit_cpu.TbeRows([[fit_cpu.Table(*t) for t in tables]], np.ones(1))
            for part, names in (("forward", fit_cpu.FORWARD), ("backward", fit_cpu.BACKWARD)):
                time = float(fit_cpu.predict_lookups(law, given, names)[0])
                rows.append(row(point, time, part, tables=tables))
        elif point.family == "gemm":
            rows.append(row(point, gemm_ms(true, p["m"], p["n"], p["k"], p["dtype"])))
        elif point.family == "elementwise":
            time = units.us(true.elementwise.floor_us) + 2 * p["bytes"] / true.memory.hbm
            rows.append(row(point, time, bytes_moved=2 * p["bytes"]))
        elif point.family == "host":
            rows.append(row(point, 0.005))
    return rows + collective_rows(true)


def collective_rows(true: HardwareProfile) -> list[Measured]:
    rows = []
    for point in design.collective_points(design.QUICK, 2):
        op = point.params["op"].removesuffix("_uneven")
        if op == "issue":
            rows.append(row(point, units.us(ISSUE_US)))
            continue
        curve = getattr(true.collectives.intra, op)
        bus = np.array([point.params["bytes"] * bus_factor(op, 2)])
        time = latency_ms(curve, 2) + float(transfer_ms(curve, bus, 2)[0])
        rows.append(row(point, time + units.us(ISSUE_US)))
    return rows


@pytest.fixture(scope="module")
def rows() -> list[Measured]:
    return synthetic_rows(TRUE)


def test_held_out_errors_of_exact_rows_are_small(rows: list[Measured]) -> None:
    found = build_profile(rows, ORIGIN, load_hardware("cpu-gloo"), "mine", 2, 24.0)
    bounds = {"lookup": 1e-3, "elementwise": 1e-3, "gemm": 0.03, "all": 0.08, "reduce": 0.08}
    assert {"lookup forward", "lookup backward", "gemm fp32", "elementwise"} <= set(found.errors)
    assert set(design.COLLECTIVE_OPS) <= set(found.errors)
    for family, error in found.errors.items():
        bound = next(b for start, b in bounds.items() if family.startswith(start))
        assert error.n == 0 or error.mape < bound, family
    overheads = found.profile.overheads
    assert overheads.collective_us == pytest.approx(ISSUE_US)
    assert overheads.op_us == pytest.approx(5.0 * GRAPH_OP_IN_SMALL_OPS)


def test_the_profile_is_a_file_that_plan_takes(rows: list[Measured], tmp_path: Path) -> None:
    found = build_profile(rows, ORIGIN, load_hardware("cpu-gloo"), "mine", 2, 24.0)
    path = tmp_path / "mine.yaml"
    path.write_text(profile_text(found.profile))
    loaded = load_hardware(str(path))
    assert loaded.name == "mine"
    assert loaded.hbm_gib == 12
    for group in ("embedding", "gemm", "elementwise", "memory", "collectives.intra"):
        provenance = loaded.groups[group].provenance
        assert provenance.kind == "measured", group
        assert provenance.n
        assert provenance.range
        assert provenance.date == "2026-01-02"
    ranges = loaded.groups["collectives.intra"].provenance.range
    assert ranges["ranks"] == (2, 2)
    words = ["plan", str(MODEL), "--gpus", "2", "--hardware", str(path), "--effort", "0.05"]
    done = CliRunner().invoke(app, [*words, "--json", "--quiet"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["hardware"] == str(path)


def test_too_few_rows_fit_nothing(rows: list[Measured]) -> None:
    with pytest.raises(InputError, match="too few to fit anything"):
        build_profile(rows[:3], ORIGIN, load_hardware("cpu-gloo"), "mine", 2, 24.0)


def test_a_family_that_was_not_measured_stays_as_it_was(rows: list[Measured]) -> None:
    base = load_hardware("cpu-gloo")
    found = build_profile(collective_rows(TRUE), ORIGIN, base, "mine", 2, 24.0)
    assert found.profile.embedding == base.embedding
    assert found.profile.collectives.intra.provenance.kind == "measured"
