"""All tunable constants of the search, as one value.

The laboratory disables or lengthens a stage by passing other parameters. Numerical constants of an
algorithm stand beside it.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields, replace

from predictor.errors import InputError

WORK = (
    *("bound_steps", "patience", "branching", "rank_targets"),
    *("moves", "least_moves", "most_moves", "tie_moves", "scenario_steps"),
    *("cpsat_work", "trials"),
)
"""Fields that are work: effort multiplies them."""


@dataclass(frozen=True)
class SearchParams:
    """Parameters of the search. Fields of `WORK` are for effort 1 until `scaled`.

    Args:
        bound_steps: refinements of the bound before plans are proposed, and again after, >= 1.
        patience, branching: work of the bound without a notable rise after which it stops, and of
            branching at peaks, in choices times refinements, >= 0.
        rank_targets: deterministic time in which CP-SAT places every shard of a small problem to
            refute targets, about seconds on one core, >= 0.
        moves: annealing proposals per table, over all annealing runs, >= 1.
        least_moves, most_moves: range of the annealing proposals for all tables, >= 1.
        tie_moves: annealing proposals of one search among ties, or in one scenario, >= 1.
        scenario_steps: refinements of the bounds of all scenarios, >= 1.
        cpsat_work: deterministic time of CP-SAT's neighbourhoods, about seconds on one core, > 0.
        trials: trials of an Optuna study, >= 1.
        proof_work: deterministic time in which CP-SAT seeks any plan that fits, once all else has
            failed, > 0.
        sets: exchange sets that plans are made from, >= 0; half of them with few exchanges.
        set_steps: most refinements of a set's program before plans are made from it, >= 1.
        set_choices: choices of all sets that are refined so, >= 1: with many choices the sets with
            the lowest bounds of their families are, fewer times.
        few: most exchanges of a module in a set with few exchanges, >= 1.
        finalists, generations: plans that are annealed to the end, >= 0, and how often the best
            plans so far are, >= 1; less often where a table gets fewer proposals than
            ``final_moves`` each time, >= 1.
        apart: fraction by which a finalist may be slower than the best one, >= 0; with fewer of
            them, each is annealed several times.
        merges: times that all tables of one exchange may join another of their module, >= 0.
        first_share: fraction of the moves spent on the sets before the finalists are chosen, in
            (0, 1).
        window: reduced cost up to which an option is kept, as a fraction of the bound, times
            tables; in (0, inf).
        least_window, most_window: range of that fraction, in (0, inf).
        rounds: annealing rounds, >= 1; each ends with a score on the timeline.
        round_moves: fewest proposals of a round, >= 1; a score takes as long as thousands of them.
        placing: fraction of a set's moves that place the options of its program's optimum, before
            others are tried, in [0, 1).
        warm: first temperature once they are placed, as a fraction of ``heat``, in (0, 1].
        heat, last_heat: first and last temperature, as a fraction of the time, > 0.
        scarce, scarce_heat: fraction of all memory that a set's optimum takes, in [0, 1], from
            which ``scarce_heat`` replaces ``heat``, > 0: shards swap only through plans that do not
            fit.
        squares, last_squares: maxima are smoothed by norms of order 2 to this power, 1 to 8.
        wall, last_wall: penalty of a rank at twice its memory limit, in plan times, > 0.
        strict_wall: first penalty for every second finalist, which starts at half the heat, > 0.
        cuts: cycles of the timeline that are kept, >= 1.
        closed: optimality gap below which annealing stops, >= 0.
        large: tables times ranks above which scoring a plan is slow, >= 1.
        pool: plans compared under scenarios or examined for less memory, >= 1.
        tie: fraction of the time by which plans that tie differ, >= 0; a gain must exceed it.
        alike: fraction of a GPU's memory by which the fullest GPUs of similar plans may differ,
            >= 0.
        prove_effort: multiple of the bound's work for a full proof, >= 1.
        baselines_time, bound_time, sets_time, annealing_time: fraction of the remaining time that a
            stage may take under a time limit, in (0, 1); the choice needs the first, choosing sets
            is a part of annealing, proposers on request and scenarios get the last.
    """

    bound_steps: int = 1000
    patience: float = 60_000.0
    branching: float = 1_000_000.0
    rank_targets: float = 5.0
    moves: int = 100_000
    least_moves: int = 4_000_000
    most_moves: int = 12_000_000
    tie_moves: int = 200_000
    scenario_steps: int = 400
    cpsat_work: float = 12.0
    trials: int = 60
    proof_work: float = 10.0
    sets: int = 8
    set_steps: int = 8
    set_choices: int = 400_000
    few: int = 3
    finalists: int = 3
    generations: int = 3
    final_moves: int = 4000
    apart: float = 0.05
    merges: int = 20
    first_share: float = 0.4
    window: float = 10.0
    least_window: float = 0.04
    most_window: float = 0.3
    rounds: int = 16
    round_moves: int = 1000
    placing: float = 0.3
    warm: float = 0.2
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
    tie: float = 0.005
    alike: float = 0.02
    prove_effort: float = 20.0
    baselines_time: float = 0.15
    bound_time: float = 1 / 3
    sets_time: float = 0.15
    annealing_time: float = 0.6

    def __post_init__(self) -> None:
        for parameter in fields(self):
            value = getattr(self, parameter.name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(
                    f"{parameter.name} is {value}; it must be a finite number of at least 0"
                )

    def scaled(self, effort: float) -> SearchParams:
        """Return the parameters with work scaled by the effort, at least one unit of each.

        Below effort 1 ``proof_work`` stays as it is.
        """
        work: dict[str, float] = {"proof_work": self.proof_work * max(1.0, effort)}
        for name in WORK:
            value = getattr(self, name) * effort
            is_count = isinstance(getattr(self, name), int)
            work[name] = max(1, round(value)) if is_count else value
        return replace(self, **work)  # type: ignore[arg-type]

    def proving(self) -> SearchParams:
        """Return the parameters of a bound that is refined even while it hardly rises."""
        effort = self.prove_effort
        return replace(
            self,
            patience=sys.float_info.max,
            branching=effort * self.branching,
            rank_targets=effort * self.rank_targets,
        )

    def moves_of(self, tables: int) -> int:
        """Return the annealing proposals of a problem with so many tables."""
        return min(self.most_moves, max(self.least_moves, self.moves * tables))

    def part_of(self, tables: int, ranks: int) -> float:
        """Return the part of the work among ties and over scenarios that is done: all of it, less
        where scoring a plan is slow."""
        return min(1.0, self.large / (tables * ranks))

    def window_of(self, tables: int) -> float:
        """Return the largest reduced cost of a kept option, as a fraction of the bound."""
        return min(self.most_window, max(self.least_window, self.window / tables))


DEFAULT = SearchParams()
