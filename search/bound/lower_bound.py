"""A lower bound on the predicted iteration time of every plan in a search space.

Every plan uses some set of exchanges (module x sharding type), which fixes the operations of its
graph. For plans that use some exchanges and may use others, a linear program over fractional plans
(each table mixes its options, memory is pooled over all ranks) is minimised under the cuts of
`search.bound.relaxation`, which are added where the program's optimum violates them (Kelley 1960).
Where such a program is solved, its plans are divided at an exchange: those that use it, and those
that do not (branch and bound, Land and Doig 1960). What has the least bound is refined first, so
the bound is the best that is known at any time, and ends at a single set of exchanges.

Plans of a single set are divided at a peak: the longest shard of a stretch of a cycle lies above a
value, or no plan has the options that are.

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
from search.bound.program import Branch
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
PATIENCE, LEAST_PATIENCE = 60_000, 120
"""Choices times refinements, and refinements, that must raise the bound by more than that, or it is
refined no more."""
DIVIDING, LEAST_STEPS = 1_000_000, 40
"""Choices times refinements of the tree with peaks at effort 1, and refinements at least."""
SMALL = 480
"""Tables times ranks up to which every shard is placed on a rank, of one host: 60 tables on 8. On
two hosts the models are several times as large, and minutes brought three per cent."""
PLACING = 5.0
"""Deterministic time of CP-SAT for that at effort 1, about seconds on one core."""
WIDE, NARROW = 0.05, 0.01
"""Gap from which on placing has all of its time; less where it is smaller. Below the second one it
has none: 26 tables on 8 ranks gained a tenth of a percent in a second."""
ATTEMPT = 1 / 3
"""Part of what is left that one attempt may take."""
SHORT = 0.5
"""Deterministic time that an attempt may take at least."""
ABOVE = 1e-4
"""Share of the time of the best plan that plans of the tree may take beyond it; so a bound above
that plan, which would be an error, is seen."""


class UnsoundBoundError(RuntimeError):
    """A plan is known that is faster than the bound: an error of ours, never of the input."""


@dataclass(frozen=True, eq=False)
class Node:
    """Plans of a set of exchanges, and of a branch of it; of all of the set if that is None."""

    plans: ExchangeSet
    branch: Branch | None = None


Bounded = tuple[float, int, Node]
"""A node with its bound in ms, and a number that tells those with equal bounds apart."""


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
        # what may still be refined or divided, least bound first; and what may not
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
        *,
        peaks: bool = False,
    ) -> float:
        """The bound in ms after at most ``steps`` more refinements.

        Args:
            upper_ms: a plan with this time is known; sets above it need no more work.
            stop: asked after every step with the bound so far, but for the first few.
            peaks: single sets are divided at peaks.

        Raises:
            UnsoundBoundError: the plan that is known is faster than what is proven.
        """
        if self._open is None:
            self._all = ExchangeSet(self.choices, np.arange(len(self.choices.all)), frozenset())
            self._open = [(0.0, next(self._count), Node(self._all))]
        limit_ms = upper_ms * (1 + ABOVE)
        for _ in range(steps):
            if not self._open or self.proven_ms >= min(_least(self._solved), upper_ms):
                break
            if not peaks and not self._open[0][2].plans.is_solved and self._is_idle():
                break
            before, number, node = heapq.heappop(self._open)
            one = node.plans
            if node.branch is None and one.proven > before:  # it was refined elsewhere
                heapq.heappush(self._open, (one.proven, number, node))
                continue
            try:
                bound, done = one.refine(node.branch)
            except KeyboardInterrupt:  # the bound is of all plans, also of these
                heapq.heappush(self._open, (before, number, node))
                raise
            bound, self._refined = max(bound, before), self._refined + 1
            parts: list[Node] | None
            if not done and bound < limit_ms:
                heapq.heappush(self._open, (bound, number, node))
                parts = []
            elif bound >= limit_ms:
                parts = None
            elif one.is_exact:
                branches = one.halves(node.branch, limit_ms) if peaks else None
                parts = None if branches is None else [Node(one, each) for each in branches]
            else:
                self._wanted = self._wanted or one.exchange_shares()
                parts = [Node(self._known(part)) for part in one.parts()]
                for part in parts:
                    part.plans.take_cuts(one)
            if parts is None:
                heapq.heappush(self._solved, (bound, number, node))
            for part in parts or ():
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
        """The bound in ms with single sets divided at peaks.

        Args:
            steps: as of `solve`.
            upper_ms: a plan with this time is known.
            effort: multiple of the default work.
            stop: asked often, with the bound so far.
            seconds: wall time left.
        """
        if self._open is not None:
            self._open, self._solved = [*self._open, *self._solved], []
            heapq.heapify(self._open)
        steps = min(steps, max(LEAST_STEPS, round(DIVIDING * effort / len(self.choices.all))))
        bound = self.solve(steps, upper_ms, stop, peaks=True)
        topology = self._problem[0].topology
        small = self.choices.tables * topology.world_size <= SMALL and topology.groups == 1
        left = PLACING * effort * min(1.0, self._gap(upper_ms) / WIDE) if small else 0.0
        while left > 0 and bound < upper_ms and not stop(bound):
            found = [*(self._open or ()), *self._solved]
            one = min(found)[2].plans
            if one.is_settled or not one.is_solved or not one.is_exact:
                break
            proven, used = one.place_ranks(upper_ms, _attempt(left), seconds)
            left -= used
            raised = [(max(ms, proven if n.plans is one else 0.0), i, n) for ms, i, n in found]
            self._open, self._solved = raised, []
            heapq.heapify(raised)
            bound = self.solve(LEAST_STEPS, upper_ms, stop, peaks=True)
        return bound

    def _gap(self, upper_ms: float) -> float:
        """Gap to the best plan, 0 where it is narrow."""
        gap = upper_ms / max(self.proven_ms, MARGIN) - 1
        return gap if gap > NARROW else 0.0

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
        if _least(self._open) < min(upper_ms, _least(self._solved)):
            found.append("The bound was cut short: not all plans were divided by sharding types")
        return tuple(found)

    def promising(self, most: int) -> list[ExchangeSet]:
        """The sets of exchanges that are not refuted, those with the lowest bounds first, of those
        alike the ones with the fewest exchanges; none before `solve`. Before any is solved they
        have bounds of families, which tell nothing: then those come first that have most of what
        the optimum over all plans uses."""
        found = [*(self._open or ()), *self._solved]
        if not self.sets:
            exact = {n.plans: None for bound, _, n in sorted(found) if n.plans.is_exact}
            return [*exact, *(self._nested() if self._refined else ())]
        known = _least(self._solved) < np.inf
        least: dict[ExchangeSet, tuple[float, int]] = {}
        for bound, _, node in sorted(found):
            family = node.plans
            for one in self.sets if bound < np.inf else ():
                if one not in least and family.used <= one.exchanges <= family.exchanges:
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
        found = []
        for kept in chain.from_iterable(combinations(kinds, n) for n in range(1, len(kinds) + 1)):
            mine = np.flatnonzero([exchange in kept for exchange in exchanges])
            mine = mine[choices.beside(mine, kept)]
            if len({exchanges[i] for i in mine.tolist()}) < len(kept):
                continue
            if len(np.unique(choices.table[mine])) == choices.tables:
                found.append(ExchangeSet(choices, mine))
        return found


def _attempt(left: float) -> float:
    """Deterministic time that one attempt may take of what is left."""
    return min(left, max(SHORT, ATTEMPT * left))


def _least(found: list[Bounded]) -> float:
    """The least bound of a heap."""
    return found[0][0] if found else np.inf
