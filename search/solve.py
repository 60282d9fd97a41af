"""The search, from a problem to ranked plans and a bound. Read `solve` from top to bottom.

space         the options of every table, with what was left out and why   (search.space)
baselines     what other methods would choose, as first candidates         (search.baselines)
plan in use   a candidate too, and how far the search may move from it     (search.in_use)
candidates    of the lowest sets of exchanges, annealed; on request by CP-SAT, Optuna
improvement   the best candidates, on the full timeline                    (search.improve)
choice        by time or over scenarios; of plans that tie, the preferred  (search.choose)
bound         no plan of the space is predicted to be faster               (search.bound)
host memory   only where device memory does not do, behind a cache         (here)
peak          plans that fit by the sum of their parts, checked whole      (search.peak)
no plan       which demands exclude each other, and what would help        (search.infeasible)

Under a ceiling of time every stage has a share of what is left when it begins, so that there are a
plan and a bound whenever time is up (docs/decisions/0029-time-of-a-search.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from predictor.cost.errors import OVERHEADS, GivenErrors
from predictor.errors import InfeasibleError
from predictor.model.memory.ranks import UVM_KERNELS
from predictor.model.plan import ComputeKernel
from search.baselines.starting_plans import plan_baselines
from search.bound.lower_bound import LowerBound
from search.candidate import Candidate, rank_distinct
from search.choose import NOMINAL, ChosenPlans, PlanGoal, check_aim, choose_plan
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
from search.infeasible import explain_infeasible, explain_no_plan
from search.objective import Assignment, Objective
from search.params import DEFAULT, SearchParams
from search.peak import search_within_peak
from search.prefer import NO_TIME, TOLERANCE, tolerance_of
from search.problem import Problem, Progress, RankedPlan, Result, silent
from search.propose.feasibility import Feasibility
from search.propose.searchers import SEARCHERS, Proposer, rescue
from search.scenarios.scenario import Scenario, draw_scenarios
from search.side_by_side import CutPiece
from search.space.enumerate import whole_space
from search.space.filters import AMPLE, drop_uncached, drop_uvm, find_simplest
from search.space.host_memory import memory_notes
from search.space.option import Space
from search.stop import Late, Stop
from search.surrogate import Surrogate

STARTS, TURNS, LAST = 4, 2, 2
"""Candidates that local search starts from; its turns, which share the budget; and the best of the
first turn that the second goes on from."""
IMPROVED_BY = " + local search"
IN_FULL = 20.0
"""Times the work for what single ranks can hold, where the bound is to be proved in full."""
ROOT_STEPS = 60
"""Refinements of the bound that says whether host memory could gain enough."""
ROUNDING = 1e-9
"""Share by which sums of the same times in another order may differ, and more."""

# Shares of the time that is left when a stage begins.
BASELINES_TIME = 0.15
LOCAL_TIME = 0.6
HOST_TIME = 0.3
CHOICE_TIME = 0.1
"""Of all time: what must be left for the choice among plans that tie."""


def solve(
    problem: Problem,
    stop: Stop,
    seed: int,
    *,
    top_k: int = 3,
    searchers: Sequence[str] = SEARCHERS,
    in_use: PlanInUse | None = None,
    tolerance: float | None = None,
    prove: bool = False,
    aim: str = NOMINAL,
    scenarios: Sequence[Scenario] | None = None,
    params: SearchParams = DEFAULT,
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
            better by other rules (`search.prefer`), >= 0; never slower than a baseline. None for a
            fifth of the stated error. Without effect where a plan is in use, of which the best
            should move little.
        prove: refine the bound in full, not only while that is worth it.
        aim: what is minimised, one of `search.choose.AIMS`: the nominal time, the mean over the
            scenarios, or the largest regret in them.
        scenarios: what else could be true; None for sixteen draws of the errors that the profile
            states.
        params: how plans are made.
        progress: called with every stage of the search.

    Raises:
        InfeasibleError: no plan fits, or a table has no option left.
        InputError: the plan in use is of another model or world size; or there are fewer than two
            scenarios, and the aim is another than the nominal time.
        KeyboardInterrupt: before any plan was found, or twice, or `stop` is not interruptible.
    """
    in_use = in_use and check_plan_in_use(in_use, problem)
    check_aim(aim, scenarios)
    others = draw_scenarios(problem) if scenarios is None else scenarios
    wanted = PlanGoal(aim, others, tolerance)
    settings = SearchSettings(stop, seed, top_k, searchers, in_use, wanted, prove, params, progress)
    return search_within_peak(problem, stop, lambda p: _search(p, settings), top_k)


