"""Plans to start from: what the searchers propose, and any that fits where they find none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from search.bound.lower_bound import LowerBound
from search.candidate import Candidate, rank_distinct
from search.improve.local_search import LocalSearch
from search.improve.neighbourhoods import Neighbourhoods
from search.objective import Assignment, Objective, apply
from search.params import DEFAULT, SearchParams
from search.problem import Progress
from search.propose.annealed import AnnealedPlans
from search.propose.feasibility import Feasibility, find_feasible
from search.propose.study import Study
from search.stop import Stop
from search.surrogate import Surrogate

SEARCHERS = ("annealing",)
"""Without others named; ``cpsat`` and ``optuna`` are the others that there are."""

# Work at effort 1, sized so that 26 tables on 8 ranks take a few seconds.
CPSAT_WORK = 12.0
NARROW, WIDE = 0.02, 0.1
"""Gap below which CP-SAT has none of that, as what it could gain ties, and from which on it has
all."""
MANY = 2_000
"""Tables times ranks from which on it has less, as its models take long."""
STARTS = 2
"""Plans that it starts from."""
TRIALS = 6
BOUND_STEPS = 1000
FEASIBILITY_WORK = 10.0
PLACINGS = 4
"""Plans whose shards fit that are tried until one also fits at its peak."""
CHANGES = 2000
"""Changes of such a plan whose peak is simulated, where nothing else fits."""

# Shares of the time that is left when a stage begins.
BOUND_TIME = 1 / 3
ANNEALING_TIME = 0.6
CPSAT_TIME = 0.4
SETUP = 0.7
"""Of a large problem, the bound's choices take about this share of the time until there are
baselines."""


@dataclass(frozen=True)
class Proposer:
    """Candidates of the searchers.

    Args:
        bound: solved here as far as its programs propose plans.
        params: how plans are made.
    """

    objective: Objective
    surrogate: Surrogate
    stop: Stop
    seed: int
    bound: LowerBound
    progress: Progress
    params: SearchParams = DEFAULT

    def propose(self, searchers: Sequence[str], known: Sequence[Candidate]) -> list[Candidate]:
        """What the searchers find, beside the plans that are known."""
        stop = self.stop
        found: list[Candidate] = []
        try:
            if "annealing" in searchers and not stop.reached():
                for one in self._annealed(known):
                    found.append(one)
            if "cpsat" in searchers and not stop.reached():
                found += self._placed_anew([*known, *found])
            if "optuna" in searchers and not stop.reached():
                best_ms = min((c.iteration_ms for c in [*known, *found]), default=None)
                self.progress("Optuna study", 0.4, best_ms, None)
                study = Study(self.objective, self.surrogate, self.seed)
                for plan, ms in study.run(max(1, round(TRIALS * stop.effort)), stop.reached):
                    found.append(Candidate(plan, ms, "optuna"))
        except KeyboardInterrupt:
            if not known and not found:
                raise
            stop.interrupt()
        return found

    @property
    def _size(self) -> int:
        """Tables times ranks."""
        return len(self.objective.space.options) * self.objective.problem.topology.world_size

    def _annealed(self, known: Sequence[Candidate]) -> Iterator[Candidate]:
        """Plans of the bound's programs, and the best known one, annealed."""
        stop, bound = self.stop, self.bound
        if self._size > self.params.large and stop.remaining_s < SETUP * stop.elapsed_s:
            return  # the bound's choices alone would take too long
        best_ms = min((c.iteration_ms for c in known), default=math.inf)
        self.progress("lower bound", 0.05, best_ms if known else None, None)
        bound.solve(stop.work(self.params.bound_steps), best_ms, stop.part(BOUND_TIME))
        late = stop.part(ANNEALING_TIME)
        self.progress("annealing", 0.2, best_ms if known else None, bound.proven_ms)
        annealed = AnnealedPlans(
            self.objective, self.surrogate, bound, stop, self.seed, self.params
        )
        for candidate in annealed.propose(known, late):
            best_ms = min(best_ms, candidate.iteration_ms)
            self.progress("annealing", 0.2, best_ms, bound.proven_ms)
            yield candidate

    def _placed_anew(self, known: Sequence[Candidate]) -> list[Candidate]:
        """The best plan, or any that fits, with what lies on a few ranks placed anew by CP-SAT."""
        objective, stop, bound = self.objective, self.stop, self.bound
        limit = objective.space.in_use
        near = [c for c in known if limit is None or limit.allows(c.assignment)]
        if self._size > self.params.large:
            return []
        ranked = rank_distinct(near or rescue(objective, stop, self.seed)[0])
        if not ranked:
            return []
        best_ms = ranked[0].iteration_ms
        gap = best_ms / bound.proven_ms - 1 if bound.proven_ms else WIDE
        if gap < NARROW:
            return []
        self.progress("CP-SAT", 0.3, best_ms, bound.proven_ms or None)
        # a plan that was made in another way leads elsewhere
        starts = ranked[:1] + [c for c in ranked if c.found_by != ranked[0].found_by][: STARTS - 1]
        if near and len(starts) < STARTS:
            starts += rescue(objective, stop, self.seed)[0]
        late = stop.part(CPSAT_TIME)
        work = CPSAT_WORK * stop.effort * min(1.0, gap / WIDE) * min(1.0, MANY / self._size)

        def improve(start: Candidate) -> Candidate:
            found = Neighbourhoods(objective, self.surrogate, self.seed).improve(
                start.assignment,
                work,
                lambda best: stop.reached(best, bound.proven_ms) or late(),
                lambda: stop.remaining_s,
            )
            return Candidate(*found, "cpsat")

        found = list(objective.side_by_side([partial(improve, one) for one in starts]))
        return [c for c in found if not near or c.iteration_ms < best_ms]


