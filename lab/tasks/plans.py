"""The plans of a task: simple ones of every structure, the searched ones, and their neighbours.

Ten to a dozen, no two the same up to a renaming of ranks. `MIN_CLOSE` are predicted within `CLOSE`
of the best, where there are so many: telling those apart is what a prediction is good for.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from lab.tasks.structures import (
    SMALL_BYTES,
    Candidate,
    column_wise,
    data_parallel,
    plan_of,
    row_wise,
    structures,
    table_wise,
    table_wise_by_skew,
)
from predictor.errors import InputError
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.plan import ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import Table, Workload
from search.problem import Problem
from search.solve import solve
from search.stop import Stop

MAX_PLANS = 12
SEARCHED = 2
CLOSE, MIN_CLOSE = 0.10, 4
NEAR_RATIOS = (1.05, 1.02, 1.08)
"""Predicted times of neighbours over that of the best plan, as near as there are any."""
EFFORT = 0.3
SPARE = (
    "table_column_wise",
    "table_wise_random",
    "table_wise_by_bytes",
    "table_wise_round_robin",
)
"""Structures similar to others; every task leaves out some of them, by its seed."""


@dataclass(frozen=True)
class TaskPlans:
    """Plans by name, the best first, its predicted time, and how many are close to it."""

    plans: dict[str, ShardingPlan]
    best_ms: float
    close: int


def quick_ms(workload: Workload, topology: Topology, hardware: HardwareProfile) -> float:
    """About what the best plan takes, without any search."""
    plans = structures(workload, topology, random.Random(0))
    return float(PlanScorer(workload, topology, hardware).score(list(plans.values())).min())


def task_plans(
    seed: int, workload: Workload, topology: Topology, hardware: HardwareProfile
) -> TaskPlans:
    """The plans of a task.

    Args:
        seed: of the search, of the random plan, and of which structures are left out.
    """
    predictor = PlanScorer(workload, topology, hardware)
    problem = Problem(workload, topology, hardware)
    result = solve(problem, Stop(effort=EFFORT), seed, top_k=SEARCHED, tolerance=0.0)
    searched = [tuple(r.plan.tables[k] for k in workload.keys) for r in result.plans]
    named = dict(zip(["searched", "searched_2"], searched, strict=False))
    named |= structures(workload, topology, random.Random(f"shardopt plans {seed}"))
    named["table_wise_by_skew"] = table_wise_by_skew(workload, topology, hardware)
    plans = _drop_equal(named)
    times = dict(zip(plans, predictor.score(list(plans.values())).tolist(), strict=True))
    best = min(times, key=lambda name: times[name])
    best_ms = times[best]
    close = {name for name, ms in times.items() if ms <= (1 + CLOSE) * best_ms}
    near = _find_neighbours(predictor, plans[best], best_ms, plans, max(1, MIN_CLOSE - len(close)))
    close |= near.keys()
    left_out = _pick_spare(seed, plans, close, len(plans) + len(near) - MAX_PLANS)
    kept = {name: plan for name, plan in (plans | near).items() if name not in left_out}
    order = sorted(kept, key=lambda name: name != best)
    made = {name: plan_of(workload, topology, kept[name]) for name in order}
    return TaskPlans(made, best_ms, len(close - left_out))


def _find_neighbours(
    predictor: PlanScorer,
    best: Candidate,
    best_ms: float,
    known: Mapping[str, Candidate],
    count: int,
) -> dict[str, Candidate]:
    """Plans that differ from the best in one or two tables, and little in predicted time."""
    changes = _changes(predictor.workload.tables, best, predictor.topology.world_size)
    times = predictor.score_neighbours(best, changes).tolist()
    seen = {signature(plan) for plan in known.values()}
    found: dict[str, Candidate] = {}
    for ratio in NEAR_RATIOS[:count]:
        order = sorted(range(len(changes)), key=lambda i: (abs(times[i] - ratio * best_ms), i))
        for i in order:
            plan = tuple(changes[i].get(table, had) for table, had in enumerate(best))
            if best_ms <= times[i] <= (1 + CLOSE) * best_ms and signature(plan) not in seen:
                seen.add(signature(plan))
                found[f"near_{len(found) + 1}"] = plan
                break
    return found


def _changes(tables: Sequence[Table], best: Candidate, world: int) -> list[dict[int, TablePlan]]:
    """Every table sharded in another way, and every two whole tables swapped."""
    changes: list[dict[int, TablePlan]] = []
    for i, table in enumerate(tables):
        others = [table_wise(table, rank) for rank in range(world)]
        others += [column_wise(table, world), row_wise(table, world)]
        if table.weight_bytes <= SMALL_BYTES:
            others.append(data_parallel(table, world))
        changes += [{i: other} for other in others if other != best[i]]
    whole = [i for i, p in enumerate(best) if p.sharding_type is ShardingType.TABLE_WISE]
    for i, j in combinations(whole, 2):
        here, there = best[i].ranks[0], best[j].ranks[0]
        if here != there:
            changes.append({i: table_wise(tables[i], there), j: table_wise(tables[j], here)})
    return changes


def _pick_spare(seed: int, plans: Mapping[str, Candidate], close: set[str], count: int) -> set[str]:
    """So many structures that a task can spare; those close to the best last."""
    turn = seed % len(SPARE)
    spare = [name for name in SPARE[turn:] + SPARE[:turn] if name in plans]
    return set(sorted(spare, key=lambda name: name in close)[: max(0, count)])


def _drop_equal(plans: Mapping[str, Candidate]) -> dict[str, Candidate]:
    """The first of every kind of plan."""
    seen: set[object] = set()
    found = {}
    for name, plan in plans.items():
        if signature(plan) not in seen:
            seen.add(signature(plan))
            found[name] = plan
    return found


def signature(plan: Sequence[TablePlan]) -> object:
    """Equal for plans that differ only by a renaming of ranks or of like shards of a table."""
    ranks: dict[int, list[object]] = {}
    for index, table in enumerate(plan):
        for shard in table.shards:
            ranks.setdefault(shard.rank, []).append((index, table.sharding_type.value, shard.size))
    return tuple(sorted(tuple(sorted(held, key=repr)) for held in ranks.values()))


def their_plan(workload: Workload, ranks: Topology, seed: int) -> ShardingPlan:
    """The plan of TorchRec's planner, which looks at embedding modules alone.

    Raises:
        InputError: it finds none that fits.
    """
    from shardopt.training.torchrec_planner import plan_with_torchrec

    found = plan_with_torchrec(workload, ranks, "cpu").plan
    if found is None:
        raise InputError(
            f"TorchRec's planner finds no plan for task {seed} that fits this machine's memory; "
            "measure on one with more, or leave the task out"
        )
    return found
