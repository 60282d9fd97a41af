"""Norms over ranks in place of maxima."""

from __future__ import annotations

import random

import numpy as np
import pytest

from search.improve.cut_norms import CutNorms
from search.improve.cycle_cuts import critical_cut
from search.improve.places import OptionPlaces
from tests.search.problems import (
    H100,
    a_problem,
    a_table,
    a_workload,
    copying,
    hosts,
    objective_of,
    random_plan,
)


def a_plan() -> CutNorms:
    tables = [a_table(f"t{i}", 50_000, 32, 1.0 + 7 * (i * i % 5)) for i in range(8)]
    problem = a_problem(a_workload(*tables, batch_size=32768), hosts(4), copying(H100, 1.0))
    objective, surrogate = objective_of(problem)
    for option in objective.space.every_option:
        surrogate.shard_loads(option)
    start = random_plan(objective, random.Random(1))
    cut = critical_cut(objective, start)
    assert cut is not None
    assert len(cut.segments)
    return CutNorms(objective, surrogate, OptionPlaces(objective, surrogate), set(), [cut], start)


@pytest.mark.parametrize("squares", [4, 5])
def test_norms_are_above_maxima_and_near_them(squares: int) -> None:
    plan = a_plan()
    plan.squares = squares
    slowest = plan.now.loads.max(axis=0) * plan.scale
    longest = float((plan.member @ slowest + plan.constants + plan.even_ms).max())
    ms = plan.aim()
    assert longest <= ms * (1 + 1e-9)
    assert ms - longest <= slowest.sum() * (plan.world ** (1 / 2**squares) - 1) + 1e-9


def test_the_excess_is_the_slope_of_the_norms() -> None:
    plan = a_plan()
    plan.squares = 4
    before, loads = plan.aim(), plan.now.loads.copy()
    counted = plan.excess(loads).sum()
    step = 1e-6 * np.random.default_rng(0).random(loads.shape)
    added = plan.excess(loads + step).sum() - counted
    plan.now.loads[:] = loads + step
    assert plan.aim() - before == pytest.approx(added, rel=1e-2)


def test_without_powers_the_excess_is_over_targets() -> None:
    plan = a_plan()
    plan.targets = plan.now.loads.max(axis=0)
    assert plan.excess(plan.now.loads).sum() == 0.0
