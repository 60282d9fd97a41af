"""CP-SAT chooses option and ranks of every table jointly, minimising the surrogate.

Identical shards of a table are counted per rank, not placed one by one, which removes their
symmetry. One worker and a deterministic time limit make the result reproducible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from search.in_use.moves import keep_shards_in_place
from search.objective import Assignment, Objective, Ranks
from search.reproducible import reproducible_solver, run
from search.space.option import Choice, Option
from search.surrogate import IDS, OUTPUTS, Surrogate, Weights

Array = NDArray[np.float64]

UNITS_PER_MS = 1e5
"""Time resolution of the integer model: 10 ns."""
MEMORY_STEPS = 1 << 16
"""Memory resolution: a rank's memory has this many steps. Shards are rounded up."""
MAX_VARIABLES = 40_000
"""Larger models do not improve on their hint within any reasonable budget."""


@dataclass(frozen=True)
class Solution:
    """What the solver found; ``gap`` is its own, on the surrogate, as a fraction.

    A solver stopped before it proved a bound above zero has no gap: None.
    """

    assignment: Assignment
    surrogate_ms: float
    gap: float | None


@dataclass
class _OptionVariables:
    """Variables of one option: how many of its units lie on each alternative."""

    option: Option
    chosen: cp_model.IntVar
    units: int
    alternatives: list[Ranks]
    counts: list[cp_model.IntVar]

    def times(self, ranks: Ranks) -> list[int]:
        """How many units lie on each alternative in a placement."""
        width = len(self.alternatives[0])
        runs = [ranks[i : i + width] for i in range(0, len(ranks), width)]
        return [runs.count(alternative) for alternative in self.alternatives]


