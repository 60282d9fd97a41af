"""Ablations take out what they say, and drift scales what it should."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lab.validate.tasks.ablations import (
    ABLATIONS,
    FULL,
    WithoutRepeats,
    busiest_ms,
    constant_bandwidth,
    period_ms,
)
from lab.validate.tasks.task_prediction import correct_drift, drift_ratios
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.model.distribution import Zipf
from predictor.model.workload import DenseArch, Feature, Table
from predictor.predict import predict
from shardopt.calibrate.points import REFERENCE_KERNELS as KERNELS
from tests.builders import a_topology, a_workload, plan_of, table_wise

CPU = load_hardware("cpu-gloo")
RANKS = a_topology()
WORKLOAD = a_workload(
    Table("a", 50_000, 32, (Feature("fa", 20.0, distribution=Zipf(1.1)),)),
    Table("b", 1000, 32, (Feature("fb", 2.0, distribution=Zipf(1.1)),)),
    batch_size=512,
    dense=DenseArch(13, (32,), (32, 1), "concat"),
)


APART, TOGETHER = (
    plan_of(WORKLOAD, RANKS, [table_wise(t, r) for t, r in zip(WORKLOAD.tables, on, strict=True)])
    for on in ((0, 1), (0, 0))
)


def test_nothing_taken_out_is_the_prediction() -> None:
    times = FULL.times(WORKLOAD, RANKS, CPU, [APART, TOGETHER])
    expected = [predict(WORKLOAD, RANKS, CPU, p).iteration_ms for p in (APART, TOGETHER)]
    assert times == pytest.approx(expected)


def test_each_ablation_changes_the_time_in_its_direction() -> None:
    full = FULL.times(WORKLOAD, RANKS, CPU, [APART])[0]
    times = {a.name: a.times(WORKLOAD, RANKS, CPU, [APART])[0] for a in ABLATIONS}
    assert times["uniform indices assumed"] > full
    assert times["lookups in place of distinct rows"] > times["uniform indices assumed"]
    assert times["without collectives and their copies"] < full
    assert times["sums in place of synchronisation"] != full
    assert times["constant bandwidth of collectives"] < full


def test_on_a_cpu_the_largest_sum_is_the_timeline_in_which_nobody_waits() -> None:
    for plan in (APART, TOGETHER):
        graph = predict(WORKLOAD, RANKS, CPU, plan).graph
        alone = dataclasses.replace(
            graph, ops=[dataclasses.replace(op, scope=None) for op in graph.ops]
        )
        assert period_ms(alone) == pytest.approx(busiest_ms(graph))


def test_every_id_is_a_row_of_its_own() -> None:
    bins = WithoutRepeats(Zipf(1.0)).bins(1000)
    assert bins.unique(5000) == pytest.approx(5000)
    assert bins.scaled(0.5).unique(5000) == pytest.approx(2500)
    top = Zipf(1.0).bins(1000).slice(0, 10)
    assert bins.slice(0, 10).unique(100) == pytest.approx(100 * top.mass)


def test_constant_bandwidth_has_the_rate_of_the_largest_size() -> None:
    curve = constant_bandwidth(CPU).collectives.intra.all_to_all
    assert curve.latency_us == curve.latency_per_doubling_us == 0
    assert len(curve.us_per_mib) == 1


def test_one_ratio_for_all_kernels_scales_the_iteration() -> None:
    slower = correct_drift(CPU, dict.fromkeys(KERNELS, 2.0))
    before, after = (predict(WORKLOAD, RANKS, hw, APART).iteration_ms for hw in (CPU, slower))
    assert after == pytest.approx(2 * before)


@pytest.mark.parametrize(
    ("kernel", "phases"),
    [
        ("lookup_forward", {"embedding_forward"}),
        ("lookup_backward", {"embedding_backward"}),
        ("all_to_all", {"input_dist", "output_dist_forward", "output_dist_backward", "all_reduce"}),
    ],
)
def test_a_reference_kernel_scales_its_own_costs(kernel: str, phases: set[str]) -> None:
    ratios = {**dict.fromkeys(KERNELS, 1.0), kernel: 2.0}
    costs = []
    for hardware in (CPU, correct_drift(CPU, ratios)):
        graph = predict(WORKLOAD, RANKS, hardware, APART).graph
        costs.append({op.name: (op.phase, np.sum(op.cost_ms)) for op in graph.ops})
    changed = {costs[1][name][0] for name in costs[0] if costs[0][name] != costs[1][name]}
    assert changed == phases


def test_ratios_and_profiles_of_gpus() -> None:
    task = dict.fromkeys(KERNELS, 3.0)
    assert drift_ratios(task, dict.fromkeys(KERNELS, 2.0)) == dict.fromkeys(KERNELS, 1.5)
    with pytest.raises(InputError, match="CPU ranks only"):
        correct_drift(load_hardware("h100-sxm"), dict.fromkeys(KERNELS, 1.0))
