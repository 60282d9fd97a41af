"""Choices of every table as the linear programs of the lower bound see them: loads and memory.

The tables of a launch share a UVM cache, so the fetches of one depend on the others. The bound
counts the fetches that a shard is certain to make, however many rows the others lend it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from predictor.cost.loads import LAUNCH, Kinds, filling_column
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
from predictor.model.lookup_group import LookupGroup
from predictor.model.plan import ComputeKernel, ShardingType, TablePlan
from search.bound.relaxation import KnownHulls
from search.problem import Problem
from search.space.option import Option, Space, sample

Array = NDArray[np.float64]
Ints = NDArray[np.intp]

GIB = float(1 << 30)
Exchange = tuple[str, str]
"""Module and sharding type."""
BY_ROW = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)
ONE_A_RANK = (ShardingType.DATA_PARALLEL, *BY_ROW)
"""Sharding types that put at most one shard of a table on a rank."""


def exchange_of(group: LookupGroup) -> Exchange:
    """Return the exchange that a lookup group belongs to."""
    return group.module, group.sharding_type


def certain_fetches_ms(caches: Sequence[Sequence[Array]], tables: Sequence[int]) -> list[Array]:
    """Return the least extra fetch time of each shard in ms against a cache of its own.

    The bound holds whatever the other tables of the launch lend. Values are <= 0, as ``[shards]``
    of every option.

    At the characteristic time T of a launch the resident rows fit in the cache that its shards
    contribute: ``sum r_s(T) <= sum c_s``. So a shard can hold ``r_s(T) - c_s`` rows beyond its own
    only if others leave them free. A shard leaves ``max(0, c - r(T))`` free, and a table at most
    the maximum of that over its options. This falls with T while ``r_s`` rises; T cannot exceed
    the time at which they cross. Fetches fall with T, so that T gives the least fetches.

    Args:
        caches: arrays ``[shared_cache.COLUMNS]`` of each option's shards; at least one in all.
        tables: table of each option; a plan has one option of each.
    """
    free = [sum((_free_rows(shard) for shard in shards), np.zeros(POINTS)) for shards in caches]
    most: dict[int, Array] = {}
    for table, rows in zip(tables, free, strict=True):
        most[table] = np.maximum(rows, most.get(table, 0.0))
    free_in_total = sum(most.values(), np.zeros(POINTS))
    # equal shards share one array
    distinct = {id(cache): cache for cache in chain.from_iterable(caches)}
    last = float(position(np.stack([*distinct.values()])).max())
    result = []
    for table, mine, shards in zip(tables, free, caches, strict=True):
        lent = free_in_total - most[table] + mine
        least = {
            key: _least_ms(distinct[key], lent - _free_rows(distinct[key]), last)
            for key in dict.fromkeys(map(id, shards))
        }
        result.append(np.array([least[id(shard)] for shard in shards]))
    return result


def _free_rows(cache: Array) -> Array:
    """Return the rows that a shard contributes but does not use at each time, ``[POINTS]``."""
    return np.asarray(np.maximum(0.0, cache[ROWS] - cache[RESIDENT]))


def _least_ms(cache: Array, lent: Array, last: float) -> float:
    """Return the extra fetch time of a shard at the longest time that the lent rows allow.

    Args:
        lent: most rows that others lend at each tabulated time, ``[POINTS]``.
        last: position of the longest time of any shard alone; no launch exceeds it.
    """
    borrowed = cache[RESIDENT] - cache[ROWS]
    over = np.flatnonzero(borrowed > lent)
    at = last
    if len(over) and over[0] > 0:
        # free rows fall with time: until the next tabulated time there are no more than here
        before = int(over[0]) - 1
        step, spare = borrowed[before + 1] - borrowed[before], lent[before] - borrowed[before]
        at = min(last, before + (spare / step if spare < step else 1.0))
    least = between(cache[None, FETCH_MS], np.array([at]))[0]
    return min(0.0, float(least) - float(cache[OWN_MS]))


@dataclass(frozen=True)
class BoundChoice:
    """One option of one table.

    Args:
        group: lookup group in the scorer.
        plan: plan of one shard of every kind of the table; its ranks are arbitrary.
        kinds: kind of every shard, ``[shards]``.
        certain_ms: least extra fetch time of each kind of shard beyond its own load, ``[kinds]``,
            if they share a cache.
    """

    option: Option
    group: int
    plan: TablePlan
    kinds: Kinds
    certain_ms: Array | None = None


class BoundChoices:
    """All choices of a space, table by table.

    Args:
        scorer: scorer of the search, which shares its shard loads.

    Attributes:
        table: table of every choice, ``[choices]``.
        shards, copies: least loads of the distinct shards, ``[shards, COLUMNS]``, and the number of
            shards of the choice equal to each, ``[shards]``; choice by choice.
        first, sizes: position of a choice's first distinct shard and their number, ``[choices]``.
        loads: mean over the ranks, ``[choices, COLUMNS]``.
        peaks: largest of a shard, ``[choices, COLUMNS]``.
        most: largest load that a choice can put on a rank, ``[choices, COLUMNS]``.
        everywhere: True if every rank has a shard, ``[choices]``.
        groups: lookup group, ``[choices]``.
        exchanges: module and sharding type, ``[choices]``.
        mean_by_row: True for mean pooling split by rows beside other tables of its module,
            ``[choices]``.
        needs: GiB of HBM, GiB of host memory, moves if they are limited, ``[choices, 2 or 3]``.
        caps: total of these over all ranks, ``[2 or 3]``.
        hulls: hulls of every exchange, shared by all exchange sets.
    """

    def __init__(self, problem: Problem, space: Space, scorer: PlanScorer) -> None:
        self.problem, self.scorer = problem, scorer
        self.tables = len(space.options)
        self.all = self._with_shared_caches(list(self._of_space(space)))
        topology = problem.topology
        world = topology.world_size
        self.table = np.array([c.option.table for c in self.all])
        distinct = [_distinct(self._loads_of_kinds(c), np.bincount(c.kinds)) for c in self.all]
        self.sizes = np.array([len(copies) for _, copies in distinct])
        self.first = np.cumsum([0, *self.sizes[:-1]])
        self.shards = np.concatenate([shards for shards, _ in distinct])
        self.copies = np.concatenate([copies for _, copies in distinct])
        self.loads = np.add.reduceat(self.shards * self.copies[:, None], self.first) / world
        self.peaks = np.maximum.reduceat(self.shards, self.first)
        alone = np.array([c.option.sharding_type in ONE_A_RANK for c in self.all])
        pinned = np.array([c.option.pinned is not None for c in self.all])
        self.most = np.where((alone & ~pinned)[:, None], self.peaks, world * self.loads)
        self.everywhere = alone & (np.add.reduceat(self.copies, self.first) >= world)
        self.groups = np.array([c.group for c in self.all])
        self.exchanges = [exchange_of(scorer.groups[c.group]) for c in self.all]
        means = {table for mean_tables, _ in space.means for table in mean_tables}
        self.mean_by_row = np.array([c.option.by_row and c.option.table in means for c in self.all])
        needs = [[sum(each) / GIB for each in c.option.bytes_of] for c in self.all]
        caps = [sum(topology.hbm_cap_bytes) / GIB, sum(topology.ddr_cap_bytes) / GIB]
        if space.in_use is not None and space.in_use.is_limited:
            # moves are limited like memory: an option that the plan in use has not moves its table
            before = [choice and choice[0] for choice in space.in_use.choices]
            for c, need in zip(self.all, needs, strict=True):
                need.append(float(before[c.option.table] is not c.option))
            caps.append(float(space.in_use.max_moves))
        self.needs, self.caps = np.array(needs), np.array(caps)
        self.hulls: KnownHulls = {}

    def _of_space(self, space: Space) -> Iterator[BoundChoice]:
        for option in space.every_option:
            if not option.legal_ranks(self.problem.topology).is_empty:
                shards = self.scorer.shards
                first, kinds = shards.alike(option.table, option.sizes, option.offsets)
                plan = sample(option, first)
                group = self.scorer.group_index(option.table, plan)
                yield BoundChoice(option, group, plan, kinds)

    def _with_shared_caches(self, choices: list[BoundChoice]) -> list[BoundChoice]:
        """Return the choices with the least fetches through caches that tables share."""
        by_group: dict[int, list[int]] = {}
        for i, choice in enumerate(choices):
            if choice.option.compute_kernel is ComputeKernel.FUSED_UVM_CACHING:
                by_group.setdefault(choice.group, []).append(i)
        for mine in by_group.values():
            caches = [self._caches(choices[i]) for i in mine]
            brought = [
                [by_kind[kind] for kind in choices[i].kinds.tolist() if kind in by_kind]
                for i, by_kind in zip(mine, caches, strict=True)
            ]
            if any(brought):
                tables = [choices[i].option.table for i in mine]
                certain = certain_fetches_ms(brought, tables)
                for i, by_kind, fetched in zip(mine, caches, certain, strict=True):
                    kinds = choices[i].kinds
                    beyond = np.zeros(len(choices[i].plan.shards))
                    beyond[kinds[np.isin(kinds, [*by_kind])]] = fetched
                    choices[i] = replace(choices[i], certain_ms=beyond)
        return choices

    def _caches(self, choice: BoundChoice) -> dict[int, Array]:
        """Return kind of shard -> its part of a UVM cache, for the kinds that use one."""
        table, shards = choice.option.table, self.scorer.shards
        caches = (shards.cache_of_shard(table, choice.plan, shard) for shard in choice.plan.shards)
        return {i: cache for i, cache in enumerate(caches) if cache is not None}

    def shards_of(self, choice: BoundChoice) -> Array:
        """Return the least loads of a choice's shards, ``[shards, COLUMNS]``, with the certain
        fetches of cached ones."""
        return self._loads_of_kinds(choice)[choice.kinds]

    def _loads_of_kinds(self, choice: BoundChoice) -> Array:
        """Return the least loads of each kind of shard of a choice, ``[kinds, COLUMNS]``."""
        loads = self.scorer.shards.of_table(choice.option.table, choice.plan)[1]
        loads[:, LAUNCH] = 0.0
        if choice.certain_ms is not None:
            loads[:, filling_column(self.problem.workload)] += choice.certain_ms
        return loads

    def beside(self, index: Ints, used: Iterable[Exchange]) -> NDArray[np.bool_]:
        """Return a mask of the choices that a plan with these exchanges can have.

        Tables with mean pooling are split by rows only if all tables of their module are.
        """
        not_by_row = {module for module, kind in used if kind not in BY_ROW}
        apart = np.array([self.exchanges[i][0] in not_by_row for i in index.tolist()], dtype=bool)
        return np.asarray(~(apart & self.mean_by_row[index]))


def _distinct(loads: Array, copies: Ints) -> tuple[Array, Array]:
    """Return the distinct loads of kinds of shards, ``[distinct, COLUMNS]``, and the number of
    shards with each.

    Args:
        copies: number of shards of every kind.
    """
    if (loads == loads[0]).all():  # most options
        return loads[:1], np.array([float(copies.sum())])
    distinct, which = np.unique(loads, axis=0, return_inverse=True)
    return distinct, np.bincount(which.ravel(), copies).astype(np.float64)
