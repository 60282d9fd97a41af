"""Plans to start from: what the searchers propose, and any that fits where they find none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from predictor.errors import InfeasibleError
from predictor.units import format_bytes
from search.cpsat import CpSat
from search.feasibility import Feasibility, find_feasible
from search.objective import Assignment, Objective, signature
from search.result import Progress
from search.stop import Stop
from search.study import Study
from search.surrogate import Surrogate

SEARCHERS = ("cpsat", "optuna")

# Work at effort 1, sized so that 26 tables on 8 ranks take a few seconds.
CPSAT_WORK = 0.5
TRIALS = 16
FEASIBILITY_WORK = 10.0


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted iteration time and who found it."""

    assignment: Assignment
    iteration_ms: float
    found_by: str


def propose(
    objective: Objective,
    surrogate: Surrogate,
    stop: Stop,
    seed: int,
    searchers: Sequence[str],
    known: Sequence[Candidate],
    progress: Progress,
) -> tuple[list[Candidate], float | None]:
    """Candidates of the searchers, and CP-SAT's gap on the surrogate."""
    found: list[Candidate] = []
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
            found.append(Candidate(solution.assignment, ms, "cpsat"))
            gap = solution.gap
    if "optuna" in searchers and not stop.reached():
        progress("Optuna study", 0.3, best_ms, None)
        study = Study(objective, surrogate, cpsat, seed)
        for plan, ms in study.run(stop.work(TRIALS), stop.reached):
            found.append(Candidate(plan, ms, "optuna"))
    return found, gap


def rescue(
    objective: Objective, surrogate: Surrogate, stop: Stop, seed: int
) -> tuple[list[Candidate], Feasibility]:
    """Any plan that fits, for want of a better one; it has a second even when time is up."""
    work, left = FEASIBILITY_WORK * max(1.0, stop.effort), max(1.0, stop.remaining_s)
    found = find_feasible(objective, surrogate, work, seed, left)
    if found.assignment is None or not objective.fits(found.assignment):
        return [], found
    ms = float(objective.score([found.assignment])[0])
    return [Candidate(found.assignment, ms, "feasibility")], found


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Best first, without plans that differ only by a renaming of ranks.

    Of plans that are equally fast to six digits, the one with fewer shards comes first.
    """
    seen: set[frozenset[object]] = set()
    found = []
    for candidate in sorted(candidates, key=_rank):
        name = signature(candidate.assignment)
        if name not in seen:
            seen.add(name)
            found.append(candidate)
    return found


def _rank(candidate: Candidate) -> tuple[float, int, float]:
    shards = sum(option.num_shards for option, _ in candidate.assignment)
    return float(f"{candidate.iteration_ms:.6g}"), shards, candidate.iteration_ms


def infeasible(objective: Objective, known: Feasibility) -> InfeasibleError:
    """The error that says what is missing."""
    topology, options = objective.problem.topology, objective.space.options
    need = sum(min(sum(m.hbm_bytes + m.ddr_bytes for m in o.memory) for o in t) for t in options)
    hbm, ddr = sum(topology.hbm_cap_bytes), sum(topology.ddr_cap_bytes)
    lines = [
        f"  rank {rank} is short of {size} bytes ({format_bytes(size)}) of {kind}"
        for rank, sizes in enumerate(known.missing)
        for kind, size in zip(("HBM", "host memory"), sizes, strict=True)
        if size
    ]
    head = "no plan fits" if known.proven else "no plan was found that fits"
    best = ["; in the plan that comes nearest", *lines] if lines else [""]
    together = " and co_locate" if objective.space.co_locate else ""
    return InfeasibleError(
        head + "\n".join(best) + f"\nThe tables need at least {format_bytes(need)} in all; the "
        f"{topology.world_size} ranks have {format_bytes(hbm)} of HBM and {format_bytes(ddr)} of "
        "host memory for them.\n"
        "To try: more --gpus, more --hbm-gib, a smaller --reserve, fused_uvm_caching, or looser "
        f"constraints on ranks{together}"
    )
