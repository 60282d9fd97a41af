"""What a search of one space knows between two stages, and the tools that every stage is given.

A stage takes a `State` and returns another one; it leaves nothing behind elsewhere but what the
objective and the bound remember of work that is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from search.bound.lower_bound import LowerBound
from search.candidate import Candidate, rank_distinct
from search.feasibility import Feasibility
from search.objective import Objective
from search.params import SearchParams
from search.problem import Problem, Progress
from search.stop import Stop
from search.surrogate import Surrogate


@dataclass(frozen=True)
class Tools:
    """One space of a problem, and how it is searched.

    Args:
        bound: of the space; it is refined in place, what it proves is in the states.
        params: scaled by the effort.
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
        """The problem that the space is of."""
        return self.objective.problem

    @property
    def is_large(self) -> bool:
        """A plan takes long to score."""
        tables, ranks = len(self.objective.space.options), self.problem.topology.world_size
        return tables * ranks > self.params.large


@dataclass(frozen=True)
class State:
    """What is known between two stages.

    Args:
        baselines: what other methods choose, of the space or not.
        usable: those of them that are plans of the space and fit.
        incumbents: plans of the space that fit, fastest first, no two alike.
        proven_ms: no plan of the space is faster.
        nearest: the plan that lacks least memory, where none was found that fits.
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

    def adding(self, found: Iterable[Candidate]) -> State:
        """The state with more plans, as far as they fit."""
        objective = self.tools.objective
        fitting = [c for c in found if objective.fits(c.assignment)]
        ranked = rank_distinct([*self.incumbents, *fitting], objective.space.in_use)
        return replace(self, incumbents=tuple(ranked))

    def show(self, stage: str, fraction: float) -> None:
        """Report a stage that begins."""
        best_ms = self.best_ms if self.incumbents else None
        self.tools.progress(stage, fraction, best_ms, self.proven_ms or None)
