"""Plans that fit at their peak: what a search adds up, checked block by block.

A search adds the bytes of shards to those of everything else. An iteration may reserve more, as
blocks of uneven sizes leave gaps. Where the best plan does not fit at its peak, the search runs
again with that much less for shards.

Why: docs/decisions/0014-memory.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from predictor.errors import InfeasibleError
from predictor.model.memory.peak import memory_of_plan
from predictor.model.memory.ranks import RankMemory, fits, missing
from predictor.model.plan import ShardingPlan
from search.choose import NOMINAL
from search.problem import Problem, RankedPlan, Result
from search.stop import Stop

ATTEMPTS = 3
"""Searches with less and less for shards, after the first."""


def fits_at_peak(problem: Problem, plan: ShardingPlan) -> bool:
    """Every rank has what the plan reserves at its peak.

    Where the topology does not say what a process may take, its caps are all there is to go by.
    """
    return not problem.topology.limit_bytes or fits(_memory(problem, plan))


def search_within_peak(
    problem: Problem, stop: Stop, search: Callable[[Problem], Result], top_k: int
) -> Result:
    """The result of a search, without plans that do not fit at their peak.

    The lower bound is no larger than that of the first search: the others know fewer plans. A
    search that the user interrupts gives what it has.

    Args:
        search: of a problem; it runs again with less memory while its best plan does not fit.

    Raises:
        InfeasibleError: no plan was found that fits at its peak.
    """
    first = result = search(problem)
    plans = _fitting(problem, first, stop)
    lowered, evaluations = problem, first.evaluations
    for _ in range(ATTEMPTS):
        if plans[:1] == [result.best] or stop.remaining_s <= 0:
            break
        lowered = _with_less(lowered, result.best.plan)
        stop.resume()
        try:
            result = search(lowered)
        except InfeasibleError:
            break
        evaluations += result.evaluations
        plans = _in_order(_fitting(problem, result, stop), plans, result.aim)
    if not plans:
        if stop.is_interrupted:
            return first
        raise _none_fits(problem, first.best.plan)
    fastest = result.fastest
    if fastest is not None and not fits_at_peak(problem, fastest.plan):
        fastest = None
    if plans[0] != result.best:
        result = replace(result, ties=None, scenarios=())  # those are of a plan that does not fit
    return replace(
        result,
        plans=tuple(plans[:top_k]),
        lower_bound_ms=min(first.lower_bound_ms, result.lower_bound_ms),
        stopped_by=stop.reason,
        evaluations=evaluations,
        fastest=fastest,
    )


def _fitting(problem: Problem, result: Result, stop: Stop) -> list[RankedPlan]:
    """The plans that fit at their peak; where time is up, the first one of them."""
    found: list[RankedPlan] = []
    for ranked in result.plans:
        if found and stop.remaining_s <= 0:
            break
        if fits_at_peak(problem, ranked.plan):
            found.append(ranked)
    return found


def _in_order(later: list[RankedPlan], earlier: list[RankedPlan], aim: str) -> list[RankedPlan]:
    """Plans of two searches, each in its order unless the earlier one has a faster plan."""
    plans = later + [found for found in earlier if found.plan not in [p.plan for p in later]]
    least = min((p.iteration_ms for p in later), default=float("inf"))
    if aim == NOMINAL and any(p.iteration_ms < least for p in earlier):
        plans.sort(key=lambda p: p.iteration_ms)
    return plans


def _memory(problem: Problem, plan: ShardingPlan) -> Sequence[RankMemory]:
    return memory_of_plan(problem.workload, problem.topology, plan, problem.hardware.device)


def _with_less(problem: Problem, plan: ShardingPlan) -> Problem:
    """The problem with less for shards, by what adding up misses of a plan's peak on a rank that
    does not have it; at least so much that the plan is none of it."""
    on_device = problem.hardware.device != "cpu"
    missed = 0
    for rank in _memory(problem, plan):
        assert rank.peak is not None
        added, cap = rank.hbm_bytes, rank.hbm_cap_bytes
        if not on_device:
            added, cap = rank.ddr_bytes, rank.ddr_cap_bytes
        if rank.peak.missing_bytes:
            missed = max(missed, cap - added + rank.peak.missing_bytes)
    topology = problem.topology
    if on_device:
        left = tuple(max(0, cap - missed) for cap in topology.hbm_cap_bytes)
        return replace(problem, topology=replace(topology, hbm_cap_bytes=left))
    left = tuple(max(0, cap - missed) for cap in topology.ddr_cap_bytes)
    return replace(problem, topology=replace(topology, ddr_cap_bytes=left))


def _none_fits(problem: Problem, plan: ShardingPlan) -> InfeasibleError:
    return InfeasibleError(
        "no plan was found that fits at the peak of an iteration; of the best one "
        f"{missing(_memory(problem, plan))}; try a smaller batch, a smaller reserve or more memory",
        inputs=("batch_size", "reserve", "hbm_gib"),
    )
