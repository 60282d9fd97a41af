"""The price of constraints: the best plan without them, and what dropping each of them saves.

The problem without constraints is searched like any other. Its plan names the tables whose
constraints bind: those that it shards as their constraints forbid. Starting from the constrained
plan, the table whose change saves most takes its sharding from the free plan, again and again; the
time saved by each step is the cost of that table's constraint, given that those before it are
dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from predictor.errors import InfeasibleError
from predictor.model.plan import ShardingPlan, TablePlan
from predictor.model.workload import Constraints, Table
from search.in_use.plan import find_broken_constraint
from search.peak import fits_at_peak
from search.problem import Problem
from search.solve import solve
from search.stop import Stop

RELAXED = ("ranks", "sharding_types", "compute_kernels", "min_partition", "co_locate")
"""Constraints that are dropped: those that a user states as a preference. What a sharder offers,
sizes of caches and the demand for device memory stay."""
MOST_NAMED = 10
"""Constraints that are priced one by one."""
LEAST_GAIN = 0.005
"""Share of the iteration below which constraints cost nothing."""
LEAST_STEP = 1e-3
"""Share of the iteration below which dropping one more constraint is not named."""


@dataclass(frozen=True)
class ConstraintCost:
    """The cost of one constraint, once those before it in the list are dropped.

    Args:
        table: key of the table; None for all constraints that are left together.
        constraint: its name and value, as in the model file.
        iteration_ms_without: predicted time once it is dropped as well.
        gain: share of the constrained plan's time that this step saves.
    """

    table: str | None
    constraint: str
    iteration_ms_without: float
    gain: float


@dataclass(frozen=True)
class ConstraintCosts:
    """The cost of all constraints of a model.

    Args:
        plan: the best plan found without them.
        iteration_ms: its predicted time.
        gain: share of the constrained plan's time that it saves.
        costs: of single constraints, in the order in which dropping them saves most.
    """

    plan: ShardingPlan
    iteration_ms: float
    gain: float
    costs: tuple[ConstraintCost, ...]


def price_constraints(
    problem: Problem, plan: ShardingPlan, iteration_ms: float, stop: Stop, seed: int
) -> ConstraintCosts | None:
    """Search without constraints, and price each constraint that binds.

    Args:
        plan: the best plan under the constraints.
        iteration_ms: its predicted time.
        stop: budget of the search.

    Returns:
        None where no table is constrained, or the best plan found without constraints saves less
        than `LEAST_GAIN`.
    """
    free = relaxed(problem)
    if free is None:
        return None
    try:
        best = solve(free, stop, seed, top_k=1, scenarios=()).best
    except InfeasibleError:
        return None
    gain = 1 - best.iteration_ms / iteration_ms
    if gain < LEAST_GAIN:
        return None
    steps = list(_greedy(problem, plan, best.plan, iteration_ms))
    rest = gain - sum(step.gain for step in steps)
    if rest > LEAST_GAIN:
        steps.append(ConstraintCost(None, "all others together", best.iteration_ms, rest))
    return ConstraintCosts(best.plan, best.iteration_ms, gain, tuple(steps))


def relaxed(problem: Problem) -> Problem | None:
    """The problem without the constraints that a user can drop; None where there are none."""
    workload = problem.workload
    tables = tuple(
        replace(table, constraints=replace(table.constraints, **dict.fromkeys(RELAXED)))
        for table in workload.tables
    )
    if tables == workload.tables:
        return None
    return replace(problem, workload=replace(workload, tables=tables))


def _greedy(
    problem: Problem, plan: ShardingPlan, free: ShardingPlan, iteration_ms: float
) -> Iterator[ConstraintCost]:
    """The constraints that bind, each time the one whose end saves most."""
    scorer, keys = problem.scorer, problem.workload.keys
    tables = dict(zip(keys, problem.workload.tables, strict=True))
    binding = {
        key: words
        for key, table in tables.items()
        if (words := _binding(table, free.tables[key], plan.tables[key]))
    }
    current, now_ms = plan, iteration_ms
    for _ in range(MOST_NAMED):
        changed = [
            replace(current, tables={**current.tables, key: free.tables[key]}) for key in binding
        ]
        fitting = [
            (key, one)
            for key, one in zip(binding, changed, strict=True)
            if fits_at_peak(problem, one)
        ]
        if not fitting:
            return
        rows = [tuple(one.tables[key] for key in keys) for _, one in fitting]
        times = scorer.score(rows).tolist()
        best_ms, (key, best) = min(zip(times, fitting, strict=True), key=lambda item: item[0])
        if best_ms > now_ms - LEAST_STEP * iteration_ms:
            return
        saved = (now_ms - best_ms) / iteration_ms
        yield ConstraintCost(key, binding.pop(key), float(best_ms), saved)
        current, now_ms = best, best_ms


def _binding(table: Table, free: TablePlan, bound: TablePlan) -> str:
    """The constraint of a table that its sharding in the free plan breaks, as the model file has
    it; empty where the two plans shard it alike or no constraint is broken."""
    if free == bound:
        return ""
    if not find_broken_constraint(table, free):
        group = table.constraints.co_locate
        return f"co_locate: {group}" if group and set(free.ranks) != set(bound.ranks) else ""
    for name in RELAXED:
        value = getattr(table.constraints, name)
        alone = replace(table, constraints=replace(Constraints(), **{name: value}))
        if value is not None and find_broken_constraint(alone, free):
            shown = f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else value
            return f"{name}: {shown}"
    return ""
