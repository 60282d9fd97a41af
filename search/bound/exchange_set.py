"""The bound of one set of exchanges: a linear program, cut where the timeline exceeds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from predictor.cost.loads import Load
from predictor.model.lookup_group import LookupGroup
from search.bound.choices import BoundChoices, Exchange, exchange_of
from search.bound.program import Branch, Program
from search.bound.rank_targets import RankChoice, RankTargets
from search.bound.relaxation import Relaxation
from search.bound.stretches import CutTimes, OptionTimes
from search.space.option import Option

Array = NDArray[np.float64]
Ints = NDArray[np.intp]
Mask = NDArray[np.bool_]

TOLERANCE = 1e-4
"""A set is solved when its relaxed time exceeds the program's optimum by less than this share."""
UNEVEN = (0.1, 0.3, 1.0)
"""Multiples of the mean that busy ranks are thought to have beyond it; there cycles are sought."""
ALIKE = 1e-6
"""Share of a unit by which multiples of it may be off."""
LARGEST_WHOLE = 2.0**53
"""Below this floats hold every whole number."""
FIRST_STEP = 0.125
NEAREST = 1e-3
"""Share of the time by which a target for ranks lies above the bound at least."""
EASY = 0.1
"""Part of its work within which a target was refuted easily: then the next one is farther off."""
HELD = 0.02
"""Share from which on an option counts as one that the optimum has."""


