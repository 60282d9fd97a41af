"""A lower bound on the predicted iteration time of every plan in a search space.

Every plan uses some set of exchanges (module x sharding type), which fixes the operations of its
graph. For each set, a linear program over fractional plans (each table mixes its options, memory is
pooled over all ranks) is minimised under the cuts of `search.bound.relaxation`, which are added
where the program's optimum violates them (Kelley 1960). The bound is the least over all sets; sets
are refined best first, so only those that could hold the optimum cost time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from predictor.cost.loads import LAUNCH
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.plan import ComputeKernel, TablePlan
from search.bound.busiest import MAX_CHOICES, longest_shard
from search.bound.cache import PRICES, least_sharing_ms
from search.bound.exchange_set import GIB, ExchangeSet, exchange_of
from search.bound.relaxation import Hulls
from search.problem import Problem
from search.space.enumerate import Option, Space, place

Array = NDArray[np.float64]
Ints = NDArray[np.intp]

ROUNDING = 1e-9
"""Taken off the bound."""
MAX_SETS = 256
"""More sets of exchanges than this are not told apart; cuts that hold for all of them remain."""
CACHED = ComputeKernel.FUSED_UVM_CACHING
FLOOR_STEPS = 20
"""Refinements of the bound that holds for all sets, where every set starts from."""


@dataclass(frozen=True)
class _Choice:
    """One option of one table with its load averaged over the ranks, and its memory.

    ``peak`` is the most that a shard has, column by column; ``longest`` is what the lookups of the
    longest shard take at least.
    ``sharing`` is what it fetches at least beyond its load, since tables share UVM caches, at
    several prices of their room.
    """

    table: int
    option: Option
    group: int
    load: Array
    peak: Array
    longest: Array
    hbm_bytes: int
    ddr_bytes: int
    sharing: Array
    moves: bool


class LowerBound:
    """The bound of a problem over a space, refined step by step.

    Args:
        batch: shares its shard loads with the search.
    """

    def __init__(self, problem: Problem, space: Space, batch: PlanScorer) -> None:
        self.problem = problem
        self.batch = batch
        self.given = space.given
        self.choices = list(self._choices(space))
        self._share_caches()
        self.tables = len(space.options)
        self.loads = np.array([c.load for c in self.choices])
        self.loads[:, LAUNCH] = 0.0
        self.peaks = np.array([c.peak for c in self.choices])
        self.longest = np.array([c.longest for c in self.choices])
        if len(self.choices) > MAX_CHOICES:
            self.longest[:] = 0.0
        self.sharing = np.array([c.sharing for c in self.choices])
        self.groups = np.array([c.group for c in self.choices])
        self.needs = np.array([[c.hbm_bytes / GIB, c.ddr_bytes / GIB] for c in self.choices])
        if self.given is not None and self.given.is_limited:
            # moves are a resource like memory, of which a given plan leaves so many
            moves = np.array([[float(c.moves)] for c in self.choices])
            self.needs = np.hstack([self.needs, moves])
        # an exchange's ceiling and least load do not depend on which others a set has
        self.hulls: dict[str, Hulls] = {}
        self.sets: list[ExchangeSet] = []
        # sets that may still be refined, least bound first; the least bound of the others
        self._open: list[tuple[float, int, ExchangeSet]] | None = None
        self._fathomed = np.inf

    def solve(
        self,
        steps: int,
        upper_ms: float = np.inf,
        stop: Callable[[float], bool] = lambda bound: False,
    ) -> float:
        """The bound in ms after at most ``steps`` more refinements.

        Args:
            upper_ms: a plan with this time is known; sets above it need no more work.
            stop: asked after every step with the bound so far.
        """
        if self._open is None:
            self._begin()
        assert self._open is not None
        for _ in range(steps):
            if not self._open or self.proven_ms >= min(self._fathomed, upper_ms):
                break
            before, index, one = heapq.heappop(self._open)
            bound, done = one.refine()
            bound = max(bound, before)
            if done:
                self._fathomed = min(self._fathomed, bound)
            else:
                heapq.heappush(self._open, (bound, index, one))
            if stop(self.proven_ms):
                break
        return float(min(self.proven_ms, upper_ms) * (1 - ROUNDING))

    @property
    def proven_ms(self) -> float:
        """The least bound of all sets so far."""
        return min(self._fathomed, self._open[0][0] if self._open else np.inf)

    def _begin(self) -> None:
        floor = self._floor()
        self.sets = self._sets()
        self._open = [(floor, i, one) for i, one in enumerate(self.sets)]
        heapq.heapify(self._open)
        self._fathomed = np.inf if self._open else floor

    def promising(self, count: int) -> list[ExchangeSet]:
        """The solved sets with the lowest bounds; fewer, or none, where `solve` saw fewer."""
        seen = [one for one in self.sets if 0 < one.proven < np.inf]
        return sorted(seen, key=lambda one: one.proven)[:count]

    def _floor(self) -> float:
        """A bound that holds whatever the set of exchanges."""
        everything = ExchangeSet(self, np.arange(len(self.choices)), exact=False)
        bound = 0.0
        for _ in range(FLOOR_STEPS):
            bound, done = everything.refine()
            if done:
                break
        return bound

    def _choices(self, space: Space) -> Iterator[_Choice]:
        world = self.problem.topology.world_size
        for table, options in enumerate(space.options):
            for option in options:
                plan = self._placed(option)
                if plan is None:
                    continue
                group, load = self.batch.table(table, plan)
                shards = self._shards(table, plan, load)
                yield _Choice(
                    table,
                    option,
                    group,
                    load.sum(axis=0) / world,
                    shards.max(axis=0),
                    longest_shard(shards, cached=plan.compute_kernel is CACHED),
                    sum(m.hbm_bytes for m in option.memory),
                    sum(m.ddr_bytes for m in option.memory),
                    np.zeros(1 + PRICES),
                    self._moves(space, option),
                )

    def _shards(self, table: int, plan: TablePlan, load: Array) -> Array:
        """Loads of a table's shards, ``[shards, COLUMNS]``, given those of the ranks."""
        ranks = np.array(plan.ranks)
        if len(np.unique(ranks)) == len(ranks):
            return np.asarray(load[ranks])
        return self.batch.shards.of_table(table, plan)[1]

    def _moves(self, space: Space, option: Option) -> bool:
        """The option is another than a given plan has, so its table moves."""
        before = space.given.choices[option.table] if space.given else None
        return before is None or before[0] is not option

    def _share_caches(self) -> None:
        """Enter into the choices what they fetch at least, whatever tables share their caches."""
        world = self.problem.topology.world_size
        for group in {choice.group for choice in self.choices}:
            caches = {
                i: self._caches(c.option) for i, c in enumerate(self.choices) if c.group == group
            }
            cached = [i for i, found in caches.items() if found]
            if cached:
                least = least_sharing_ms([caches[i] for i in cached]) / world
                for i, sharing in zip(cached, least, strict=True):
                    self.choices[i] = replace(self.choices[i], sharing=sharing)

    def _caches(self, option: Option) -> list[Array]:
        """What each shard of an option adds to a UVM cache."""
        plan, shards = self._placed(option), self.batch.shards
        assert plan is not None
        found = (shards.cache_of_shard(option.table, plan, shard) for shard in plan.shards)
        return [cache for cache in found if cache is not None]

    def _placed(self, option: Option) -> TablePlan | None:
        """A plan of the option, None if there is none; where shards lie does not matter here."""
        legal = option.legal_ranks(self.problem.topology)
        return (
            None if legal.is_empty else place(option, [r for unit in legal.units for r in unit[0]])
        )

    def undominated(self, index: Ints) -> NDArray[np.bool_]:
        """Of some choices, which ones a fractional plan needs: no other of the same table and
        lookup group has no more of any load, memory and moves, and no longer shard."""
        needed = np.ones(len(index), dtype=bool)
        cost = np.hstack([self.loads, self.needs, self.sharing, self.longest])[index]
        blocks: dict[tuple[int, int], list[int]] = {}
        for i, choice in enumerate(index.tolist()):
            key = self.choices[choice].table, self.choices[choice].group
            blocks.setdefault(key, []).append(i)
        for block in blocks.values():
            mine = cost[block]
            beats = (mine[:, None] <= mine[None]).all(axis=-1)
            # of choices alike the first stays
            beats &= ~beats.T | np.triu(np.ones_like(beats), 1)
            needed[block] = ~beats.any(axis=0)
        return needed

    def _exchange(self, choice: _Choice) -> tuple[str, str]:
        return exchange_of(self.batch.groups[choice.group])

    def _sets(self) -> list[ExchangeSet]:
        """All sets of exchanges that offer every table an option; none if they are too many."""
        exchanges = [self._exchange(c) for c in self.choices]
        kinds = sorted(set(exchanges))
        if 2 ** len(kinds) > MAX_SETS:
            return []
        needed = self.undominated(np.arange(len(self.choices)))
        found = []
        for kept in chain.from_iterable(combinations(kinds, n) for n in range(1, len(kinds) + 1)):
            mine = np.flatnonzero([exchange in kept for exchange in exchanges])
            if len({self.choices[i].table for i in mine}) == self.tables:
                found.append(ExchangeSet(self, mine, exact=True, needed=needed[mine]))
        return found
