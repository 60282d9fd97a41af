"""Plans of a set of exchanges that are not slower than a target, as a model for CP-SAT.

It has an option for every table and a rank for every shard, under memory and under cuts in which
every stretch takes as long as its slowest rank. If it has no solution, no plan is as fast as the
target; so every number is rounded such that a plan which is as fast stays a solution. All ranks
are on one host, so that any two can change their names.

Docs: docs/model.md, chapter 15. Why: docs/decisions/0076.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from predictor.cost.loads import Load
from predictor.model.topology import Topology
from search.bound.rank_cut import RankCut
from search.space.option import Choice, Option

Array = NDArray[np.float64]
Term = tuple[int, cp_model.IntVar]
"""A coefficient and its variable."""

UNITS_PER_MS = 1e5
"""Times are whole steps of 10 ns."""
MEMORY_STEPS = 1 << 20
"""A rank's memory has this many."""
ORDERED = 5
"""Tables with the most work, by whose shards ranks are put in order."""
BASE = 5
"""A table weighs this much more in that order than the next one."""


@dataclass(frozen=True)
class RankUnits:
    """Runs of shards of an option that are placed together, and are all alike.

    Args:
        runs: their positions in the option's placement.
        load: of the least shard of a run, ``[COLUMNS]``.
        memory: share of a rank's memory that it takes, ``[kinds]``.
    """

    runs: tuple[int, ...]
    load: Array
    memory: Array


@dataclass(frozen=True)
class RankChoice:
    """An option of a table, by what it puts on ranks.

    Args:
        group: position of its lookup group in the slopes of cuts.
        mean: its load on the mean rank, ``[COLUMNS]``.
        slack_ms: what every plan with it exceeds a proven bound by at least.
    """

    option: Option
    group: int
    mean: Array
    slack_ms: float
    alternatives: tuple[tuple[int, ...], ...]
    units: tuple[RankUnits, ...]

    @classmethod
    def of(
        cls,
        option: Option,
        group: int,
        shards: Array,
        mean: Array,
        slack_ms: float,
        topology: Topology,
    ) -> RankChoice:
        """The option with shards of these loads, ``[shards, COLUMNS]``."""
        legal = option.legal_ranks(topology)
        width = len(legal.units[0][0])
        caps = np.array([max(topology.hbm_cap_bytes), max(topology.ddr_cap_bytes)], dtype=float)
        memory = np.array([(m.hbm_bytes, m.ddr_bytes) for m in option.memory])
        both = np.hstack([shards, memory / np.maximum(caps, 0.5)])
        least = both.reshape(-1, width, both.shape[1]).min(axis=1)
        alike: dict[tuple[float, ...], list[int]] = {}
        for run, row in enumerate(least.tolist()):
            alike.setdefault(tuple(row), []).append(run)
        units = tuple(
            RankUnits(tuple(runs), np.array(row[: len(mean)]), np.array(row[len(mean) :]))
            for row, runs in alike.items()
        )
        # the runs of an option differ in what they hold, not in where they may lie
        return cls(option, group, mean, slack_ms, legal.units[0], units)


@dataclass(frozen=True)
class _PlacedChoice:
    """The variables of a choice.

    Args:
        chosen: their sum says whether it is chosen.
        counts: how many runs of every units lie on each alternative.
        each: that many times; above 1 where there is one alternative for all.
    """

    choice: RankChoice
    chosen: list[cp_model.IntVar]
    counts: list[list[cp_model.IntVar]]
    each: list[int]


