"""Plans to start from: what the searchers propose, and any that fits where they find none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

from search.bound.lower_bound import LowerBound
from search.candidate import Candidate, rank_distinct
from search.improve.neighbourhoods import Neighbourhoods
from search.objective import Assignment, Objective
from search.problem import Progress
from search.propose.feasibility import Feasibility, find_feasible
from search.propose.packed import RoundingPacker
from search.propose.rounding import LARGE, Rounding
from search.propose.study import Study
from search.stop import Stop
from search.surrogate import Surrogate

SEARCHERS = ("rounding", "cpsat")
"""Without others named; ``optuna`` is the third that there is."""

# Work at effort 1, sized so that 26 tables on 8 ranks take a few seconds.
CPSAT_WORK = 20.0
WIDE = 0.1
"""Gap from which on CP-SAT has all of that; less where it is smaller."""
NARROW = 0.02
"""Gap below which it has none: what it could gain ties."""
MANY = 2_000
"""Tables times ranks from which on it has less, as its models take long."""
OTHERS = 4
"""Plans of different exchanges whose cycles it knows from the start."""
TRIALS = 6
BOUND_STEPS = 1000
FEASIBILITY_WORK = 10.0

# Shares of the time that is left when a stage begins.
BOUND_TIME = 1 / 3
ROUNDING_TIME = 0.4
CPSAT_TIME = 0.4
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
) -> list[Candidate]:
    """Candidates of the searchers.

    Args:
        bound: solved here as far as its programs propose plans.
    """
    found: list[Candidate] = []
    try:
        if "rounding" in searchers and not stop.reached():
            for one in _rounded(objective, surrogate, stop, seed, known, bound, progress):
                found.append(one)
        if "cpsat" in searchers and not stop.reached():
            found += _replaced(objective, surrogate, stop, seed, [*known, *found], bound, progress)
        if "optuna" in searchers and not stop.reached():
            progress("Optuna study", 0.4, _best_ms([*known, *found]), None)
            trials = max(1, round(TRIALS * stop.effort))
            for plan, ms in Study(objective, surrogate, seed).run(trials, stop.reached):
                found.append(Candidate(plan, ms, "optuna"))
    except KeyboardInterrupt:
        if not known and not found:
            raise
        stop.interrupt()
    return found


def _best_ms(known: Sequence[Candidate]) -> float | None:
    return min((c.iteration_ms for c in known), default=None)


def _replaced(
    objective: Objective,
    surrogate: Surrogate,
    stop: Stop,
    seed: int,
    known: Sequence[Candidate],
    bound: LowerBound,
    progress: Progress,
) -> list[Candidate]:
    """The best plan, or any that fits, with what lies on a few ranks placed anew by CP-SAT."""
    size = len(objective.space.options) * objective.problem.topology.world_size
    if size > LARGE:
        return []
    limit = objective.space.in_use
    near = [c for c in known if limit is None or limit.allows(c.assignment)]
    ranked = rank_distinct(near or rescue(objective, stop, seed)[0])
    if not ranked:
        return []
    best_ms = ranked[0].iteration_ms
    gap = best_ms / bound.proven_ms - 1 if bound.proven_ms else WIDE
    if gap < NARROW:
        return []
    progress("CP-SAT", 0.3, best_ms, bound.proven_ms or None)
    others: dict[frozenset[int], Assignment] = {}
    for one in ranked[1:]:
        groups = frozenset(surrogate.shard_loads(option)[0] for option, _ in one.assignment)
        others.setdefault(groups, one.assignment)
    late = stop.part(CPSAT_TIME)
    work = CPSAT_WORK * stop.effort * min(1.0, gap / WIDE) * min(1.0, MANY / size)

    def improve(start: Candidate) -> Candidate:
        found = Neighbourhoods(objective, surrogate, seed).improve(
            start.assignment,
            [*others.values()][:OTHERS],
            work,
            lambda best: stop.reached(best, bound.proven_ms) or late(),
            lambda: stop.remaining_s,
        )
        return Candidate(*found, "cpsat")

    # a plan that was not packed leads elsewhere
    starts = [ranked[0], *[c for c in ranked[1:] if c.found_by == "rounding"][:1]]
    pieces = [partial(improve, one) for one in starts]
    found = list(objective.side_by_side(pieces))
    return [c for c in found if not near or c.iteration_ms < best_ms]


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
