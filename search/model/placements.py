"""Options of tables and the ranks of their shards as the integer variables of CP-SAT.

Shards of an option that are alike are counted per rank, not placed one by one, which removes their
symmetry. What uses the model adds limits and an objective: neighbourhoods of a plan minimise its
cycle cuts (`search.propose.cpsat`), the search for any plan that fits minimises what is
missing of memory (`search.feasibility`), and the bound refutes targets
(`search.bound.rank_targets`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from predictor.model.topology import Topology
from search.in_use.moves import keep_shards_in_place
from search.objective import Assignment
from search.space.option import AllowedPlacements, Choice, Option, Space

Array = NDArray[np.float64]
Ranks = tuple[int, ...]
Term = tuple[int, cp_model.IntVar]
"""A coefficient and its variable."""


@dataclass(frozen=True)
class RunVariables:
    """Runs of shards of an option that are placed together and are all alike.

    Args:
        runs: their positions in the option's placement.
        alternatives: the ranks that a run may lie on.
        counts: how many of them lie on each alternative, divided by ``each``.
        each: above 1 where there is one alternative for all.
    """

    runs: Ranks
    alternatives: tuple[Ranks, ...]
    counts: list[cp_model.IntVar]
    each: int

    @property
    def placed(self) -> Iterator[tuple[Ranks, cp_model.IntVar]]:
        """Every alternative and how many runs lie there."""
        return zip(self.alternatives, self.counts, strict=True)


@dataclass(frozen=True)
class OptionVariables:
    """The variables of an option.

    Args:
        chosen: their sum says whether it is chosen.
        width: shards of a run.
    """

    option: Option
    chosen: list[cp_model.IntVar]
    width: int
    units: list[RunVariables]

    def times(self, ranks: Ranks) -> list[list[int]]:
        """The values of the counts in a placement."""
        width = self.width
        runs = [tuple(ranks[i : i + width]) for i in range(0, len(ranks), width)]
        return [
            [sum(runs[i] == one for i in unit.runs) // unit.each for one in unit.alternatives]
            for unit in self.units
        ]


class PlacementModel:
    """One option for every table, and a rank for every shard.

    Args:
        options: what every table may choose from; those that can lie nowhere are left out.
        legal: where the shards of an option may lie; all that the ranks allow if None.
        bytes_of: what its shards count of HBM and of host memory.
        numbers: of these tables in the space; all of it if None.
    """

    def __init__(
        self,
        topology: Topology,
        options: Sequence[Sequence[Option]],
        legal: Callable[[Option], AllowedPlacements] | None = None,
        numbers: Sequence[int] | None = None,
        bytes_of: Callable[[Option], tuple[list[int], list[int]]] = lambda option: option.bytes_of,
    ) -> None:
        self.bytes_of = bytes_of
        self.numbers = range(len(options)) if numbers is None else numbers
        self.topology = topology
        self.legal = legal or (lambda option: option.legal_ranks(topology))
        self.model = cp_model.CpModel()
        self.tables = [[p for o in some if (p := self._place(o))] for some in options]
        for placed in self.tables:
            self.model.add_exactly_one([x for p in placed for x in p.chosen])

    @property
    def placed(self) -> list[OptionVariables]:
        """The options of all tables."""
        return [placed for table in self.tables for placed in table]

    def _place(self, option: Option) -> OptionVariables | None:
        model, legal = self.model, self.legal(option)
        if legal.is_empty:
            return None
        width = len(legal.units[0][0])
        if len(legal.units) == 1:
            chosen = [model.new_bool_var("") for _ in legal.units[0]]
            return OptionVariables(
                option, chosen, width, [RunVariables((0,), legal.units[0], chosen, 1)]
            )
        alike: dict[tuple[object, ...], list[int]] = {}
        for run, alternatives in enumerate(legal.units):
            at = slice(run * width, (run + 1) * width)
            key = option.sizes[at], option.memory[at], alternatives
            alike.setdefault(key, []).append(run)
        one = [model.new_bool_var("")]
        units: list[RunVariables] = []
        for runs in alike.values():
            alternatives, count = legal.units[runs[0]], len(runs)
            if len(alternatives) == 1:
                units.append(RunVariables(tuple(runs), alternatives, one, count))
                continue
            counts = [model.new_int_var(0, count, "") for _ in alternatives]
            model.add(sum(counts) == count * one[0])
            units.append(RunVariables(tuple(runs), alternatives, counts, 1))
        placed = OptionVariables(option, one, width, units)
        if legal.same_group and self.topology.groups > 1:
            self._same_group(placed)
        return placed

    def _same_group(self, placed: OptionVariables) -> None:
        """All its runs lie in one intra group."""
        groups = [self.model.new_bool_var("") for _ in range(self.topology.groups)]
        self.model.add(sum(groups) == sum(placed.chosen))
        for unit in placed.units:
            for ranks, count in unit.placed:
                here = groups[self.topology.group_of(ranks[0])]
                self.model.add(count <= len(unit.runs) * here)

    def per_rank(self, value: Callable[[OptionVariables, int], int]) -> list[list[Term]]:
        """What every rank has, if each shard puts a value there.

        Args:
            value: of a shard of an option; runs that are alike have those of the first.
        """
        found: list[list[Term]] = [[] for _ in range(self.topology.world_size)]
        for placed in self.placed:
            for unit in placed.units:
                first = unit.runs[0] * placed.width
                worth = [value(placed, first + i) * unit.each for i in range(placed.width)]
                if not any(worth):
                    continue
                for ranks, count in unit.placed:
                    for rank, one in zip(ranks, worth, strict=True):
                        found[rank].append((one, count))
        return found

    def used(self, kind: int) -> list[list[Term]]:
        """Bytes that every rank takes of a kind of memory (0: HBM, 1: DDR)."""
        sizes = {placed.option: self.bytes_of(placed.option)[kind] for placed in self.placed}
        return self.per_rank(lambda placed, shard: sizes[placed.option][shard])

    def limit_memory(self, caps: Array, kinds: Sequence[int] = (0, 1)) -> None:
        """No rank takes more of these kinds than its bytes, ``[hbm or ddr, ranks]``."""
        for kind in kinds:
            for terms, cap in zip(self.used(kind), caps[kind].tolist(), strict=True):
                if terms:
                    self.model.add(weighted(terms) <= int(cap))

    def co_locate(self, space: Space) -> None:
        """Tables of a group use the same ranks: a rank is either used by all of them or by none."""
        for group in space.co_locate:
            for rank in range(self.topology.world_size):
                used = self.model.new_bool_var("")
                for table in group:
                    counts = [
                        (1, count)
                        for placed in self.tables[table]
                        for unit in placed.units
                        for ranks, count in unit.placed
                        if rank in ranks
                    ]
                    most = sum(len(u.runs) for p in self.tables[table] for u in p.units)
                    self.model.add(weighted(counts) >= used)
                    self.model.add(weighted(counts) <= most * used)

    def divide_right(self, space: Space) -> None:
        """Rows of means are split only where those of all tables of the module are."""
        for means, tables in space.means:
            split = self.model.new_bool_var("")
            for table in tables:
                for placed in self.tables[table]:
                    if not placed.option.by_row:
                        self.model.add(sum(placed.chosen) <= 1 - split)
                    elif table in means:
                        self.model.add(sum(placed.chosen) <= split)

    def limit_moves(self, space: Space, others: int = 0) -> None:
        """No more tables differ from the plan in use than may.

        Args:
            others: that are not in the model, and differ.
        """
        if space.in_use is not None and space.in_use.is_limited:
            least = len(self.tables) + others - space.in_use.max_moves
            self.model.add(sum(self.stays(space)) >= least)

    def stays(self, space: Space) -> list[cp_model.IntVar]:
        """A variable per table that may stay: if true, it does."""
        found = []
        for placed, table in zip(self.tables, self.numbers, strict=True):
            before = space.in_use.choices[table] if space.in_use else None
            same = [p for p in placed if before and p.option is before[0]]
            if before is None or not same:
                continue
            stay = self.model.new_bool_var("")
            self.model.add(sum(same[0].chosen) >= stay)
            # wherever its shards are alike, any of them may lie on a rank
            for unit, times in zip(same[0].units, same[0].times(before[1]), strict=True):
                for count, value in zip(unit.counts, times, strict=True):
                    self.model.add(count == value).only_enforce_if(stay)
            found.append(stay)
        return found

    def read(self, solver: cp_model.CpSolver, space: Space | None = None) -> Assignment:
        """The plan that was found.

        Args:
            space: shards that are alike stay where its plan in use has them.
        """
        found: list[Choice] = []
        for placed in self.placed:
            if not any(solver.boolean_value(x) for x in placed.chosen):
                continue
            where: dict[int, Ranks] = {}
            for unit in placed.units:
                ranks = [
                    one
                    for one, count in unit.placed
                    for _ in range(unit.each * solver.value(count))
                ]
                where.update(zip(unit.runs, ranks, strict=True))
            found.append(
                (placed.option, tuple(rank for run in sorted(where) for rank in where[run]))
            )
        return keep_shards_in_place(space.in_use if space else None, tuple(found))


def weighted(terms: Sequence[Term]) -> cp_model.LinearExprT:
    """The sum of the terms."""
    return cp_model.LinearExpr.weighted_sum([v for _, v in terms], [c for c, _ in terms])
