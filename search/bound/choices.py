"""The choices of every table, as the programs of the lower bound see them: loads and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from predictor.cost.loads import LAUNCH, LONGEST, LookupGroup, filling_column
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.plan import ComputeKernel, TablePlan
from search.bound.cache import PRICES, certain_fetches_ms, least_sharing_ms
from search.bound.rank_excess import MAX_CHOICES, ONE_A_RANK, everywhere, longest_shard
from search.bound.relaxation import KnownHulls
from search.problem import Problem
from search.space.option import Option, Space, place

Array = NDArray[np.float64]
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
