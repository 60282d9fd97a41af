"""Evens out the phases of a placed plan: single shards move or swap ranks, options stay.

An iteration waits for the slowest rank in every phase (`search.surrogate`), and greedy placement
balances one sum at the expense of the others. Here all phases count at once, each by a norm of its
ranks' times (`search.improve.placed_plan`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from search.improve.placed_plan import Columns, PlacedPlan
from search.improve.shard_moves import Array
from search.objective import Assignment, Objective
from search.space.option import Option
from search.surrogate import BACKWARD, FORWARD, IDS, OUTPUTS, Surrogate

SQUARES = (4, 5)
"""Of the loads: the 16th power, whose root is the norm, then the 32nd."""
FILL_SQUARES = 3
"""Of the loads where shards are placed one by one: the 8th power. Early ranks are far from full,
where the 16th sees no difference."""
MAX_STEPS = 4000


def balance(
    objective: Objective,
    surrogate: Surrogate,
    assignment: Assignment,
    stop: Callable[[], bool] = lambda: False,
) -> Assignment:
    """The same options on better ranks.

    Args:
        assignment: fits, and so does the result.
        stop: asked before every step; what is reached then is the result.
    """
    plan = _filled(objective, surrogate, assignment)
    best, best_ms = plan.assignment, plan.slowest_ms
    plan.lower(MAX_STEPS, SQUARES, stop)
    return plan.assignment if plan.slowest_ms < best_ms else best


def refill(objective: Objective, surrogate: Surrogate, assignment: Assignment) -> Assignment:
    """The same options with every movable shard placed anew, the largest first, where it raises
    the norms least; the assignment itself where that is no better or does not fit."""
    return _filled(objective, surrogate, assignment).assignment


def _filled(objective: Objective, surrogate: Surrogate, assignment: Assignment) -> PlacedPlan:
    """The plan as `refill` says."""
    tied = {table for group in objective.space.co_locate for table in group}
    plan = PlacedPlan(objective, _phases(surrogate, assignment), assignment, tied)
    before, norm = plan.chosen, plan.aim()
    placed = _placed_anew(plan)
    if placed:
        plan.apply([plan.moved(placed)])
        if plan.aim() >= norm:
            plan.put(before)
    return plan


def _phases(surrogate: Surrogate, assignment: Assignment) -> Columns:
    """Lookups forward and backward are one column each, ids and outputs one an exchange."""
    exchanges = sorted({surrogate.exchange(option) for option, _ in assignment})
    count = 2 + 2 * len(exchanges)

    def work(option: Option) -> Array:
        phases = np.zeros((option.num_shards, count))
        at = 2 + 2 * exchanges.index(surrogate.exchange(option))
        order = [FORWARD, BACKWARD, IDS, OUTPUTS]
        phases[:, [0, 1, at, at + 1]] = surrogate.phases(option)[:, order]
        return phases

    nothing = np.zeros(1)
    return Columns(work, lambda option: nothing, np.ones((1, count)), nothing)


def _placed_anew(plan: PlacedPlan) -> dict[int, int]:
    """The rank of every movable shard, the largest placed first, each where it raises the sum of
    powers least; empty if one has no room."""
    shards, scale = plan.shards, plan.scale
    loads, used = plan.now.loads.copy(), plan.now.used.copy()
    np.subtract.at(loads, shards.ranks, shards.work)
    np.subtract.at(used, shards.ranks, shards.memory)
    powers = _square(loads)
    placed = {}
    for shard in np.argsort(-(shards.work @ scale), kind="stable").tolist():
        raised = _square(loads + shards.work[shard])
        cost = (raised - powers) @ scale
        full = (used + shards.memory[shard] > plan.now.room).any(axis=1)
        cost[~shards.allowed[shard] | full] = np.inf
        rank = int(cost.argmin())
        if cost[rank] == np.inf:
            return {}
        placed[shard] = rank
        loads[rank] += shards.work[shard]
        powers[rank] = raised[rank]
        used[rank] += shards.memory[shard]
    return placed


def _square(loads: Array) -> Array:
    """To the 8th power."""
    for _ in range(FILL_SQUARES):
        loads = loads * loads
    return loads
