"""Sets of exchanges with their programs solved, and plans of each, for tests of the bound."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from predictor.cost.loads import LAUNCH, Load
from predictor.units import GIB
from search.bound.exchange_set import ExchangeSet
from search.bound.lower_bound import LowerBound
from search.objective import Assignment, Objective
from tests.search.problems import objective_of, random_plan, random_problem

Array = np.ndarray
WORLDS = ((2, 2), (3, 3), (4, 2))
ONE_HOST = ((2, 2), (3, 3), (4, 4))
"""Ranks, and those of a host."""


def roomy_objective(
    seed: int, batch_size: int = 16384, worlds: Sequence[tuple[int, int]] = WORLDS
) -> Objective:
    """Three tables on two to four ranks; every placement fits."""
    problem = random_problem(seed, world=worlds[seed % len(worlds)], tables=3)
    roomy = (1000 * GIB,) * problem.topology.world_size
    topology = replace(problem.topology, hbm_cap_bytes=roomy)
    workload = replace(problem.workload, batch_size=batch_size)
    return objective_of(replace(problem, workload=workload, topology=topology))[0]


def sets_with_plans(objective: Objective, seed: int) -> list[tuple[ExchangeSet, Assignment, float]]:
    """Random plans, with the solved set of their exchanges and their time in ms."""
    rng = random.Random(seed)
    plans = [random_plan(objective, rng) for _ in range(12)]
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    choices = bound.choices
    sets: dict[frozenset[tuple[str, str]], ExchangeSet] = {}
    results = []
    for plan, ms in zip(plans, objective.score(plans).tolist(), strict=True):
        modules = [table.module for table in objective.problem.workload.tables]
        key = frozenset((modules[o.table], str(o.sharding_type)) for o, _ in plan)
        members = np.flatnonzero([exchange in key for exchange in choices.exchanges])
        exchange_set = sets.setdefault(key, ExchangeSet(choices, members))
        for _ in range(60):
            if exchange_set.refine()[1]:
                break
        results.append((exchange_set, plan, ms))
    return results


def rank_loads(
    objective: Objective, exchange_set: ExchangeSet, plan: Assignment
) -> tuple[Array, Array]:
    """Loads of a plan ``[groups, ranks, COLUMNS]``, and which groups its ranks launch."""
    numbers = sorted({choice.group for choice in exchange_set.choices})
    loads = objective.scorer.totals(objective.table_plans(plan))[numbers]
    launched = loads[..., Load.SHARDS] > 0
    loads[..., LAUNCH] = 0.0
    return loads, launched
