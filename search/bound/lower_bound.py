"""A lower bound on the predicted iteration time of every plan in a search space.

Every plan uses some set of exchanges (module x sharding type), which fixes the operations of its
graph. For plans that use some exchanges and may use others, a linear program over fractional plans
(each table mixes its options, memory is pooled over all ranks) is minimised under the cuts of
`search.bound.relaxation`, which are added where the program's optimum violates them (Kelley 1960).
Where such a program is solved, its plans are divided at an exchange: those that use it, and those
that do not (branch and bound, Land and Doig 1960). What has the least bound is refined first, so
the bound is the best that is known at any time, and ends at a single set of exchanges.

Where the best plan stays well above it, the same plans are bounded again with one option for every
table (`search.bound.whole_options`), and by what single ranks can hold.

Why: docs/decisions/0026-bound.md, docs/decisions/0029-time-of-a-search.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, count

import numpy as np

from predictor.iteration.plan_scorer import PlanScorer
from search.bound.choices import BoundChoices, Exchange
from search.bound.exchange_set import ExchangeSet
from search.bound.rank_excess import MAX_CHOICES
from search.problem import Problem
from search.space.option import Space

MARGIN = 1e-9
"""Share that is taken off the bound: what adding up prices and loads in floating point can be off
by. A plan may lie below what is proven by as much; by more, the bound is wrong."""
MAX_SETS = 256
"""With more sets of exchanges than this, plans are made of those only that the division ends at."""
REST = 0.02
"""Share of the tables that may be in exchanges that the optimum uses least."""
FLOOR_STEPS = 20
"""Refinements that are made even when time is up: without them next to nothing is proven."""
WORTH = 5e-3
"""Gap below which it is not worth while to look at what single ranks can hold."""
PATIENCE, LEAST_PATIENCE = 60_000, 40
"""Choices times refinements, and refinements, that must raise the bound by more than that, or it is
refined no more."""
KNAPSACKS = 120
"""Knapsacks solved for that at effort 1; each takes hundredths of a second."""
SMALL = 480
"""Tables times ranks up to which every shard is placed on a rank, of one host: 60 tables on 8. On
two hosts the models are several times as large, and minutes brought three per cent."""
PLACING = 5.0
"""Deterministic time of CP-SAT for that at effort 1, about seconds on one core."""
CHOOSING = 15.0
"""The same for one option of every table, on any number of ranks, times the gap up to `VERY_WIDE`:
gaps of a few per cent are closed by a few sets, or not at all."""
VERY_WIDE = 0.3
VAIN = 0.35
"""What a set costs beside whose bound it did not raise by `WORTH`: where a few are such, most are.
"""
WIDE, NARROW = 0.05, 0.01
"""Gap from which on placing has all of its time; less where it is smaller. Below the second one
neither has any: 26 tables on 8 ranks gained a tenth of a percent in a second."""
ATTEMPT = 1 / 3
"""Part of what is left that one attempt may take."""
SHORT = 0.5
"""Deterministic time that an attempt may take at least."""


class UnsoundBoundError(RuntimeError):
    """A plan is known that is faster than the bound: an error of ours, never of the input."""


Bounded = tuple[float, int, ExchangeSet]
"""Plans with their bound in ms, and a number that tells those with equal bounds apart."""


@dataclass
class Budget:
    """Deterministic time that is left for programs with one option for every table, and what tells
    the seconds of wall time that are."""

    work: float = 0.0
    seconds: Callable[[], float] = lambda: np.inf


class LowerBound:
    """The bound of a problem over a space, refined step by step.

    Args:
        scorer: shares its shard loads with the search.
        patience: multiple of `PATIENCE`; None to refine it however little that raises it.
    """

    def __init__(
        self, problem: Problem, space: Space, scorer: PlanScorer, patience: float | None = None
    ) -> None:
        self._problem = problem, space, scorer
        self._patience = patience
        self._raised = 0.0, 0  # the bound when it last rose by more than that, and when that was
        # what may still be refined or divided, least bound first; and sets of exchanges whose
        # program is solved
        self._open: list[Bounded] | None = None
        self._solved: list[Bounded] = []
        self._wanted: dict[Exchange, float] = {}  # by the optimum over all plans
        self._count = count()
        self._refined = 0

    @cached_property
    def choices(self) -> BoundChoices:
        """All choices of the space; for many tables and ranks this takes seconds."""
        return BoundChoices(*self._problem)

    @property
    def has_begun(self) -> bool:
        """Something is proven."""
        return self._open is not None

    def solve(
        self,
        steps: int,
        upper_ms: float = np.inf,
        stop: Callable[[float], bool] = lambda bound: False,
        choosing: Budget | None = None,
    ) -> float:
        """The bound in ms after at most ``steps`` more refinements.

        Args:
            upper_ms: a plan with this time is known; sets above it need no more work.
            stop: asked after every step with the bound so far, but for the first few.
            choosing: what may be spent on one option for every table, and is charged; None for
                nothing.

        Raises:
            UnsoundBoundError: the plan that is known is faster than what is proven.
        """
        choosing = choosing or Budget()
        if self._open is None:
            self._all = ExchangeSet(self.choices, np.arange(len(self.choices.all)), frozenset())
            self._open = [(0.0, next(self._count), self._all)]
        for _ in range(steps):
            if not self._open or self.proven_ms >= min(_least(self._solved), upper_ms):
                break
            if choosing.work <= 0 and not self._open[0][2].is_solved and self._is_idle():
                break
            before, number, one = heapq.heappop(self._open)
            if one.proven > before:  # it was refined elsewhere
                heapq.heappush(self._open, (one.proven, number, one))
                continue
            try:
                bound, done = one.refine()
                if done and bound < upper_ms and not one.is_chosen and choosing.work > 0:
                    limits = _attempt(choosing.work), choosing.seconds()
                    bound, used = one.choose_options(upper_ms, *limits)
                    done = one.is_chosen
                    vain = done and bound < one.priced_ms * (1 + WORTH)
                    choosing.work -= used + VAIN * vain
            except KeyboardInterrupt:  # the bound is of all plans, also of these
                heapq.heappush(self._open, (before, number, one))
                raise
            bound, self._refined = max(bound, before), self._refined + 1
            if not done:
                heapq.heappush(self._open, (bound, number, one))
            elif one.is_exact or bound == np.inf:
                heapq.heappush(self._solved, (bound, number, one))
            else:
                self._wanted = self._wanted or one.exchange_shares()
                for part in one.parts():
                    part = self._known(part)
                    part.take_cuts(one)
                    heapq.heappush(self._open, (bound, next(self._count), part))
            if self._refined >= FLOOR_STEPS and stop(self.proven_ms):
                break
        return self._below(upper_ms)

    def _is_idle(self) -> bool:
        """What is worth refining has been."""
        if self._patience is None:
            return False
        if self.proven_ms > self._raised[0] * (1 + WORTH):
            self._raised = self.proven_ms, self._refined
        most = max(LEAST_PATIENCE, PATIENCE * self._patience / len(self.choices.all))
        return self._refined - self._raised[1] >= most

    def tighten(
        self,
        steps: int,
        upper_ms: float,
        effort: float,
        stop: Callable[[float], bool],
        seconds: Callable[[], float] = lambda: np.inf,
    ) -> float:
        """The bound in ms with one option for every table, and with what single ranks can hold,
        where that can help; set after set, the least bound first.

        Args:
            steps: as of `solve`, in all, for sets that are the least then.
            upper_ms: a plan with this time is known.
            effort: multiple of the default work.
            stop: asked often, with the bound so far.
            seconds: wall time left.
        """
        last, choosing = self._refined + steps, Budget(0.0, seconds)

        def ended() -> bool:
            return stop(self.solve(last - self._refined, upper_ms, stop, choosing))

        def gap() -> float:
            gap = upper_ms / max(self.proven_ms, MARGIN) - 1
            return gap if gap > NARROW else 0.0

        if ended():
            return self._below(upper_ms)
        choosing.work = CHOOSING * effort * min(VERY_WIDE, gap())
        if choosing.work > 0:
            self._open, self._solved = [*(self._open or ()), *self._solved], []
            heapq.heapify(self._open)
            if ended():
                return self._below(upper_ms)
        self._raise(
            max(1, round(KNAPSACKS * effort)),
            lambda one, left: one.fill_ranks(upper_ms, int(left), lambda: stop(self.proven_ms)),
            lambda one: not one.is_filled and one.proven * (1 + WORTH) < upper_ms,
            ended,
        )
        choices, topology = self.choices, self._problem[0].topology
        small = choices.tables * topology.world_size <= SMALL and topology.groups == 1
        if small and not choices.without_longest:
            self._raise(
                PLACING * effort * min(1.0, gap() / WIDE),
                lambda one, left: one.place_ranks(upper_ms, _attempt(left), seconds),
                lambda one: not one.is_settled and one.proven < upper_ms,
                ended,
            )
        return self._below(upper_ms)

    def _raise(
        self,
        left: float,
        work: Callable[[ExchangeSet, float], tuple[float, float]],
        able: Callable[[ExchangeSet], bool],
        ended: Callable[[], bool],
    ) -> None:
        """Raise the least bound as long as it is of a solved set that is able to.

        Args:
            left: what may be spent.
            work: the bound of a set after some work of what is left, and what that was.
            ended: solves what is open; whether to end.
        """
        while left > 0 and not ended() and self._solved:
            before, number, one = self._solved[0]
            if before > self.proven_ms or not able(one):
                break
            bound, used = work(one, left)
            left -= used
            heapq.heapreplace(self._solved, (max(bound, before), number, one))

    def _below(self, upper_ms: float) -> float:
        """What is proven, less `MARGIN`.

        Raises:
            UnsoundBoundError: the plan that is known is faster.
        """
        proven = self.proven_ms
        if proven * (1 - MARGIN) > upper_ms:
            problem, space = self._problem[:2]
            workload, topology = problem.workload, problem.topology
            raise UnsoundBoundError(
                f"the lower bound of {proven:.6g} ms is wrong: a plan of {upper_ms:.6g} ms is "
                f"known. Model '{workload.name}' ({len(workload.tables)} tables, {space.size} "
                f"options, batch size {workload.batch_size}) on {topology.world_size} ranks of "
                f"{problem.hardware.name}; please report it with these inputs"
            )
        return min(proven, upper_ms) * (1 - MARGIN)

    @property
    def proven_ms(self) -> float:
        """No plan is faster, as far as is known; 0 before anything is."""
        if self._open is None:
            return 0.0
        return min(_least(self._solved), _least(self._open))

    def notes(self, upper_ms: float) -> tuple[str, ...]:
        """What the bound leaves out or did not get to, a sentence each; none where it is closed.

        Args:
            upper_ms: of the best plan known.
        """
        if self._open is None or self.proven_ms * (1 + WORTH) >= upper_ms:
            return ()
        found = []
        if self.choices.without_longest:
            found.append(
                f"The bound balances all tables: {len(self.choices.all)} options are more than the "
                f"{MAX_CHOICES} up to which it looks at longest shards"
            )
        if _least(self._open) < min(upper_ms, _least(self._solved)):
            found.append("The bound was cut short: not all plans were divided by sharding types")
        if any(one.cut_short for _, _, one in self._solved):
            found.append("The bound was cut short: how tables fill single ranks was not settled")
        return tuple(found)

    def promising(self, most: int) -> list[ExchangeSet]:
        """The sets of exchanges that are not refuted, those with the lowest bounds first, of those
        alike the ones with the fewest exchanges; none before `solve`. Before any is solved they
        have bounds of families, which tell nothing: then those come first that have most of what
        the optimum over all plans uses."""
        found = [*(self._open or ()), *self._solved]
        if not self.sets:
            exact = [one for bound, _, one in sorted(found) if one.is_exact and bound < np.inf]
            return [*exact, *(self._nested() if self._refined else ())]
        known = _least(self._solved) < np.inf
        least: dict[ExchangeSet, tuple[float, int]] = {}
        for bound, _, family in found:
            for one in self.sets if bound < np.inf else ():
                if family.used <= one.exchanges <= family.exchanges:
                    if bound > one.proven:
                        one.take_cuts(family)
                    one.proven = max(one.proven, bound)
                    first = one.proven if known else self._elsewhere(one)
                    least[one] = first, len(one.exchanges)
        return sorted(least, key=least.__getitem__)[:most]

    def _nested(self) -> Iterator[ExchangeSet]:
        """Of too many sets to tell apart: the exchanges that the optimum over all plans uses most,
        as few as will do, then one more and another, while it uses them for more than a few
        tables."""
        choices, wanted = self.choices, self._all.exchange_shares()
        order = sorted(wanted, key=lambda one: (-wanted[one], one))
        for last in range(1, len(order) + 1):
            kept = set(order[:last])
            mine = np.flatnonzero([exchange in kept for exchange in choices.exchanges])
            mine = mine[choices.beside(mine, kept)]
            if len(np.unique(choices.table[mine])) < choices.tables:
                continue
            one = ExchangeSet(choices, mine)
            one.take_cuts(self._all)
            yield one
            if sum(wanted[other] for other in order[last:]) < REST * choices.tables:
                break

    def _elsewhere(self, one: ExchangeSet) -> float:
        """The share of tables that other exchanges have at the optimum over all plans, in tenths:
        what is left out for a few tables is made up for."""
        others = sum(n for name, n in self._wanted.items() if name not in one.exchanges)
        return round(others / self.choices.tables, 1)

    def _known(self, part: ExchangeSet) -> ExchangeSet:
        """The same plans as one of `sets`, if they are one."""
        return self._by_exchanges.get(part.exchanges, part) if part.is_exact else part

    @cached_property
    def _by_exchanges(self) -> dict[frozenset[Exchange], ExchangeSet]:
        return {one.exchanges: one for one in self.sets}

    @cached_property
    def sets(self) -> list[ExchangeSet]:
        """All sets of exchanges that offer every table an option; none if they are too many."""
        choices = self.choices
        exchanges = choices.exchanges
        kinds = sorted(set(exchanges))
        if 2 ** len(kinds) > MAX_SETS:
            return []
        needed = choices.undominated(np.arange(len(choices.all)))
        found = []
        for kept in chain.from_iterable(combinations(kinds, n) for n in range(1, len(kinds) + 1)):
            mine = np.flatnonzero([exchange in kept for exchange in exchanges])
            mine = mine[choices.beside(mine, kept)]
            if len({exchanges[i] for i in mine.tolist()}) < len(kept):
                continue
            if len(np.unique(choices.table[mine])) == choices.tables:
                found.append(ExchangeSet(choices, mine, needed=needed[mine]))
        return found


def _attempt(left: float) -> float:
    """Deterministic time that one attempt may take of what is left."""
    return min(left, max(SHORT, ATTEMPT * left))


def _least(found: list[Bounded]) -> float:
    """The least bound of a heap."""
    return found[0][0] if found else np.inf