class RankModel:
    """The model; see the module's text.

    Args:
        choices: table by table.
        bound_ms: what the slacks of the choices are counted from.
    """

    def __init__(
        self,
        choices: Sequence[RankChoice],
        cuts: Sequence[RankCut],
        topology: Topology,
        bound_ms: float,
        target_ms: float,
    ) -> None:
        self.topology = topology
        self.target_ms = target_ms
        self.model = cp_model.CpModel()
        self.placed = [self._place(choice) for choice in choices]
        self.launches: dict[tuple[int, int], cp_model.IntVar] = {}
        self._one_a_table()
        self._limit_memory()
        slacks = [(_floor(one.choice.slack_ms), x) for one in self.placed for x in one.chosen]
        self.model.add(_sum(slacks) <= _ceil(target_ms - bound_ms))
        for cut in cuts:
            self._limit_time(cut)
        self._order_ranks()

    def _place(self, choice: RankChoice) -> _PlacedChoice:
        model, alternatives = self.model, choice.alternatives
        if len(alternatives) > 1 and [len(u.runs) for u in choice.units] == [1]:
            places = [model.new_bool_var("") for _ in alternatives]
            return _PlacedChoice(choice, places, [places], [1])
        chosen, counts, each = model.new_bool_var(""), [], []
        for units in choice.units:
            many = len(units.runs)
            if len(alternatives) == 1:
                counts.append([chosen])
                each.append(many)
                continue
            counts.append([model.new_int_var(0, many, "") for _ in alternatives])
            each.append(1)
            model.add(sum(counts[-1]) == many * chosen)
        return _PlacedChoice(choice, [chosen], counts, each)

    def _one_a_table(self) -> None:
        tables: dict[int, list[cp_model.IntVar]] = {}
        for one in self.placed:
            tables.setdefault(one.choice.option.table, []).extend(one.chosen)
        for chosen in tables.values():
            self.model.add_exactly_one(chosen)

    def _by_rank(self, value: Callable[[RankChoice, RankUnits], int]) -> list[list[Term]]:
        """What every rank has, if each shard of a run puts a value there."""
        found: list[list[Term]] = [[] for _ in range(self.topology.world_size)]
        for one in self.placed:
            for units, counts, each in zip(one.choice.units, one.counts, one.each, strict=True):
                if not (worth := value(one.choice, units)):
                    continue
                for ranks, count in zip(one.choice.alternatives, counts, strict=True):
                    for rank in ranks:
                        found[rank].append((worth * each, count))
        return found

    def _limit_memory(self) -> None:
        for kind in range(2):

            def taken(_: RankChoice, units: RankUnits, kind: int = kind) -> int:
                return int(units.memory[kind] * MEMORY_STEPS)

            for used in self._by_rank(taken):
                self.model.add(_sum(used) <= MEMORY_STEPS)

    def _limit_time(self, cut: RankCut) -> None:
        """The cut is not above the target."""
        terms = [
            (_floor(float((cut.rest[one.choice.group] * one.choice.mean).sum())), x)
            for one in self.placed
            for x in one.chosen
        ]
        most = _ceil(self.target_ms)
        for work, floors in zip(cut.work, cut.floors, strict=True):

            def taken(choice: RankChoice, units: RankUnits, work: Array = work) -> int:
                return max(0, _floor(float(work[choice.group] @ units.load)))

            ranks = self._by_rank(taken)
            for rank, mine in enumerate(ranks):
                mine += self._floors(floors, rank)
            if not any(ranks):
                continue
            slowest = self.model.new_int_var(0, most, "")
            for mine in ranks:
                self.model.add(_sum(mine) <= slowest)
            # follows from the rows above, but is seen at once
            self.model.add(_sum([t for mine in ranks for t in mine]) <= len(ranks) * slowest)
            terms.append((1, slowest))
        self.model.add(_sum(terms) <= _ceil(self.target_ms - cut.constant))

    def _floors(self, floors: Array, rank: int) -> list[Term]:
        """The floors of what a rank launches."""
        return [
            (_floor(ms), self._launched(group, rank))
            for group, ms in enumerate(floors.tolist())
            if _floor(ms) > 0
        ]

    def _launched(self, group: int, rank: int) -> cp_model.IntVar:
        """Whether a rank has a shard of a lookup group."""
        if (group, rank) not in self.launches:
            self.launches[group, rank] = launched = self.model.new_bool_var("")
            for one in self.placed:
                if one.choice.group != group:
                    continue
                for units, counts in zip(one.choice.units, one.counts, strict=True):
                    if not units.load[Load.FORWARD_MS] > 0:  # it may be empty
                        continue
                    for ranks, count in zip(one.choice.alternatives, counts, strict=True):
                        if rank in ranks:
                            self.model.add(count <= len(units.runs) * launched)
        return self.launches[group, rank]

    def _order_ranks(self) -> None:
        """Of plans that differ in the names of their ranks only, keep one."""
        options = [one.choice.option for one in self.placed]
        if any(o.ranks is not None or o.pinned is not None for o in options):
            return
        work: dict[int, float] = {}
        for one in self.placed:
            table = one.choice.option.table
            mine = float(one.choice.mean[[Load.FORWARD_MS, Load.BACKWARD_MS]].sum())
            work[table] = max(mine, work.get(table, 0.0))
        most = sorted(work, key=lambda t: (-work[t], t))[:ORDERED]
        weight = {table: BASE**i for i, table in enumerate(reversed(most))}
        ranks = self._by_rank(
            lambda c, _: weight.get(c.option.table, 0) if len(c.alternatives) > 1 else 0
        )
        for rank, following in pairwise(ranks):
            self.model.add(_sum(rank) >= _sum(following))

    def read(self, solver: cp_model.CpSolver) -> tuple[Choice, ...]:
        """The plan that was found."""
        found = {}
        for one in self.placed:
            if not any(solver.value(x) for x in one.chosen):
                continue
            placement: dict[int, tuple[int, ...]] = {}
            for units, counts, each in zip(one.choice.units, one.counts, one.each, strict=True):
                ranks = [
                    alternative
                    for alternative, count in zip(one.choice.alternatives, counts, strict=True)
                    for _ in range(each * solver.value(count))
                ]
                placement.update(zip(units.runs, ranks, strict=True))
            placed = tuple(rank for run in sorted(placement) for rank in placement[run])
            found[one.choice.option.table] = one.choice.option, placed
        return tuple(found[table] for table in sorted(found))


def _sum(terms: Sequence[Term]) -> cp_model.LinearExprT:
    return cp_model.LinearExpr.weighted_sum([v for _, v in terms], [c for c, _ in terms])


def _floor(ms: float) -> int:
    return int(np.floor(ms * UNITS_PER_MS))


def _ceil(ms: float) -> int:
    return int(np.ceil(ms * UNITS_PER_MS))
