"""Price of constraints: the best plan without them, and the time that dropping each saves.

The problem without constraints is searched like any other. Its plan names the tables whose
constraints bind: those that it shards as their constraints forbid. Starting from the constrained
plan, the table whose change saves most takes its sharding from the free plan, again and again; the
time saved by each step is the cost of that table's constraint, given that those before it are
dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from predictor.errors import InfeasibleError
from predictor.model.plan import ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import Constraints, Table
from search.in_use.plan import find_broken_constraint
from search.prefer import TOLERANCE
from search.problem import Problem
from search.solve import solve
from search.stop import Stop

RELAXED = ("ranks", "sharding_types", "compute_kernels", "min_partition", "co_locate")
"""Constraints that can be dropped, as a user states them as a preference. The offer of a sharder,
the sizes of caches and the demand for device memory stay."""
MOST_SHIFTS = 16
"""Number of places that are tried for a table whose constraint is dropped."""
MOST_NAMED = 10
"""Largest number of constraints that are priced one by one."""
LEAST_STEP = 1e-3
"""Least share of the iteration that dropping one more constraint must save to be named."""


@dataclass(frozen=True)
class ConstraintCost:
    """Cost of one constraint, once those before it in the list are dropped.

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
    """Cost of all constraints of a model.

    Args:
        plan: the best plan found without them.
        iteration_ms: its predicted time.
        gain: share of the constrained plan's time that it saves.
        costs: of single constraints, in the order in which dropping them saves most.
        binding: keys of all tables whose constraint the plan without them breaks.
    """

    plan: ShardingPlan
    iteration_ms: float
    gain: float
    costs: tuple[ConstraintCost, ...]
    binding: tuple[str, ...] = ()


def price_constraints(
    problem: Problem,
    plan: ShardingPlan,
    iteration_ms: float,
    stop: Stop,
    seed: int,
    free: Problem | None = None,
) -> ConstraintCosts | None:
    """Search without constraints, and price each constraint that binds.

    Args:
        plan: the best plan under the constraints.
        iteration_ms: its predicted time.
        stop: budget of the search.
        free: the problem without constraints, where that is more than the model says.

    Returns:
        None where no table is constrained, or the best plan found without constraints saves less
        than `TOLERANCE`.
    """
    free = free or relaxed(problem)
    if free is None:
        return None
    try:
        best = solve(replace(free, scenarios=()), stop, seed, top_k=1).best
    except InfeasibleError:
        return None
    gain = 1 - best.iteration_ms / iteration_ms
    if gain < TOLERANCE:
        return None
    binding = _binding_constraints(problem, plan, best.plan)
    steps = list(_greedy(problem, plan, best.plan, iteration_ms, binding))
    unpriced = [key for key in binding if key not in {step.table for step in steps}]
    rest = gain - sum(step.gain for step in steps)
    if unpriced and rest > TOLERANCE:
        # they save only together, with tables that nothing constrains
        alone = unpriced[0] if len(unpriced) == 1 else None
        words = "all others together" if alone is None else binding[alone]
        steps.append(ConstraintCost(alone, words, best.iteration_ms, rest))
    return ConstraintCosts(best.plan, best.iteration_ms, gain, tuple(steps), tuple(binding))


def relaxed(problem: Problem) -> Problem | None:
    """Return the problem without the constraints that a user can drop; None if there are none."""
    workload = problem.workload
    tables = tuple(
        replace(table, constraints=replace(table.constraints, **dict.fromkeys(RELAXED)))
        for table in workload.tables
    )
    if tables == workload.tables:
        return None
    return replace(problem, workload=replace(workload, tables=tables))


def _greedy(
    problem: Problem,
    plan: ShardingPlan,
    free: ShardingPlan,
    iteration_ms: float,
    binding: Mapping[str, str],
) -> Iterator[ConstraintCost]:
    """Yield binding constraints greedily: each time the one whose removal saves most."""
    scorer, keys = problem.scorer, problem.workload.keys
    remaining = dict(binding)
    current, now_ms = plan, iteration_ms
    for _ in range(min(MOST_NAMED, len(binding))):
        changed = [
            (key, replace(current, tables={**current.tables, key: table}))
            for key in remaining
            for table in _placements(free.tables[key], problem.topology)
        ]
        times = scorer.score(
            [tuple(changed_plan.tables[k] for k in keys) for _, changed_plan in changed]
        ).tolist()
        gaining = sorted(
            (ms, place)
            for place, ms in enumerate(times)
            if ms <= now_ms - LEAST_STEP * iteration_ms
        )
        best_ms, place = next(
            ((ms, place) for ms, place in gaining if problem.fits(changed[place][1])),
            (now_ms, None),
        )
        if place is None:
            return
        key, current = changed[place]
        saved = (now_ms - best_ms) / iteration_ms
        yield ConstraintCost(key, remaining.pop(key), float(best_ms), saved)
        now_ms = best_ms


def _placements(table: TablePlan, topology: Topology) -> Iterator[TablePlan]:
    """Yield the table's shards in place, then all shifted by the same number of ranks.

    Types other than table-wise and column-wise shift by whole hosts. The other tables lie unlike
    in the free plan, so the ranks that were best there need not be best here.
    """
    world, step = topology.world_size, 1
    if table.sharding_type not in (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE):
        step = topology.local_world_size
    everywhere = len(set(table.ranks)) == world
    for shift in range(0, 1 if everywhere else min(world, MOST_SHIFTS * step), step):
        shards = tuple(replace(s, rank=(s.rank + shift) % world) for s in table.shards)
        yield replace(table, shards=shards)


def _binding_constraints(
    problem: Problem, plan: ShardingPlan, free: ShardingPlan
) -> dict[str, str]:
    """Map the key of each table whose constraint the free plan breaks to that constraint."""
    pairs = zip(problem.workload.keys, problem.workload.tables, strict=True)
    broken = {key: _binding(table, free.tables[key], plan.tables[key]) for key, table in pairs}
    return {key: words for key, words in broken.items() if words}


def _binding(table: Table, free: TablePlan, bound: TablePlan) -> str:
    """Return the constraint that a table's sharding in the free plan breaks, as in the model file.

    It is empty if the two plans shard the table alike, or no constraint is broken.
    """
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
