"""Synthetic rows of a known machine become a profile that predicts that machine, and is judged."""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from predictor import units
from predictor.cost.collectives import OPS, latency_ms, transfer_ms
from predictor.cost.loads import Load, ShardLoads
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import CpuEmbedding, HardwareProfile, Verdict
from predictor.model.plan import ComputeKernel, Shard, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.api.setting import Machine, resolve
from shardopt.calibrate import Group, families, lookups
from shardopt.calibrate import points as design
from shardopt.calibrate.collectives import collective_points
from shardopt.calibrate.fitting import CalibratedProfile, HeldOut, Wiring, source_on
from shardopt.calibrate.host import _layer_op_us
from shardopt.calibrate.points import Point
from shardopt.calibrate.products import BATCH_LAYOUTS
from shardopt.calibrate.profile import (
    build_profile,
    elsewhere_notes,
    judge,
    measured_on,
    profile_text,
)
from shardopt.calibrate.rows import Accepted, Measurement, Origin, read_rows
from shardopt.cli.app import app
from tests.quick import seeds
from tests.shardopt.calibrate.synthetic import (
    CALL_US,
    ISSUE_US,
    LAYER_OP_US,
    STEP_US,
    collective_rows,
    cpu_rows,
    iteration_rows,
    row,
    with_groups,
)

pytest.importorskip("scipy")

ORIGIN = Origin("a made-up machine", "torch 0")
BASE = load_hardware("cpu-gloo")
ROOT = Path(__file__).parents[3]
MODEL = ROOT / "configs" / "models" / "dlrm_criteo_kaggle.yaml"
UNPOOLED = {name: 0.7 for names in lookups.UNPOOLED.values() for name in names}
RATES = {
    **{"batches": dict.fromkeys(BATCH_LAYOUTS, (0.8, 0.5, 1.3, 0.02))},
    **{"attention_head_us": (4.0, 8.0), "attention_forward": 0.6, "attention_backward": 0.5},
}
LEVELS = ("hbm_gb_s", "l2_gb_s", "ddr_gb_s", "host_link_gb_s")
MACHINES: list[dict[str, dict[str, Any]]] = [
    {
        "memory": dict.fromkeys(LEVELS, 16.0),
        "elementwise": {
            **{"columns": 0.45, "bucketize_ns_per_id": 3.0, "gather_ns_per_element": 1.5},
            **{"sliced_ns_per_element": 0.6, "turned_ns_per_element": 1.7},
        },
        "gemm": {
            **{"tflops": {"fp32": 0.12, "bf16": 0.3}, "prologue_k": 12.0},
            **{"batched_us": 0.2, "batched_share": 0.5, **RATES},
        },
        "embedding": {
            **{"backward_dense_table_us": 300.0, "backward_dense_ns_per_weight": 0.4},
            **{"backward_dense_ns_per_lookup": 6.0, "backward_dense_ns_per_lookup_dim": 0.05},
            **{"backward_dense_ns_per_row_dim": 0.8, **UNPOOLED},
        },
    },
    {
        "memory": dict.fromkeys(LEVELS, 40.0),
        "elementwise": {
            **{"columns": 1.0, "bucketize_ns_per_id": 12.0, "gather_ns_per_element": 8.0}
        },
        "gemm": {"batched_us": 0.6, "batched_share": 0.15, **RATES},
        "embedding": {"forward_ns_per_lookup_dim": 0.2, "backward_ns_per_row": 900.0},
    },
]
TRUE = with_groups(BASE, **MACHINES[0])


def rows_of(true: HardwareProfile) -> list[Measurement]:
    wires = collective_rows(true, collective_points(design.QUICK, 2))
    return cpu_rows(true, families.alone(design.QUICK)) + wires


@pytest.fixture(scope="module")
def rows() -> list[Measurement]:
    return rows_of(TRUE)


@pytest.mark.parametrize("machine", MACHINES)
def test_constants_come_back_from_their_rows(machine: dict[str, dict[str, Any]]) -> None:
    calibrated = build_profile(rows_of(with_groups(BASE, **machine)), ORIGIN, BASE, "mine", 2, 24.0)
    for group, constants in machine.items():
        fitted = getattr(calibrated.profile, group).model_dump()
        for name, value in constants.items():
            for key in value if isinstance(value, dict) else ():
                assert fitted[name][key] == pytest.approx(value[key], rel=2e-3), (name, key)
            if not isinstance(value, dict):
                assert fitted[name] == pytest.approx(value, rel=2e-3), name
    assert {"lookup forward", "lookup backward", "gemm fp32", *OPS} <= set(calibrated.errors)
    for family, error in calibrated.errors.items():
        assert error.n
        assert error.mape < (0.08 if family in OPS else 0.01), family
    overheads = calibrated.profile.overheads
    assert calibrated.profile.elementwise.floor_us == pytest.approx(CALL_US)
    assert len(calibrated.profile.elementwise.math_ns) == 10
    assert overheads.collective_us == pytest.approx(ISSUE_US)
    assert overheads.step_us == pytest.approx(STEP_US, rel=1e-2)
    assert _layer_op_us(calibrated) == pytest.approx(LAYER_OP_US, rel=1e-2)
    op_costs = (overheads.op_us, overheads.layer_op_us)
    assert op_costs == (BASE.overheads.op_us, BASE.overheads.layer_op_us), "no iterations were run"