class ExchangeSet:
    """The bound for plans that use a set of exchanges, and may use some others.

    Args:
        index: positions in `BoundChoices.all`, table by table.
        used: exchanges that all plans use; None: all that the choices have.

    Attributes:
        proven: no plan of the set is faster, in ms.
        priced_ms: the best bound that prices prove.
        slack: what plans with a choice exceed that by at least in ms, ``[choices]``.
        is_solved: no refinement of the whole set will raise what it proves.
        step: share of the way to the best plan, at which the next target for ranks lies.
        is_settled: the nearest target was tried in vain.
        targets: what was found out about targets for ranks.
    """

    def __init__(
        self, known: BoundChoices, index: Ints, used: frozenset[Exchange] | None = None
    ) -> None:
        self.known = known
        self.index = index
        self.choices = [known.all[i] for i in index.tolist()]
        self.proven = 0.0
        self.priced_ms = 0.0
        self.slack = np.zeros(len(index))
        self.step = FIRST_STEP
        self.is_solved = self.is_settled = False
        self.targets: RankTargets | None = None
        self.first = np.flatnonzero(np.diff(known.table[index], prepend=-1))
        self.names = [known.exchanges[i] for i in index.tolist()]  # exchange of every choice
        self.exchanges = frozenset(self.names)
        self.used = self.exchanges if used is None else used | self._needed_by_tables()
        # cuts of a larger set, and their rows
        self.taken: list[tuple[CutTimes, list[tuple[int, int]]]] = []
        self.binding: list[int] = []
        self.relaxation: Relaxation | None = None
        self.program: Program

    def _needed_by_tables(self) -> frozenset[Exchange]:
        """Exchanges without which some table has no option."""
        tables = np.split(np.arange(len(self.names)), self.first[1:])
        offered = [{self.names[i] for i in table} for table in tables]
        return frozenset().union(*(found for found in offered if len(found) == 1))

    @property
    def options(self) -> list[Option]:
        """The option of every choice."""
        return [choice.option for choice in self.choices]

    @property
    def shares(self) -> Array:
        """What the last optimum gives every choice, ``[choices]``."""
        return self.program.shares

    def rounded(self, part: float = 1.0) -> list[Option] | None:
        """The option with the largest share of every table, in the workload's order; where less
        memory may be taken, as `Program.within` says, None if nothing fits."""
        best = self.program.largest() if part == 1.0 else self.program.within(part)
        return None if best is None else [self.choices[i].option for i in best.tolist()]

    def _start(self) -> None:
        known = self.known
        numbers, self.group = np.unique(known.groups[self.index], return_inverse=True)
        self.numbers: list[int] = numbers.tolist()
        self.members = [np.flatnonzero(self.group == i) for i in range(len(self.numbers))]
        self.loads = known.loads[self.index]
        self.memory = known.needs[self.index].T
        self.times = OptionTimes(known, self.index, self.group, self.numbers, self._certain_floor)
        mine = self.times.members[:, self.group]
        outputs = np.where(mine, self.loads[:, Load.OUTPUTS], 0.0)
        self.program = Program(self.first, self.memory, known.caps, outputs)
        self.relaxation = self._relax()
        for times, rows in self.taken:
            self.program.add_cut(times, rows)

    def _certain_floor(self, floors: Array) -> float:
        """What the ranks that launch anything in a segment pay at least, if some rank is sure to:
        plans that use an exchange use one of its groups.

        Args:
            floors: of the groups there, ``[groups]``.
        """
        paid = floors > 0
        names = [exchange_of(self.known.scorer.groups[g]) for g in self.numbers]
        without = {name for name, one in zip(names, paid.tolist(), strict=True) if not one}
        return float(floors[paid].min()) if self.used - without else 0.0

    def take_cuts(self, larger: ExchangeSet) -> None:
        """Begin with the cuts that bind a larger set: what holds for all of its plans holds for
        those here. Without effect once this set's program has begun, before the other's has, or
        where plans here may do without an exchange that all plans there use.

        Args:
            larger: has all of these choices.
        """
        begun = self.relaxation is not None or larger.relaxation is None
        if not begun and larger.used <= self.used:
            kept = np.searchsorted(larger.index, self.index)
            cuts = [larger.program.cuts[number] for number in larger.binding]
            self.taken = [(cut.times.of(kept), sorted(cut.tables)) for cut in cuts]

    def _relax(self) -> Relaxation:
        known = self.known
        groups = [known.scorer.groups[g] for g in self.numbers]
        ceiling = np.stack([self._at_most(self.loads, mine) for mine in self.members])
        most = np.stack([self._at_most(known.most[self.index], mine) for mine in self.members])
        present = [exchange_of(group) in self.used for group in groups]
        certain = [self._is_certain(i, groups) for i in range(len(groups))]
        least = np.stack([self._least(mine) for mine in self.members])
        least[~np.array(present)] = 0.0
        return Relaxation(
            known.scorer.costs,
            groups,
            ceiling,
            most,
            present,
            certain,
            known.hulls,
            least,
            self._averaged(groups),
        )

    def _at_most(self, loads: Array, mine: Ints) -> Array:
        """The most that the tables can put into one lookup group, ``[COLUMNS]``.

        Args:
            loads: of every choice, ``[choices, COLUMNS]``.
            mine: choices of the group.
        """
        found = np.zeros_like(loads)
        found[mine] = loads[mine]
        return np.asarray(np.maximum.reduceat(found, self.first).sum(axis=0))

    def _averaged(self, groups: Sequence[LookupGroup]) -> int:
        """All-reduces of copies that every plan has: one a data type of tables that no plan keeps
        out of fused lookups, and one of their states (`ReplicaSync`)."""
        fused = np.array([group.fused for group in groups])[self.group]
        always = np.logical_and.reduceat(fused, self.first)
        tables = self.known.problem.workload.tables
        kinds = {tables[self.choices[i].option.table].data_type for i in self.first[always]}
        return len(kinds) + 1 if kinds else 0

    def _least(self, mine: Ints) -> Array:
        """Mean load and largest shard of the least option of a lookup group, ``[2, COLUMNS]``."""
        peaks = self.known.peaks[self.index[mine]]
        return np.stack([self.loads[mine].min(axis=0), peaks.min(axis=0)])

    def _is_certain(self, number: int, groups: Sequence[LookupGroup]) -> bool:
        """Every plan of the set uses the lookup group: some table has no other, or its exchange,
        which they use, has no other."""
        if any(self.choices[i].option.pinned is not None for i in self.members[number]):
            return False  # rows may be split over a part of the ranks
        key = exchange_of(groups[number])
        alone = sum(exchange_of(group) == key for group in groups) == 1
        always = np.logical_and.reduceat(self.group == number, self.first).any()
        return (key in self.used and alone) or bool(always)

    @property
    def is_exact(self) -> bool:
        """All plans use all of its exchanges."""
        return self.used == self.exchanges

    def exchange_shares(self) -> dict[Exchange, float]:
        """How many tables each exchange has at the last optimum, in fractions of tables."""
        every = sorted(self.exchanges)
        return {one: float(self.shares[[n == one for n in self.names]].sum()) for one in every}

    def parts(self) -> Iterator[ExchangeSet]:
        """Sets that hold all of its plans between them: with the exchange that the last optimum
        uses most of those that plans may do without, and, if tables have others, without it."""
        shares = self.exchange_shares()
        chosen = max(sorted(self.exchanges - self.used), key=shares.__getitem__)
        every = np.array([name != chosen for name in self.names])
        for used, able in ((self.used | {chosen}, ~every | every), (self.used, every)):
            kept = able & self.known.beside(self.index, used)
            there = {name for name, one in zip(self.names, kept.tolist(), strict=True) if one}
            if np.logical_or.reduceat(kept, self.first).all() and used <= there:
                yield ExchangeSet(self.known, self.index[kept], used)

    def refine(self, branch: Branch | None = None) -> tuple[float, bool]:
        """One step: solve, cut. Returns the bound so far and whether no step will raise it.

        Args:
            branch: some of the plans only; all of the set's if None.
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
        if program.optimum < 0:  # of the even mix, beside what was taken from a larger set
            self._cut()
        program.enter(branch or program.whole)
        status = program.solve()
        if status == pywraplp.Solver.INFEASIBLE and program.is_infeasible():
            return np.inf, True
        if status != pywraplp.Solver.OPTIMAL:
            return 0.0, True
        priced, bound = program.price(), 0.0
        if priced is not None:
            bound = priced.bound_ms
            if branch is None:
                self.binding = np.flatnonzero(priced.prices).tolist()
                if bound > self.priced_ms:
                    self.priced_ms, self.slack = bound, priced.slack
        return bound, not program.add_rows() and not self._cut()

    def halves(self, branch: Branch | None, limit_ms: float) -> list[Branch] | None:
        """Divide the plans that the program was solved for last where that raises the time most;
        None if nothing does.

        Either at a peak, above which a plan has an option or has none; or at the outputs of the
        busiest rank of an exchange, which are a multiple of what shards have.

        Args:
            limit_ms: slower plans do not matter.
        """
        program, branch = self.program, branch or self.program.whole
        priced = program.price()
        if priced is None:
            return None
        able = branch.able & (priced.slack <= limit_ms - priced.bound_ms)
        branch = replace(branch, able=able)
        shares, held = program.shares, program.shares > HELD
        most, tall = TOLERANCE * priced.bound_ms, None
        dearer = np.zeros(len(program.outputs))  # ms of an output element of the busiest rank
        sent = np.maximum(program.outputs @ shares, branch.low)
        for times, price, worth in program.priced_cuts(priced.prices):
            level = np.maximum(times.peaks(shares, self.first).max(axis=1), branch.least(times)[0])
            tallest = np.where(held, times.peak, 0.0).max(axis=1)
            gain = worth * (tallest - level)
            if gain.max(initial=0.0) > most:
                stretch = int(np.argmax(gain))
                most = float(gain[stretch])
                tall = times.peak[stretch] > (tallest[stretch] + level[stretch]) / 2
            dearer += price * times.per_output.sum(axis=0)
            each = np.where(times.per_output > 0, times.per_output, np.inf)
            sent = np.maximum(sent, (level[:, None] / each).max(axis=0, initial=0.0))
        units = self._units(able)
        steps = np.floor(sent / np.maximum(units, 1.0) + ALIKE)
        between = (units > 0) & (sent - steps * units > ALIKE * units)
        above = np.where(between, (steps + 1) * units, sent)
        gain = dearer * (above - sent)
        number = int(np.argmax(gain))
        parts: list[Branch] | None
        if gain[number] > most:
            parts = self._at_outputs(branch, number, float(steps[number] * units[number]), above)
        elif tall is not None:
            parts = [
                replace(branch, some=(*branch.some, able & tall)),
                replace(branch, able=able & ~tall),
            ]
        else:
            parts = self._at_option(branch)
        return (
            [
                part
                for part in parts
                if np.logical_or.reduceat(part.able, self.first).all()
                and all((one & part.able).any() for one in part.some)
                and (part.low <= part.high).all()
            ]
            if parts
            else None
        )

    def _at_outputs(self, branch: Branch, number: int, most: float, above: Array) -> list[Branch]:
        """Divide plans at the outputs of the busiest rank of an exchange.

        Args:
            most: outputs that it has at most in one half.
            above: outputs that it has at least in the other, ``[exchanges]``.
        """
        low, high = branch.low.copy(), branch.high.copy()
        low[number], high[number] = above[number], most
        fits = self.known.peaks[self.index, Load.OUTPUTS] <= most * (1 + ALIKE)
        others = self.program.outputs[number] <= 0
        return [
            replace(branch, low=low),
            replace(branch, high=high, able=branch.able & (fits | others)),
        ]

    def _at_option(self, branch: Branch) -> list[Branch] | None:
        """Divide plans at the option that has most of the table that is mixed most."""
        shares = self.program.shares
        most = np.maximum.reduceat(shares, self.first)
        table = int(np.argmin(most))
        if most[table] > 1 - HELD:
            return None
        mine = self.program.table == table
        one = mine & (np.arange(len(shares)) == self.program.largest()[table])
        return [
            replace(branch, able=branch.able & (one | ~mine)),
            replace(branch, able=branch.able & ~one),
        ]

    def _units(self, able: Mask) -> Array:
        """Output elements that the shards of an exchange have whole multiples of, ``[exchanges]``;
        0 where there is no such number."""
        outputs, rows = self.times.shards[:, Load.OUTPUTS], np.repeat(able, self.times.sizes)
        found = np.zeros(len(self.times.members))
        for number, groups in enumerate(self.times.members):
            sizes = outputs[rows & groups[self.times.groups]]
            whole = (sizes == np.rint(sizes)).all() and sizes.max(initial=0.0) < LARGEST_WHOLE
            if whole and sizes.any():
                found[number] = float(np.gcd.reduce(sizes.astype(np.int64)))
        return found

    def _cut(self) -> bool:
        """Add the cut that the program's optimum (or first of all, the even mix) violates."""
        assert self.relaxation is not None
        program, load = self.program, self.mean_load()
        known = program.optimum * (1 + TOLERANCE) + 1e-12
        evaluate = self.relaxation.evaluate
        # where floors are paid, and ranks are uneven, another cycle may be the longest
        for more in (None, 0.0, *UNEVEN):
            cut = evaluate(load, (more or 0.0) * load, launched=more is not None)[1]
            times = self.times.under(cut)
            least = program.branch.least(times)
            if times.at(program.shares, self.first, least) > known:
                program.add_cut(times)
                return True
        return False

    def place_ranks(
        self, upper_ms: float, work: float, seconds: Callable[[], float]
    ) -> tuple[float, float]:
        """The bound once one more target was tried with every shard on a rank, and the work spent.

        Args:
            upper_ms: above the bound; no target is as high.
            work: deterministic time of CP-SAT, about seconds on one core.
            seconds: wall time left.
        """
        if self.targets is None:
            self.targets = self.targets_of_ranks()
        above = max(self.step * (upper_ms - self.proven), NEAREST * self.proven)
        target = min(self.proven + above, upper_ms * (1 - TOLERANCE))
        refuted, used = self.targets.refute(target, self.priced_ms, work, seconds)
        if refuted:
            self.proven = max(self.proven, target)
            self.step *= 2 if used < EASY * work else 1
        else:
            self.is_settled = above <= NEAREST * self.proven
            self.step /= 3
        return self.proven, used

    def targets_of_ranks(self) -> RankTargets:
        """What refutes targets for plans of the set, whose program is solved."""
        known = self.known
        each = zip(self.choices, self.group.tolist(), self.loads, self.slack.tolist(), strict=True)
        topology = known.problem.topology
        choices = [
            RankChoice.of(one.option, group, mean, slack, known.shards_of(one), topology)
            for one, group, mean, slack in each
        ]
        relaxation, load = self.relaxation_of_ranks(), self.mean_load()
        return RankTargets(choices, known.scorer, self.numbers, relaxation, topology, load)

    def relaxation_of_ranks(self) -> Relaxation:
        """The relaxation, whose hulls reach as far as the load of one rank can."""
        assert self.relaxation is not None
        return self.relaxation

    def mean_load(self) -> Array:
        """Of the program's last optimum, ``[groups, COLUMNS]``."""
        return np.stack([self.shares[mine] @ self.loads[mine] for mine in self.members])
