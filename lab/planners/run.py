"""The planners that are compared, and the value of their plans by two objectives.

The objectives are the predicted iteration time and TorchRec's rating. Only TorchRec's planners
import torchrec: where torch is loaded, our search takes one core (decision 0029).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from lab.planners import published
from lab.planners.additive import solve_additive
from lab.planners.instances import Instance, problem_of
from lab.planners.published import PlannerInputs, TorchRecObjective, best_ms
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
from search.problem import Problem
from search.solve import solve
from search.stop import Stop


@dataclass(frozen=True)
class PlannerSettings:
    """Limits and seed of a planner's run.

    Args:
        limit_s: limit on wall time, as far as the planner checks the clock; None for none.
        rating_limit_s: the same for a separate run by TorchRec's rating.
        effort: of shardopt's searches.
    """

    limit_s: float | None = None
    rating_limit_s: float | None = None
    effort: float = 1.0
    seed: int = 0


def _rating(problem: Problem) -> TorchRecObjective:
    return TorchRecObjective(problem.workload, problem.topology, problem.hardware.device)


def _scored(problem: Problem, plan: ShardingPlan, outcome: Outcome) -> Outcome:
    """Return the outcome with the plan's value by both objectives."""
    workload, topology, hardware = problem.workload, problem.topology, problem.hardware
    tables = match_plan(workload, topology, plan)
    rating = _rating(problem)
    return replace(
        outcome,
        iteration_ms=float(PlanScorer(workload, topology, hardware).score([tables])[0]),
        fits=fits(plan_memory(workload, topology, plan, hardware.device)),
        rating_ms=rating.rating_ms(tables),
        rating_fits=rating.fits(tables),
    )


def torchrecs_search(variant: str) -> dict[str, Any]:
    """Return the proposer and partitioner of a variant of TorchRec's planner.

    Args:
        variant: ``default``: its grid, greedy and uniform proposers, and `GreedyPerfPartitioner`.
            ``dynamic``: `DynamicProgrammingProposer` alone, which minimises the sum of all costs
            for every amount of device memory. ``balanced``: the same with
            `MemoryBalancedPartitioner`.
    """
    from torchrec.distributed.planner.partitioners import MemoryBalancedPartitioner
    from torchrec.distributed.planner.proposers import DynamicProgrammingProposer

    return {
        "proposer": None if variant == "default" else DynamicProgrammingProposer(),
        "partitioner": MemoryBalancedPartitioner() if variant == "balanced" else None,
    }


def _run_torchrec(variant: str, problem: Problem, settings: PlannerSettings) -> Outcome:
    from shardopt.training.torchrec_planner import plan_with_torchrec

    limit = None if settings.limit_s is None else max(1, round(settings.limit_s))
    search = {**torchrecs_search(variant), "timeout_seconds": limit}
    answer = plan_with_torchrec(
        problem.workload, problem.topology, problem.hardware.device, **search
    )
    timed_out = limit is not None and answer.seconds > limit
    if answer.plan is None:
        return Outcome(answer.seconds, ended="limit" if timed_out else NO_PLAN)
    ended = "limit" if timed_out else "done"
    return _scored(problem, answer.plan, Outcome(answer.seconds, ended=ended))


def _run_published(
    planner: published.Planner, problem: Problem, settings: PlannerSettings
) -> Outcome:
    """Run once by each objective, with its count of memory; ``seconds`` is that of the first."""

    def best(torchrec: TorchRecObjective | None, stop: Stop) -> float | None:
        try:
            inputs = PlannerInputs(problem, torchrec)
        except InfeasibleError:
            return None
        return best_ms(planner, inputs, settings.seed, stop)

    start = time.perf_counter()
    stop = Stop(time_limit_s=settings.limit_s)
    iteration_ms = best(None, stop)
    seconds = time.perf_counter() - start
    rating_ms = best(_rating(problem), Stop(time_limit_s=settings.rating_limit_s))
    ended = "limit" if stop.reason == "time" else "done"
    return Outcome(
        seconds,
        iteration_ms,
        None if iteration_ms is None else True,
        rating_ms,
        None if rating_ms is None else True,
        ended=NO_PLAN if iteration_ms is rating_ms is None else ended,
    )


def _run_shardopt(problem: Problem, settings: PlannerSettings) -> Outcome:
    start = time.perf_counter()
    better: list[tuple[float, float]] = []
    began: list[tuple[str, float]] = [("options", 0.0)]

    def progress(
        stage: str, fraction: float, best_ms: float | None, bound_ms: float | None
    ) -> None:
        now = time.perf_counter() - start
        began.append((stage, now))
        if best_ms is not None and (not better or best_ms < better[-1][1]):
            better.append((now, best_ms))

    stop = Stop(effort=settings.effort, time_limit_s=settings.limit_s)
    try:
        result = solve(problem, stop, settings.seed, progress=progress)
    except InfeasibleError:
        return Outcome(time.perf_counter() - start)
    outcome = Outcome(
        time.perf_counter() - start,
        bound_ms=result.lower_bound_ms,
        ended=result.stopped_by,
        incumbents=tuple(better),
        found_by=result.best.found_by,
        stages=_stages(began),
    )
    return _scored(problem, result.best.plan, outcome)


def _stages(began: Sequence[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """Return the seconds of every stage from their starts; the last start only ends the others."""
    seconds_of: dict[str, float] = {}
    for (stage, start), (_, end) in pairwise(began):
        seconds_of[stage] = seconds_of.get(stage, 0.0) + end - start
    return tuple(seconds_of.items())


def _run_additive(extended: bool, problem: Problem, settings: PlannerSettings) -> Outcome:
    start = time.perf_counter()
    stop = Stop(effort=settings.effort, time_limit_s=settings.limit_s)
    try:
        additive = solve_additive(problem, stop, settings.seed, extended=extended)
    except InfeasibleError:
        return Outcome(time.perf_counter() - start)
    outcome = Outcome(
        time.perf_counter() - start, bound_ms=additive.lower_bound_ms, ended=stop.reason
    )
    return _scored(problem, additive.plan, outcome)


Planner = Callable[[Problem, PlannerSettings], Outcome]
PLANNERS: Mapping[str, Planner] = {
    TORCHREC: partial(_run_torchrec, "default"),
    "torchrec dynamic": partial(_run_torchrec, "dynamic"),
    "torchrec balanced": partial(_run_torchrec, "balanced"),
    "neuroshard": partial(_run_published, published.neuroshard),
    "dreamshard-greedy": partial(_run_published, published.dreamshard_greedy),
    "hugectr": partial(_run_published, published.hugectr),
    RATED_SAME: partial(_run_additive, False),
    RATED: partial(_run_additive, True),
    SHARDOPT: _run_shardopt,
    RANDOM: partial(_run_published, published.random_plans),
}
"""Name -> planner, in running order: random plans get the time of shardopt, so they come last."""


def run_planner(name: str, instance: Instance, settings: PlannerSettings) -> Outcome:
    """Let one planner plan one instance."""
    return PLANNERS[name](problem_of(instance), settings)