class CpSat:
    """The model of one problem; `solve` may be called with other options or weights."""

    def __init__(self, objective: Objective, surrogate: Surrogate) -> None:
        self.objective = objective
        self.surrogate = surrogate
        self.topology = objective.problem.topology

    def solve(
        self,
        options: Sequence[Sequence[Option]],
        work: float,
        seed: int,
        hint: Assignment | None = None,
        weights: Weights | None = None,
        time_limit_s: float = float("inf"),
    ) -> Solution | None:
        """The best joint choice found.

        Args:
            options: what every table may choose from.
            work: deterministic time of CP-SAT, about seconds on one core.
            hint: an assignment to start from.
            time_limit_s: ceiling on wall time.

        Returns:
            None if the model is too large, infeasible, or nothing was found in time.
        """
        build = Model(self.objective, self.surrogate, options, weights or Weights())
        if build.size > MAX_VARIABLES:
            return None
        build.build()
        if hint is not None:
            build.hint(hint)
        solver = reproducible_solver(work, seed, time_limit_s)
        if run(solver, build.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        value, bound = solver.ObjectiveValue(), solver.BestObjectiveBound()
        gap = value / bound - 1 if bound > 0 else None
        return Solution(build.read(solver), value / UNITS_PER_MS, gap)


class Model:
    """Variables and constraints over the options of every table; see the module's text.

    Args:
        memory_unit: bytes that memory is counted in; shards are rounded up, caps down.
    """

    def __init__(
        self,
        objective: Objective,
        surrogate: Surrogate,
        options: Sequence[Sequence[Option]],
        weights: Weights,
        memory_unit: int = 0,
    ) -> None:
        self.objective = objective
        self.surrogate = surrogate
        self.options = options
        self.weights = weights.array
        self.topology = objective.problem.topology
        self.units = [
            memory_unit or max(1, int(most) // MEMORY_STEPS) for most in objective.caps.max(axis=1)
        ]
        self.model = cp_model.CpModel()
        self.placed: list[list[_OptionVariables]] = []
        self.forward: dict[int, list[cp_model.LinearExprT]] = defaultdict(list)
        self.backward: dict[int, list[cp_model.LinearExprT]] = defaultdict(list)
        self.traffic: dict[tuple[tuple[str, str], int, int], list[cp_model.LinearExprT]] = (
            defaultdict(list)
        )
        self.memory: dict[tuple[int, int], list[cp_model.LinearExprT]] = defaultdict(list)
        self.cost: list[cp_model.LinearExprT] = []

    @property
    def size(self) -> int:
        """Variables of the model."""
        return sum(
            1 + len(self.objective.legal(o).units[0]) for options in self.options for o in options
        )

    def build(self, *, timed: bool = True) -> None:
        """All variables and constraints; if not ``timed``, neither caps nor the objective."""
        for options in self.options:
            placed = [self._option(o) for o in options if not self.objective.legal(o).is_empty]
            self.model.add_exactly_one([p.chosen for p in placed])
            self.placed.append(placed)
        self._co_locate()
        self._limit_moves()
        if timed:
            self.limit_memory()
            self._objective()

    def _option(self, option: Option) -> _OptionVariables:
        model = self.model
        legal = self.objective.legal(option)
        alternatives, units = list(legal.units[0]), len(legal.units)
        chosen = model.new_bool_var("")
        if len(alternatives) == 1:
            counts = [chosen]
            if units > 1:
                counts = [model.new_int_var(0, units, "")]
                model.add(counts[0] == units * chosen)
        else:
            counts = [model.new_int_var(0, units, "") for _ in alternatives]
            model.add(sum(counts) == units * chosen)
        placed = _OptionVariables(option, chosen, units, alternatives, counts)
        if legal.same_group:
            self._same_group(placed)
        self._loads(placed)
        return placed

    def _same_group(self, placed: _OptionVariables) -> None:
        groups = [self.model.new_bool_var("") for _ in range(self.topology.groups)]
        self.model.add(sum(groups) == placed.chosen)
        for alternative, count in zip(placed.alternatives, placed.counts, strict=True):
            here = groups[self.topology.group_of(alternative[0])]
            self.model.add(count <= placed.units * here)

    def _loads(self, placed: _OptionVariables) -> None:
        option = placed.option
        phases = np.rint(self.surrogate.phases(option) * self.weights * UNITS_PER_MS).astype(int)
        exchange = self.surrogate.exchange(option)
        for alternative, count in zip(placed.alternatives, placed.counts, strict=True):
            for shard, rank in enumerate(alternative):
                forward, backward, ids, outputs = (int(v) for v in phases[shard])
                self.forward[rank].append(forward * count)
                self.backward[rank].append(backward * count)
                if ids or outputs:
                    self.traffic[exchange, IDS, rank].append(ids * count)
                    self.traffic[exchange, OUTPUTS, rank].append(outputs * count)
                memory = option.memory[shard]
                for kind, need in enumerate((memory.hbm_bytes, memory.ddr_bytes)):
                    if need:
                        self.memory[kind, rank].append(-(-need // self.units[kind]) * count)
        constant = round(self.surrogate.constant_ms(option) * UNITS_PER_MS)
        if constant:
            self.cost.append(constant * placed.chosen)

    def limit_memory(self, *kinds: int) -> None:
        """No rank takes more than its caps, of these kinds (0: HBM, 1: DDR) or else of both."""
        for (kind, rank), terms in self.memory.items():
            if kinds and kind not in kinds:
                continue
            self.model.add(sum(terms) <= self._cap(kind, rank))

    def exceed(self, kind: int, rank: int) -> cp_model.IntVar:
        """By how many units a plan exceeds a cap (0: HBM, 1: DDR) of a rank."""
        over = self.model.new_int_var(0, 1 << 50, "")
        self.model.add(sum(self.memory[kind, rank]) <= self._cap(kind, rank) + over)
        return over

    def _cap(self, kind: int, rank: int) -> int:
        return int(self.objective.caps[kind, rank] // self.units[kind])

    def _co_locate(self) -> None:
        """Tables of a group use the same ranks: a rank is either used by all of them or by none."""
        for group in self.objective.space.co_locate:
            for rank in range(self.topology.world_size):
                used = self.model.new_bool_var("")
                for table in group:
                    counts = [
                        count
                        for placed in self.placed[table]
                        for alternative, count in zip(
                            placed.alternatives, placed.counts, strict=True
                        )
                        if rank in alternative
                    ]
                    most = sum(p.units for p in self.placed[table])
                    self.model.add(sum(counts) >= used)
                    self.model.add(sum(counts) <= most * used)

    def _limit_moves(self) -> None:
        """At most ``max_moves`` tables differ from the plan in use."""
        in_use = self.objective.space.in_use
        if in_use is not None and in_use.is_limited:
            self.model.add(sum(self.stays()) >= len(self.placed) - in_use.max_moves)

    def stays(self) -> list[cp_model.IntVar]:
        """A variable per table that may stay: if true, it does."""
        in_use = self.objective.space.in_use
        found = []
        for table, before in enumerate(in_use.choices if in_use else ()):
            same = [p for p in self.placed[table] if before and p.option is before[0]]
            if before is None or not same:
                continue
            stay = self.model.new_bool_var("")
            self.model.add_implication(stay, same[0].chosen)
            if same[0].counts[0] is not same[0].chosen:
                for count, times in zip(same[0].counts, same[0].times(before[1]), strict=True):
                    self.model.add(count == times).only_enforce_if(stay)
            found.append(stay)
        return found

    def _objective(self) -> None:
        for per_rank in (self.forward, self.backward):
            self._maximum(per_rank)
        by_exchange: dict[tuple[object, int], dict[int, list[cp_model.LinearExprT]]] = {}
        for (exchange, phase, rank), terms in self.traffic.items():
            by_exchange.setdefault((exchange, phase), {})[rank] = terms
        for per_rank in by_exchange.values():
            self._maximum(per_rank)
        self._fixed()
        self.model.minimize(sum(self.cost))

    def _maximum(self, per_rank: dict[int, list[cp_model.LinearExprT]]) -> None:
        slowest = self.model.new_int_var(0, 1 << 40, "")
        for terms in per_rank.values():
            self.model.add(slowest >= sum(terms))
        self.cost.append(slowest)

    def _fixed(self) -> None:
        users: dict[tuple[str, str], list[_OptionVariables]] = defaultdict(list)
        for placed in (p for options in self.placed for p in options):
            users[self.surrogate.exchange(placed.option)].append(placed)
        for options in users.values():
            used = self.model.new_bool_var("")
            for placed in options:
                self.model.add_implication(placed.chosen, used)
            self.cost.append(
                round(self.surrogate.fixed_ms(options[0].option) * UNITS_PER_MS) * used
            )

    def hint(self, assignment: Assignment) -> None:
        """Start from an assignment; options that the model lacks are not hinted."""
        for table, (option, ranks) in enumerate(assignment):
            for placed in self.placed[table]:
                mine = placed.option is option
                if placed.counts[0] is not placed.chosen:
                    times = placed.times(ranks) if mine else [0] * len(placed.counts)
                    for count, value in zip(placed.counts, times, strict=True):
                        self.model.add_hint(count, value)
                self.model.add_hint(placed.chosen, mine)

    def read(self, solver: cp_model.CpSolver) -> Assignment:
        """The solver's values as an assignment."""
        found: list[Choice] = []
        for options in self.placed:
            placed = next(p for p in options if solver.boolean_value(p.chosen))
            ranks: list[int] = []
            for alternative, count in zip(placed.alternatives, placed.counts, strict=True):
                times = placed.units if count is placed.chosen else solver.value(count)
                ranks += list(alternative) * times
            found.append((placed.option, tuple(ranks)))
        return keep_shards_in_place(self.objective.space.in_use, tuple(found))
