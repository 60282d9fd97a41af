"""The spine: space -> baselines -> candidates -> improvement -> bound -> result.

space         options per table, with what was left out and why   (search.space)
baselines     what others would choose: the first incumbents      (search.baselines)
candidates    CP-SAT and an Optuna study propose plans            (search.cpsat, search.study)
improvement   all are improved on the full timeline               (search.local_search)
bound         no plan of the space is predicted to be faster      (search.bounds)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from predictor.errors import InfeasibleError
from predictor.units import format_bytes
from search.baselines import baselines
from search.bounds import LowerBound
from search.cpsat import CpSat
from search.dominance import drop_uvm
from search.local_search import LocalSearch
from search.objective import Assignment, Objective, signature
from search.result import Problem, Progress, RankedPlan, Result, silent
from search.space import Space, deduplicate, enumerate_space, prune
from search.soundness import drop_unsound
from search.stop import Stop
from search.study import Study
from search.surrogate import Surrogate

SEARCHERS = ("cpsat", "optuna")

# Work at effort 1, sized so that 26 tables on 8 ranks take a few seconds.
CPSAT_WORK = 1.0
TRIALS = 16
EVALUATIONS = 20_000
BOUND_STEPS = 600
IMPROVED = 4
"""Candidates that local search starts from."""


@dataclass(frozen=True)
class _Candidate:
    assignment: Assignment
    iteration_ms: float
    found_by: str


def solve(
    problem: Problem,
    stop: Stop,
    seed: int,
    *,
    top_k: int = 3,
    searchers: Sequence[str] = SEARCHERS,
    progress: Progress = silent,
) -> Result:
    """Search the sharding plans of a problem.

    Args:
        problem: model, ranks with the memory left for shards, costs.
        stop: work budget, time ceiling, gap.
        seed: of every random choice, >= 0.
        top_k: plans to return, >= 1.
        searchers: which of `SEARCHERS` propose candidates.
        progress: told what is going on.

    Raises:
        InfeasibleError: no plan fits, or a table has no option left.
    """
    space = reduced_space(problem)
    objective = Objective(problem, space)
    surrogate = Surrogate(objective)

    progress("baselines", 0.0, None, None)
    others = baselines(objective, surrogate, seed)
    times = objective.score(list(others.values())).tolist() if others else []
    known = [
        _Candidate(plan, ms, name) for (name, plan), ms in zip(others.items(), times, strict=True)
    ]
    seeds, surrogate_gap = _propose(objective, surrogate, stop, seed, searchers, known, progress)
    if not known + seeds:
        raise _infeasible(problem, space)

    improved = _improve(objective, surrogate, stop, seed, known + seeds, progress)
    ranked = _distinct(problem, [*improved, *seeds, *known])[:top_k]
    best_ms = ranked[0].iteration_ms
    progress("lower bound", 0.8, best_ms, None)
    bound = LowerBound(problem, space, objective.batch).solve(
        stop.work(BOUND_STEPS), best_ms, lambda bound: stop.reached(best_ms, bound)
    )
    progress("done", 1.0, best_ms, bound)
    return Result(
        plans=tuple(
            RankedPlan(objective.sharding_plan(c.assignment), c.iteration_ms, c.found_by)
            for c in ranked
        ),
        lower_bound_ms=bound,
        surrogate_gap=surrogate_gap,
        stopped_by=stop.reason,
        baselines={c.found_by: c.iteration_ms for c in known},
        baseline_plans={c.found_by: objective.sharding_plan(c.assignment) for c in known},
        search_seconds=stop.elapsed_s,
        evaluations=objective.evaluations,
        seed=seed,
    )


def reduced_space(problem: Problem) -> Space:
    """The options worth trying; what was left out keeps its reason."""
    space = enumerate_space(problem.workload, problem.topology, problem.hardware.device)
    space = drop_unsound(space, problem.workload)
    space = prune(deduplicate(space, problem.topology), problem.topology)
    return drop_uvm(space, problem.topology)


def _propose(
    objective: Objective,
    surrogate: Surrogate,
    stop: Stop,
    seed: int,
    searchers: Sequence[str],
    known: Sequence[_Candidate],
    progress: Progress,
) -> tuple[list[_Candidate], float | None]:
    """Candidates of the searchers, and CP-SAT's gap on the surrogate."""
    found: list[_Candidate] = []
    gap = None
    cpsat = CpSat(objective, surrogate)
    first = min(known, key=lambda c: c.iteration_ms, default=None)
    best_ms = first.iteration_ms if first else None
    if "cpsat" in searchers and not stop.reached():
        progress("CP-SAT", 0.1, best_ms, None)
        solution = cpsat.solve(
            objective.space.options,
            CPSAT_WORK * stop.effort,
            seed,
            first.assignment if first else None,
            time_limit_s=stop.remaining_s,
        )
        if solution is not None:
            ms = float(objective.score([solution.assignment])[0])
            found.append(_Candidate(solution.assignment, ms, "cpsat"))
            gap = solution.gap
    if "optuna" in searchers and not stop.reached():
        progress("Optuna study", 0.3, best_ms, None)
        study = Study(objective, surrogate, cpsat, seed)
        for plan, ms in study.run(stop.work(TRIALS), stop.reached):
            found.append(_Candidate(plan, ms, "optuna"))
    return found, gap


def _improve(
    objective: Objective,
    surrogate: Surrogate,
    stop: Stop,
    seed: int,
    candidates: list[_Candidate],
    progress: Progress,
) -> list[_Candidate]:
    """Local search from the best few candidates, the better ones first."""
    starts = _distinct(objective.problem, candidates)[:IMPROVED]
    budget = stop.work(EVALUATIONS) // len(starts)
    search = LocalSearch(objective, surrogate, seed)
    improved: list[_Candidate] = []
    for i, start in enumerate(starts):
        best_ms = min(c.iteration_ms for c in [*improved, *starts])
        progress("local search", 0.5 + 0.3 * i / len(starts), best_ms, None)
        plan, ms = search.improve(start.assignment, budget, lambda _: stop.reached())
        improved.append(_Candidate(plan, ms, f"{start.found_by} + local search"))
    return improved


def _distinct(problem: Problem, candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Best first, without plans that differ only by a renaming of ranks."""
    seen: set[frozenset[object]] = set()
    found = []
    for candidate in sorted(candidates, key=lambda c: c.iteration_ms):
        name = signature(candidate.assignment, problem.topology.intra_group_size)
        if name not in seen:
            seen.add(name)
            found.append(candidate)
    return found


def _infeasible(problem: Problem, space: Space) -> InfeasibleError:
    need = sum(
        min(sum(m.hbm_bytes for m in o.memory) for o in options) for options in space.options
    )
    have = sum(problem.topology.hbm_cap_bytes)
    return InfeasibleError(
        f"no plan was found that fits: the tables need at least {format_bytes(need)} of HBM, "
        f"all {problem.topology.world_size} ranks have {format_bytes(have)} for them; "
        "try more --gpus, more --hbm-gib, a smaller --reserve, or allow fused_uvm_caching"
    )
