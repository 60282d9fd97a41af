"""The bound of one set of exchanges: a linear program, cut where the timeline exceeds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from predictor.model.lookup_group import LookupGroup
from search.bound.choices import BoundChoices, Exchange, exchange_of
from search.bound.patterns import RankItems, RankPatterns, rank_items
from search.bound.program import Program
from search.bound.rank_excess import CycleSegments, Place, RankExcess
from search.bound.rank_targets import RankChoice, RankTargets
from search.bound.relaxation import BUSIEST, KnownHulls, Relaxation
from search.bound.whole_options import WholeOptions
from search.space.option import Option

Array = NDArray[np.float64]
Ints = NDArray[np.intp]

TOLERANCE = 1e-4
"""A set is solved when its relaxed time exceeds the program's optimum by less than this share."""
MAX_CUTS = 60
"""Refinements of a set that plans are made of."""
FEW = 16
"""Tables of a rank up to which what single ranks can hold is looked at."""
WHOLE = 0.5
"""Share of the tables that must not be divisible for that; others balance what these do not."""
SLOWER = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""How much more than the mean the slowest ranks are thought to have, until that sets the pace."""
CLOSE = 2e-3
"""Share of the time by which a target must rise to be tried."""
PARTS = 3
"""One target may use this part of the knapsacks that are left: a lower one may be easier."""
FIRST_STEP = 0.125
NEAREST = 1e-3
"""Share of the time by which a target for ranks lies above the bound at least."""
EASY = 0.1
"""Part of its work within which a target was refuted easily: then the next one is farther off."""


class ExchangeSet:
    """The bound for plans that use a set of exchanges, and may use some others.

    Args:
        index: positions in `BoundChoices.all`, table by table.
        used: exchanges that all plans use; None: all that the choices have.
        needed: choices that are variables of the program; found out if None. What it proves holds
            for all.

    Attributes:
        priced_ms: the best bound that prices prove.
        slack: what plans with a choice exceed that by at least in ms, ``[choices]``.
        step: share of the way to the best plan, at which the next target for ranks lies.
        is_solved: no refinement will raise what it proves.
        is_settled: the nearest target was tried in vain.
        is_chosen: with one option for every table nothing more was found.
        is_filled: it is known what single ranks can hold, as far as was looked at.
        targets: what was found out about targets for ranks.
        whole, larger: the program with one option for every table, and that of a larger set.
    """

    def __init__(
        self,
        known: BoundChoices,
        index: Ints,
        used: frozenset[Exchange] | None = None,
        needed: NDArray[np.bool_] | None = None,
    ) -> None:
        self.known = known
        self.index = index
        self.choices = [known.all[i] for i in index.tolist()]
        self.proven = 0.0
        self.cut_short = False
        self.priced_ms = 0.0
        self.slack = np.zeros(len(index))
        self.step = FIRST_STEP
        self.is_solved = self.is_settled = self.is_chosen = self.is_filled = False
        self.whole: WholeOptions | None = None
        self.larger: WholeOptions | None = None
        self.targets: RankTargets | None = None
        self.first = np.flatnonzero(np.diff(known.table[index], prepend=-1))
        self.names = [known.exchanges[i] for i in index.tolist()]  # exchange of every choice
        self.exchanges = frozenset(self.names)
        self.used = self.exchanges if used is None else used | self._needed_by_tables()
        self.needed = known.undominated(index) if needed is None else needed
        # cuts of a larger set: constant, weights, segments of the cycle and rows of those
        self.taken: list[tuple[float, Array, CycleSegments, list[Place]]] = []
        self.binding: list[int] = []
        self.relaxation: Relaxation | None = None

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

    def without(self, excess: Array) -> ExchangeSet:
        """The set with the choices of least excess ``[choices]`` of every table, solved."""
        least = np.minimum.reduceat(excess, self.first)
        kept = excess <= np.repeat(least, self.program.sizes) * (1 + TOLERANCE)
        smaller = ExchangeSet(self.known, self.index[kept])
        smaller.take_cuts(self)
        for _ in range(MAX_CUTS):
            if smaller.refine()[1]:
                break
        return smaller

    def _start(self) -> None:
        known = self.known
        numbers, self.group = np.unique(known.groups[self.index], return_inverse=True)
        self.numbers: list[int] = numbers.tolist()
        self.members = [np.flatnonzero(self.group == i) for i in range(len(self.numbers))]
        self.loads = known.loads[self.index]
        self.relaxation = self._relax(known.hulls)
        self.memory = known.needs[self.index].T
        self.program = Program(self.first, self.needed, self.memory, known.caps)
        exchange = [exchange_of(known.scorer.groups[g]) for g in self.numbers]
        longest, even = known.longest[self.index], known.even[self.index]
        self.rank_excess = RankExcess(self.program, self.group, exchange, self.used, longest, even)
        self.constants: list[float] = []
        self.weights = np.zeros((0, len(self.choices)))
        for constant, weights, segments, rows in self.taken:
            self._add_row(constant, weights, segments, rows)

    def take_cuts(self, larger: ExchangeSet) -> None:
        """Begin with the cuts that bind a larger set: what holds for all of its plans holds for
        those here. Without effect once this set's program has begun, before the other's has, or
        where plans here may do without an exchange that all plans there use.

        Args:
            larger: has all of these choices.
        """
        if larger.used <= self.used:
            self.larger = larger.whole
        begun = self.relaxation is not None or larger.relaxation is None
        if not begun and larger.used <= self.used:
            kept = np.searchsorted(larger.index, self.index)
            self.taken = [
                (
                    larger.constants[number],
                    larger.weights[number, kept],
                    *larger.rank_excess.binding(number, kept),
                )
                for number in larger.binding
            ]

    def _relax(self, hulls: KnownHulls, reach: float = 1.0) -> Relaxation:
        known = self.known
        groups = [known.scorer.groups[g] for g in self.numbers]
        ceiling = np.stack([self._at_most(self.loads, mine) for mine in self.members])
        most = np.stack([self._at_most(known.most[self.index], mine) for mine in self.members])
        present = [exchange_of(group) in self.used for group in groups]
        certain = [self._is_certain(i, groups) for i in range(len(groups))]
        least = np.stack([self._least(mine) for mine in self.members])
        least[~np.array(present)] = 0.0
        costs, averaged = known.scorer.costs, self._averaged(groups)
        return Relaxation(
            costs, groups, ceiling, most, present, certain, hulls, least, reach, averaged
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

    def refine(self) -> tuple[float, bool]:
        """One step: solve, cut. Returns the bound so far and whether no step will raise it."""
        if not self.is_solved:
            self.is_solved = self._refine()
        return self.proven, self.is_solved

    def _refine(self) -> bool:
        """Whether no step will raise the bound after this one."""
        if self.relaxation is None:
            self._start()
        if self.program.optimum < 0:  # of the even mix, beside what was taken from a larger set
            self._cut()
        status = self.program.solve()
        if status == pywraplp.Solver.INFEASIBLE and self.program.is_infeasible():
            self.proven = np.inf
        if status != pywraplp.Solver.OPTIMAL:
            return True
        self.proven = max(self.proven, self._certified())
        grown = self.rank_excess.add_rows()
        return not self._cut() and not grown

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
                yield ExchangeSet(self.known, self.index[kept], used, self.needed[kept])

    def fill_ranks(self, upper_ms: float, work: int, stop: Callable[[], bool]) -> tuple[float, int]:
        """The bound once it is known what single ranks can hold, where that can help, and the
        knapsacks solved for it.

        Args:
            upper_ms: above the bound; a higher one is not looked for.
            work: knapsacks that may be solved.
            stop: whether to end now.
        """
        self.is_filled = True
        items = self._items(upper_ms) if self._is_coarse() else None
        if items is None:
            return self.proven, 0
        patterns = RankPatterns(items, self.known.problem.topology.world_size)
        high, left = upper_ms, work
        while high - self.proven > CLOSE * self.proven and left > 0 and not stop():
            target, mine = (self.proven + high) / 2, -(-left // PARTS)
            if patterns.refutes(target, mine, stop):
                self.proven = target
            else:
                high = target
                self.cut_short |= patterns.cut_short
            left -= max(1, mine - patterns.left)
        return self.proven, work - left

    def choose_options(self, upper_ms: float, work: float, seconds: float) -> tuple[float, float]:
        """The bound once one more integer program was solved, with one option for every table, and
        the work spent.

        Args:
            upper_ms: above the bound.
            work: deterministic time of CP-SAT, about seconds on one core.
            seconds: wall time left.
        """
        if self.whole is None:
            self.whole = WholeOptions(
                self.known,
                self.index,
                self.group,
                self.relaxation_of_ranks(),
                self.mean_load(),
                self.rank_excess.floor,
                self.larger,
            )
        limits = upper_ms, work, seconds
        bound, self.is_chosen, used = self.whole.bound(self.slack, self.priced_ms, *limits)
        self.proven = max(self.proven, bound)
        return self.proven, used

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
            RankChoice.of(one.option, group, mean, slack, known.shards(one), topology)
            for one, group, mean, slack in each
        ]
        relaxation, load = self.relaxation_of_ranks(), self.mean_load()
        return RankTargets(choices, known.scorer, self.numbers, relaxation, topology, load)

    def relaxation_of_ranks(self) -> Relaxation:
        """The relaxation with hulls that reach as far as the load of one rank can."""
        return self._relax(self.known.wide_hulls, float(self.known.problem.topology.world_size))

    def _is_coarse(self) -> bool:
        """Ranks have few tables, most of which cannot be divided."""
        divisible = np.array([c.option.num_shards > 1 for c in self.choices])
        whole = ~np.logical_or.reduceat(divisible, self.first)
        few = len(whole) <= FEW * self.known.problem.topology.world_size
        return few and bool(whole.mean() >= WHOLE)

    def _items(self, upper_ms: float) -> RankItems | None:
        """What ranks can hold, under the cycle that is critical where ranks are so uneven that the
        time comes to ``upper_ms``."""
        load, relaxation = self.mean_load(), self._relax({}, BUSIEST)
        for more in SLOWER:
            ms, cut = relaxation.evaluate(load, more * load)
            if ms >= upper_ms:
                break
        if not len(cut.segments):
            return None
        topology = self.known.problem.topology
        caps = np.array([max(topology.hbm_cap_bytes), max(topology.ddr_cap_bytes)], dtype=float)
        ceiling = BUSIEST * relaxation.ceiling
        of = self.known.shards, self.group, self.loads
        return rank_items(self.choices, *of, cut, ceiling, caps)

    def mean_load(self) -> Array:
        """Of the program's last optimum, ``[groups, COLUMNS]``."""
        return np.stack([self.shares[mine] @ self.loads[mine] for mine in self.members])

    def _cut(self) -> bool:
        """Add what the program's optimum violates (or first of all, the even mix)."""
        assert self.relaxation is not None
        load = self.mean_load()
        # where floors are paid another cycle may be the longest
        for launched in (False, True):
            cut = self.relaxation.evaluate(load, launched=launched)[1]
            segments = self.rank_excess.segments(cut, self.loads)
            at = cut.constant + float((cut.slope * load).sum())
            at += self.rank_excess.excess_ms(segments)
            if at > self.program.optimum * (1 + TOLERANCE) + 1e-12:
                weights = np.einsum("nc,nc->n", self.loads, cut.slope[self.group])
                self._add_row(cut.constant, weights, segments)
                return True
        return False

    def _add_row(
        self, constant: float, weights: Array, segments: CycleSegments, rows: Sequence[Place] = ()
    ) -> None:
        self.constants.append(constant)
        self.weights = np.vstack([self.weights, weights])
        self.rank_excess.add_cut(self.program.cut(constant, weights), segments, rows)

    def _certified(self) -> float:
        """The bound that the program's prices prove, whatever the solver's tolerances were.

        For prices of the cuts that sum to one and prices of memory, no plan is faster than the
        priced cuts where every table takes its cheapest option (Lagrange).
        """
        prices = np.array([max(0.0, row.dual_value()) for row in self.program.cuts])
        if prices.sum() <= 0:
            return 0.0
        self.binding = np.flatnonzero(prices).tolist()
        rent = np.array([max(0.0, -row.dual_value()) for row in self.program.room])
        scale = float(prices.sum())
        rent, prices = rent / scale, prices / scale
        charged, beyond = self.rank_excess.price(prices, scale)
        cost = prices @ self.weights + rent @ self.memory + charged
        cheapest = np.minimum.reduceat(cost, self.first)
        fixed = prices @ np.array(self.constants) + beyond - rent @ self.known.caps
        bound = float(fixed + cheapest.sum())
        if bound > self.priced_ms:
            self.priced_ms = bound
            self.slack = cost - np.repeat(cheapest, self.program.sizes)
        return bound
