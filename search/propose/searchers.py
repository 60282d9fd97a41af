"""Plans to start from: what the searchers propose, and any that fits where they find none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from search.bound.lower_bound import LowerBound
from search.candidate import Candidate
from search.objective import Objective
from search.problem import Progress
from search.propose.cpsat import CpSat
from search.propose.feasibility import Feasibility, find_feasible
from search.propose.packed import RoundingPacker
from search.propose.rounding import LARGE, Rounding
from search.propose.study import Study
from search.space.enumerate import LOAD_FACTORS
from search.space.option import Option, Space
from search.stop import Stop
from search.surrogate import Surrogate

SEARCHERS = ("rounding", "cpsat", "optuna")

# Work at effort 1, sized so that 26 tables on 8 ranks take a few seconds.
CPSAT_WORK = 0.1
TRIALS = 6
BOUND_STEPS = 1000
FEASIBILITY_WORK = 10.0

# Shares of the time that is left when a stage begins.
BOUND_TIME = 1 / 3
ROUNDING_TIME = 0.4
SETUP = 0.7
"""Of a large problem, the bound's choices take about this share of the time until there are
baselines."""


def propose(
    objective: Objective,
    surrogate: Surrogate,
    stop: Stop,
    seed: int,
    searchers: Sequence[str],
    known: Sequence[Candidate],
    bound: LowerBound,
    progress: Progress,
) -> tuple[list[Candidate], float | None]:
    """Candidates of the searchers, and CP-SAT's gap on the surrogate.

    Args:
        bound: solved here as far as its programs propose plans.
    """
    found: list[Candidate] = []
    gap = None
    try:
        for candidate, proven in _candidates(
            objective, surrogate, stop, seed, searchers, known, bound, progress
        ):
            found.append(candidate)
            gap = proven if candidate.found_by == "cpsat" else gap
    except KeyboardInterrupt:
        if not known and not found:
            raise
        stop.interrupt()
    return found, gap


def _candidates(
    objective: Objective,
    surrogate: Surrogate,
    stop: Stop,
    seed: int,
    searchers: Sequence[str],
    known: Sequence[Candidate],
    bound: LowerBound,
    progress: Progress,
) -> Iterator[tuple[Candidate, float | None]]:
    """Candidates one by one, with CP-SAT's gap."""
    first = min(known, key=lambda c: c.iteration_ms, default=None)
    if "rounding" in searchers and not stop.reached():
        for candidate in _rounded(objective, surrogate, stop, seed, known, bound, progress):
            yield candidate, None
            first = min([first or candidate, candidate], key=lambda c: c.iteration_ms)
    best_ms = first.iteration_ms if first else None
    if "cpsat" in searchers and not stop.reached():
        progress("CP-SAT", 0.3, best_ms, None)
        cpsat = CpSat(objective, surrogate)
        for options in _few_and_all(objective.space):
            solution = cpsat.solve(
                options,
                CPSAT_WORK * stop.effort,
                seed,
                first.assignment if first else None,
                time_limit_s=stop.remaining_s,
            )
            if solution is not None:
                ms = float(objective.score([solution.assignment])[0])
                yield Candidate(solution.assignment, ms, "cpsat"), solution.gap
    size = len(objective.space.options) * objective.problem.topology.world_size
    trials = round(TRIALS * stop.effort * min(1.0, LARGE / size))
    if size <= LARGE:
        trials = max(1, trials)  # a trial of a large problem takes seconds and finds nothing
    if "optuna" in searchers and trials and not stop.reached():
        progress("Optuna study", 0.4, best_ms, None)
        study = Study(objective, surrogate, seed)
        for plan, ms in study.run(trials, stop.reached):
            yield Candidate(plan, ms, "optuna"), None


def _few_and_all(space: Space) -> list[tuple[tuple[Option, ...], ...]]:
    """Options with UVM caches of the usual size alone, if there are others; and all, for which
    CP-SAT's budget may be short."""
    few = tuple(
        tuple(o for o in table if o.cache_load_factor not in LOAD_FACTORS[1:]) or table
        for table in space.options
    )
    return [space.options] if few == space.options else [few, space.options]


def _rounded(
    objective: Objective,
    surrogate: Surrogate,
    stop: Stop,
    seed: int,
    known: Sequence[Candidate],
    bound: LowerBound,
    progress: Progress,
) -> Iterator[Candidate]:
    """Plans from the bound's programs, and the best of these and of the known ones packed."""
    size = len(objective.space.options) * objective.problem.topology.world_size
    if size > LARGE and stop.remaining_s < SETUP * stop.elapsed_s:
        return  # the bound's choices alone would take too long
    best_ms = min((c.iteration_ms for c in known), default=math.inf)
    shown = best_ms if known else None
    progress("lower bound", 0.05, shown, None)
    bound.solve(stop.work(BOUND_STEPS), best_ms, stop.part(BOUND_TIME))
    found: list[Candidate] = []
    late = stop.part(ROUNDING_TIME)
    rounding = Rounding(objective, surrogate, seed)
    for candidate in rounding.propose(bound, best_ms, late):
        progress("rounding", 0.2, min([best_ms, *(c.iteration_ms for c in found)]), bound.proven_ms)
        found.append(candidate)
        yield candidate
        if stop.reached():
            return
    yield from RoundingPacker(rounding, bound, stop).pack([*known, *found], progress)


def rescue(objective: Objective, stop: Stop, seed: int) -> tuple[list[Candidate], Feasibility]:
    """Any plan that fits, if nothing else was found; it has a second even when time is up."""
    work, left = FEASIBILITY_WORK * max(1.0, stop.effort), max(1.0, stop.remaining_s)
    found = find_feasible(objective, work, seed, left)
    if found.assignment is None or not objective.fits(found.assignment):
        return [], found
    ms = float(objective.score([found.assignment])[0])
    return [Candidate(found.assignment, ms, "feasibility")], found
