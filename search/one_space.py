"""The search of one space: candidates, improvement, preference, bound. `search.solve` reads first.

Under a ceiling of time every stage has a share of what is left when it begins, so that there are a
plan and a bound whenever time is up (docs/decisions/0029-time-of-a-search.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from predictor.errors import InfeasibleError
from search.baselines.starting_plans import plan_baselines
from search.bound.lower_bound import LowerBound
from search.candidate import Candidate, rank_distinct
from search.choose import NOMINAL, ChosenPlans, PlanGoal, choose_plan
from search.improve.local_search import LocalSearch
from search.in_use.align import rename_ranks
from search.in_use.plan import (
    PlanInUse,
    candidates_in_use,
    finish_plan,
    lift_move_limit,
    pick_searchers,
    rate_plan_in_use,
    space_of_bound,
)
from search.in_use.worth import prefer_worthwhile
from search.infeasible import explain_no_plan
from search.objective import Assignment, Objective
from search.prefer import TOLERANCE, tolerance_of
from search.problem import Problem, Progress, RankedPlan, Result
from search.propose.feasibility import Feasibility
from search.propose.rounding import LARGE
from search.propose.searchers import BOUND_STEPS, propose, rescue
from search.side_by_side import CutPiece
from search.space.filters import is_sound
from search.space.option import Space
from search.stop import Stop
from search.surrogate import Surrogate

Late = Callable[..., bool]
"""Whether the time of a stage is up."""

# Work at effort 1, sized so that 26 tables on 8 ranks take a few seconds.
EVALUATIONS = 40_000
BEYOND = 0.05
"""Share of it where a plan takes long to score and one change gains little: packing has the time
(docs/decisions/0028-plans-from-the-bound.md)."""
IMPROVED = 4
"""Candidates that local search starts from."""
TURNS = 2
LAST = 2
"""Of those, the best that it goes on from, with half of its budget."""
IMPROVED_BY = " + local search"
LOCAL_TIME = 0.6
"""Share of the time that is left, for local search."""
CHOICE_TIME = 0.1
"""Share of all time that must be left for the choice among plans that tie."""
ROUNDING = 1e-9
"""Share by which sums of the same times in another order may differ, and more."""
IN_FULL = 20.0
"""Times the work for what single ranks can hold, where the bound is to be proved in full."""
BASELINES_TIME = 0.15
"""Share of the time that is left, for what other methods would choose."""


@dataclass(frozen=True)
class SearchSettings:
    """How to search; see `search.solve.solve`."""

    stop: Stop
    seed: int
    top_k: int
    searchers: Sequence[str]
    in_use: PlanInUse | None
    wanted: PlanGoal
    prove: bool
    progress: Progress


class SpaceSearcher:
    """One space of a problem, and how to search it."""

    def __init__(self, problem: Problem, space: Space, settings: SearchSettings) -> None:
        self.settings = settings
        self.objective = Objective(problem, space)
        self.surrogate = Surrogate(self.objective)
        self.bound = LowerBound(problem, space_of_bound(space), self.objective.scorer)
        self.size = len(space.options) * problem.topology.world_size
        self.valid: list[Candidate] = []
        self.nearest: Feasibility | None = None

    def find(self) -> Result | None:
        """The best plans of the space; None if nothing was found that fits."""
        settings, objective = self.settings, self.objective
        stop, seed, progress = settings.stop, settings.seed, settings.progress
        progress("baselines", 0.0, None, None)
        baselines = self._baselines()
        # what TorchRec would run with wrong results is shown, but never chosen
        self.valid = [c for c in baselines if self._is_valid(c)]
        known = [*self.valid, *filter(self._is_valid, candidates_in_use(objective))]
        able = pick_searchers(objective.space, settings.searchers)
        found = propose(objective, self.surrogate, stop, seed, able, known, self.bound, progress)
        limit = objective.space.in_use
        known += [c for c in found if limit is None or limit.allows(c.assignment)]
        if not known:
            known, self.nearest = rescue(objective, stop, seed)
            if not known:
                return None
        fastest, chosen = self._improve_and_choose(known)
        ranked = self._rank(chosen)
        progress("lower bound", 0.8, ranked[0].iteration_ms, None)
        bound_ms = self._tighten(fastest.iteration_ms)
        stop.reached(fastest.iteration_ms, bound_ms)  # remembers a gap that was closed before
        return self._result(baselines, ranked, fastest, chosen, bound_ms)

    def _result(
        self,
        baselines: Sequence[Candidate],
        ranked: Sequence[Candidate],
        fastest: Candidate,
        chosen: ChosenPlans,
        bound_ms: float,
    ) -> Result:
        """What was found, with plans in place of assignments.

        Args:
            ranked: the preferred plan first.
            fastest: of all.
        """
        settings, objective = self.settings, self.objective
        stop, in_use = settings.stop, settings.in_use

        def finished(c: Candidate) -> RankedPlan:
            plan = finish_plan(objective, in_use, c.assignment)
            return RankedPlan(plan, c.iteration_ms, c.found_by)

        best_ms = ranked[0].iteration_ms
        return Result(
            plans=tuple(map(finished, ranked)),
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

    def explain(self) -> InfeasibleError:
        """Why nothing fits, once `find` found nothing."""
        settings = self.settings
        assert self.nearest is not None
        return explain_no_plan(
            self.objective,
            self.nearest,
            settings.in_use,
            settings.stop,
            settings.seed,
        )

    def _baselines(self) -> list[Candidate]:
        """What other methods would choose, with its predicted time."""
        free = self.objective.over(lift_move_limit(self.objective.space))
        late = self.settings.stop.part(BASELINES_TIME)
        plans = plan_baselines(free, self.surrogate, self.settings.seed, late)
        times = self.objective.score(list(plans.values())).tolist()
        return [
            Candidate(plan, ms, name) for (name, plan), ms in zip(plans.items(), times, strict=True)
        ]

    def _is_valid(self, candidate: Candidate) -> bool:
        """It fits, and TorchRec computes it right."""
        problem = self.objective.problem
        workload, device = problem.workload, problem.hardware.device
        sound = all(is_sound(option, workload, device) for option, _ in candidate.assignment)
        return sound and self.objective.fits(candidate.assignment)

    def _improve_and_choose(self, known: Sequence[Candidate]) -> tuple[Candidate, ChosenPlans]:
        """The fastest plan, and the ranked ones with the preferred one first."""
        settings, objective = self.settings, self.objective
        stop, wanted, in_use = settings.stop, settings.wanted, settings.in_use
        search = LocalSearch(objective, self.surrogate, settings.seed)
        improved = self._improve(search, _starts(rank_distinct(known)))
        ranked = rank_distinct([*improved, *known], objective.space.in_use)
        chosen = ChosenPlans(ranked, None, ())
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
                chosen = choose_plan(search, ranked, limit_ms, wanted, stop, in_use)
            except KeyboardInterrupt:
                stop.interrupt()
        return ranked[0], chosen

    def _rank(self, chosen: ChosenPlans) -> list[Candidate]:
        """The best of the chosen plans, with the names of their ranks nearest to those in use."""
        settings, in_use = self.settings, self.settings.in_use
        ranked = [rename_ranks(self.objective, c) for c in chosen.ranked[: settings.top_k]]
        weighed = bool(chosen.scenarios)
        if in_use is not None and in_use.horizon is not None and not weighed:
            found = prefer_worthwhile(self.objective, in_use, ranked, TOLERANCE)
            ranked = found[: settings.top_k]
        return ranked

    def _improve(self, search: LocalSearch, starts: Sequence[Candidate]) -> list[Candidate]:
        """Local search: half of the budget over the best few, half over the best of those."""
        objective, stop = self.objective, self.settings.stop
        limit = objective.space.in_use
        if limit is not None and not limit.max_moves:
            return []
        share = min(1.0, LARGE / self.size)
        if share < 1.0 and (limit is None or not limit.is_limited):
            share *= BEYOND
        budget = stop.work(round(EVALUATIONS * share)) // 2
        improved: list[Candidate] = []
        late = stop.part(LOCAL_TIME)
        for turn in range(TURNS):
            some = starts if turn == 0 else rank_distinct(improved)[:LAST]
            best_ms = min(c.iteration_ms for c in [*improved, *starts])
            self.settings.progress("local search", 0.5 + 0.15 * turn, best_ms, None)
            pieces = [
                partial(self._descend, search, turn * IMPROVED + i, one, budget // len(some), late)
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

    def _limit_ms(self, fastest: Candidate, tolerance: float) -> float:
        """No slower plan ties: of those that are slower than a baseline none does."""
        limits = [fastest.iteration_ms * (1 + tolerance)]
        limits += [c.iteration_ms * (1 + min(tolerance, ROUNDING)) for c in self.valid]
        return max(fastest.iteration_ms, min(limits))

    def _tighten(self, best_ms: float) -> float:
        """The lower bound in ms; after Ctrl-C what was proven before.

        Where time was up before the bound of a large problem began, nothing is proven.
        """
        stop = self.settings.stop
        if stop.remaining_s <= 0 and self.size > LARGE and not self.bound.has_begun:
            return 0.0
        try:
            steps = 0 if stop.is_interrupted else stop.work(BOUND_STEPS)
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


def _starts(ranked: Sequence[Candidate]) -> list[Candidate]:
    """The best few, one of them by another searcher than the rest: plans that were packed are much
    alike."""
    best, others = list(ranked[: IMPROVED - 1]), list(ranked[IMPROVED - 1 :])
    searchers = {one.found_by for one in best}
    apart = [one for one in others if one.found_by not in searchers]
    return best + (apart or others)[:1]
