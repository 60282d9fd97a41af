"""Balancing of a placed plan's phases: shards and blocks move or swap ranks, options stay.

An iteration waits for the slowest rank in every phase (`search.surrogate`), and greedy placement
balances one sum at the expense of the others. Here all phases count at once, each by a norm of its
ranks' times, in the compiled loop that annealing has.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from search.model.shard_costs import ShardCosts, ShardModel
from search.objective import Assignment, Objective
from search.partitioner import Costs
from search.space.option import Option

MOVES = 2_000
"""Proposals, for every table, of each round."""
ROUNDS = ((4, 1e-4), (5, 1e-6))
"""Rounds: log2 of the norm, and heat as a share of the time."""
WALL = 1e3
"""Cost of exceeding memory, as a multiple of the time."""


def balance(objective: Objective, costs: Costs, assignment: Assignment) -> Assignment:
    """Return the same options on better ranks, or the plan itself.

    Args:
        assignment: plan that fits; the result fits, too.
    """
    from search.improve.kernel import anneal

    tied = {table for group in objective.space.co_locate for table in group}
    free = [table for table in range(len(assignment)) if table not in tied]
    if not free:
        return assignment
    options = [[option] for option, _ in assignment]
    within = objective.beside(assignment)

    def kinds_of(option: Option) -> tuple[int, NDArray[np.float64], NDArray[np.int32]]:
        phases = costs.phases(option)
        return 0, phases, np.arange(len(phases), dtype=np.int32)

    model = ShardModel(within, options, kinds_of, free)
    phases = model.loads.shape[1]
    nothing = np.zeros((phases, model.groups))
    even, ones = np.zeros((len(options), 1)), np.ones((1, phases))
    of_phases = ShardCosts(np.ascontiguousarray(model.loads), even, nothing, ones, np.zeros(1))

    def slowest_ms(plan: Assignment) -> float:
        loads = np.zeros((model.world, phases))
        for option, ranks in plan:
            np.add.at(loads, list(ranks), costs.phases(option))
        return float(loads.max(axis=0).sum())

    best, best_ms = assignment, slowest_ms(assignment)
    chosen, where = model.numbers(assignment)
    for seed, (squares, heat) in enumerate(ROUNDS):
        ms, moves = slowest_ms(model.plan(chosen, where)), MOVES * len(free)
        anneal(model.space, of_phases, chosen, where, moves, heat * ms, squares, WALL * ms, seed)
        plan = model.plan(chosen, where)
        if objective.fits(plan) and slowest_ms(plan) < best_ms:
            best, best_ms = plan, slowest_ms(plan)
    return best
