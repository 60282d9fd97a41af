"""Plans of other methods: shown with every result, and starts of the search.

`torchrec` is TorchRec's default planner. The greedy rules place whole tables, largest first, on the
least loaded rank: by size (rows x dim), by dim, by lookups (dim x pooling) and by both
(lookups x log10 rows), the weights that Lin et al. 2024 and DreamShard (Zha et al. 2022) compare.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.workload import Table
from search.baselines.torchrec_planner import torchrec_plan
from search.objective import Assignment, Objective
from search.partitioner import GreedyPartitioner
from search.problem import Problem, RankedPlan
from search.space.enumerate import reduced_space
from search.space.option import Option
from search.surrogate import FORWARD, PHASES, Surrogate

TORCHREC = "torchrec default"
"""TorchRec's planner with its defaults, among the baselines of a search."""
CUT_SHORT = f"{TORCHREC}, cut short"
"""The best of its proposals until time was up."""
TRIES = 20
"""Random plans drawn until one fits."""

Array = NDArray[np.float64]
Weight = Callable[[Table], float]

GREEDY: dict[str, Weight] = {
    "greedy by size": lambda t: float(t.num_embeddings * t.embedding_dim),
    "greedy by dim": lambda t: float(t.embedding_dim * len(t.features)),
    "greedy by lookups": lambda t: t.embedding_dim * t.lookups_per_sample,
    "greedy by size and lookups": lambda t: (
        t.embedding_dim * t.lookups_per_sample * math.log10(t.num_embeddings + 1)
    ),
}


def plan_baselines(
    objective: Objective,
    surrogate: Surrogate,
    seed: int,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Assignment]:
    """Name -> assignment of every baseline that finds a plan within the memory caps.

    Args:
        stop: asked once there is a plan, before the next method and within TorchRec's, which takes
            longest and comes last.
    """
    methods: dict[str, Callable[[], Assignment | None]] = {
        **{name: partial(_table_wise, objective, weight) for name, weight in GREEDY.items()},
        "row_wise all": lambda: _uniform(objective, surrogate, ShardingType.ROW_WISE),
        "random": lambda: _random(objective, surrogate, seed),
    }
    found: dict[str, Assignment] = {}
    for name, method in methods.items():
        if found and stop():
            return found
        plan = method()
        if plan and _may(objective, plan):
            found[name] = plan
    if found and stop():
        return found
    plan, cut_short = torchrec_assignment(objective, stop)
    if plan is None or not _may(objective, plan):
        return found
    return {CUT_SHORT if cut_short else TORCHREC: plan, **found}


def first_plan(problem: Problem, seed: int, stop: Callable[[], bool]) -> RankedPlan | None:
    """The fastest of the baselines, before anything is searched; None where none fits.

    Args:
        stop: as of `plan_baselines`.
    """
    objective = Objective(problem, reduced_space(problem))
    plans = plan_baselines(objective, Surrogate(objective), seed, stop)
    if not plans:
        return None
    times = objective.score(list(plans.values())).tolist()
    ms, name = min(zip(times, plans, strict=True))
    return RankedPlan(objective.sharding_plan(plans[name]), ms, name)


def _may(objective: Objective, plan: Assignment) -> bool:
    """Fits, and lies where constraints allow: TorchRec's planner knows no ranks."""
    topology = objective.problem.topology
    legal = all(option.is_legal(ranks, topology) for option, ranks in plan)
    return legal and objective.fits(plan)


def torchrec_assignment(
    objective: Objective, stop: Callable[[], bool] = lambda: False
) -> tuple[Assignment | None, bool]:
    """TorchRec's plan, and whether its planner was cut short; options that are the same as one of
    ours are named as ours.

    Args:
        stop: as of `torchrec_plan`.
    """
    problem = objective.problem
    device = problem.hardware.device
    theirs = torchrec_plan(problem.workload, problem.topology, device, stop=stop)
    if theirs is None:
        return None, False
    plan = tuple(
        (objective.space.option_of(table, plan) or option, plan.ranks)
        for table, (plan, option) in enumerate(zip(theirs.tables, theirs.options, strict=True))
    )
    return plan, theirs.cut_short


def pick(options: Sequence[Option], sharding_type: ShardingType) -> Option:
    """The table's option of this type that is fastest to read, else its first option."""
    same = [o for o in options if o.sharding_type is sharding_type]
    fused = [o for o in same if o.compute_kernel in (ComputeKernel.FUSED, ComputeKernel.DENSE)]
    return (fused or same or list(options))[0]


@dataclass(frozen=True)
class _TableWeights:
    """Costs of shards that are the weight of their table, evenly split."""

    tables: Sequence[Table]
    weight: Weight

    def phases(self, option: Option) -> Array:
        """All in one phase."""
        found = np.zeros((option.num_shards, PHASES))
        found[:, FORWARD] = self.weight(self.tables[option.table]) / option.num_shards
        return found


def _table_wise(objective: Objective, weight: Weight) -> Assignment | None:
    tables = objective.problem.workload.tables
    options = [pick(o, ShardingType.TABLE_WISE) for o in objective.space.options]
    if any(len(objective.legal(option).units) > 1 for option in options):
        return None
    # the rules that these papers compare know of no tables that lie together
    alone = objective.over(replace(objective.space, co_locate=()))
    order = sorted(range(len(tables)), key=lambda t: (-weight(tables[t]), t))
    return GreedyPartitioner(alone, _TableWeights(tables, weight)).place_in_order(order, options)


def _uniform(
    objective: Objective, surrogate: Surrogate, sharding_type: ShardingType
) -> Assignment | None:
    options = [pick(o, sharding_type) for o in objective.space.options]
    return GreedyPartitioner(objective, surrogate).place_all(options)


def _random(objective: Objective, surrogate: Surrogate, seed: int) -> Assignment | None:
    """Random options; placed at random where that fits."""
    rng = random.Random(seed)
    topology = objective.problem.topology
    for _ in range(TRIES):
        options = [rng.choice(o) for o in objective.space.options]
        plan = []
        for option in options:
            legal = option.legal_ranks(topology)
            if legal.is_empty or legal.same_group:
                break
            plan.append((option, tuple(r for unit in legal.units for r in rng.choice(unit))))
        else:
            if objective.fits(tuple(plan)):
                return tuple(plan)
    return GreedyPartitioner(objective, surrogate).place_all(options)
