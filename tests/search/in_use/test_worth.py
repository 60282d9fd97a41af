"""Over a short horizon nothing moves; over an endless one the move counts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from search.candidate import Candidate
from search.in_use.moves import moved_tables
from search.in_use.plan import candidates_in_use
from search.in_use.price import MovePrice
from search.in_use.worth import prefer_worthwhile
from search.objective import Objective, apply
from search.prefer import TOLERANCE
from search.problem import PlanInUse
from search.solve import solve
from search.stop import Stop
from tests.quick import quick_first
from tests.search.problems import large_tables, objective_near, some_plan

QUICK = 0.003
ENDLESS = 10**12


@pytest.mark.parametrize("seed", quick_first(1, range(3)))
def test_a_short_horizon_keeps_and_a_long_one_moves(seed: int) -> None:
    problem = large_tables(seed)
    plan = some_plan(problem, seed)
    free, short, long = (
        solve(replace(problem, in_use=PlanInUse(plan, horizon=horizon)), Stop(effort=QUICK), 0)
        for horizon in (None, 1, ENDLESS)
    )
    assert moved_tables(plan, free.best.plan)
    assert moved_tables(plan, short.best.plan) == []
    assert short.fastest is not None
    assert long.best.iteration_ms == pytest.approx(free.best.iteration_ms, rel=1e-9)


@pytest.mark.parametrize(("gain", "moves"), [(0.8 * TOLERANCE, False), (1.2 * TOLERANCE, True)])
def test_nothing_moves_for_less_than_plans_that_tie_differ(gain: float, moves: bool) -> None:
    problem = large_tables(0)
    objective = objective_near(problem, PlanInUse(some_plan(problem, 0), horizon=ENDLESS))
    (staying,) = candidates_in_use(objective)
    moved = next(c for c in _renamed(objective, staying) if objective.fits(c.assignment))
    faster = replace(moved, iteration_ms=staying.iteration_ms * (1 - gain))
    best = prefer_worthwhile(objective, [faster], TOLERANCE)[0]
    assert (best.assignment != staying.assignment) is moves


def _renamed(objective: Objective, candidate: Candidate) -> Iterator[Candidate]:
    """The plan with one table on another rank."""
    for table, (option, ranks) in enumerate(candidate.assignment):
        for rank in range(objective.problem.topology.world_size):
            if len(ranks) == 1 and rank not in ranks:
                moved = apply(candidate.assignment, {table: (option, (rank,))})
                yield replace(candidate, assignment=moved)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_every_move_pays_for_itself(seed: int) -> None:
    problem = large_tables(seed)
    plan = some_plan(problem, seed)
    price = MovePrice(problem, plan)
    gains = []
    for horizon in (1, 10, 100, 1000):
        result = solve(
            replace(problem, in_use=PlanInUse(plan, horizon=horizon)), Stop(effort=QUICK), 0
        )
        assert result.in_use is not None
        now, after = result.in_use.iteration_ms, result.best.iteration_ms
        move = price.of(result.best.plan)
        steps = move.pays_back_after(now, after)
        assert (steps is None) == (not move.tables)
        assert steps is None or steps <= horizon
        gains.append(now - after)
    # a longer horizon never gains less a step; times are sums, rounded
    assert (np.diff(gains) > -1e-9).all()
