"""Lower bound of one exchange set: a linear program with cuts where the timeline exceeds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from predictor.model.lookup_group import LookupGroup
from search.bound.choices import BoundChoices, Exchange, exchange_of
from search.bound.program import Branch, Priced, Program
from search.bound.relaxation import Relaxation
from search.bound.stretches import CutTimes, OptionTimes
from search.space.option import Option

if TYPE_CHECKING:
    from search.bound.rank_targets import RankTargets

Array = NDArray[np.float64]
Ints = NDArray[np.intp]
Mask = NDArray[np.bool_]

TOLERANCE = 1e-4
"""Largest gap between relaxed time and the program's optimum, as a fraction, of a solved set."""
UNEVEN = (0.1, 0.3, 1.0)
"""Excess of busy ranks over the mean load, as multiples of it, at which cycles are sought."""
NEAREST = 1e-3
"""Least distance of a rank target above the bound, as a fraction of the time; that of the first."""
HELD = 0.02
"""Share from which an option counts as used by the optimum."""


class ExchangeSet:
    """Lower bound for plans that use some exchanges and may use some others.

    Args:
        all_choices: choices of the whole space.
        index: positions in `BoundChoices.all`, table by table.
        used: exchanges that all plans use; None for all exchanges of the choices.

    Attributes:
        proven: lower bound in ms: no plan of the set is faster.
        priced_ms: best bound proven by dual prices, in ms.
        reduced_costs: least excess over that bound of plans with a choice, ``[choices]`` in ms.
        is_solved: True if no refinement of the whole set will raise the bound.
        reach: distance of the next rank target above the bound, as a fraction of the time.
        growth: factor of that distance after a target is refuted, until one could not be.
        is_settled: True if no target is left, or the nearest one could not be refuted.
        targets: state of the rank targets; None before the first.
    """

    def __init__(
        self, all_choices: BoundChoices, index: Ints, used: frozenset[Exchange] | None = None
    ) -> None:
        self.all_choices = all_choices
        self.index = index
        self.choices = [all_choices.all[i] for i in index.tolist()]
        self.proven = 0.0
        self.priced_ms = 0.0
        self.reduced_costs = np.zeros(len(index))
        self.reach, self.growth = NEAREST, 2.0
        self.is_solved = self.is_settled = False
        self.targets: RankTargets | None = None
        self.first = np.flatnonzero(np.diff(all_choices.table[index], prepend=-1))
        self.names = [all_choices.exchanges[i] for i in index.tolist()]  # exchange of every choice
        self.exchanges = frozenset(self.names)
        self.used = self.exchanges if used is None else used | self._needed_by_tables()
        # cuts of a larger set with the stretches and tables of their rows, and its choices
        self.inherited_cuts: list[tuple[CutTimes, list[tuple[int, int]]]] = []
        self.inherited_index: Ints = index
        self.binding: list[int] = []
        self.priced: Priced | None = None  # by the last optimum
        self.relaxation: Relaxation | None = None
        self.program: Program

    def _needed_by_tables(self) -> frozenset[Exchange]:
        """Return the exchanges without which some table has no option."""
        tables = np.split(np.arange(len(self.names)), self.first[1:])
        offered = [{self.names[i] for i in table} for table in tables]
        return frozenset().union(*(exchanges for exchanges in offered if len(exchanges) == 1))

    @property
    def options(self) -> list[Option]:
        """The option of every choice."""
        return [choice.option for choice in self.choices]

    @property
    def loads(self) -> Array:
        """Mean load of every choice over the ranks, ``[choices, COLUMNS]``."""
        return self.all_choices.loads[self.index]

    @property
    def shares(self) -> Array:
        """Share of every choice at the last optimum, ``[choices]``."""
        return self.program.shares

    def rounded(self, part: float = 1.0) -> list[Option] | None:
        """Return every table's option with the largest share, in the workload's order.

        Args:
            part: limit on memory of `Program.within`; None is returned if nothing fits it.
        """
        best = self.program.largest() if part == 1.0 else self.program.within(part)
        return None if best is None else [self.choices[i].option for i in best.tolist()]

    def _start(self) -> None:
        all_choices = self.all_choices
        numbers, self.group = np.unique(all_choices.groups[self.index], return_inverse=True)
        self.numbers: list[int] = numbers.tolist()
        self.members = [np.flatnonzero(self.group == i) for i in range(len(self.numbers))]
        self.memory = all_choices.needs[self.index].T
        self.times = OptionTimes(all_choices, self.index, self.group, self._certain_floor)
        self.program = Program(self.first, self.memory, all_choices.caps)
        self.relaxation = self._relax()
        columns = np.searchsorted(self.inherited_index, self.index)
        for times, rows in self.inherited_cuts:
            self.program.add_cut(times.of(columns), rows)
        self.inherited_cuts, self.inherited_index = [], self.index

    def _certain_floor(self, floors: Array) -> float:
        """Return the least launch floor that some rank is sure to pay in a segment, or 0.

        A plan that uses an exchange uses one of its groups.

        Args:
            floors: launch floors of the groups in the segment, ``[groups]``.
        """
        paid = floors > 0
        names = [exchange_of(self.all_choices.scorer.groups[g]) for g in self.numbers]
        without = {name for name, pays in zip(names, paid.tolist(), strict=True) if not pays}
        return float(floors[paid].min()) if self.used - without else 0.0

    def take_cuts(self, larger: ExchangeSet) -> None:
        """Start from the binding cuts of a larger set; they hold for all plans of this one.

        No effect if this set's program has begun, if the larger one's has not, or if plans here may
        lack an exchange that all plans there use.

        Args:
            larger: set with all of these choices.
        """
        begun = self.relaxation is not None or larger.relaxation is None
        if not begun and larger.used <= self.used:
            cuts = [larger.program.cuts[number] for number in larger.binding]
            # the times of these choices alone are copied when the program begins: few ever do
            self.inherited_index = larger.index
            self.inherited_cuts = [(cut.times, sorted(cut.tables)) for cut in cuts]

    def _relax(self) -> Relaxation:
        all_choices = self.all_choices
        groups = [all_choices.scorer.groups[g] for g in self.numbers]
        loads, largest = self.loads, all_choices.most[self.index]
        ceiling = np.stack([self._at_most(loads, mine) for mine in self.members])
        most = np.stack([self._at_most(largest, mine) for mine in self.members])
        present = [exchange_of(group) in self.used for group in groups]
        certain = [self._is_certain(i, groups) for i in range(len(groups))]
        least = np.stack([self._least(mine) for mine in self.members])
        least[~np.array(present)] = 0.0
        return Relaxation(
            all_choices.scorer.costs,
            groups,
            ceiling,
            most,
            present,
            certain,
            all_choices.hulls,
            least,
            self._averaged(groups),
            {frozenset(of_table.tolist()) for of_table in np.split(self.group, self.first[1:])},
        )

    def _at_most(self, loads: Array, mine: Ints) -> Array:
        """Return the largest load that the tables can put into a lookup group, ``[COLUMNS]``.

        Args:
            loads: loads of every choice, ``[choices, COLUMNS]``.
            mine: choices of the group.
        """
        group_loads = np.zeros_like(loads)
        group_loads[mine] = loads[mine]
        return np.asarray(np.maximum.reduceat(group_loads, self.first).sum(axis=0))

    def _averaged(self, groups: Sequence[LookupGroup]) -> int:
        """Return the number of all-reduces of replicas that every plan has (`ReplicaSync`): one per
        data type of tables that are always fused, and one for their optimizer states."""
        fused = np.array([group.fused for group in groups])[self.group]
        always = np.logical_and.reduceat(fused, self.first)
        tables = self.all_choices.problem.workload.tables
        kinds = {tables[self.choices[i].option.table].data_type for i in self.first[always]}
        return len(kinds) + 1 if kinds else 0

    def _least(self, mine: Ints) -> Array:
        """Return the least mean load and least peak of a group's options, ``[2, COLUMNS]``."""
        loads, peaks = self.all_choices.loads, self.all_choices.peaks
        rows = self.index[mine]
        return np.stack([loads[rows].min(axis=0), peaks[rows].min(axis=0)])

    def _is_certain(self, number: int, groups: Sequence[LookupGroup]) -> bool:
        """Return True if every plan of the set uses the lookup group.

        That holds if some table has no other group, or a used exchange has no other group.
        """
        if any(self.choices[i].option.pinned is not None for i in self.members[number]):
            return False  # rows may be split over a part of the ranks
        key = exchange_of(groups[number])
        alone = sum(exchange_of(group) == key for group in groups) == 1
        always = np.logical_and.reduceat(self.group == number, self.first).any()
        return (key in self.used and alone) or bool(always)

    @property
    def is_exact(self) -> bool:
        """True if all plans use all exchanges of the set."""
        return self.used == self.exchanges

    def exchange_shares(self) -> dict[Exchange, float]:
        """Return exchange -> tables that it has at the last optimum, with fractions."""
        exchanges = sorted(self.exchanges)
        return {
            exchange: float(self.shares[[n == exchange for n in self.names]].sum())
            for exchange in exchanges
        }

    def parts(self) -> Iterator[ExchangeSet]:
        """Branch on the optional exchange that the last optimum uses most: yield the set whose
        plans all use it and, if every table still has an option, the set without it."""
        shares = self.exchange_shares()
        chosen = max(sorted(self.exchanges - self.used), key=shares.__getitem__)
        every = np.array([name != chosen for name in self.names])
        for used, allowed in ((self.used | {chosen}, ~every | every), (self.used, every)):
            allowed_here = allowed & self.all_choices.beside(self.index, used)
            offered = {
                name
                for name, is_allowed in zip(self.names, allowed_here.tolist(), strict=True)
                if is_allowed
            }
            if np.logical_or.reduceat(allowed_here, self.first).all() and used <= offered:
                yield ExchangeSet(self.all_choices, self.index[allowed_here], used)

    def refine(self, branch: Branch | None = None) -> tuple[float, bool]:
        """Solve once and add cuts; return the bound and True if no further step will raise it.

        Args:
            branch: branch of the set to refine; the whole set if None.
        """
        if branch is None:
            if not self.is_solved:
                bound, self.is_solved = self._refine(None)
                self.proven = max(self.proven, bound)
            return self.proven, self.is_solved
        return self._refine(branch)

    def _refine(self, branch: Branch | None) -> tuple[float, bool]:
        if self.relaxation is None:
            self._start()
        program = self.program
        if program.optimum < 0:  # cut off the even mix, beside the inherited cuts
            self._cut()
        program.enter(branch or program.whole)
        self.priced = None
        status = program.solve()
        if status == pywraplp.Solver.INFEASIBLE and program.is_infeasible():
            return np.inf, True
        if status != pywraplp.Solver.OPTIMAL:
            return 0.0, True
        self.priced = priced = program.price()
        bound = priced.bound_ms if priced else 0.0
        if priced and branch is None:
            self.binding = np.flatnonzero(priced.prices).tolist()
            if bound > self.priced_ms:
                self.priced_ms, self.reduced_costs = bound, priced.reduced_costs
        return bound, not program.add_rows() and not self._cut()

    def halves(self, branch: Branch | None, limit_ms: float) -> list[Branch] | None:
        """Branch the last solved plans where that raises the time most; None if nothing does.

        A branch is at a peak (a plan has some option above it, or none), else at an option.

        Args:
            branch: branch that was solved last; the whole set if None.
            limit_ms: time above which plans are ignored.
        """
        program, branch, priced = self.program, branch or self.program.whole, self.priced
        if priced is None:
            return None
        allowed = branch.allowed & (priced.reduced_costs <= limit_ms - priced.bound_ms)
        branch = replace(branch, allowed=allowed)
        shares, is_used = program.shares, program.shares > HELD
        most, tall = TOLERANCE * priced.bound_ms, None
        for times, worth in priced.peaks:
            level = np.maximum(times.peaks(shares, self.first).max(axis=1), branch.least(times))
            tallest = np.where(is_used, times.peak, 0.0).max(axis=1)
            gain = worth * (tallest - level)
            if gain.max(initial=0.0) > most:
                stretch = int(np.argmax(gain))
                most = float(gain[stretch])
                tall = times.peak[stretch] > (tallest[stretch] + level[stretch]) / 2
        parts = self._at_option(branch)
        if tall is not None:
            above = replace(branch, one_of=(*branch.one_of, allowed & tall))
            parts = [above, replace(branch, allowed=allowed & ~tall)]
        return parts and [part for part in parts if self._has_plans(part)]

    def _has_plans(self, branch: Branch) -> bool:
        """Return True if a branch leaves every table a choice, and one of those it must have."""
        some = all((choices & branch.allowed).any() for choices in branch.one_of)
        return some and bool(np.logical_or.reduceat(branch.allowed, self.first).all())

    def _at_option(self, branch: Branch) -> list[Branch] | None:
        """Branch on the largest option of the most mixed table; None if no table is mixed."""
        shares = self.program.shares
        most = np.maximum.reduceat(shares, self.first)
        table = int(np.argmin(most))
        if most[table] > 1 - HELD:
            return None
        mine = self.program.table == table
        largest = mine & (np.arange(len(shares)) == self.program.largest()[table])
        return [
            replace(branch, allowed=branch.allowed & (largest | ~mine)),
            replace(branch, allowed=branch.allowed & ~largest),
        ]

    def _cut(self) -> bool:
        """Add a cut that the last shares (at first the even mix) violate; False if none is."""
        assert self.relaxation is not None
        program, load = self.program, self.mean_load()
        reached_ms = program.optimum * (1 + TOLERANCE) + 1e-12
        evaluate = self.relaxation.evaluate
        # another cycle may be critical once floors are paid and ranks are uneven
        for more in (None, 0.0, *UNEVEN):
            cut = evaluate(load, (more or 0.0) * load, launched=more is not None)[1]
            times = self.times.under(cut)
            least = program.branch.least(times)
            if times.at(program.shares, self.first, least) > reached_ms:
                program.add_cut(times)
                return True
        return False

    def place_ranks(
        self,
        branches: Sequence[tuple[float, Branch | None]],
        upper_ms: float,
        work: float,
        seconds: Callable[[], float],
    ) -> tuple[float, float]:
        """Try to refute the next rank target; return the bound and the work spent.

        Args:
            branches: branches that hold all plans of the set, each with its bound in ms.
            upper_ms: time above the bound; targets stay below it.
            work: deterministic time of CP-SAT, about seconds on one core.
            seconds: returns the wall time left.
        """
        if self.targets is None:
            self.targets = self.targets_of_ranks()
        self.proven = max(self.proven, min(ms for ms, _ in branches))
        target = min(self.proven * (1 + self.reach), upper_ms * (1 - TOLERANCE))
        if target <= self.proven:
            self.is_settled = True
            return self.proven, 0.0
        # a plan as fast as the target is in one of the branches with a lower bound
        left = [branch or self.program.whole for ms, branch in branches if ms <= target]
        allowed = np.any([branch.allowed for branch in left], axis=0)
        allowed &= self.reduced_costs <= target - self.priced_ms
        refuted, used = self.targets.refute(target, allowed, self.priced_ms, work, seconds)
        if refuted:
            self.proven = max(self.proven, target)
            self.reach *= self.growth
        else:
            self.growth = 1.0
            self.is_settled = self.reach <= NEAREST
            self.reach = max(NEAREST, self.reach / 3)
        return self.proven, used

    def targets_of_ranks(self) -> RankTargets:
        """Make the rank targets of the set; its program must be solved."""
        from search.bound.rank_targets import RankChoice, RankTargets  # imports CP-SAT

        all_choices = self.all_choices
        each = zip(
            self.choices, self.group.tolist(), self.loads, self.reduced_costs.tolist(), strict=True
        )
        topology = all_choices.problem.topology
        choices = [
            RankChoice.of(
                choice.option, group, mean, reduced_cost, all_choices.shards_of(choice), topology
            )
            for choice, group, mean, reduced_cost in each
        ]
        relaxation, load = self.relaxation_of_ranks(), self.mean_load()
        return RankTargets(choices, all_choices.scorer, self.numbers, relaxation, topology, load)

    def relaxation_of_ranks(self) -> Relaxation:
        """Return the relaxation; its hulls reach to the largest load of a single rank."""
        assert self.relaxation is not None
        return self.relaxation

    def mean_load(self) -> Array:
        """Return the mean load of a rank at the last optimum, ``[groups, COLUMNS]``."""
        loads = self.loads
        return np.stack([self.shares[mine] @ loads[mine] for mine in self.members])
