"""Every constant of the search's behaviour that annealing and its starts have, as one value.

The laboratory leaves a stage out, or makes it longer, by passing another one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from predictor.errors import InputError


@dataclass(frozen=True)
class SearchParams:
    """How the search makes plans. Times and moves are at effort 1.

    Args:
        bound_steps: refinements of the bound before plans are made, >= 1.
        sets: sets of exchanges that plans are made of, >= 1; half of them with few exchanges.
        few: exchanges of a module up to which a set has few, >= 1.
        refined: refinements of the program of a set at most, >= 1.
        finalists: plans that are annealed to the end, >= 1.
        moves: proposals of all annealing together, for one table, >= 1.
        least_moves, most_moves: ends of that for all tables, >= 1.
        first_share: share of the moves that the sets have, before the finalists are known, in
            (0, 1).
        window: an option may cost so much more than the best of its table, as a share of the
            bound, times tables; in (0, inf).
        least_window, most_window: ends of that share, in (0, inf).
        first_rounds, rounds: rounds of a set's and of a finalist's annealing, >= 1; after each the
            timeline is asked.
        heat, last_heat: what a change that is taken may cost, as a share of the time, > 0.
        scarce, scarce_heat: part of all memory that a set's optimum takes, in [0, 1], from which on
            ``heat`` is another, > 0: shards pass each other only in plans that do not fit.
        squares, last_squares: norms are of 2 to this power, 1 to 8.
        wall, last_wall: what a rank costs that has twice the memory it may have, in times of the
            plan, > 0.
        tight_wall: the same from the first round on, where plans that fit are not found otherwise.
        cuts: cycles of the timeline that are kept, >= 1.
        evaluations: plans that local search scores; those that it goes through may tie, >= 0.
        large: tables times ranks beyond which a plan takes long to score, >= 1.
        large_share: share of ``evaluations`` there, in [0, 1].
        closed: gap below which nothing more is annealed, >= 0.
    """

    bound_steps: int = 1000
    sets: int = 8
    few: int = 3
    refined: int = 60
    finalists: int = 3
    moves: int = 30_000
    least_moves: int = 600_000
    most_moves: int = 6_000_000
    first_share: float = 0.4
    window: float = 10.0
    least_window: float = 0.04
    most_window: float = 0.3
    first_rounds: int = 12
    rounds: int = 20
    heat: float = 1e-3
    last_heat: float = 2e-5
    scarce: float = 0.85
    scarce_heat: float = 5e-3
    squares: int = 3
    last_squares: int = 6
    wall: float = 3.0
    last_wall: float = 300.0
    tight_wall: float = 100.0
    cuts: int = 5
    evaluations: int = 6_000
    large: int = 20_000
    large_share: float = 0.05
    closed: float = 5e-4

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{one.name} is {value}; it must be a finite number of at least 0")

    def moves_of(self, tables: int) -> int:
        """Proposals of all annealing of a problem."""
        return min(self.most_moves, max(self.least_moves, self.moves * tables))

    def window_of(self, tables: int) -> float:
        """Share of the bound that an option may cost more than the best of its table."""
        return min(self.most_window, max(self.least_window, self.window / tables))


DEFAULT = SearchParams()
