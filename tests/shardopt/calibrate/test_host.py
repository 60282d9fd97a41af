"""Near-empty models, and host overheads that come back from their iterations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest

from predictor.cost.collectives import OPS
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.predict import predict
from shardopt.calibrate.fitting import CalibratedProfile, Wiring
from shardopt.calibrate.host import (
    DEEPER,
    OP_COSTS,
    SHARDING,
    fit_cpu,
    iteration_points,
    near_empty,
)
from shardopt.calibrate.points import Point
from shardopt.calibrate.rows import Measurement, Origin
from tests.quick import quick_first
from tests.shardopt.calibrate.synthetic import iteration_rows, with_groups

pytest.importorskip("scipy")

BASE = load_hardware("cpu-gloo")


def machine(op_us: float, layer_op_us: float, iteration_us: float) -> HardwareProfile:
    overheads = {"op_us": op_us, "layer_op_us": layer_op_us, "iteration_us": iteration_us}
    return with_groups(BASE, overheads=overheads)


@cache
def usual_rows() -> tuple[Measurement, ...]:
    """Iterations whose messages all take 300 us."""
    return tuple(iteration_rows(machine(9.0, 6.0, 900.0), 300.0))


def fitted(rows: Sequence[Measurement]) -> SimpleNamespace:
    calibrated, latency_us = fit_cpu(
        CalibratedProfile(rows, Origin("m", "t"), Wiring(2), BASE, BASE)
    )
    costs = {name: getattr(calibrated.profile.overheads, name) for name in OP_COSTS}
    return SimpleNamespace(**costs, latency_us=latency_us, held_out=calibrated.errors["host"])


@pytest.mark.parametrize(
    ("op_us", "layer_op_us", "iteration_us", "latency_us"),
    quick_first(1, [(9.0, 6.0, 900.0, 300.0), (14.0, 14.0, 0.0, 0.0), (5.0, 0.0, 400.0, 80.0)]),
)
def test_known_costs_are_found(
    op_us: float,
    layer_op_us: float,
    iteration_us: float,
    latency_us: float,
) -> None:
    rows = iteration_rows(machine(op_us, layer_op_us, iteration_us), latency_us)
    fit = fitted(rows)
    assert fit.op_us == pytest.approx(op_us, rel=0.01)
    assert fit.layer_op_us == pytest.approx(layer_op_us, rel=0.02, abs=0.1)
    assert fit.iteration_us == pytest.approx(iteration_us, rel=0.02, abs=10.0)
    assert fit.latency_us == pytest.approx(dict.fromkeys(OPS, latency_us), rel=0.01, abs=1.0)
    assert fit.held_out.n == len(rows) // 2
    assert fit.held_out.fitted == fit.held_out.n - 1
    cpu = [r for r in rows if r.part == "cpu"]
    # the one row of more layers is all that tells a layer's ops from the iteration's
    alike = [not r.point.params["layers"] for r in cpu]
    assert abs(fit.held_out.errors[alike]).max() < 0.01


def test_a_row_is_held_out_of_the_fit_it_is_scored_by() -> None:
    """A wrong row has a large error of its own, and leaves the costs nearly alone."""
    rows = [*usual_rows()]
    where = next(i for i, r in enumerate(rows) if r.part == "cpu" and r.point.params["layers"] == 0)
    rows[where] = replace(rows[where], median_us=2.0 * rows[where].median_us)
    fit = fitted(rows)
    assert fit.held_out.errors[0] == pytest.approx(-0.5, abs=0.03)
    assert fit.op_us == pytest.approx(9.0, rel=0.1)


def test_waiting_that_a_pipeline_hides_says_nothing_of_messages() -> None:
    rows = usual_rows()
    base = [row for row in rows if row.point.params["pipeline"] == "base"]
    longer = [
        replace(row, median_us=10 * row.median_us)
        if row.part == "wall" and row.point.params["pipeline"] != "base"
        else row
        for row in rows
    ]
    assert len(base) < len(rows)
    assert fitted(longer).latency_us == pytest.approx(dict.fromkeys(OPS, 300.0), rel=0.01)


def test_an_iteration_shorter_than_its_main_thread_has_free_messages() -> None:
    rows = [
        replace(row, median_us=0.5 * row.median_us) if row.part == "wall" else row
        for row in iteration_rows(machine(9.0, 6.0, 900.0), 1.0)
    ]
    assert max(fitted(rows).latency_us.values()) < 1.0


def test_every_collective_has_a_latency_of_its_own() -> None:
    """A plain gloo all-reduce of two ranks takes four times an all-to-all."""
    latency_us = {"all_to_all": 560.0, "all_reduce": 2240.0, "reduce_scatter": 1260.0}
    latency_us["all_gather"] = latency_us["reduce_scatter"]
    fit = fitted(iteration_rows(machine(9.0, 6.0, 900.0), latency_us))
    assert fit.latency_us == pytest.approx(latency_us, rel=0.02)


POINTS = iteration_points(ranks=2)


def rebuilt(point: Point) -> tuple[Workload, ShardingPlan]:
    return near_empty(json.loads(json.dumps(point.params)))


@pytest.mark.parametrize("point", POINTS, ids=lambda p: "-".join(map(str, p.params.values())))
def test_the_plan_has_the_types_it_is_named_after(point: Point) -> None:
    workload, plan = rebuilt(point)
    assert len(workload.tables) == len(plan.tables) == point.params["tables"]
    types = {table.sharding_type for table in plan.tables.values()}
    assert types == {SHARDING[kind] for kind in point.params["plan"].split("+")}
    assert workload.train_pipeline == point.params["pipeline"]
    for table in workload.tables:
        shards = plan.tables[table.name].shards
        area = sum(shard.size[0] * shard.size[1] for shard in shards)
        copies = 2 if plan.tables[table.name].sharding_type is SHARDING["dp"] else 1
        assert area == copies * table.num_embeddings * table.embedding_dim


def test_the_deeper_model_is_the_same_otherwise_and_ranks_joined_by_a_link_are_hosts() -> None:
    shallow = next(p for p in POINTS if p.params["plan"] == "tw")
    deep = next(p for p in POINTS if p.params["layers"])
    few, many = rebuilt(shallow)[0], rebuilt(deep)[0]
    assert len(many.dense.top_mlp) == len(few.dense.top_mlp) + DEEPER
    assert many.tables == few.tables
    assert rebuilt(iteration_points(ranks=2, link_gbit_s=1.0)[0])[1].local_world_size == 1


@pytest.mark.parametrize(
    ("card", "plan", "layers", "pipeline", "measured_ms"),
    [
        ("h100-sxm", "tw", 0, "base", 2.952),
        ("h100-sxm", "tw+rw+cw", 0, "base", 4.917),
        ("h100-sxm", "tw", 8, "base", 4.057),
        ("h100-sxm", "tw", 0, "sparse_dist", 3.898),
        ("h200-sxm", "tw", 0, "base", 5.611),
        ("h200-sxm", "tw+rw+cw+dp", 0, "base", 11.448),
        ("h200-sxm", "tw", 8, "base", 7.555),
        ("h200-sxm", "tw+rw+dp", 0, "sparse_dist", 11.094),
    ],
)
def test_near_empty_iterations_of_two_gpu_hosts(
    card: str, plan: str, layers: int, pipeline: str, measured_ms: float
) -> None:
    """Iterations of TorchRec 1.7 that `calibrate --only host` timed on one rank of each machine."""
    hw = load_hardware(card)
    hw = hw.model_copy(update={"overheads": hw.overheads.model_copy(update={"batch_us": 0.0})})
    params = {"plan": plan, "tables": 8, "layers": layers, "pipeline": pipeline, "ranks": 1}
    workload, candidate = near_empty(params)
    topology = Topology.uniform(1, 1, hbm_bytes=hw.hbm_bytes, ddr_bytes=hw.ddr_bytes)
    prediction = predict(workload, topology, hw, candidate)
    assert prediction.iteration_ms == pytest.approx(measured_ms, rel=0.1)
