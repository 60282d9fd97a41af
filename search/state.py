"""State of a search of one space between two stages, and the tools that every stage uses.

A stage takes a `State` and returns another one. Its only side effect is on the caches of the
objective and the bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from search.bound.lower_bound import LowerBound
from search.candidate import Candidate, rank_distinct
from search.objective import Objective
from search.params import SearchParams
from search.problem import Problem, Progress
from search.stop import Stop
from search.surrogate import Surrogate

if TYPE_CHECKING:
    from search.feasibility import Feasibility


@dataclass(frozen=True)
class Tools:
    """One space of a problem, and how it is searched.

    Args:
        bound: bound of the space; refined in place, its proven value is kept in the states.
        params: constants of the search, scaled by the effort.
    """

    objective: Objective
    surrogate: Surrogate
    bound: LowerBound
    stop: Stop
    seed: int
    params: SearchParams
    progress: Progress

    @property
    def problem(self) -> Problem:
        """The problem whose plans the space holds."""
        return self.objective.problem

    @property
    def is_large(self) -> bool:
        """True if the problem has so many tables and ranks that scoring a plan is slow."""
        tables, ranks = len(self.objective.space.options), self.problem.topology.world_size
        return tables * ranks > self.params.large


@dataclass(frozen=True)
class State:
    """Plans and bound known between two stages.

    Args:
        baselines: plans of other methods, inside the space or not.
        usable: baselines and given starts that belong to the space and fit.
        incumbents: plans of the space that fit, fastest first, all distinct.
        proven_ms: lower bound: no plan of the space is faster.
        nearest: the plan that lacks least memory, if none was found that fits.
        notes: sentences on what was left out of the space.
    """

    tools: Tools
    baselines: tuple[Candidate, ...] = ()
    usable: tuple[Candidate, ...] = ()
    incumbents: tuple[Candidate, ...] = ()
    proven_ms: float = 0.0
    nearest: Feasibility | None = None
    notes: tuple[str, ...] = ()

    @property
    def best_ms(self) -> float:
        """The time of the fastest plan; infinite without one."""
        return self.incumbents[0].iteration_ms if self.incumbents else math.inf

    def adding(self, candidates: Iterable[Candidate]) -> State:
        """Return the state with those of some candidates added that fit."""
        objective = self.tools.objective
        fitting = [c for c in candidates if objective.fits(c.assignment)]
        ranked = rank_distinct([*self.incumbents, *fitting], objective.space.in_use)
        return replace(self, incumbents=tuple(ranked))

    def show(self, stage: str, fraction: float) -> None:
        """Report that a stage begins."""
        best_ms = self.best_ms if self.incumbents else None
        self.tools.progress(stage, fraction, best_ms, self.proven_ms or None)
