"""The search, from a problem to ranked plans and a bound. Read `solve` from top to bottom.

space         the options of every table, with what was left out and why   (search.space)
baselines     what other methods would choose, as first candidates         (search.baselines)
plan in use   a candidate too, and how far the search may move from it     (search.in_use)
candidates    proposed by the bound's programs, packing, CP-SAT, Optuna    (search.propose)
improvement   the best candidates, on the full timeline                    (search.improve)
preference    of plans that cannot be told apart, the simplest             (search.prefer)
bound         no plan of the space is predicted to be faster               (search.bound)
no plan       which demands exclude each other, and what would help        (search.infeasible)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from predictor.errors import InfeasibleError
from search.baselines.starting_plans import plan_baselines
from search.bound.lower_bound import LowerBound
from search.candidate import Candidate, rank_distinct
from search.improve.local_search import LocalSearch
from search.in_use.align import rename_ranks
from search.in_use.plan import (
    PlanInUse,
    candidates_in_use,
    check_plan_in_use,
    finish_plan,
    lift_move_limit,
    pick_searchers,
    rate_plan_in_use,
    space_near,
    space_of_bound,
)
from search.in_use.worth import prefer_worthwhile
from search.infeasible.remedy import explain_infeasible, explain_no_plan
from search.objective import Objective
from search.prefer import TOLERANCE, prefer_simple
from search.problem import Problem, Progress, RankedPlan, Result, silent
from search.propose.rounding import LARGE
from search.propose.searchers import BOUND_STEPS, SEARCHERS, propose, rescue
from search.space.build import whole_space
from search.space.filters import drop_uvm, is_sound
from search.space.option import Space
from search.stop import Stop
from search.surrogate import Surrogate

# Work at effort 1, sized so that 26 tables on 8 ranks take a few seconds.
EVALUATIONS = 40_000
BEYOND = 0.05
"""Share of it where a plan takes long to score and one change gains little: packing has the time
(docs/decisions/0056)."""
IMPROVED = 4
"""Candidates that local search starts from."""
IMPROVED_BY = " + local search"


def solve(
    problem: Problem,
    stop: Stop,
    seed: int,
    *,
    top_k: int = 3,
    searchers: Sequence[str] = SEARCHERS,
    in_use: PlanInUse | None = None,
    tolerance: float = TOLERANCE,
    progress: Progress = silent,
) -> Result:
    """Search the sharding plans of a problem.

    Args:
        problem: model, ranks with the memory left for shards, costs.
        stop: work budget, time ceiling, gap.
        seed: of every random choice, >= 0.
        top_k: plans to return, >= 1.
        searchers: which of `SEARCHERS` propose candidates.
        in_use: a plan in use to start from, near which the search stays if it limits the moves. If
            it allows none, that plan is rated against the bound of all plans.
        tolerance: by which share the best plan may be slower than the fastest one found, if it is
            simpler and cannot be told apart from that, >= 0; never slower than a baseline. Without
            effect where a plan is in use, of which the best should move little.
        progress: called with every stage of the search.

    Raises:
        InfeasibleError: no plan fits, or a table has no option left.
        InputError: the plan in use is of another model or world size.
        KeyboardInterrupt: before any plan was found, or twice, or `stop` is not interruptible.
    """
    in_use = in_use and check_plan_in_use(in_use, problem)
    start = _start(problem, stop, seed, searchers, in_use, progress)
    objective = start.objective
    search = LocalSearch(objective, start.surrogate, seed)
    improved = _improve(start, search, stop, progress)
    ranked = rank_distinct([*improved, *start.candidates], objective.space.in_use)
    fastest = ranked[0]
    if tolerance and in_use is None and stop.remaining_s > 0:
        try:
            ranked = prefer_simple(search, ranked, _limit_ms(start, fastest, tolerance, stop))
        except KeyboardInterrupt:
            stop.interrupt()
    ranked = [rename_ranks(objective, candidate) for candidate in ranked[:top_k]]
    if in_use is not None and in_use.horizon is not None:
        ranked = prefer_worthwhile(objective, in_use, ranked)[:top_k]
    best_ms = ranked[0].iteration_ms
    progress("lower bound", 0.8, best_ms, None)
    bound = _bound(start, best_ms, stop)
    stop.reached(best_ms, bound)  # remembers a gap that was closed before
    progress("done", 1.0, best_ms, bound)

    def finished(c: Candidate) -> RankedPlan:
        plan = finish_plan(objective, in_use, c.assignment)
        return RankedPlan(plan, c.iteration_ms, c.found_by)

    return Result(
        plans=tuple(finished(c) for c in ranked),
        lower_bound_ms=bound,
        surrogate_gap=start.surrogate_gap,
        stopped_by=stop.reason,
        baselines={c.found_by: c.iteration_ms for c in start.baselines},
        baseline_plans={c.found_by: objective.sharding_plan(c.assignment) for c in start.baselines},
        search_seconds=stop.elapsed_s,
        evaluations=objective.evaluations,
        seed=seed,
        in_use=rate_plan_in_use(objective, in_use) if in_use else None,
        fastest=finished(fastest) if fastest.iteration_ms < best_ms else None,
        bound_notes=(*start.bound.notes(best_ms), *_size_notes(problem)),
    )


@dataclass(frozen=True)
class _Start:
    """What the search has before it improves anything; ``candidates`` is never empty."""

    objective: Objective
    surrogate: Surrogate
    bound: LowerBound
    baselines: list[Candidate]
    candidates: list[Candidate]
    surrogate_gap: float | None


def _start(
    problem: Problem,
    stop: Stop,
    seed: int,
    searchers: Sequence[str],
    in_use: PlanInUse | None,
    progress: Progress,
) -> _Start:
    """Baselines and candidates; in the whole space if nothing fits in the reduced one."""
    for space in _spaces(problem, stop, in_use):
        objective = Objective(problem, space)
        surrogate = Surrogate(objective)
        bound = LowerBound(problem, space_of_bound(space), objective.scorer)
        progress("baselines", 0.0, None, None)
        baselines = _baselines(objective, surrogate, seed, stop)
        # what TorchRec would run with wrong results is shown, but never chosen
        known = [c for c in baselines + candidates_in_use(objective) if _is_valid(objective, c)]
        able = pick_searchers(space, searchers)
        found, gap = propose(objective, surrogate, stop, seed, able, known, bound, progress)
        found = [c for c in found if space.in_use is None or space.in_use.allows(c.assignment)]
        if known + found:
            return _Start(objective, surrogate, bound, baselines, known + found, gap)
        found, nearest = rescue(objective, surrogate, stop, seed)
        if found:
            return _Start(objective, surrogate, bound, baselines, found, gap)
    raise explain_no_plan(objective, surrogate, nearest, in_use, stop, seed)


def _spaces(problem: Problem, stop: Stop, in_use: PlanInUse | None) -> list[Space]:
    """The options worth trying, then all options if those are more."""
    try:
        whole = whole_space(problem, stop.check_start)
    except InfeasibleError as error:
        raise explain_infeasible(problem, error, stop) from None
    reduced = drop_uvm(whole, problem.topology)
    spaces = [reduced] if reduced.size == whole.size else [reduced, whole]
    return spaces if in_use is None else [space_near(s, problem, in_use) for s in spaces]


def _baselines(
    objective: Objective, surrogate: Surrogate, seed: int, stop: Stop
) -> list[Candidate]:
    """What other methods would choose, with its predicted time."""
    free = objective.over(lift_move_limit(objective.space))
    plans = plan_baselines(free, surrogate, seed, lambda: stop.remaining_s <= 0)
    times = objective.score(list(plans.values())).tolist()
    return [
        Candidate(plan, ms, name) for (name, plan), ms in zip(plans.items(), times, strict=True)
    ]


def _is_valid(objective: Objective, candidate: Candidate) -> bool:
    """It fits, and TorchRec computes it right."""
    workload, device = objective.problem.workload, objective.problem.hardware.device
    sound = all(is_sound(option, workload, device) for option, _ in candidate.assignment)
    return sound and objective.fits(candidate.assignment)


def _improve(start: _Start, search: LocalSearch, stop: Stop, progress: Progress) -> list[Candidate]:
    """Local search: half of the budget over the best few candidates, half on the best of those."""
    limit = start.objective.space.in_use
    if limit is not None and not limit.max_moves:
        return []
    starts = rank_distinct(start.candidates)[:IMPROVED]
    size = len(starts[0].assignment) * start.objective.problem.topology.world_size
    share = min(1.0, LARGE / size)
    if share < 1.0 and (limit is None or not limit.is_limited):
        share *= BEYOND
    budget = stop.work(round(EVALUATIONS * share)) // 2
    improved: list[Candidate] = []
    for turn, share in enumerate([budget // len(starts)] * len(starts) + [budget]):
        one = starts[turn] if turn < len(starts) else rank_distinct(improved)[0]
        best_ms = min(c.iteration_ms for c in [*improved, *starts])
        progress("local search", 0.5 + 0.3 * turn / (len(starts) + 1), best_ms, None)
        try:
            plan, ms = search.improve(
                one.assignment, share, lambda best: stop.reached(best, start.bound.proven_ms)
            )
        except KeyboardInterrupt:
            stop.interrupt()
            reached = {one.assignment: one.iteration_ms, **search.visited}
            plan, ms = min(reached.items(), key=lambda item: item[1])
        name = one.found_by.removesuffix(IMPROVED_BY) + IMPROVED_BY
        improved.append(Candidate(plan, ms, name))
    return improved


def _bound(start: _Start, best_ms: float, stop: Stop) -> float:
    """The lower bound in ms; after Ctrl-C what was proven before.

    Where time was up before the bound of a large problem began, nothing is proven.
    """
    size = len(start.objective.space.options) * start.objective.problem.topology.world_size
    if stop.remaining_s <= 0 and size > LARGE and not start.bound.has_begun:
        return 0.0
    try:
        steps = 0 if stop.is_interrupted else stop.work(BOUND_STEPS)
        return start.bound.tighten(
            steps, best_ms, stop.effort, lambda bound: stop.reached(best_ms, bound)
        )
    except KeyboardInterrupt:
        stop.interrupt()
        return start.bound.solve(0, best_ms)


def _size_notes(problem: Problem) -> tuple[str, ...]:
    """That the problem is so large that the search does less of what it does for others."""
    tables, ranks = len(problem.workload.tables), problem.topology.world_size
    if tables * ranks <= LARGE:
        return ()
    return (
        f"With {tables} tables on {ranks} ranks (over {LARGE:,} tables times ranks) plans are "
        "packed more and searched locally less",
    )


def _limit_ms(start: _Start, fastest: Candidate, tolerance: float, stop: Stop) -> float:
    """No slower plan is preferred: one that a baseline beats, or that opens a closed gap."""
    limits = [fastest.iteration_ms * (1 + tolerance)]
    limits += [c.iteration_ms for c in start.baselines if c in start.candidates]
    if stop.reached(fastest.iteration_ms, start.bound.proven_ms):
        limits.append(start.bound.proven_ms * (1 + stop.gap))
    return max(fastest.iteration_ms, min(limits))
