"""Brute force: every plan of a few tables on few ranks, against the search and its bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from predictor.errors import InfeasibleError
from predictor.model.plan import ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import INFERENCE, Constraints, Workload
from predictor.units import GIB, MIB
from search.bound.lower_bound import LowerBound
from search.objective import Assignment
from search.problem import Problem
from search.solve import solve
from search.stop import Stop
from tests.quick import quick_only
from tests.search.problems import (
    CPU,
    H100,
    a_problem,
    a_table,
    a_workload,
    copying,
    every_plan,
    hosts,
    objective_of,
)

BIG = 32768


def skewed(batch_size: int = BIG, **more: str) -> Workload:
    return a_workload(
        a_table("hot", 2_000_000, 128, 20.0, alpha=1.1),
        a_table("wide", 500_000, 64, 8.0),
        a_table("small", 1000, 64, 1.0),
        a_table("twin", 500_000, 64, 8.0),
        batch_size=batch_size,
        **more,
    )


def three() -> Workload:
    """The same without the small one, for cases of many options."""
    return a_workload(*(t for t in skewed().tables if t.name != "small"), batch_size=BIG)


def few(**more: str) -> Workload:
    """Three tables of unlike dtype and order, the hot rows first."""
    return a_workload(
        a_table("a", 3_000_000, 128, 10.0, alpha=1.2, id_order="frequency"),
        a_table("b", 800_000, 32, 30.0, data_type="fp16"),
        a_table("c", 100, 16, 1.0, optimizer="adam"),
        batch_size=BIG,
        **more,
    )


def two_modules() -> Workload:
    return a_workload(
        a_table("a", 1_000_000, 64, 10.0, module="user"),
        a_table("b", 1_000_000, 64, 5.0, module="item"),
        a_table("c", 300_000, 32, 2.0, module="item"),
        batch_size=BIG,
    )


def constrained() -> Workload:
    together = Constraints(co_locate="pair")
    return a_workload(
        a_table("a", 2_000_000, 64, 10.0, constraints=together),
        a_table("b", 1_000_000, 32, 20.0, constraints=together),
        a_table("c", 1_000_000, 64, 10.0, constraints=Constraints(ranks=(1, 2))),
        batch_size=BIG,
    )


def two_types(**more: str) -> Workload:
    """Tables that lie on one rank or are split by rows: one exchange or two."""
    kinds = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE)
    either = Constraints(sharding_types=kinds, compute_kernels=("fused",))
    return a_workload(
        a_table("a", 300_000, 64, 10.0, alpha=1.1, constraints=either),
        a_table("b", 100_000, 64, 4.0, constraints=either),
        a_table("c", 50_000, 32, 2.0, constraints=either),
        batch_size=2048,
        **more,
    )


def uneven(world: int, hbm: int) -> Topology:
    return Topology(world, world, (hbm,) * (world - 1) + (2 * hbm,), (GIB,) * world)


def served() -> Workload:
    """Quantised tables of a model that is not trained."""
    tables = (
        a_table("a", 3_000_000, 128, 10.0, alpha=1.2, data_type="int8"),
        a_table("b", 800_000, 64, 30.0, data_type="int4"),
        a_table("c", 500_000, 32, 8.0, data_type="fp16"),
    )
    return replace(a_workload(*tables, batch_size=BIG), mode=INFERENCE)


CASES = {
    "inference": (served(), hosts(2)),
    "inference, tight": (served(), hosts(2, hbm=480 * MIB)),
    "two ranks": (skewed(), hosts(2)),
    "pipelined": (skewed(train_pipeline="sparse_dist"), hosts(2)),
    "host-bound": (skewed(512), hosts(2)),
    "hot rows first": (few(), hosts(3)),
    "prefetch, UVM needed": (few(train_pipeline="prefetch_sparse_dist"), hosts(2, hbm=900 * MIB)),
    "two modules": (two_modules(), hosts(3)),
    "two hosts": (two_modules(), hosts(2, 1)),
    "constrained": (constrained(), hosts(3)),
    "tight": (three(), hosts(2, hbm=880 * MIB)),
    "tight, a million plans": (skewed(), hosts(2, hbm=880 * MIB)),
    "uneven caps": (few(), uneven(3, 600 * MIB)),
    "CPU, one exchange or two": (two_types(), hosts(2), CPU),
    "CPU, pipelined": (two_types(train_pipeline="sparse_dist"), hosts(2), CPU),
    "CPU, slow copies": (two_types(), hosts(2), copying(CPU)),
    "GPU, slow copies": (two_types(), hosts(2), copying(H100, 0.002)),
}


def brute_force(problem: Problem) -> tuple[list[Assignment], np.ndarray]:
    objective, _ = objective_of(problem)
    plans = list(every_plan(objective))
    return plans, objective.score(plans)


QUICK = ("pipelined", "inference")


@pytest.mark.parametrize("case", quick_only(QUICK, CASES))
def test_the_search_finds_the_optimum_and_the_bound_stays_below_it(case: str) -> None:
    problem = a_problem(*CASES[case])
    plans, times = brute_force(problem)
    assert len(plans) >= 10
    result = solve(problem, Stop(effort=0.05), 0, tolerance=0.0)
    optimum = float(times.min())
    assert result.best.iteration_ms == pytest.approx(optimum, rel=1e-9)
    assert result.lower_bound_ms <= optimum * (1 + 1e-9)
    objective, _ = objective_of(problem)
    alone = LowerBound(problem, objective.space, objective.scorer).solve(3000)
    assert 0 < alone <= optimum * (1 + 1e-9)
    if case != "two hosts":  # two modules of seven types each: too many sets to tell apart
        assert alone > 0.6 * optimum
    for name, ms in result.baselines.items():
        assert result.best.iteration_ms <= ms * (1 + 1e-9), name


@pytest.mark.slow
def test_what_brute_force_cannot_place_is_infeasible() -> None:
    """Three tables that may not be split, on two ranks that take one and a half each."""
    table_wise = Constraints(sharding_types=(ShardingType.TABLE_WISE,), compute_kernels=("fused",))
    tables = [a_table(n, 1_000_000, 64, constraints=table_wise) for n in "abc"]
    problem = a_problem(a_workload(*tables), hosts(2, hbm=400 * MIB))
    assert not brute_force(problem)[0]
    with pytest.raises(InfeasibleError, match="no plan fits") as raised:
        solve(problem, Stop(effort=0.05), 0)
    assert "MiB" in str(raised.value)
    assert "rank" in str(raised.value)
    roomy = replace(problem, topology=hosts(3, hbm=400 * MIB))
    assert brute_force(roomy)[0]
    assert solve(roomy, Stop(effort=0.05), 0).plans
