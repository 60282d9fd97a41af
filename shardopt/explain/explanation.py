"""Findings of ``shardopt explain`` about a plan, for the console, ``--json`` and ``--html``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from predictor.cost.loads import Load, ShardLoads
from predictor.model.plan import ShardingPlan
from predictor.predict import Prediction, profile_groups
from search.problem import Problem
from search.space.host_memory import memory_notes
from search.tune.advice import Advised, Advisor
from search.tune.knobs import Case
from shardopt.explain.changes import Changes, best_changes
from shardopt.explain.deciding import (
    RIVAL,
    DecidingConstant,
    deciding_constants,
    usual_plans,
)
from shardopt.explain.waits import Wait, find_waits
from shardopt.explain.whatif import WhatIf, sensitivity

TableTimes = dict[str, tuple[float, float]]
"""Plan key -> ms of the table's shards forward and backward, alone, on the rank where they take
longest."""


@dataclass(frozen=True)
class Explanation:
    """Findings about one plan.

    Args:
        waits: on the critical path, the longest first.
        what_if: the same plan in another setting.
        table_times: how long each table's lookups take.
        critical_groups: groups of the hardware profile that the critical path uses.
        memory_notes: why tables are in host memory, and what caches waste.
        deciding: constants whose stated errors could make another plan the faster one.
        advised: changes beside the plan; None where nobody asked.
    """

    waits: Sequence[Wait]
    changes: Changes
    what_if: Sequence[WhatIf]
    table_times: TableTimes = field(default_factory=dict)
    critical_groups: frozenset[str] = frozenset()
    memory_notes: Sequence[str] = ()
    deciding: Sequence[DecidingConstant] = ()
    advised: Advised | None = None


def explain_plan(
    problem: Problem,
    plan: ShardingPlan,
    prediction: Prediction,
    others: Mapping[str, ShardingPlan] | None = None,
    case: Case | None = None,
) -> Explanation:
    """Explain a plan; deterministic, a few seconds at most.

    Args:
        others: name -> plan to compare with.
        case: the case of the problem; None for no advice.
    """
    changes = best_changes(problem, plan, prediction)
    rivals = {
        **usual_plans(problem),
        **{
            f"{RIVAL}with this change: {c.words},": replace(
                plan, tables={**plan.tables, **c.tables}
            )
            for c in changes.helpful
        },
        **{f"{RIVAL}{name}": other for name, other in (others or {}).items()},
    }
    return Explanation(
        find_waits(problem, plan, prediction),
        changes,
        sensitivity(problem, plan, prediction),
        _table_times(problem, plan),
        _critical_groups(problem, prediction),
        memory_notes(problem, plan),
        deciding_constants(problem, plan, rivals),
        None if case is None else Advisor(case, plan, prediction.iteration_ms).advise(),
    )


def _critical_groups(problem: Problem, prediction: Prediction) -> frozenset[str]:
    hardware = problem.hardware
    used = [
        group
        for resource in {segment.resource for segment in prediction.critical_path}
        for group in profile_groups(resource, hardware, problem.topology)
    ]
    return frozenset(
        name for name, group in hardware.groups.items() if any(group is other for other in used)
    )


def _table_times(problem: Problem, plan: ShardingPlan) -> TableTimes:
    """Return the lookup times in ms of every table of the plan."""
    loads = ShardLoads(problem.workload, problem.topology, problem.hardware)
    times = {}
    for index, key in enumerate(problem.workload.keys):
        ranks, load = loads.of_table(index, plan.tables[key])
        forward, backward = (
            max(float(load[ranks == rank, column].sum()) for rank in set(ranks.tolist()))
            for column in (Load.FORWARD_MS, Load.BACKWARD_MS)
        )
        times[key] = (forward, backward)
    return times
