"""Host overheads come back from near-empty iterations of a machine that has them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from predictor.cost.collectives import OPS
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from shardopt.calibrate.profile.host import HostCosts, host_costs
from shardopt.calibrate.rows import Measurement
from tests.quick import quick_first

pytest.importorskip("scipy")

Rows = Callable[..., list[Measurement]]
BASE = load_hardware("cpu-gloo")


def machine(op_us: float, layer_op_us: float, iteration_us: float) -> HardwareProfile:
    known = {"op_us": op_us, "layer_op_us": layer_op_us, "iteration_us": iteration_us}
    return BASE.model_copy(update={"overheads": BASE.overheads.model_copy(update=known)})


def fitted(rows: Sequence[Measurement]) -> HostCosts:
    cpu, wall = ([r for r in rows if r.part == part] for part in ("cpu", "wall"))
    return host_costs(cpu, wall, BASE)


@pytest.mark.parametrize(
    ("op_us", "layer_op_us", "iteration_us", "latency_us"),
    quick_first(1, [(9.0, 6.0, 900.0, 300.0), (14.0, 14.0, 0.0, 0.0), (5.0, 0.0, 400.0, 80.0)]),
)
def test_known_costs_are_found(
    iteration_rows: Rows,
    op_us: float,
    layer_op_us: float,
    iteration_us: float,
    latency_us: float,
) -> None:
    rows = iteration_rows(machine(op_us, layer_op_us, iteration_us), latency_us)
    found = fitted(rows)
    assert found.op_us == pytest.approx(op_us, rel=0.01)
    assert found.layer_op_us == pytest.approx(layer_op_us, rel=0.02, abs=0.1)
    assert found.iteration_us == pytest.approx(iteration_us, rel=0.02, abs=10.0)
    assert found.latency_us == pytest.approx(dict.fromkeys(OPS, latency_us), rel=0.01, abs=1.0)
    assert found.held_out.n == len(rows) // 3
    assert found.held_out.fitted == found.held_out.n - 1
    cpu = [r for r in rows if r.part == "cpu"]
    # the one row of more layers is all that tells a layer's ops from the iteration's
    alike = [not r.point.params["layers"] for r in cpu]
    assert abs(found.held_out.errors[alike]).max() < 0.01


def test_a_row_is_held_out_of_the_fit_it_is_scored_by(iteration_rows: Rows) -> None:
    """A wrong row has a large error of its own, and leaves the costs nearly alone."""
    rows = iteration_rows(machine(9.0, 6.0, 900.0), 300.0)
    where = next(i for i, r in enumerate(rows) if r.part == "cpu" and r.point.params["layers"] == 0)
    rows[where] = replace(rows[where], median_us=2.0 * rows[where].median_us)
    found = fitted(rows)
    assert found.held_out.errors[0] == pytest.approx(-0.5, abs=0.03)
    assert found.op_us == pytest.approx(9.0, rel=0.1)


def test_noise_of_the_rows_is_noise_of_the_errors(iteration_rows: Rows) -> None:
    draw = random.Random(0)
    rows = [
        replace(row, median_us=row.median_us * draw.uniform(0.97, 1.03))
        for row in iteration_rows(machine(9.0, 6.0, 900.0), 300.0)
    ]
    found = fitted(rows)
    assert found.op_us == pytest.approx(9.0, rel=0.25)
    assert 0.005 < np.median(abs(found.held_out.errors)) < 0.04


def test_waiting_that_a_pipeline_hides_says_nothing_of_messages(iteration_rows: Rows) -> None:
    rows = iteration_rows(machine(9.0, 6.0, 900.0), 300.0)
    base = [row for row in rows if row.point.params["pipeline"] == "base"]
    longer = [
        replace(row, median_us=10 * row.median_us)
        if row.part == "wall" and row.point.params["pipeline"] != "base"
        else row
        for row in rows
    ]
    assert len(base) < len(rows)
    assert fitted(longer).latency_us == fitted(rows).latency_us


def test_an_iteration_shorter_than_its_main_thread_has_free_messages(iteration_rows: Rows) -> None:
    rows = [
        replace(row, median_us=0.5 * row.median_us) if row.part == "wall" else row
        for row in iteration_rows(machine(9.0, 6.0, 900.0), 1.0)
    ]
    assert max(fitted(rows).latency_us.values()) < 1.0


def test_every_collective_has_a_latency_of_its_own(iteration_rows: Rows) -> None:
    """A plain gloo all-reduce of two ranks takes four times an all-to-all."""
    known = {"all_to_all": 560.0, "all_reduce": 2240.0, "reduce_scatter": 1260.0}
    known["all_gather"] = known["reduce_scatter"]
    found = fitted(iteration_rows(machine(9.0, 6.0, 900.0), known))
    assert found.latency_us == pytest.approx(known, rel=0.02)
