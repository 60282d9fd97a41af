"""The changes of a plan that would help most, each verified by predicting it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from predictor.errors import InfeasibleError
from predictor.model.plan import ShardingPlan, TablePlan
from predictor.model.plan_check import match_plan
from predictor.model.workload import Constraints
from predictor.predict import Prediction, predict
from search.improve.merges import Change
from search.improve.neighbours import Neighbours
from search.in_use.plan import option_in_use
from search.objective import Assignment, Objective, apply
from search.problem import Problem
from search.space.enumerate import reduced_space
from search.space.option import Choice, Space
from search.surrogate import Surrogate
from shardopt.formatting import percent, plural, ranks_text

MAX_CHANGES = 3
MIN_SAVING = 1e-3
"""Savings below this share of the iteration are not worth a line."""
RANKS_TRIED = 65_536
"""Most changes tried times ranks, which takes a few seconds for any number of ranks."""
FEWEST, MOST = 32, 4096
"""Fewest and most changes tried."""
MOST_RANKS = 8192
"""Most ranks on which changes are tried: beyond, one takes seconds and gains little."""
NO_LIMIT = 2**60
"""Bytes that no plan fills."""
MAX_NAMED = 3
SWAPPED = 2
"""Most tables in a swap; larger changes move a group of tables to another exchange."""


@dataclass(frozen=True)
class PlanChange:
    """One or several tables sharded or placed otherwise.

    Args:
        tables: plan key -> the new sharding of every table that changes.
        iteration_ms: predicted anew for the whole plan.
    """

    words: str
    tables: dict[str, TablePlan]
    iteration_ms: float
    saving_ms: float


@dataclass(frozen=True)
class Changes:
    """Changes that were tried, and the best that help, the most helpful first.

    Args:
        tried: changes that fit in memory and were scored.
        helpful: those that save time, the most helpful first.
        reason: why nothing could be tried; empty otherwise.
    """

    tried: int
    helpful: tuple[PlanChange, ...]
    reason: str = ""

    @property
    def none_words(self) -> str:
        """Reason for showing nothing, as a sentence without its full stop."""
        if self.reason:
            return f"No change of the plan was tried, as {self.reason}"
        tried = plural(self.tried, "single change")
        return (
            f"None of the {tried} of the plan that were tried saves more than {percent(MIN_SAVING)}"
        )


def best_changes(problem: Problem, plan: ShardingPlan, prediction: Prediction) -> Changes:
    """Find the best changes of a plan: of one or two tables, no table twice, and of one group.

    Its neighbours (a shard on another rank, two tables swapped, another way to
    shard a table, a group of tables in another exchange) are scored together, then the best of them
    are predicted one by one.
    """
    ranks = problem.topology.world_size
    if ranks > MOST_RANKS:
        return Changes(0, (), f"{ranks:,} ranks are more than {MOST_RANKS:,}")
    try:
        space, base = _space_around(problem, plan)
    except InfeasibleError:
        return Changes(0, (), "some table has no sharding that fits in memory")
    objective = Objective(problem, space)
    most = max(FEWEST, min(MOST, RANKS_TRIED // ranks))
    tried = list(islice(Neighbours(objective, Surrogate(objective), seed=0).of(base), most))
    if not tried:
        return Changes(0, (), _why_none(problem, plan))
    times = objective.score_neighbours(base, tried)
    best = _without_shared_tables(tried[i] for i in np.argsort(times, kind="stable").tolist())
    priced = [_predict_change(objective, base, change, prediction.iteration_ms) for change in best]
    worth = [c for c in priced if c.saving_ms > MIN_SAVING * prediction.iteration_ms]
    return Changes(len(tried), tuple(sorted(worth, key=lambda c: -c.saving_ms)))


def _why_none(problem: Problem, plan: ShardingPlan) -> str:
    """Say why a plan has no neighbour: memory, if it has some without memory limits; else its
    tables have no other sharding."""
    topology = problem.topology
    roomy = replace(
        topology,
        hbm_cap_bytes=tuple(cap and NO_LIMIT for cap in topology.hbm_cap_bytes),
        ddr_cap_bytes=tuple(cap and NO_LIMIT for cap in topology.ddr_cap_bytes),
        installed_bytes=(),
        limit_bytes=(),
    )
    problem = replace(problem, topology=roomy, loads=None)
    space, base = _space_around(problem, plan)
    objective = Objective(problem, space)
    if any(Neighbours(objective, Surrogate(objective), seed=0).of(base)):
        return "none fits in memory"
    constrained = any(table.constraints != Constraints() for table in problem.workload.tables)
    source = "the constraints leave" if constrained else "the tables have"
    return f"{source} no other sharding on {plural(topology.world_size, 'rank')}"


def _space_around(problem: Problem, plan: ShardingPlan) -> tuple[Space, Assignment]:
    """The search space with the plan's own choices in it, and the plan as one of its points."""
    space, topology = reduced_space(problem), problem.topology
    options, base = list(space.options), []
    for index, table in enumerate(match_plan(problem.workload, topology, plan)):
        option = space.option_of(index, table)
        if option is None or not option.is_legal(table.ranks, topology):
            pinned = option_in_use(index, table, problem)
            free = replace(pinned, pinned=None)
            option = free if free.is_legal(table.ranks, topology) else pinned
            options[index] = (*options[index], option)
        base.append((option, table.ranks))
    return replace(space, options=tuple(options)), tuple(base)


