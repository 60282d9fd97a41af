"""The choices of every table, as the programs of the lower bound see them: loads and memory.

The tables of a launch share a UVM cache, so what one of them fetches follows from the others. What
a shard is certain to fetch, however many rows others lend it, counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from predictor.cost.loads import LAUNCH, filling_column
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
from search.space.option import Option, Space, place

Array = NDArray[np.float64]
Ints = NDArray[np.intp]

GIB = float(1 << 30)
Exchange = tuple[str, str]
"""Module and sharding type."""
BY_ROW = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)
ONE_A_RANK = (ShardingType.DATA_PARALLEL, *BY_ROW)
"""No rank has two shards of such a table."""


def exchange_of(group: LookupGroup) -> Exchange:
    """What a lookup group is exchanged with."""
    return group.module, group.sharding_type


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
    # shards alike are one array
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


@dataclass(frozen=True)
class BoundChoice:
    """One option of one table.

    Args:
        group: its lookup group in the scorer.
        plan: of the option, wherever its shards lie.
        certain_ms: what its shards fetch at least beyond their own loads, ``[shards]``, if they
            share a cache.
    """

    option: Option
    group: int
    plan: TablePlan
    certain_ms: Array | None = None


class BoundChoices:
    """All choices of a space, table by table.

    Args:
        scorer: shares its shard loads with the search.

    Attributes:
        table: of every choice, ``[choices]``.
        shards, copies: least loads of the shards that are not alike, ``[shards, COLUMNS]``, and how
            many shards of the choice are like each, ``[shards]``; choice by choice.
        first, sizes: where a choice's shards begin there, and how many there are, ``[choices]``.
        loads: mean over the ranks, ``[choices, COLUMNS]``.
        peaks: the most that a shard has, ``[choices, COLUMNS]``.
        most: the most that a rank can have of a choice, ``[choices, COLUMNS]``.
        everywhere: every rank has a shard, ``[choices]``.
        groups: lookup group, ``[choices]``.
        exchanges: module and sharding type, ``[choices]``.
        mean_by_row: a mean that is split by rows beside other tables of its module, ``[choices]``.
        needs: GiB of HBM, GiB of host memory, moves if they are limited, ``[choices, 2 or 3]``.
        caps: what all ranks together have of these, ``[2 or 3]``.
        hulls: of every exchange, the same for all sets of exchanges.
    """

    def __init__(self, problem: Problem, space: Space, scorer: PlanScorer) -> None:
        self.problem, self.scorer = problem, scorer
        self.tables = len(space.options)
        self.all = self._with_shared_caches(list(self._of_space(space)))
        topology = problem.topology
        world = topology.world_size
        self.table = np.array([c.option.table for c in self.all])
        found = [_distinct(self.shards_of(c)) for c in self.all]
        self.sizes = np.array([len(copies) for _, copies in found])
        self.first = np.cumsum([0, *self.sizes[:-1]])
        self.shards = np.concatenate([shards for shards, _ in found])
        self.copies = np.concatenate([copies for _, copies in found])
        self.loads = np.add.reduceat(self.shards * self.copies[:, None], self.first) / world
        self.peaks = np.maximum.reduceat(self.shards, self.first)
        alone = np.array([c.option.sharding_type in ONE_A_RANK for c in self.all])
        pinned = np.array([c.option.pinned is not None for c in self.all])
        self.most = np.where((alone & ~pinned)[:, None], self.peaks, world * self.loads)
        self.everywhere = alone & (np.add.reduceat(self.copies, self.first) >= world)
        self.groups = np.array([c.group for c in self.all])
        self.exchanges = [exchange_of(scorer.groups[c.group]) for c in self.all]
        means = {table for some, _ in space.means for table in some}
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
            legal = option.legal_ranks(self.problem.topology)
            if not legal.is_empty:
                plan = place(option, [r for unit in legal.units for r in unit[0]])
                yield BoundChoice(option, self.scorer.group_index(option.table, plan), plan)

    def _with_shared_caches(self, found: list[BoundChoice]) -> list[BoundChoice]:
        """The choices with what they fetch at least through caches that tables share."""
        by_group: dict[int, list[int]] = {}
        for i, one in enumerate(found):
            if one.option.compute_kernel is ComputeKernel.FUSED_UVM_CACHING:
                by_group.setdefault(one.group, []).append(i)
        for mine in by_group.values():
            caches = [self._caches(found[i]) for i in mine]
            brought = [[*of.values()] for of in caches]
            if any(brought):
                tables = [found[i].option.table for i in mine]
                certain = certain_fetches_ms(brought, tables)
                for i, of, fetched in zip(mine, caches, certain, strict=True):
                    beyond = np.zeros(found[i].option.num_shards)
                    beyond[[*of]] = fetched
                    one = found[i]
                    found[i] = BoundChoice(one.option, one.group, one.plan, beyond)
        return found

    def _caches(self, one: BoundChoice) -> dict[int, Array]:
        """Shard -> what it adds to a UVM cache, of those that use one."""
        table, shards = one.option.table, self.scorer.shards
        found = (shards.cache_of_shard(table, one.plan, shard) for shard in one.plan.shards)
        return {i: cache for i, cache in enumerate(found) if cache is not None}

    def shards_of(self, choice: BoundChoice) -> Array:
        """Loads of a choice's shards at least, ``[shards, COLUMNS]``: of cached ones with the
        fetches that they are certain of."""
        loads = self.scorer.shards.of_table(choice.option.table, choice.plan)[1]
        loads[:, LAUNCH] = 0.0
        if choice.certain_ms is not None:
            loads[:, filling_column(self.problem.workload)] += choice.certain_ms
        return loads

    def beside(self, index: Ints, used: Iterable[Exchange]) -> NDArray[np.bool_]:
        """Which of some choices a plan that uses exchanges can have: means are split by rows where
        all tables of their module are."""
        others = {module for module, kind in used if kind not in BY_ROW}
        apart = np.array([self.exchanges[i][0] in others for i in index.tolist()], dtype=bool)
        return np.asarray(~(apart & self.mean_by_row[index]))


def _distinct(shards: Array) -> tuple[Array, Array]:
    """Loads of shards that differ, ``[distinct, COLUMNS]``, and how many have each."""
    if (shards == shards[0]).all():  # most options
        return shards[:1], np.array([float(len(shards))])
    found, copies = np.unique(shards, axis=0, return_counts=True)
    return found, copies.astype(np.float64)
