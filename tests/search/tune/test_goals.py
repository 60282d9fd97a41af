"""Objectives: what they count, and which points beat which."""

from __future__ import annotations

import random

from search.solve import solve
from search.stop import Stop
from search.tune.goals import GOALS, covers, pareto_front, shard_bytes, values_of
from tests.search.problems import H100, a_problem, a_table, a_workload, hosts

ALL = [GOALS[name] for name in ("time", "memory", "gpu_hours")]


def test_units() -> None:
    problem = a_problem(a_workload(a_table(), batch_size=500), hosts(4), H100)
    time, memory, hours = values_of(ALL, problem, 10.0, 0.0)
    assert time == 5.0  # 2000 samples in 10 ms
    # 10^9 samples are 500,000 iterations of 10 ms on 4 ranks
    assert hours == 500_000 * 0.010 / 3600 * 4
    assert memory > 0  # the dense part and the input batch


def test_bytes_are_those_of_the_fullest_rank() -> None:
    problem = a_problem(a_workload(a_table("a"), a_table("b", 1000)), hosts(2))
    plan = solve(problem, Stop(effort=0.01), 0, searchers=()).best.plan
    placed = [0, 0]
    for table in plan.tables.values():
        for shard in table.shards:
            placed[shard.rank] += shard.size[0] * shard.size[1] * 4
    assert shard_bytes(problem, plan) > max(placed)


def test_the_front_covers_every_point() -> None:
    rng = random.Random(0)
    points = [(float(rng.randint(0, 9)), float(rng.randint(0, 9))) for _ in range(60)]
    best = pareto_front(points)
    assert all(any(covers(points[i], point) for i in best) for point in points)
    assert not any(covers(points[i], points[j]) for i in best for j in best if i != j)
    assert pareto_front([(3.0,), (1.0,), (2.0,)]) == [1]
