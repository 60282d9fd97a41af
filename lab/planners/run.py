"""The planners that are compared, and what their plans are worth by two objectives.

The objectives are the predicted iteration time and TorchRec's own rating. Only TorchRec's planners
import it: where torch is loaded, our search takes one core (decision 0029).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from lab.planners.additive import solve_additive
from lab.planners.instances import Instance, problem_of
from lab.planners.published import (
    BaselinePlanner,
    DreamShardGreedy,
    HugeCtr,
    NeuroShard,
    PlannerInputs,
    RandomPlans,
    TorchRecObjective,
    find_best_ms,
)
from lab.planners.rows import (
    NO_PLAN,
    RANDOM,
    RATED,
    RATED_SAME,
    SHARDOPT,
    TORCHREC,
    Outcome,
)
from predictor.errors import InfeasibleError
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.memory.ranks import fits, plan_memory
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import match_plan
from search.objective import Assignment
from search.problem import Problem
from search.solve import solve
from search.stop import Stop


@dataclass(frozen=True)
class PlannerSettings:
    """What a planner gets apart from the instance.

    Args:
        limit_s: wall time it may take, as far as it looks at the clock; None for none.
        rating_limit_s: the same for plans by TorchRec's rating, where these are others.
        effort: of shardopt's searches.
    """

    limit_s: float | None = None
    rating_limit_s: float | None = None
    effort: float = 1.0
    seed: int = 0


def _add_scores(problem: Problem, plan: ShardingPlan, outcome: Outcome) -> Outcome:
    """The outcome with what the plan is worth by both objectives."""
    workload, topology, hardware = problem.workload, problem.topology, problem.hardware
    tables = match_plan(workload, topology, plan)
    rating = TorchRecObjective(workload, topology, hardware.device)
    return replace(
        outcome,
        iteration_ms=float(PlanScorer(workload, topology, hardware).score([tables])[0]),
        fits=fits(plan_memory(workload, topology, plan, hardware.device)),
        rating_ms=rating.rating_ms(tables),
        rating_fits=rating.fits(tables),
    )


def _run_torchrec(variant: str, problem: Problem, settings: PlannerSettings) -> Outcome:
    from shardopt.training.torchrec_planner import Variant, plan_with_torchrec

    limit = None if settings.limit_s is None else max(1, round(settings.limit_s))
    workload, topology = problem.workload, problem.topology
    device = problem.hardware.device
    answer = plan_with_torchrec(workload, topology, device, Variant(variant), limit)
    ended = "limit" if answer.timed_out else "done"
    if answer.plan is None:
        return Outcome(answer.seconds, ended="limit" if answer.timed_out else NO_PLAN)
    return _add_scores(problem, answer.plan, Outcome(answer.seconds, ended=ended))


def _run_baseline(
    baseline: BaselinePlanner, problem: Problem, settings: PlannerSettings
) -> Outcome:
    """Once by each objective, with its count of memory; the time is that of the first."""
    start = time.perf_counter()
    stop = Stop(time_limit_s=settings.limit_s)
    iteration_ms = _best(baseline, problem, None, settings.seed, stop)
    seconds = time.perf_counter() - start
    rating = TorchRecObjective(problem.workload, problem.topology, problem.hardware.device)
    other = Stop(time_limit_s=settings.rating_limit_s)
    rating_ms = _best(baseline, problem, rating, settings.seed, other)
    ended = "limit" if stop.reason == "time" else "done"
    return Outcome(
        seconds,
        iteration_ms,
        None if iteration_ms is None else True,
        rating_ms,
        None if rating_ms is None else True,
        ended=NO_PLAN if iteration_ms is rating_ms is None else ended,
    )


def _best(
    baseline: BaselinePlanner,
    problem: Problem,
    rating: TorchRecObjective | None,
    seed: int,
    stop: Stop,
) -> float | None:
    try:
        inputs = PlannerInputs(problem, rating)
    except InfeasibleError:
        return None
    if rating is None:
        return find_best_ms(
            baseline, inputs, lambda plans: inputs.objective.score(plans).tolist(), seed, stop
        )
    cost_ms, world = lru_cache(maxsize=None)(rating.cost_ms), problem.topology.world_size

    def rate(plans: Sequence[Assignment]) -> list[float]:
        loads = np.zeros((len(plans), world))
        for load, plan in zip(loads, plans, strict=True):
            for option, ranks in plan:
                np.add.at(load, list(ranks), cost_ms(option))
        return loads.max(axis=1).tolist()

    return find_best_ms(baseline, inputs, rate, seed, stop)


def _run_shardopt(problem: Problem, settings: PlannerSettings) -> Outcome:
    start = time.perf_counter()
    better: list[tuple[float, float]] = []

    def progress(
        stage: str, fraction: float, best_ms: float | None, bound_ms: float | None
    ) -> None:
        if best_ms is not None and (not better or best_ms < better[-1][1]):
            better.append((time.perf_counter() - start, best_ms))

    stop = Stop(effort=settings.effort, time_limit_s=settings.limit_s)
    try:
        result = solve(problem, stop, settings.seed, progress=progress)
    except InfeasibleError:
        return Outcome(time.perf_counter() - start)
    seconds = time.perf_counter() - start
    outcome = Outcome(
        seconds,
        bound_ms=result.lower_bound_ms,
        ended=result.stopped_by,
        incumbents=tuple(better),
    )
    return _add_scores(problem, result.best.plan, outcome)


def _run_additive(extended: bool, problem: Problem, settings: PlannerSettings) -> Outcome:
    start = time.perf_counter()
    stop = Stop(effort=settings.effort, time_limit_s=settings.limit_s)
    try:
        found = solve_additive(problem, stop, settings.seed, extended=extended)
    except InfeasibleError:
        return Outcome(time.perf_counter() - start)
    outcome = Outcome(time.perf_counter() - start, bound_ms=found.lower_bound_ms, ended=stop.reason)
    return _add_scores(problem, found.plan, outcome)


Planner = Callable[[Problem, PlannerSettings], Outcome]
PLANNERS: Mapping[str, Planner] = {
    TORCHREC: partial(_run_torchrec, "default"),
    "torchrec dynamic": partial(_run_torchrec, "dynamic"),
    "torchrec balanced": partial(_run_torchrec, "balanced"),
    **{r.name: partial(_run_baseline, r) for r in (NeuroShard(), DreamShardGreedy(), HugeCtr())},
    RATED_SAME: partial(_run_additive, False),
    RATED: partial(_run_additive, True),
    SHARDOPT: _run_shardopt,
    RANDOM: partial(_run_baseline, RandomPlans()),
}
"""In the order in which they run: random plans last, for they get the time that shardopt took."""


def run_planner(name: str, instance: Instance, settings: PlannerSettings) -> Outcome:
    """Let one planner plan one instance."""
    return PLANNERS[name](problem_of(instance), settings)
