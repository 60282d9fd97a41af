"""The choices of every table, as the programs of the lower bound see them: loads and memory.

What ``fused_uvm_caching`` options fetch at least, whichever tables share their caches.

The tables of a launch share a cache, so what one of them fetches follows from the others. What all
of them fetch has a lower bound that is a sum over shards, which the program of
`search.bound.lower_bound` can add up. What a single shard is certain to fetch, however many rows
others lend it, counts in its rank's longest shard (`search.bound.rank_excess`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from predictor.cost.loads import LAUNCH, LONGEST, LookupGroup, filling_column
from predictor.cost.lookup.shared_cache import (
    FETCH_MS,
    OWN_MS,
    POINTS,
    RESIDENT,
    ROWS,
    between,
    position,
)
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.plan import ComputeKernel, TablePlan
from search.bound.rank_excess import MAX_CHOICES, ONE_A_RANK, everywhere, longest_shard
from search.bound.relaxation import KnownHulls
from search.problem import Problem
from search.space.option import Option, Space, place

Array = NDArray[np.float64]

PRICES = 32
"""Prices of a cached row that are tried."""


def least_sharing_ms(caches: Sequence[Sequence[Array]]) -> Array:
    """What options that may meet in a launch fetch at least, beyond what they would with caches of
    their own, for several prices of a cached row, ``[options, 1 + PRICES]``.

    At every price, the sum over the options of a launch is never above what the launch fetches
    beyond that. An option that brings in more of the cache than it needs may count less than minus
    its own fetches.

    Args:
        caches: of each option's shards, ``[shared_cache.COLUMNS]`` each; at least one in all.
    """
    # shards alike are one array
    alike = {id(cache): cache for cache in chain.from_iterable(caches)}
    row = {key: i for i, key in enumerate(alike)}
    shards = np.stack([*alike.values()])
    beyond = _least_fetches_ms(shards) - shards[:, OWN_MS, None]
    return np.stack([beyond[[row[id(c)] for c in found]].sum(axis=0) for found in caches])


def _least_fetches_ms(shards: Array) -> Array:
    """Fetches ``[shards, 1 + PRICES]`` whose sum over those of a launch is never above what it
    fetches, at any of the prices.

    The characteristic time T of a launch lies between those that its shards would have alone: below
    the shortest, every shard holds less than it brings in, above the longest more. So it lies in
    the range ``R`` of all shards that may join. Resident rows ``r_s`` fill at most the rows ``c_s``
    that the shards bring in, so for every price ``p >= 0`` of a row, with fetches ``f_s``,

        sum f_s(T) >= sum f_s(T) + p (r_s(T) - c_s) >= sum min over t in R of f_s(t) + p (r_s - c_s)
    """
    alone = position(shards)
    shortest, longest = float(alone.min()), float(alone.max())
    # what is tabulated is linear between its points, so the least lies on one or at an end
    inside = np.arange(np.ceil(shortest), np.floor(longest) + 1)
    at = np.unique(np.concatenate(([shortest], inside, [longest])))
    everywhere = np.broadcast_to(at, (len(shards), len(at)))
    fetched = between(shards[:, None, FETCH_MS], everywhere)
    beyond = between(shards[:, None, RESIDENT], everywhere) - shards[:, None, ROWS]
    prices = _prices(fetched, beyond)
    return np.stack([(fetched + price * beyond).min(axis=1) for price in prices], axis=1)


def _prices(fetched: Array, beyond: Array) -> Array:
    """Prices ``[1 + PRICES]`` as different as what one more row of cache saves, and 0."""
    saved, more = -np.diff(fetched), np.diff(beyond)
    useful = (saved > 0) & (more > 0)
    if not useful.any():
        return np.zeros(1 + PRICES)
    rates = saved[useful] / more[useful]
    return np.concatenate(([0.0], np.geomspace(rates.min(), rates.max(), PRICES)))


def certain_fetches_ms(caches: Sequence[Sequence[Array]], tables: Sequence[int]) -> list[Array]:
    """What each shard fetches beyond what it would with a cache of its own, at least, whatever
    other tables of its launch lend it, ``[shards]`` of every option; never above 0.

    At the characteristic time T of a launch the resident rows fill at most what its shards bring
    in: ``sum r_s(T) <= sum c_s``. So a shard can hold only ``r_s(T) - c_s`` more rows than it
    brings in as others leave free. A table leaves at most ``max over its options`` of what their
    shards leave free at T, ``max(0, c - r(T))`` each, which falls with T while ``r_s`` rises. Where
    they cross, T ends, and fetches fall with T.

    Args:
        caches: of each option's shards, ``[shared_cache.COLUMNS]`` each; at least one in all.
        tables: of each option; a plan has one option of each.
    """
    free = [sum((_free_rows(one) for one in found), np.zeros(POINTS)) for found in caches]
    most: dict[int, Array] = {}
    for table, rows in zip(tables, free, strict=True):
        most[table] = np.maximum(rows, most.get(table, 0.0))
    every = sum(most.values(), np.zeros(POINTS))
    alike = {id(cache): cache for cache in chain.from_iterable(caches)}
    last = float(position(np.stack([*alike.values()])).max())
    result = []
    for table, mine, found in zip(tables, free, caches, strict=True):
        others = every - most[table] + mine
        least = {
            key: _least_ms(alike[key], others - _free_rows(alike[key]), last)
            for key in dict.fromkeys(map(id, found))
        }
        result.append(np.array([least[id(one)] for one in found]))
    return result


def _free_rows(cache: Array) -> Array:
    """Rows that a shard brings in and does not use at each tabulated time, ``[POINTS]``."""
    return np.asarray(np.maximum(0.0, cache[ROWS] - cache[RESIDENT]))


def _least_ms(cache: Array, lent: Array, last: float) -> float:
    """Fetches of a shard beyond its own at the longest time that rows lent allow.

    Args:
        lent: at most, at each tabulated time, ``[POINTS]``.
        last: position of the longest time of any shard alone, which no launch exceeds.
    """
    wanted = cache[RESIDENT] - cache[ROWS]
    over = np.flatnonzero(wanted > lent)
    at = last
    if len(over) and over[0] > 0:
        # up to the next tabulated time no more rows are free than at the one before
        before = int(over[0]) - 1
        step, left = wanted[before + 1] - wanted[before], lent[before] - wanted[before]
        at = min(last, before + (left / step if left < step else 1.0))
    least = between(cache[None, FETCH_MS], np.array([at]))[0]
    return min(0.0, float(least) - float(cache[OWN_MS]))


Ints = NDArray[np.intp]

GIB = float(1 << 30)


Exchange = tuple[str, str]
"""Module and sharding type."""


def exchange_of(group: LookupGroup) -> Exchange:
    """What a lookup group is exchanged with."""
    return group.module, group.sharding_type


@dataclass(frozen=True)
class BoundChoice:
    """One option of one table with its load averaged over the ranks, and its memory.

    ``peak`` is the most that a shard has, column by column; ``longest`` is the work of the longest
    shard at least, ``even`` what of it every rank has at least.
    ``certain`` is what its shards fetch at least beyond their own loads, however much others lend.
    ``sharing`` is what it fetches at least beyond its load, since tables share UVM caches, at
    several prices of their room.
    """

    table: int
    option: Option
    group: int
    load: Array
    peak: Array
    longest: Array
    even: Array
    hbm_bytes: int
    ddr_bytes: int
    sharing: Array
    moves: bool
    certain: Array | None = None


class BoundChoices:
    """All choices of a space, table by table.

    Args:
        scorer: shares its shard loads with the search.

    Attributes:
        loads: mean over the ranks, ``[choices, COLUMNS]``.
        peaks: the most that a shard has, ``[choices, COLUMNS]``.
        most: the most that a rank can have of a choice, ``[choices, COLUMNS]``.
        longest: work of the longest shard, ``[choices, rank_excess.WORK]``.
        even: work that every rank has at least, ``[choices, rank_excess.WORK]``.
        without_longest: there are too many choices to look at longest shards; these are 0 then.
        sharing: what is fetched at least beyond the loads, ``[choices, 1 + PRICES]`` in ms.
        groups: lookup group, ``[choices]``.
        exchanges: module and sharding type, ``[choices]``.
        needs: GiB of HBM, GiB of host memory, moves if they are limited, ``[choices, 2 or 3]``.
        caps: what all ranks together have of these, ``[2 or 3]``.
        hulls: of every exchange, the same for all sets of exchanges.
    """

    def __init__(self, problem: Problem, space: Space, scorer: PlanScorer) -> None:
        self.problem = problem
        self.scorer = scorer
        self.all = list(self._of_space(space))
        self._share_caches()
        self.tables = len(space.options)
        self.loads = np.array([c.load for c in self.all])
        self.loads[:, LAUNCH] = 0.0
        self.peaks = np.array([c.peak for c in self.all])
        single = np.array([c.option.sharding_type in ONE_A_RANK for c in self.all])
        single &= np.array([c.option.pinned is None for c in self.all])
        self.most = np.where(single[:, None], self.peaks, problem.topology.world_size * self.loads)
        self.longest = np.array([c.longest for c in self.all])
        self.even = np.array([c.even for c in self.all])
        self.without_longest = len(self.all) > MAX_CHOICES
        if self.without_longest:
            self.longest[:] = 0.0
        self.sharing = np.array([c.sharing for c in self.all])
        self.groups = np.array([c.group for c in self.all])
        self.exchanges = [exchange_of(scorer.groups[c.group]) for c in self.all]
        self.needs = np.array([[c.hbm_bytes / GIB, c.ddr_bytes / GIB] for c in self.all])
        topology = problem.topology
        caps = [sum(topology.hbm_cap_bytes) / GIB, sum(topology.ddr_cap_bytes) / GIB]
        if space.in_use is not None and space.in_use.is_limited:
            # moves are limited like memory
            moves = np.array([[float(c.moves)] for c in self.all])
            self.needs = np.hstack([self.needs, moves])
            caps.append(float(space.in_use.max_moves))
        self.caps = np.array(caps)
        self.hulls: KnownHulls = {}

    def _of_space(self, space: Space) -> Iterator[BoundChoice]:
        world = self.problem.topology.world_size
        for table, options in enumerate(space.options):
            for option in options:
                plan = self._placed(option)
                if plan is None:
                    continue
                shards = self.scorer.shards.of_table(table, plan)[1]
                shards[:, LONGEST] = 0.0
                yield BoundChoice(
                    table,
                    option,
                    self.scorer.group_index(table, plan),
                    shards.sum(axis=0) / world,
                    shards.max(axis=0),
                    longest_shard(shards),
                    everywhere(option.sharding_type, shards, world),
                    sum(m.hbm_bytes for m in option.memory),
                    sum(m.ddr_bytes for m in option.memory),
                    np.zeros(1 + PRICES),
                    self._moves(space, option),
                )

    def _moves(self, space: Space, option: Option) -> bool:
        """The option is another than the plan in use has, so its table moves."""
        before = space.in_use.choices[option.table] if space.in_use else None
        return before is None or before[0] is not option

    def _share_caches(self) -> None:
        """Add to the choices what they fetch at least through caches that tables share."""
        world = self.problem.topology.world_size
        for group in {choice.group for choice in self.all}:
            caches = {i: self._caches(c.option) for i, c in enumerate(self.all) if c.group == group}
            cached = [i for i, found in caches.items() if found]
            if cached:
                brought = [[*caches[i].values()] for i in cached]
                least = least_sharing_ms(brought) / world
                certain = certain_fetches_ms(brought, [self.all[i].table for i in cached])
                for i, sharing, fetched in zip(cached, least, certain, strict=True):
                    beyond = np.zeros(self.all[i].option.num_shards)
                    beyond[[*caches[i]]] = fetched
                    found = replace(self.all[i], sharing=sharing, certain=beyond)
                    shards, kind = self.shards(found), found.option.sharding_type
                    even = everywhere(kind, shards, world)
                    self.all[i] = replace(found, longest=longest_shard(shards), even=even)

    def _caches(self, option: Option) -> dict[int, Array]:
        """Shard -> what it adds to a UVM cache, of those that use one."""
        if option.compute_kernel is not ComputeKernel.FUSED_UVM_CACHING:
            return {}
        plan, shards = self._placed(option), self.scorer.shards
        assert plan is not None
        found = (shards.cache_of_shard(option.table, plan, shard) for shard in plan.shards)
        return {i: cache for i, cache in enumerate(found) if cache is not None}

    def shards(self, choice: BoundChoice) -> Array:
        """Loads of a choice's shards, ``[shards, COLUMNS]``; of cached ones with the fetches that
        they are certain of."""
        plan = self._placed(choice.option)
        assert plan is not None
        loads = self.scorer.shards.of_table(choice.table, plan)[1]
        loads[:, LAUNCH] = 0.0
        if choice.certain is not None:
            loads[:, filling_column(self.problem.workload)] += choice.certain
        return loads

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
            key = self.all[choice].table, self.all[choice].group
            blocks.setdefault(key, []).append(i)
        for block in blocks.values():
            mine = cost[block]
            beats = (mine[:, None] <= mine[None]).all(axis=-1)
            # of choices alike the first stays
            beats &= ~beats.T | np.triu(np.ones_like(beats), 1)
            needed[block] = ~beats.any(axis=0)
        return needed