def test_the_profile_is_a_file_that_plan_takes(rows: list[Measurement], tmp_path: Path) -> None:
    calibrated = build_profile(rows, ORIGIN, BASE, "mine", 2, 24.0)
    path = tmp_path / "mine.yaml"
    path.write_text(profile_text(calibrated))
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
    words = ["plan", str(MODEL), "--gpus", "2", "--hardware", str(path), "--effort", "0.005"]
    done = CliRunner().invoke(app, [*words, "--json", "--quiet"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["hardware"] == str(path)


def test_a_link_between_hosts_is_fitted_from_its_own_rows_alone() -> None:
    points = [*collective_points(design.QUICK, 2), *collective_points(design.QUICK, 2, 1.0)]
    both = collective_rows(TRUE, points)
    profile = build_profile(both, ORIGIN, BASE, "mine", 2, 24.0, 1.0).profile
    assert (profile.gpus_per_host, profile.nvlink_domain) == (1, 1)
    assert profile.collectives.intra == BASE.collectives.intra
    inter = profile.collectives.inter
    assert inter.provenance.kind == "measured"
    assert inter.nic_gbit_s == 1.0
    sizes = np.array([2.0**20])
    for op in OPS:
        fitted, true = (getattr(wire, op) for wire in (inter, TRUE.collectives.inter))
        times = [latency_ms(c, 2) + float(transfer_ms(c, sizes, 2)[0]) for c in (fitted, true)]
        assert times[0] == pytest.approx(times[1], rel=0.05)
    within = build_profile(both, ORIGIN, BASE, "mine", 2, 24.0).profile
    assert within.overheads.collective_us == pytest.approx(ISSUE_US)
    assert within.collectives.inter == BASE.collectives.inter
    assert within.collectives.intra.provenance.kind == "measured"


@pytest.mark.parametrize("link_gbit_s", [None, 1.0])
def test_iterations_give_the_host_costs_and_what_the_curves_hold_of_them(
    link_gbit_s: float | None,
) -> None:
    """The latency of a curve is that of iterations; a row split's two collectives share theirs."""
    costs = {"op_us": 8.0, "layer_op_us": 5.0, "iteration_us": 700.0, "collective_us": 0.0}
    true = with_groups(TRUE, overheads=costs)
    name, among = ("intra", {}) if link_gbit_s is None else ("inter", {"link_gbit_s": link_gbit_s})
    wire = getattr(true.collectives, name)
    in_iterations = {
        "all_to_all": 150.0,
        "all_reduce": 600.0,
        "reduce_scatter": 400.0,
        "all_gather": 400.0,
    }
    points = collective_points(design.QUICK, 2, link_gbit_s)
    rows = collective_rows(true, points) + iteration_rows(true, in_iterations, **among)
    calibrated = build_profile(rows, ORIGIN, TRUE, "mine", 2, 24.0, link_gbit_s)
    overheads = calibrated.profile.overheads
    assert overheads.provenance.kind == "measured"
    assert {cost: getattr(overheads, cost) for cost in costs} == pytest.approx(costs, rel=0.02)
    assert "host" in calibrated.errors
    sizes = np.array([2.0**20])
    for op in OPS:
        fitted = getattr(getattr(calibrated.profile.collectives, name), op)
        assert fitted.latency_us == pytest.approx(in_iterations[op], rel=0.05), op
        moved = (float(transfer_ms(curve, sizes, 2)[0]) for curve in (fitted, getattr(wire, op)))
        assert next(moved) == pytest.approx(next(moved), rel=0.05), op


@pytest.mark.parametrize(("small_us", "floor_us"), [(2.0, 2.0), (50.0, CALL_US), (None, CALL_US)])
def test_the_floor_of_a_kernel_is_at_most_a_small_op_in_a_loop(
    rows: list[Measurement], small_us: float | None, floor_us: float
) -> None:
    small_rows = [r for r in rows if r.point.family == "elementwise"]
    if small_us is not None:
        small_rows.append(row(Point("host", {"what": "op"}), units.us(small_us)))
    calibrated = build_profile(small_rows, ORIGIN, BASE, "mine", 2, 24.0)
    assert calibrated.profile.elementwise.floor_us == pytest.approx(floor_us, rel=1e-3)


def test_one_group_is_fitted_and_written_over_the_base(
    rows: list[Measurement], tmp_path: Path
) -> None:
    """Whatever other rows the file holds."""
    true = with_groups(TRUE, overheads={"op_us": 8.0, "layer_op_us": 5.0, "iteration_us": 700.0})
    all_rows = [*rows, *iteration_rows(true, 100.0)]
    calibrated = build_profile(all_rows, ORIGIN, BASE, "mine", 2, 24.0, only=Group.HOST)
    assert calibrated.groups == {"overheads"}
    path = tmp_path / "mine.yaml"
    path.write_text(profile_text(calibrated, "cpu-gloo"))
    loaded = load_hardware(str(path))
    assert loaded.overheads.op_us == pytest.approx(8.0, rel=0.1)
    assert loaded.overheads.provenance.kind == "measured"
    for name, group in loaded.groups.items():
        assert name == "overheads" or group == BASE.groups[name], name
    with pytest.raises(InputError, match="no point is measured"):
        build_profile(rows[:0], ORIGIN, BASE, "mine", 2, 24.0, only=Group.GEMM)


def some(count: int, family: str = "gemm", load: float = 1.0) -> list[Measurement]:
    return [replace(row(Point(family, {"m": i}), 1.0), load=load) for i in range(count)]


def errors(**by_family: float) -> dict[str, HeldOut]:
    return {name: HeldOut(np.full(4, error), 9) for name, error in by_family.items()}


GOOD = Accepted(some(19) + some(19, "collective", load=2.0), [], 0)
MINE, SHIPPED = errors(gemm=0.05, all_reduce=0.05), errors(gemm=0.1, all_reduce=0.1)


def test_nothing_stands_against_a_quiet_calibration() -> None:
    verdict = judge(GOOD, {"gemm": 0.03}, MINE, SHIPPED, 2)
    assert verdict == Verdict(quality="quiet")


@pytest.mark.parametrize(
    ("accepted", "drift", "why"),
    [
        (GOOD, 0.2, "reference gemm moved by 20%"),
        (Accepted(some(18), some(2), 2), 0.0, "2 of 20 rows of one rank were refused"),
        (
            Accepted(some(19) + some(9, "collective"), some(1, "iteration"), 2),
            0.0,
            "1 of 10 rows of all ranks were refused",
        ),
        (
            Accepted(some(19) + some(9, "collective", load=3.1), [], 0),
            0.0,
            "load average of other work 1.1 while all ranks measured",
        ),
        (
            Accepted(some(19, load=2.0), [], 0),
            0.0,
            "load average of other work 1.0 while one rank measured",
        ),
    ],
)
def test_a_doubt_makes_it_usable(accepted: Accepted, drift: float, why: str) -> None:
    verdict = judge(accepted, {"gemm": drift, "all_to_all": 0.0}, MINE, SHIPPED, 2)
    assert verdict == Verdict(quality="usable", why=(why,))


def test_a_larger_error_of_one_kind_makes_it_worse_whatever_the_other_is() -> None:
    measured = errors(gemm=0.01, all_reduce=0.2, host=0.9)
    verdict = judge(GOOD, {"gemm": 0.2}, measured, SHIPPED, 2)
    assert verdict.quality == "worse than the shipped one"
    assert verdict.why == (
        "held-out error of collectives 20.0%, of the shipped one 10.0%",
        "reference gemm moved by 20%",
    )


def judged(verdict: Verdict) -> CalibratedProfile:
    named = BASE.model_copy(update={"verdict": verdict, "name": "mine"})
    return CalibratedProfile([], ORIGIN, Wiring(2), BASE, named)


def test_a_profile_keeps_its_verdict_and_those_who_plan_with_it_hear_it(tmp_path: Path) -> None:
    notes = {}
    for quality in ("quiet", "usable", "worse than the shipped one"):
        verdict = Verdict(quality=quality, why=("the cat sat on it",))
        calibrated = judged(verdict)
        path = tmp_path / "mine.yaml"
        for base in (None, "cpu-gloo"):
            path.write_text(profile_text(calibrated, base))
            assert load_hardware(str(path)).verdict == verdict
        notes[quality] = resolve(MODEL, Machine(gpus=2, hardware=str(path))).notes
    assert not any("calibration" in note for note in notes["quiet"])
    for quality in ("usable", "worse than the shipped one"):
        (note,) = (note for note in notes[quality] if "calibration" in note)
        assert f"hardware mine: its calibration is {quality} (the cat sat on it)" in note


def test_a_file_on_top_of_a_judged_profile_has_no_verdict(tmp_path: Path) -> None:
    verdict = Verdict(quality="usable")
    calibrated = judged(verdict)
    (tmp_path / "mine.yaml").write_text(profile_text(calibrated))
    (tmp_path / "other.yaml").write_text("base: mine.yaml\n")
    assert load_hardware(str(tmp_path / "other.yaml")).verdict is None


def test_a_measured_profile_names_its_machine_and_runtime_where_they_are_others() -> None:
    published = load_hardware("h100-sxm")
    assert published.verdict is None
    (machine,) = measured_on(BASE)
    assert measured_on(published) == ()
    assert BASE.embedding.provenance.source.startswith(source_on(machine))
    assert (
        elsewhere_notes(BASE, machine, "tuned") == elsewhere_notes(published, "any", "plain") == []
    )
    where, how = elsewhere_notes(BASE, "a toaster, 1 cores, 2 GiB, Linux", "plain")
    assert "this is a toaster" in where
    assert machine in where
    assert "cpu-gloo was measured in the tuned runtime" in how


ROWS = ROOT / "configs/bench/against-torchrec/2026-11-23-plain-published/calibration.rows.csv"
"""Of all families."""
GOLDEN = ROOT / "tests" / "golden" / "calibrated.yaml"


def test_committed_rows_give_the_profile_that_they_gave() -> None:
    origin, rows = read_rows(ROWS)
    profile = yaml.safe_load(profile_text(build_profile(rows, origin, BASE, "golden", 2, 24.0)))
    golden = yaml.safe_load(GOLDEN.read_text(encoding="utf-8"))
    assert dict(numbers(profile)) == pytest.approx(dict(numbers(golden)), rel=1e-3)


def numbers(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a document by its path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from numbers(inner, f"{path}/{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from numbers(inner, f"{path}/{i}")
    elif isinstance(value, int | float):
        yield path, float(value)


@pytest.mark.parametrize("seed", seeds(range(2), 8))
def test_whatever_points_there_are_give_a_profile(seed: int, tmp_path: Path) -> None:
    """A calibration ends early: some points of some families, of each a few parts."""
    origin, rows = read_rows(ROWS)
    draw = random.Random(seed)
    share = {row.point.family: draw.random() ** 2 for row in rows}
    sampled = [row for row in rows if draw.random() < share[row.point.family]]
    calibrated = build_profile(
        sampled, origin, BASE, "some", 2, 24.0, missing=len(rows) - len(sampled)
    )
    assert calibrated.profile.verdict.quality != "quiet"
    (tmp_path / "some.yaml").write_text(profile_text(calibrated))
    assert load_hardware(str(tmp_path / "some.yaml")).name == "some"


def model_of(*widths: int) -> Workload:
    tables = tuple(
        Table(f"t{i}", 100_000, width, (Feature(f"f{i}", 8.0),)) for i, width in enumerate(widths)
    )
    dense = DenseArch(4, (widths[0],), (1,), interaction="concat")
    return Workload("small", 512, tables, dense, sha256="abc")


def lookup_ms(
    hardware: HardwareProfile, model: Workload, index: int, column: Load = Load.FORWARD_MS
) -> float:
    """Return the lookup time of a whole table for the samples of two ranks."""
    topology = Topology.uniform(2, 2, hbm_bytes=2**34, ddr_bytes=2**34)
    table = model.tables[index]
    shape = (table.num_embeddings, table.embedding_dim)
    plan = TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED, (Shard(0, (0, 0), shape),))
    _, loads = ShardLoads(model, topology, hardware).of_table(index, plan)
    return float(loads[0][column])


def test_tables_of_the_model_are_priced_as_measured() -> None:
    """And those that there was no time for by the kernel model, near which they are shrunk."""
    model, base = model_of(32, 32, 128), load_hardware("cpu-gloo")
    assert isinstance(base.embedding, CpuEmbedding)
    points = lookups.model_points(model, 2)[:1]  # of three tables, one is measured
    plain = [lookup_ms(base, model, i) for i in range(3)]
    slower = 1.6
    rows = [
        row(points[0], slower * lookup_ms(base, model, 0, column) + units.us(launch_us), part)
        for part, column, launch_us in (
            ("forward", Load.FORWARD_MS, base.embedding.forward_us),
            ("backward", Load.BACKWARD_MS, base.embedding.backward_us),
        )
    ]
    profile = build_profile(rows, ORIGIN, base, "new", 2, 8.0, missing=5, model=model).profile
    ratios = [lookup_ms(profile, model, i) / plain[i] for i in range(3)]
    assert ratios[0] == pytest.approx(slower, rel=0.08)
    assert 1 < ratios[2] < ratios[1] < ratios[0]
    renamed = replace(model, name="other")
    assert lookup_ms(profile, renamed, 0) < slower * plain[0]  # factors of tables are of one model
    assert profile.learned is not None
    assert {f.table for f in profile.learned.factors} == {None, "t0"}