def _without_shared_tables(changes: Iterable[Change]) -> list[Change]:
    """The first few changes that share no table, and at most one of a whole group of tables."""
    chosen: list[Change] = []
    touched: set[int] = set()
    grouped = False
    for change in changes:
        group = len(change) > SWAPPED
        if not (grouped if group else touched & change.keys()):
            chosen.append(change)
            grouped = grouped or group
            touched |= set() if group else change.keys()
        if len(chosen) == MAX_CHANGES:
            break
    return chosen


def _predict_change(
    objective: Objective, base: Assignment, change: Change, before_ms: float
) -> PlanChange:
    plan = objective.sharding_plan(apply(base, change))
    problem = objective.problem
    after = predict(problem.workload, problem.topology, problem.hardware, plan).iteration_ms
    keys = objective.space.keys
    tables = {keys[table]: plan.tables[keys[table]] for table in sorted(change)}
    return PlanChange(_describe(keys, base, change), tables, after, before_ms - after)


def _describe(keys: Sequence[str], base: Assignment, change: Change) -> str:
    if len(change) == 1:
        ((table, new),) = change.items()
        return f"{keys[table]}: {_describe_one(base[table], new)}"
    first, *rest = sorted(change)
    moved = all(change[table][0] is base[table][0] for table in change)
    if moved and len(change) == 2:
        there = [ranks_text(base[table][1]) for table in sorted(change)]
        return f"swap {keys[first]} (rank {there[0]}) and {keys[rest[0]]} (rank {there[1]})"
    named = ", ".join(keys[table] for table in sorted(change)[:MAX_NAMED])
    more = f" and {len(change) - MAX_NAMED} more" if len(change) > MAX_NAMED else ""
    types = Counter(option.sharding_type.short for option, _ in change.values())
    into = types.most_common(1)[0][0]
    return f"{plural(len(change), 'table')} to {into}: {named}{more}"


def _describe_one(old: Choice, new: Choice) -> str:
    (before, here), (after, there) = old, new
    if before is not after:
        kernel = before.compute_kernel is not after.compute_kernel
        names = [o.label if kernel else o.label.partition("/")[0] for o in (after, before)]
        if names[0] == names[1]:
            names[1] = "its present form"
        return f"{names[0]} on {_on(there)} instead of {names[1]} on {_on(here)}"
    removed, added = Counter(here) - Counter(there), Counter(there) - Counter(here)
    count = "" if len(here) == 1 else f"{plural(removed.total(), 'shard')} "
    return f"{count}from {_on(removed)} to {_on(added)}"


def _on(ranks: Iterable[int]) -> str:
    shown = ranks_text(ranks)
    return f"rank {shown}" if shown.isdigit() else f"ranks {shown}"
