"""The part of the network between hosts in a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.hardware.loader import load_hardware
from predictor.hardware.networks import Network
from predictor.predict import predict
from search.problem import Problem
from shardopt.explain.networks import NetworkPart, network_part
from tests.shardopt.report.plans import a_problem, tables, whole


def on_ranks(ranks: int) -> Problem:
    few = a_problem(tables(4_000_000, 4_000_000), ranks, min(ranks, 8))
    return replace(few, hardware=load_hardware("h100-sxm"))


def part_of(problem: Problem, *, named: bool = False) -> tuple[NetworkPart | None, float]:
    plan = whole(problem, [0, 1])
    prediction = predict(problem.workload, problem.topology, problem.hardware, plan)
    return network_part(problem, plan, prediction, named=named), prediction.iteration_ms


def test_one_host_has_none() -> None:
    assert part_of(on_ranks(8))[0] is None


def test_others_are_what_the_plan_takes_over_them() -> None:
    problem = on_ranks(16)
    network, _ = part_of(problem)
    assert network is not None
    assert network.stage in {"output_dist", "output_dist_backward", "input_dist", "all_reduce"}
    assert network.stage_ms > 0
    joined = replace(problem, hardware=Network("tcpx").joins(problem.hardware))
    part, time = part_of(joined, named=True)
    assert network.others["tcpx"] == pytest.approx(time, rel=1e-12)
    assert part is not None
    assert not part.others
