"""Breakdown of a plan's time, and what would change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from predictor.cost.loads import Load, ShardLoads
from predictor.model.plan import ShardingPlan
from predictor.predict import Prediction, profile_groups
from search.problem import Problem
from search.space.host_memory import memory_notes
from search.tune.advice import Advisor
from shardopt.api.document import ExplainAnswer, GivenPlan, advice_keys, changes_keys, path_keys
from shardopt.api.setting import Setting
from shardopt.explain.changes import best_changes
from shardopt.explain.deciding import RIVAL, deciding_constants, usual_plans
from shardopt.explain.waits import find_waits, host_work
from shardopt.explain.whatif import sensitivity


def explain_plans(
    setting: Setting, plans: Sequence[GivenPlan], *, advise: bool = True
) -> ExplainAnswer:
    """Explain the first of predicted plans, compared with the others; deterministic, a few seconds
    at most."""
    given, *others = plans
    plan, prediction, problem = given.sharding_plan, given.prediction, setting.problem()
    changes = best_changes(problem, plan, prediction)
    rivals = usual_plans(problem)
    for change in changes.helpful:
        name = f"{RIVAL}with this change: {change.words},"
        rivals[name] = replace(plan, tables={**plan.tables, **change.tables})
    rivals |= {f"{RIVAL}{other.plan}": other.sharding_plan for other in others}
    advised = None
    if advise:
        advised = Advisor(setting.case(), plan, prediction.iteration_ms).advise()
    keys = {
        "setting": setting,
        "lower_bound_ms": given.bound_ms,
        "critical_path": path_keys(prediction.critical_path),
        "host_work": host_work(prediction.graph),
        "waits": find_waits(problem, plan, prediction),
        "changes": changes_keys(plan, changes),
        "memory_notes": memory_notes(problem, plan),
        "sensitivity": sensitivity(problem, plan, prediction),
        "deciding": deciding_constants(problem, plan, rivals),
        "others": others,
        "table_times": _table_times(problem, plan),
        "critical_groups": _critical_groups(problem, prediction),
    }
    return ExplainAnswer.model_validate(
        {**vars(given), **setting.facts(), **advice_keys(advised), **keys}
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


def _table_times(problem: Problem, plan: ShardingPlan) -> dict[str, tuple[float, float]]:
    """Return ms of each table's shards forward and backward, alone, on their slowest rank."""
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
