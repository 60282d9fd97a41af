"""Every constant of the search's behaviour, as one value.

The laboratory leaves a stage out, or makes it longer, by passing another one. Constants of an
algorithm's arithmetic stand beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from predictor.errors import InputError

WORK = (
    *("bound_steps", "moves", "least_moves", "most_moves", "evaluations", "scenario_steps"),
    *("cpsat_work", "trials"),
)
"""Fields that are work: effort multiplies them."""


@dataclass(frozen=True)
class SearchParams:
    """How plans are searched. Fields of `WORK` are at effort 1 until they are scaled.

    Args:
        bound_steps: refinements of the bound before plans are made, and after, >= 1.
        moves: proposals of all annealing together, for one table, >= 1.
        least_moves, most_moves: ends of that for all tables, >= 1.
        evaluations: plans that one local search scores, among those that tie or over scenarios,
            >= 1.
        scenario_steps: refinements of the bounds of all scenarios, >= 1.
        cpsat_work: deterministic time of CP-SAT's neighbourhoods, about seconds on one core, > 0.
        trials: of an Optuna study, >= 1.
        proof_work: deterministic time in which CP-SAT looks for any plan that fits, where nothing
            else has found one, > 0.
        sets: sets of exchanges that plans are made of, >= 0; half of them with few exchanges.
        few: exchanges of a module up to which a set has few, >= 1.
        finalists: plans that are annealed to the end, >= 0.
        merges: times that all tables of one exchange may join another of their module, >= 0.
        first_share: share of the moves that the sets have, before the finalists are known, in
            (0, 1).
        window: an option may cost so much more than the best of its table, as a share of the
            bound, times tables; in (0, inf).
        least_window, most_window: ends of that share, in (0, inf).
        rounds: of annealing, >= 1; after each the timeline is asked.
        heat, last_heat: what a change that is taken may cost, as a share of the time, > 0.
        scarce, scarce_heat: part of all memory that a set's optimum takes, in [0, 1], from which on
            ``heat`` is another, > 0: shards pass each other only in plans that do not fit.
        squares, last_squares: norms are of 2 to this power, 1 to 8.
        wall, last_wall: what a rank costs that has twice the memory it may have, in times of the
            plan, > 0.
        strict_wall: the first of every second finalist, which has half the heat, > 0.
        cuts: cycles of the timeline that are kept, >= 1.
        closed: gap below which nothing more is annealed, >= 0.
        large: tables times ranks beyond which a plan takes long to score, >= 1.
        pool: plans that are compared under scenarios or looked at for less memory, >= 1.
        tie_of_error: share of the stated error of a time within which plans tie, >= 0.
        least_tie, most_tie: ends of that share of the time, >= 0; a gain must exceed the first.
        alike: share of a GPU's memory by which the fullest GPUs of plans alike may differ, >= 0.
        prove_effort: multiple of the bound's work where it is to be proved in full, >= 1.
        baselines_time, bound_time, annealing_time: share of the time left that a stage may take
            under a ceiling, in (0, 1); the choice needs the first, proposers on request and
            scenarios have the last.
    """

    bound_steps: int = 1000
    moves: int = 45_000
    least_moves: int = 1_200_000
    most_moves: int = 6_000_000
    evaluations: int = 3000
    scenario_steps: int = 400
    cpsat_work: float = 12.0
    trials: int = 60
    proof_work: float = 10.0
    sets: int = 8
    few: int = 3
    finalists: int = 3
    merges: int = 20
    first_share: float = 0.4
    window: float = 10.0
    least_window: float = 0.04
    most_window: float = 0.3
    rounds: int = 16
    heat: float = 1e-3
    last_heat: float = 2e-5
    scarce: float = 0.85
    scarce_heat: float = 1e-2
    squares: int = 3
    last_squares: int = 6
    wall: float = 0.1
    last_wall: float = 300.0
    strict_wall: float = 3.0
    cuts: int = 5
    closed: float = 5e-4
    large: int = 20_000
    pool: int = 96
    tie_of_error: float = 0.2
    least_tie: float = 0.005
    most_tie: float = 0.02
    alike: float = 0.02
    prove_effort: float = 20.0
    baselines_time: float = 0.15
    bound_time: float = 1 / 3
    annealing_time: float = 0.6

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{one.name} is {value}; it must be a finite number of at least 0")

    def scaled(self, effort: float) -> SearchParams:
        """The same with work for an effort, at least one unit of each; any plan that fits is looked
        for with no less."""
        work: dict[str, float] = {"proof_work": self.proof_work * max(1.0, effort)}
        for name in WORK:
            value = getattr(self, name) * effort
            work[name] = value if name == "cpsat_work" else max(1, round(value))
        return replace(self, **work)  # type: ignore[arg-type]

    def moves_of(self, tables: int) -> int:
        """Proposals of all annealing of a problem."""
        return min(self.most_moves, max(self.least_moves, self.moves * tables))

    def window_of(self, tables: int) -> float:
        """Share of the bound that an option may cost more than the best of its table."""
        return min(self.most_window, max(self.least_window, self.window / tables))


DEFAULT = SearchParams()