def rescue(objective: Objective, stop: Stop, seed: int) -> tuple[list[Candidate], Feasibility]:
    """Any plan that fits, if nothing else was found; it has a second even when time is up.

    Where the bytes of a plan's shards fit, but its peak does not, it is placed again within less,
    and the plan that lacks least is changed until it fits.
    """
    work, within = FEASIBILITY_WORK * max(1.0, stop.effort), objective
    tried: list[Assignment] = []
    known: Feasibility | None = None
    for _ in range(PLACINGS):
        found = find_feasible(within, work, seed, max(1.0, stop.remaining_s))
        known = known or found  # caps that were lowered prove nothing
        plan = found.assignment
        if plan is None:
            break
        tried.append(plan)
        if objective.fits(plan):
            break
        within = within.beside(plan)
    assert known is not None
    if not tried:
        return [], known
    nearest = min(tried, key=lambda plan: _lacking(objective, plan))
    plan = _lower_peak(objective, nearest, stop, seed)
    if not objective.fits(plan):
        return [], replace(known, assignment=plan)
    return [Candidate(plan, float(objective.score([plan])[0]), "feasibility")], known


def _lacking(objective: Objective, plan: Assignment) -> int:
    """Bytes that all ranks lack at the peak of a plan."""
    return sum(map(sum, objective.missing(plan)))


def _lower_peak(objective: Objective, plan: Assignment, stop: Stop, seed: int) -> Assignment:
    """The plan changed table by table as long as its ranks lack memory at its peak."""
    lacking, size = _lacking(objective, plan), len(plan) * objective.problem.topology.world_size
    left = stop.work(round(CHANGES * min(1.0, MANY / size)))
    search = LocalSearch(objective, Surrogate(objective), seed)
    while lacking and left > 0:
        for change in islice(search.neighbours(plan), left):
            left -= 1
            changed = apply(plan, change)
            less = _lacking(objective, changed)
            if less < lacking:
                plan, lacking = changed, less
                break
        else:
            break
    return plan