@dataclass(frozen=True)
class SearchSettings:
    """How to search; see `solve`."""

    stop: Stop
    seed: int
    top_k: int
    searchers: Sequence[str]
    in_use: PlanInUse | None
    wanted: PlanGoal
    prove: bool
    params: SearchParams
    progress: Progress


def _search(problem: Problem, settings: SearchSettings) -> Result:
    """One search, over plans whose parts add up to what there is."""
    stop, host = settings.stop, ""
    spaces = _spaces(problem, stop, settings.in_use)
    for space in spaces:
        one = SpaceSearcher(problem, space, settings)
        found = one.find()
        if found is not None:
            break
    else:
        assert one.nearest is not None
        raise explain_no_plan(one.objective, one.nearest, settings.in_use, stop, settings.seed)
    if space is not spaces[-1]:
        found, host = _compare_host_memory(found, problem, space, spaces[-1], settings)
    settings.progress("done", 1.0, found.best.iteration_ms, found.lower_bound_ms)
    memory = memory_notes(problem, found.best.plan)
    size = _size_note(problem, settings.params)
    notes = tuple(filter(None, (*memory, host, *found.bound_notes, size)))
    return replace(found, bound_notes=notes, stopped_by=stop.reason, search_seconds=stop.elapsed_s)


def _spaces(problem: Problem, stop: Stop, in_use: PlanInUse | None) -> list[Space]:
    """The options without host memory if their bytes fit, those with a cache wherever they use it,
    and all options, each if it has more than the one before."""
    try:
        whole = whole_space(problem, stop.check_start)
    except InfeasibleError as error:
        raise explain_infeasible(problem, error, stop) from None
    cached = drop_uncached(whole)
    spaces = [whole]
    for narrower in (cached, drop_uvm(cached, problem.topology, 1.0)):
        if narrower.size < spaces[0].size:
            spaces.insert(0, narrower)
    return spaces if in_use is None else [space_near(s, problem, in_use) for s in spaces]


