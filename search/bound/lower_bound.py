"""Lower bound on the predicted iteration time of every plan in a search space.

Every plan uses some set of exchanges (module x sharding type), which fixes the operations of its
graph. A node holds the plans that use some exchanges and may use others. Its bound is a linear
program over fractional plans: each table mixes its options, memory is pooled over all ranks. Cuts
of `search.bound.relaxation` are added where the program's optimum violates them (Kelley 1960).
Once a program is solved, its plans are branched on an exchange: used or not used (branch and bound,
Land and Doig 1960). The node with the least bound is refined first, so the bound is the best known
at any time; the leaves are single exchange sets.

Plans of a single set are branched at a peak, the longest shard of a stretch of a cycle: either it
is above a value, or the options above that value are excluded.

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
from search.params import DEFAULT, SearchParams
from search.problem import Problem
from search.space.option import Space

MARGIN = 1e-9
"""Fraction taken off the bound for rounding when prices and loads are summed. A plan may lie below
the proven value by as much; if it lies lower, the bound is wrong."""
MAX_SETS = 256
"""Above this many exchange sets, only the leaves of the branch-and-bound tree propose plans."""
REST = 0.02
"""Nested sets stop growing once the exchanges left out hold less than this fraction of the tables
at the optimum."""
FLOOR_STEPS, FLOOR_WORK = 20, 40_000
"""Refinements made even when time is up, as without them next to nothing is proven; and the work,
in choices times refinements, above which there are fewer: about a second."""
WORTH = 5e-3
"""Relative rise of the bound that restarts the patience; a gap below it needs no note."""
STEADY = 2e-3
"""Rise that restarts the patience once single sets are branched."""
LEAST_PATIENCE, LEAST_STEPS = 120, 40
"""Least number of refinements without such a rise, and of those of branching at peaks."""
MOST_LEAST = 1_200_000
"""Work, in choices times refinements, above which there are fewer than the least number: that of
10,000 choices, with which the least patience takes half a minute."""
SMALL = 480
"""Largest product of tables and ranks for which CP-SAT places every shard on its rank, on one host
only: 60 tables on 8 ranks. On two hosts its models are several times as large, and minutes of it
gained three per cent."""
WIDE, NARROW = 0.05, 0.01
"""Gap from which placement gets all of its time, and gap below which it gets none; less time in
between. Below the second, a second gained a tenth of a percent for 26 tables on 8 ranks."""
ATTEMPT = 0.2
"""Fraction of the remaining work that one attempt may take."""
SHORT = 0.5
"""Deterministic time that an attempt is always allowed."""
ABOVE = 1e-4
"""Nodes are pruned this fraction above the best plan's time, so that a bound above that plan, which
would be an error, stays visible."""


class UnsoundBoundError(RuntimeError):
    """Error raised if a known plan is faster than the bound: a defect, never bad input."""


@dataclass(frozen=True, eq=False)
class Node:
    """Node of the branch-and-bound tree: a branch of an exchange set, or all of it if None."""

    plans: ExchangeSet
    branch: Branch | None = None


Bounded = tuple[float, int, Node]
"""Bound in ms, number that breaks ties, node."""


class LowerBound:
    """Lower bound of a problem over a space, refined step by step.

    Args:
        scorer: scorer of the search, which shares its shard loads.
        params: constants of the search, scaled by the effort.
    """

    def __init__(
        self, problem: Problem, space: Space, scorer: PlanScorer, params: SearchParams = DEFAULT
    ) -> None:
        self._problem = problem, space, scorer
        self._params = params
        self._raised = 0.0, 0  # bound and refinement at the last rise
        # nodes still to refine or branch, least bound first, and nodes that are finished
        self._open: list[Bounded] | None = None
        self._solved: list[Bounded] = []
        self._exchange_shares: dict[Exchange, float] = {}  # by the optimum over all plans
        self._count = count()
        self._refined = 0

    @cached_property
    def choices(self) -> BoundChoices:
        """Choices of the space; takes seconds for many tables and ranks."""
        return BoundChoices(*self._problem)

    @property
    def has_begun(self) -> bool:
        """True once the bound was first solved."""
        return self._open is not None

    def solve(
        self,
        steps: int,
        upper_ms: float = np.inf,
        stop: Callable[[float], bool] = lambda bound: False,
        *,
        peaks: bool = False,
    ) -> float:
        """Refine the bound at most ``steps`` times; return it in ms.

        Args:
            upper_ms: time of a known plan; nodes above it are pruned.
            stop: called with the bound after every step except the first few.
            peaks: also branch single sets at peaks.

        Raises:
            UnsoundBoundError: the known plan is faster than the bound.
        """
        if self._open is None:
            self._all = ExchangeSet(self.choices, np.arange(len(self.choices.all)), frozenset())
            self._open = [(0.0, next(self._count), Node(self._all))]
        limit_ms = upper_ms * (1 + ABOVE)
        floor = min(FLOOR_STEPS, FLOOR_WORK / len(self.choices.all))
        for _ in range(steps):
            if not self._open or self.proven_ms >= min(_least(self._solved), upper_ms):
                break
            if (peaks or not self._open[0][2].plans.is_solved) and self._is_idle(peaks):
                break
            before, number, node = heapq.heappop(self._open)
            plans = node.plans
            if node.branch is None and plans.proven > before:  # it was refined elsewhere
                heapq.heappush(self._open, (plans.proven, number, node))
                continue
            try:
                bound, done = plans.refine(node.branch)
            except KeyboardInterrupt:  # the bound must still cover the plans of this node
                heapq.heappush(self._open, (before, number, node))
                raise
            bound, self._refined = max(bound, before), self._refined + 1
            parts: list[Node] | None
            if not done and bound < limit_ms:
                heapq.heappush(self._open, (bound, number, node))
                parts = []
            elif bound >= limit_ms:
                parts = None
            elif plans.is_exact:
                branches = plans.halves(node.branch, limit_ms) if peaks else None
                parts = None if branches is None else [Node(plans, each) for each in branches]
            else:
                self._exchange_shares = self._exchange_shares or plans.exchange_shares()
                parts = [Node(self._known(part)) for part in plans.parts()]
                for part in parts:
                    part.plans.take_cuts(plans)
            if parts is None:
                heapq.heappush(self._solved, (bound, number, node))
            for part in parts or ():
                heapq.heappush(self._open, (bound, next(self._count), part))
            if self._refined >= floor and stop(self.proven_ms):
                break
        return self._below(upper_ms)

    def _is_idle(self, peaks: bool) -> bool:
        """Return True if the bound has not risen for as long as the patience allows."""
        if self.proven_ms > self._raised[0] * (1 + (STEADY if peaks else WORTH)):
            self._raised = self.proven_ms, self._refined
        most = self._refinements(LEAST_PATIENCE, self._params.patience)
        return self._refined - self._raised[1] >= most

    def _refinements(self, least: int, work: float) -> float:
        """Return the refinements of some work, at least so many unless they take very long; none
        of no work."""
        choices = len(self.choices.all)
        if not work:
            return 0
        return max(min(least, MOST_LEAST / choices), work / choices)

    def tighten(
        self,
        steps: int,
        upper_ms: float,
        stop: Callable[[float], bool],
        seconds: Callable[[], float] = lambda: np.inf,
    ) -> float:
        """Refine the bound with single sets branched at peaks; return it in ms.

        Args:
            steps: see `solve`.
            upper_ms: time of a known plan.
            stop: called often, with the bound so far.
            seconds: returns the wall time left.
        """
        if self._open is not None:
            self._open, self._solved = [*self._open, *self._solved], []
            heapq.heapify(self._open)
            self._raised = self.proven_ms, self._refined
        steps = min(steps, round(self._refinements(LEAST_STEPS, self._params.branching)))
        bound = self.solve(steps, upper_ms, stop, peaks=True)
        topology = self._problem[0].topology
        small = self.choices.tables * topology.world_size <= SMALL and topology.groups == 1
        gap = upper_ms / max(self.proven_ms, MARGIN) - 1
        attempts = small and gap > NARROW
        work_left = self._params.rank_targets * min(1.0, gap / WIDE) if attempts else 0.0
        while work_left > 0 and bound < upper_ms and not stop(bound):
            nodes = [*(self._open or ()), *self._solved]
            plans = min(nodes)[2].plans
            if plans.is_settled or not plans.is_solved or not plans.is_exact:
                break
            most = min(work_left, max(SHORT, ATTEMPT * work_left))
            branches = [(ms, n.branch) for ms, _, n in nodes if n.plans is plans]
            proven, used = plans.place_ranks(branches, upper_ms, most, seconds)
            work_left -= used
            raised = [(max(ms, proven if n.plans is plans else 0.0), i, n) for ms, i, n in nodes]
            self._open, self._solved = raised, []
            heapq.heapify(raised)
            bound = self.solve(LEAST_STEPS, upper_ms, stop, peaks=True)
        return bound

    def _below(self, upper_ms: float) -> float:
        """Return the proven bound in ms, less `MARGIN`.

        Raises:
            UnsoundBoundError: the known plan is faster.
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
        return float(min(proven, upper_ms) * (1 - MARGIN))

    @property
    def proven_ms(self) -> float:
        """Lower bound proven so far; 0 before the first solve."""
        if self._open is None:
            return 0.0
        return min(_least(self._solved), _least(self._open))

    def notes(self, upper_ms: float) -> tuple[str, ...]:
        """Return a sentence for each thing the bound did not get to; none if the gap is closed.

        Args:
            upper_ms: time of the best plan known.
        """
        if self._open is None or self.proven_ms * (1 + WORTH) >= upper_ms:
            return ()
        if _least(self._open) >= min(upper_ms, _least(self._solved)):
            return ()
        return ("The bound was cut short: not all plans were divided by sharding types",)

    def promising(self, most: int) -> list[ExchangeSet]:
        """Return the exchange sets that are not refuted, lowest bound first; none before `solve`.

        Sets with equal bounds are ordered by the number of exchanges. Before any set is solved, all
        have the bounds of their families, which do not tell them apart. Then sets that cover more
        of the optimum over all plans come first.
        """
        nodes = [*(self._open or ()), *self._solved]
        if not self.sets:
            exact = {n.plans: None for bound, _, n in sorted(nodes) if n.plans.is_exact}
            return [*exact, *(self._nested() if self._refined else ())]
        any_solved = _least(self._solved) < np.inf
        least: dict[ExchangeSet, tuple[float, int]] = {}
        for bound, _, node in sorted(nodes):
            family = node.plans
            for exchange_set in self.sets if bound < np.inf else ():
                if (
                    exchange_set not in least
                    and family.used <= exchange_set.exchanges <= family.exchanges
                ):
                    if bound > exchange_set.proven:
                        exchange_set.take_cuts(family)
                    exchange_set.proven = max(exchange_set.proven, bound)
                    first = exchange_set.proven if any_solved else self._elsewhere(exchange_set)
                    least[exchange_set] = first, len(exchange_set.exchanges)
        return sorted(least, key=least.__getitem__)[:most]

    def _nested(self) -> Iterator[ExchangeSet]:
        """Yield nested sets of the exchanges that the optimum over all plans uses most.

        Used if there are too many sets to list. The first set has the fewest exchanges that offer
        every table an option. Each further set adds one exchange, until the exchanges left out
        hold only a few tables.
        """
        choices, shares = self.choices, self._all.exchange_shares()
        order = sorted(shares, key=lambda exchange: (-shares[exchange], exchange))
        for last in range(1, len(order) + 1):
            used = set(order[:last])
            mine = np.flatnonzero([exchange in used for exchange in choices.exchanges])
            mine = mine[choices.beside(mine, used)]
            if len(np.unique(choices.table[mine])) < choices.tables:
                continue
            exchange_set = ExchangeSet(choices, mine)
            exchange_set.take_cuts(self._all)
            yield exchange_set
            if sum(shares[other] for other in order[last:]) < REST * choices.tables:
                break

    def _elsewhere(self, exchange_set: ExchangeSet) -> float:
        """Return the fraction of tables in other exchanges at the optimum over all plans.

        It is rounded to tenths: an exchange that only few tables use can be replaced.
        """
        tables = sum(
            n for name, n in self._exchange_shares.items() if name not in exchange_set.exchanges
        )
        return round(tables / self.choices.tables, 1)

    def _known(self, part: ExchangeSet) -> ExchangeSet:
        """Return the member of `sets` with the same plans, else the set itself."""
        return self._by_exchanges.get(part.exchanges, part) if part.is_exact else part

    @cached_property
    def _by_exchanges(self) -> dict[frozenset[Exchange], ExchangeSet]:
        return {exchange_set.exchanges: exchange_set for exchange_set in self.sets}

    @cached_property
    def sets(self) -> list[ExchangeSet]:
        """Exchange sets that offer every table an option; empty if there are too many."""
        choices = self.choices
        exchanges = choices.exchanges
        kinds = sorted(set(exchanges))
        if 2 ** len(kinds) > MAX_SETS:
            return []
        sets = []
        for used in chain.from_iterable(combinations(kinds, n) for n in range(1, len(kinds) + 1)):
            mine = np.flatnonzero([exchange in used for exchange in exchanges])
            mine = mine[choices.beside(mine, used)]
            if len({exchanges[i] for i in mine.tolist()}) < len(used):
                continue
            if len(np.unique(choices.table[mine])) == choices.tables:
                sets.append(ExchangeSet(choices, mine))
        return sets


def _least(heap: list[Bounded]) -> float:
    """Return the least bound of a heap; infinite if it is empty."""
    return heap[0][0] if heap else np.inf
