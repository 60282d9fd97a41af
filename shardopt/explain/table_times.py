"""How long the lookups of each table take under a plan."""

from __future__ import annotations

from predictor.cost.loads import Load, ShardLoads
from predictor.model.plan import ShardingPlan
from search.problem import Problem

TableTimes = dict[str, tuple[float, float]]
"""Plan key -> ms of the table's shards forward and backward, alone, on the rank where they take
longest."""


def table_times(problem: Problem, plan: ShardingPlan) -> TableTimes:
    """The times of every table of the plan."""
    loads = ShardLoads(problem.workload, problem.topology, problem.hardware)
    found = {}
    for index, key in enumerate(problem.workload.keys):
        ranks, load = loads.of_table(index, plan.tables[key])
        forward, backward = (
            max(float(load[ranks == rank, column].sum()) for rank in set(ranks.tolist()))
            for column in (Load.FORWARD_MS, Load.BACKWARD_MS)
        )
        found[key] = (forward, backward)
    return found