class SpaceSearcher:
    """One space of a problem, and how to search it."""

    def __init__(self, problem: Problem, space: Space, settings: SearchSettings) -> None:
        self.settings = settings
        self.objective = Objective(problem, space)
        self.surrogate = Surrogate(self.objective)
        patience = None if settings.prove else settings.stop.effort
        self.bound = LowerBound(problem, space_of_bound(space), self.objective.scorer, patience)
        self.size = len(space.options) * problem.topology.world_size
        self.valid: list[Candidate] = []
        self.nearest: Feasibility | None = None

    def find(self) -> Result | None:
        """The best plans of the space; None if nothing was found that fits."""
        settings, objective = self.settings, self.objective
        stop, seed, progress = settings.stop, settings.seed, settings.progress
        progress("baselines", 0.0, None, None)
        baselines = self._baselines()
        # what lies outside the space that the bound is of is shown, but never chosen
        self.valid = [c for plan in baselines if (c := self._in_space(plan))]
        in_use = candidates_in_use(objective)
        known = [*self.valid, *(c for c in in_use if objective.fits(c.assignment))]
        able = pick_searchers(objective.space, settings.searchers)
        proposer = Proposer(
            objective, self.surrogate, stop, seed, self.bound, progress, settings.params
        )
        found = proposer.propose(able, known)
        limit = objective.space.in_use
        known += [c for c in found if objective.fits(c.assignment)]
        if not known:
            known, self.nearest = rescue(objective, stop, seed)
            if not known:
                return None
        search = LocalSearch(objective, self.surrogate, seed)
        improved = self._improve(search, _starts(rank_distinct(known)))
        ranked = rank_distinct([*improved, *known], limit)
        fastest, chosen = ranked[0], self._choose(search, ranked)
        shown = self._shown(chosen)
        progress("lower bound", 0.8, shown[0].iteration_ms, None)
        bound_ms = self._tighten(fastest.iteration_ms)
        stop.reached(fastest.iteration_ms, bound_ms)  # remembers a gap that was closed before
        return self._result(baselines, shown, fastest, chosen, bound_ms)

    def _baselines(self) -> list[Candidate]:
        """What other methods would choose, with its predicted time."""
        free = self.objective.over(lift_move_limit(self.objective.space))
        late = self.settings.stop.part(BASELINES_TIME)
        plans = plan_baselines(free, self.surrogate, self.settings.seed, late)
        times = self.objective.score(list(plans.values())).tolist()
        return [
            Candidate(plan, ms, name) for (name, plan), ms in zip(plans.items(), times, strict=True)
        ]

    def _in_space(self, candidate: Candidate) -> Candidate | None:
        """The candidate as a plan of the space, whose simplest options stand for others that put
        the same bytes on the same ranks; None if it fits not, or lies outside."""
        objective, plan = self.objective, candidate.assignment
        space, topology = objective.space, objective.problem.topology
        options = [find_simplest(space, option, topology) for option, _ in plan]
        same = tuple(
            (option, ranks[: option.num_shards])
            for option, (_, ranks) in zip(options, plan, strict=True)
            if option is not None
        )
        if len(same) < len(plan) or not objective.fits(same):
            return None
        if same == plan:
            return candidate
        return replace(candidate, assignment=same, iteration_ms=float(objective.score([same])[0]))

    def _improve(self, search: LocalSearch, starts: Sequence[Candidate]) -> list[Candidate]:
        """Local search: half of the budget over the best few, half over the best of those."""
        objective, stop = self.objective, self.settings.stop
        limit = objective.space.in_use
        if limit is not None and not limit.max_moves:
            return []
        params = self.settings.params
        share = min(1.0, params.large / self.size)
        if share < 1.0 and (limit is None or not limit.is_limited):
            share *= params.large_share
        budget = stop.work(round(params.evaluations * share)) // TURNS
        improved: list[Candidate] = []
        late = stop.part(LOCAL_TIME)
        for turn in range(TURNS):
            some = starts if turn == 0 else rank_distinct(improved)[:LAST]
            best_ms = min(c.iteration_ms for c in [*improved, *starts])
            self.settings.progress("local search", 0.5 + 0.15 * turn, best_ms, None)
            pieces = [
                partial(self._descend, search, turn * STARTS + i, one, budget // len(some), late)
                for i, one in enumerate(some)
            ]
            try:
                for one, visited in objective.side_by_side(pieces):
                    improved.append(one)
                    search.visited.update(visited)
            except KeyboardInterrupt:
                stop.interrupt()
                break
        return improved

    def _descend(
        self, known: LocalSearch, number: int, start: Candidate, budget: int, late: Late
    ) -> tuple[Candidate, dict[Assignment, float]]:
        """One descent, which depends on no other: the best plan, and all it went through.

        Raises:
            CutPiece: Ctrl-C came.
        """
        stop, bound = self.settings.stop, self.bound
        search = LocalSearch(known.objective, known.surrogate, self.settings.seed + number)
        name = start.found_by.removesuffix(IMPROVED_BY) + IMPROVED_BY
        try:
            plan, ms = search.improve(
                start.assignment,
                budget,
                lambda best: stop.reached(best, bound.proven_ms) or late(),
            )
        except KeyboardInterrupt:
            reached = {start.assignment: start.iteration_ms, **search.visited}
            plan, ms = min(reached.items(), key=lambda item: item[1])
            raise CutPiece((Candidate(plan, ms, name), search.visited)) from None
        return Candidate(plan, ms, name), search.visited

    def _choose(self, search: LocalSearch, ranked: list[Candidate]) -> ChosenPlans:
        """The ranked plans with the preferred one first."""
        settings, objective = self.settings, self.objective
        stop, wanted, in_use = settings.stop, settings.wanted, settings.in_use
        near = objective.space.in_use
        if wanted.tolerance is None and in_use is None:
            wanted = replace(wanted, tolerance=tolerance_of(objective, ranked[0]))
        ties = bool(wanted.tolerance) and in_use is None
        over = wanted.aim != NOMINAL and (near is None or near.max_moves > 0)
        in_time = stop.remaining_s > CHOICE_TIME * (stop.time_limit_s or 0.0)
        if in_time and (ties or over):
            settings.progress("choice", 0.78, ranked[0].iteration_ms, None)
            try:
                limit_ms = self._limit_ms(ranked[0], wanted.tolerance or 0.0)
                return choose_plan(search, ranked, limit_ms, wanted, stop, in_use)
            except KeyboardInterrupt:
                stop.interrupt()
        return ChosenPlans(ranked, None, ())

    def _limit_ms(self, fastest: Candidate, tolerance: float) -> float:
        """No slower plan ties: of those that are slower than a baseline none does."""
        limits = [fastest.iteration_ms * (1 + tolerance)]
        limits += [c.iteration_ms * (1 + min(tolerance, ROUNDING)) for c in self.valid]
        return max(fastest.iteration_ms, min(limits))

    def _shown(self, chosen: ChosenPlans) -> list[Candidate]:
        """The best of the chosen plans, with the names of their ranks nearest to those in use."""
        settings, in_use = self.settings, self.settings.in_use
        ranked = [rename_ranks(self.objective, c) for c in chosen.ranked[: settings.top_k]]
        if in_use is not None and in_use.horizon is not None and not chosen.scenarios:
            found = prefer_worthwhile(self.objective, in_use, ranked, TOLERANCE)
            ranked = found[: settings.top_k]
        return ranked

    def _tighten(self, best_ms: float) -> float:
        """The lower bound in ms; after Ctrl-C what was proven before.

        Where time was up before the bound of a large problem began, nothing is proven.
        """
        stop = self.settings.stop
        if (
            stop.remaining_s <= 0
            and self.size > self.settings.params.large
            and not self.bound.has_begun
        ):
            return 0.0
        try:
            steps = 0 if stop.is_interrupted else stop.work(self.settings.params.bound_steps)
            return self.bound.tighten(
                steps,
                best_ms,
                stop.effort * (IN_FULL if self.settings.prove else 1.0),
                lambda bound: stop.reached(best_ms, bound),
                lambda: stop.remaining_s,
            )
        except KeyboardInterrupt:
            stop.interrupt()
            return self.bound.solve(0, best_ms)

    def _result(
        self,
        baselines: Sequence[Candidate],
        shown: Sequence[Candidate],
        fastest: Candidate,
        chosen: ChosenPlans,
        bound_ms: float,
    ) -> Result:
        """What was found, with plans in place of assignments."""
        settings, objective = self.settings, self.objective
        stop, in_use = settings.stop, settings.in_use

        def finished(c: Candidate) -> RankedPlan:
            plan = finish_plan(objective, in_use, c.assignment)
            return RankedPlan(plan, c.iteration_ms, c.found_by)

        best_ms = shown[0].iteration_ms
        return Result(
            plans=tuple(map(finished, shown)),
            lower_bound_ms=bound_ms,
            stopped_by=stop.reason,
            baselines={c.found_by: c.iteration_ms for c in baselines},
            baseline_plans={c.found_by: objective.sharding_plan(c.assignment) for c in baselines},
            search_seconds=stop.elapsed_s,
            evaluations=objective.evaluations,
            seed=settings.seed,
            in_use=rate_plan_in_use(objective, in_use) if in_use else None,
            fastest=finished(fastest) if fastest.iteration_ms < best_ms else None,
            bound_notes=self.bound.notes(best_ms),
            aim=settings.wanted.aim,
            ties=chosen.ties,
            scenarios=chosen.scenarios,
            passed_over=chosen.passed_over,
        )


def _starts(ranked: Sequence[Candidate]) -> list[Candidate]:
    """The best few, one of them by another searcher than the rest: plans that were packed are much
    alike."""
    best, others = list(ranked[: STARTS - 1]), list(ranked[STARTS - 1 :])
    searchers = {one.found_by for one in best}
    apart = [one for one in others if one.found_by not in searchers]
    return best + (apart or others)[:1]


def _compare_host_memory(
    found: Result, problem: Problem, space: Space, whole: Space, settings: SearchSettings
) -> tuple[Result, str]:
    """The plans with more tables in host memory, or without a cache there, where they gain more
    than the stated error of lookups could hide, else those found; and what there is to say of that.

    Where device memory is ample, or a search takes long, they are not looked at. A cache that only
    a slow host cannot keep up with stays: without it, the devices have more to do.

    Args:
        found: the plans of ``space``, which has fewer options than the ``whole``.
    """
    stop = settings.stop
    error = problem.hardware.embedding.rel_error
    best_ms = (found.fastest or found.best).iteration_ms
    enough_ms = best_ms / (1 + error)
    large = len(whole.options) * problem.topology.world_size > settings.params.large
    whole = drop_uvm(whole, problem.topology, AMPLE)
    if whole.size == space.size:
        return found, ""
    cached = space.size == drop_uncached(whole).size
    where = "in host memory " + ("without a cache" if cached else "(UVM kernels)")
    left_out = f"Plans with tables {where} are left out, also by the bound"
    if large or stop.remaining_s <= 0:
        return found, f"{left_out}: they were not tried, since a plan fits without them"
    late = stop.part(HOST_TIME)
    bound = LowerBound(problem, space_of_bound(whole), problem.scorer)
    least_ms = bound.solve(stop.work(ROOT_STEPS), best_ms, lambda ms: ms >= enough_ms or late())
    if least_ms >= enough_ms:
        return found, f"{left_out}: none is more than {error:.0%} faster, the error of lookups"
    other = SpaceSearcher(problem, whole, settings).find()
    if other is None or other.best.iteration_ms >= enough_ms:
        return found, f"{left_out}: no plan was found that is more than {error:.0%} faster"
    if cached and _devices_ms(problem, other) > _devices_ms(problem, found):
        return found, (
            f"{left_out}: one takes {other.best.iteration_ms:.4g} ms because the host launches "
            "less, but its devices have more to do"
        )
    kernels = (ComputeKernel.FUSED_UVM,) if cached else UVM_KERNELS
    tables = sum(t.compute_kernel in kernels for t in other.best.plan.tables.values())
    return other, (
        f"{tables} tables are {where}, whose kernels are not validated: that is "
        f"{best_ms / other.best.iteration_ms - 1:.0%} faster than the best plan without, more "
        f"than the {error:.0%} that lookups may be wrong by"
    )


def _devices_ms(problem: Problem, result: Result) -> float:
    """What the devices of the best plan would take with a host that needs no time."""
    plan = [result.best.plan.tables[key] for key in problem.workload.keys]
    numbers = [problem.scorer.number(table, one) for table, one in enumerate(plan)]
    alone = problem.perturbed(problem.scorer, GivenErrors({OVERHEADS: NO_TIME}))
    return float(alone.score_numbered(np.array([numbers]))[0, 0])


def _size_note(problem: Problem, params: SearchParams) -> str:
    """That the problem is so large that the search does less of what it does for others."""
    tables, ranks = len(problem.workload.tables), problem.topology.world_size
    if tables * ranks <= params.large:
        return ""
    return (
        f"With {tables} tables on {ranks} ranks (over {params.large:,} tables times ranks) plans "
        "are searched locally less"
    )
