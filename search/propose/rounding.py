"""Plans from the linear programs of the lower bound.

Of a set of exchanges, the program's optimum (`search.bound.lower_bound`) mixes the options of a few
tables only: as many as it has binding rows. Every table takes its largest share, and what is left
is to place them. A second program leaves out options with a shard above the mean rank's work, which
no placement can balance.

Which set holds the best plan the bounds alone do not tell: every exchange adds maxima over the
ranks, which its program knows nothing of. So the plans of many sets are placed and scored, and the
best of them are balanced.

Why: docs/decisions/0028-plans-from-the-bound.md.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, zip_longest

import numpy as np

from predictor.cost.loads import Load
from predictor.model.plan import ShardingType
from search.bound.exchange_set import ExchangeSet
from search.bound.lower_bound import LowerBound
from search.candidate import Candidate, rank_distinct
from search.improve.balance import balance, refill
from search.objective import Assignment, Objective
from search.partitioner import GreedyPartitioner
from search.space.option import Option
from search.surrogate import Surrogate

SETS = 16
"""Sets of exchanges that plans are made of, where there are more than `MANY` whose bound lies under
the best plan: those with the lowest bounds first."""
MANY = 24
FEW = 3
"""Exchanges of a module: half of the sets have no more."""
BALANCED = 12
"""Plans that are balanced, those first that are fastest as they were placed; of a large problem
half as many."""
AT_ONCE = 4
"""Sets that are placed before it is asked again which of the others may hold a better plan."""
SCARCE = 0.9
"""Part of all memory from which on a set's optimum is rounded with less memory, too: shards do not
fill ranks as the program does."""
ROOMIER = (0.75, 0.5, 0.25)
"""Parts of what the optimum takes beyond the least of memory that are left then."""
LARGE = 20_000
"""Tables times ranks beyond which a descent takes seconds."""
REFINED = 60
"""Refinements of a set at most."""
WORK = [Load.FORWARD_MS, Load.BACKWARD_MS]
MESSAGES = [Load.IDS, Load.OUTPUTS]
FOUND_BY = "rounding"


class Rounding:
    """Proposes plans."""

    def __init__(self, objective: Objective, surrogate: Surrogate) -> None:
        self.objective = objective
        self.surrogate = surrogate
        self.placer = GreedyPartitioner(objective, surrogate)
        size = len(objective.space.options) * objective.problem.topology.world_size
        self.balanced = BALANCED if size <= LARGE else BALANCED // 2
        self.refined = REFINED if size <= LARGE else 0

    def propose(
        self,
        bound: LowerBound,
        best_ms: float = math.inf,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Candidate]:
        """Balanced plans; none for sets whose options cannot be placed.

        Args:
            bound: solved, so that its sets have optima.
            best_ms: of a plan that is known; sets that cannot hold a faster one are left out.
            stop: asked before every set and every plan; one plan is made in any case.
        """
        placed: list[Candidate] = []
        sets = self._sets(bound, best_ms, stop)
        while sets and not (placed and stop()):
            count = 1 if stop() else AT_ONCE
            wave = [one for one in sets[:count] if one.proven < best_ms]
            sets = sets[count:]
            pieces = [partial(self._place, one, best_ms, stop) for one in wave]
            for one, (found, proven) in zip(wave, self.objective.side_by_side(pieces), strict=True):
                one.proven = max(one.proven, proven)
                placed += found
            best_ms = min([best_ms, *(c.iteration_ms for c in placed)])
        best = rank_distinct(placed)[: 1 if stop() else self.balanced]
        # the cheapest set with few exchanges: placed, others may be faster, and can gain less
        if len(best) > 1 and placed[0] not in best:
            best[-1] = placed[0]
        yield from self.objective.side_by_side([partial(self._balance, c, stop) for c in best])

    def _place(
        self, one: ExchangeSet, best_ms: float, stop: Callable[[], bool]
    ) -> tuple[list[Candidate], float]:
        """The plans of a set as they are placed, and its bound."""
        found: dict[Assignment, Candidate] = {}
        for options in self._rounded(one, best_ms, stop):
            plan = self._fitting(options)
            if plan is not None:
                refilled = refill(self.objective.beside(plan), self.surrogate, plan)
                plan = refilled if self.objective.fits(refilled) else plan
                found[plan] = Candidate(plan, self._ms(plan), FOUND_BY)
                best_ms = min(best_ms, found[plan].iteration_ms)
        return list(found.values()), one.proven

    def _fitting(self, options: Sequence[Option]) -> Assignment | None:
        """These options where they fit; None if no such place was found."""
        plan, objective = self.placer.place_all(options), self.objective
        if plan is None or objective.fits(plan):
            return plan
        placer = GreedyPartitioner(objective.beside(plan), self.surrogate)
        plan = placer.place_all(options)
        return plan if plan is not None and objective.fits(plan) else None

    def _balance(self, one: Candidate, stop: Callable[[], bool]) -> Candidate:
        within = self.objective.beside(one.assignment)
        plan = balance(within, self.surrogate, one.assignment, stop)
        return Candidate(plan, self._ms(plan), FOUND_BY) if self.objective.fits(plan) else one

    def _ms(self, plan: Assignment) -> float:
        return float(self.objective.score([plan])[0])

    def _sets(
        self, bound: LowerBound, best_ms: float, stop: Callable[[], bool]
    ) -> list[ExchangeSet]:
        """The sets that may hold a better plan, by their bounds: of many, the first of all and the
        first with few exchanges, in turns."""
        sets = [one for one in bound.promising(len(bound.sets)) if one.proven < best_ms]
        if len(sets) <= MANY:
            return sets
        few = [one for one in sets if _most_exchanges(one) <= FEW]
        turns = zip_longest(*(self._cheapest(some, best_ms, stop) for some in (few, sets)))
        found: dict[ExchangeSet, None] = {}
        for one in chain.from_iterable(turns):
            if one is not None:
                found[one] = None
            if len(found) == SETS:
                break
        return list(found)

    def _cheapest(
        self, sets: Sequence[ExchangeSet], best_ms: float, stop: Callable[[], bool]
    ) -> Iterator[ExchangeSet]:
        """Sets that may hold a better plan in the order of what their programs prove. Before a set
        is solved it has the bound of a family, which says little of one set; of a large problem
        the order that the bound knows has to do."""
        if not self.refined:
            yield from sets
            return
        waiting = [(one.proven, number, self.refined) for number, one in enumerate(sets)]
        heapq.heapify(waiting)
        while waiting:
            _, number, left = heapq.heappop(waiting)
            one = sets[number]
            if not left or stop():
                yield one
                continue
            done = one.refine()[1]
            if one.proven < best_ms:
                heapq.heappush(waiting, (one.proven, number, 0 if done else left - 1))

    def _rounded(
        self, one: ExchangeSet, best_ms: float, stop: Callable[[], bool]
    ) -> Iterator[list[Option]]:
        """The options of a set's plans; none where it cannot hold a faster one.

        Of programs far from their optimum the shares are arbitrary.
        """
        self.solve(one, stop, best_ms)
        if one.proven >= best_ms:
            return
        scarce = bool((one.memory @ one.shares > SCARCE * one.known.caps).any())
        for part in (1.0, *ROOMIER) if scarce else (1.0,):
            options = one.rounded(part)
            if options is not None:
                yield options
            if stop():
                return
        divisible = self.divisible(one)
        options = divisible.rounded() if divisible.proven < best_ms else None
        if options is not None:
            yield options

    @staticmethod
    def solve(one: ExchangeSet, stop: Callable[[], bool], best_ms: float = math.inf) -> bool:
        """Refine a set until it is solved or cannot hold a faster plan; whether it is solved."""
        for _ in range(REFINED):
            done = one.refine()[1]
            if done or one.proven >= best_ms or stop():
                return done and one.proven < best_ms
        return False

    def divisible(self, one: ExchangeSet) -> ExchangeSet:
        """The set without options whose largest shard exceeds the mean rank's work of its optimum:
        lookups of all exchanges together, ids and outputs of its own; a table that has no other
        keeps the one that exceeds it least."""
        loads, peaks = one.known.loads[one.index], one.known.peaks[one.index]
        excess = _ratio(peaks[:, WORK], one.shares @ loads[:, WORK])
        exchanges = [(o.module, o.sharding_type) for o in one.options]
        for exchange in sorted(set(exchanges)):
            if exchange[1] is not ShardingType.DATA_PARALLEL:
                mine = np.flatnonzero([other == exchange for other in exchanges])
                mean = one.shares[mine] @ loads[mine][:, MESSAGES]
                excess[mine] = np.maximum(excess[mine], _ratio(peaks[mine][:, MESSAGES], mean))
        return one.without(np.maximum(excess, 1.0))


def _ratio(peaks: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """The largest share of the mean that a shard has, ``[choices]``."""
    return np.asarray((peaks / np.maximum(mean, 1e-12)).max(axis=1))


def _most_exchanges(one: ExchangeSet) -> int:
    """Exchanges of the module that has the most."""
    used = {(option.module, option.sharding_type) for option in one.options}
    modules = [module for module, _ in used]
    return max(map(modules.count, modules))
