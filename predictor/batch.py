"""The predicted iteration time of many plans at once: the objective that the search minimises.

It runs the very graph builder and timeline of `predictor.predict` with a leading axis of plans.
Plans that use different sharding types share one graph; what a plan does not use is inactive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from predictor import shared_cache
from predictor.costs import Costs
from predictor.dlrm import DlrmBuilder
from predictor.graph import Graph
from predictor.hardware import HardwareProfile
from predictor.loads import (
    COLUMNS,
    LONGEST,
    Load,
    LookupGroup,
    ShardLoads,
    add,
    filling_column,
    group_of,
)
from predictor.plan import TablePlan
from predictor.timeline import simulate
from predictor.topology import Topology
from predictor.workload import Workload

Array = NDArray[np.float64]
Candidate = Sequence[TablePlan]
"""One plan: the sharding of every table, in the workload's order."""
Change = Mapping[int, TablePlan]
"""What a neighbour of a plan does differently: table index -> its new sharding."""

CHUNK_ELEMENTS = 4096
"""Plans x ranks simulated together; larger arrays leave the processor's cache."""


class _Entry(NamedTuple):
    """What one table's sharding puts on the ranks: lookup group, summed load ``[ranks, COLUMNS]``
    without the longest latencies, those ``[ranks, 2]``, and what it adds to which ranks' UVM caches
    ``[some ranks, shared_cache.COLUMNS]``, if any."""

    group: int
    load: Array
    longest: Array
    cache: tuple[NDArray[np.intp], Array] | None


Entries = Sequence[_Entry]
Caches = Mapping[int, Array]
"""Lookup group -> what fills its UVM caches, ``[ranks, shared_cache.COLUMNS]``."""


class BatchPredictor:
    """Scores plans of one workload on one topology and profile.

    Loads of shards and tables are computed once and kept, so that neighbours are cheap to score.
    """

    def __init__(self, workload: Workload, topology: Topology, hardware: HardwareProfile) -> None:
        self.workload = workload
        self.topology = topology
        self.hardware = hardware
        self.costs = Costs(workload, topology, hardware)
        self.shards = ShardLoads(workload, topology, hardware)
        self.groups: list[LookupGroup] = []
        self._index: dict[LookupGroup, int] = {}
        self._entries: dict[tuple[int, TablePlan], _Entry] = {}
        self._cached = False
        self._most = np.zeros(LONGEST.stop - LONGEST.start)

    def group_index(self, index: int, plan: TablePlan) -> int:
        """Position of the lookup group that a table joins under a sharding."""
        group = group_of(self.workload.tables[index], plan, self.workload.train_pipeline)
        if group not in self._index:
            self._index[group] = len(self.groups)
            self.groups.append(group)
        return self._index[group]

    def table(self, index: int, plan: TablePlan) -> tuple[int, Array]:
        """Lookup group and load of one table's sharding, ``[ranks, COLUMNS]``.

        All of it adds up; the longest latencies, which do not, are left out, and every shard has
        a UVM cache of its own.
        """
        entry = self._entry(index, plan)
        return entry.group, entry.load

    def _entry(self, index: int, plan: TablePlan) -> _Entry:
        key = (index, plan)
        found = self._entries.get(key)
        if found is None:
            per_rank = np.zeros((self.topology.world_size, COLUMNS))
            for rank, load in zip(*self.shards.of_table(index, plan), strict=True):
                add(per_rank[rank], load)
            longest = per_rank[:, LONGEST].copy()
            per_rank[:, LONGEST] = 0.0
            self._most = np.maximum(self._most, longest.max(axis=0))
            caches = self._cache(index, plan)
            found = _Entry(self.group_index(index, plan), per_rank, longest, caches)
            self._entries[key] = found
        return found

    def _cache(self, index: int, plan: TablePlan) -> tuple[NDArray[np.intp], Array] | None:
        per_rank: dict[int, Array] = {}
        for shard in plan.shards:
            cache = self.shards.cache_of_shard(index, plan, shard)
            if cache is not None:
                per_rank[shard.rank] = per_rank.get(shard.rank, 0.0) + cache
        if not per_rank:
            return None
        self._cached = True
        return np.array([*per_rank], dtype=np.intp), np.stack([*per_rank.values()])

    def _of(self, candidate: Candidate) -> list[_Entry]:
        return [self._entry(index, plan) for index, plan in enumerate(candidate)]

    def totals(self, candidate: Candidate) -> Array:
        """Summed loads of one plan, ``[groups, ranks, COLUMNS]``."""
        entries = self._of(candidate)
        total = self._sums(entries)
        self._share_caches(total[None], [self._caches(entries)])
        _put_longest(total, entries, {entry.group for entry in entries})
        return total

    def _sums(self, entries: Sequence[_Entry]) -> Array:
        total = np.zeros((len(self.groups), self.topology.world_size, COLUMNS))
        for entry in entries:
            total[entry.group] += entry.load
        return total

    def _caches(self, entries: Iterable[_Entry]) -> Caches:
        found: dict[int, Array] = {}
        for entry in entries:
            if entry.cache is not None:
                if entry.group not in found:
                    shape = self.topology.world_size, shared_cache.COLUMNS
                    found[entry.group] = np.zeros(shape)
                ranks, filled = entry.cache
                found[entry.group][ranks] += filled
        return found

    def _refilled(self, caches: Caches, base: Entries, change: Mapping[int, _Entry]) -> Caches:
        after = dict(caches)
        for group, filled in self._caches(base[index] for index in change).items():
            after[group] = after[group] - filled
        for group, filled in self._caches(change.values()).items():
            after[group] = after.get(group, 0.0) + filled
        return after

    def _share_caches(self, totals: Array, caches: Sequence[Caches]) -> None:
        """Enter into ``totals`` ``[plans, groups, ranks, COLUMNS]`` what changes because the tables
        of a launch share one cache."""
        lookups = [(plan, group) for plan, found in enumerate(caches) for group in found]
        if lookups:
            plans, groups = zip(*lookups, strict=True)
            filled = np.stack([caches[plan][group] for plan, group in lookups])
            column = filling_column(self.workload)
            totals[plans, groups, :, column] += shared_cache.sharing_ms(filled)

    def _short(self, totals: Array) -> NDArray[np.bool_]:
        """Lookups ``[plans, groups]`` so short on a rank that a latency may outlast them."""
        times = totals[..., Load.FORWARD_MS : Load.BACKWARD_MS + 1]
        short = (times < self._most).any(axis=-1) & (totals[..., Load.SHARDS] > 0)
        return np.asarray(short.any(axis=-1))

    def graph(self, totals: Array) -> Graph:
        """The iteration graph of summed loads ``[plans, groups, ranks, COLUMNS]``."""
        present = totals[..., Load.SHARDS].any(axis=(0, 2))
        # the timeline does not depend on the order within an exchange, rounding does: fix it
        used = sorted(np.flatnonzero(present), key=lambda i: _order(self.groups[i]))
        groups = [self.groups[i] for i in used]
        loads = totals[:, used]
        return DlrmBuilder(self.costs, groups, loads).build()

    def score(self, candidates: Sequence[Candidate]) -> Array:
        """Predicted iteration time in ms of every plan, ``[plans]``."""
        entries = [self._of(candidate) for candidate in candidates]

        return self._in_chunks(
            len(candidates),
            lambda part: np.stack([self._sums(e) for e in entries[part]]),
            lambda part: [self._caches(e) for e in entries[part]],
            entries.__getitem__,
        )

    def score_neighbours(self, base: Candidate, changes: Sequence[Change]) -> Array:
        """Predicted iteration time in ms of ``base`` with each of the changes, ``[changes]``."""
        entries = self._of(base)
        others = [{i: self._entry(i, plan) for i, plan in change.items()} for change in changes]
        before, filled = self._sums(entries), self._caches(entries)
        _put_longest(before, entries, {entry.group for entry in entries})

        touched = np.zeros((len(changes), len(self.groups)), dtype=bool)
        for which, other in enumerate(others):
            for index, entry in other.items():
                touched[which, [entries[index].group, entry.group]] = True
        return self._in_chunks(
            len(changes),
            lambda part: np.stack([_changed(before, entries, other) for other in others[part]]),
            lambda part: [self._refilled(filled, entries, other) for other in others[part]],
            lambda which: [others[which].get(i, entry) for i, entry in enumerate(entries)],
            touched,
        )

    def _in_chunks(
        self,
        count: int,
        sums: Callable[[slice], Array],
        caches: Callable[[slice], list[Caches]],
        entries: Callable[[int], Entries],
        touched: NDArray[np.bool_] | None = None,
    ) -> Array:
        """Times of ``count`` plans, as many at once as the processor's cache holds.

        Args:
            sums: summed loads of the plans of a slice.
            caches: what fills their UVM caches.
            entries: of one plan.
            touched: lookups ``[plans, groups]`` that lack their longest latencies; all if None.
        """
        times = []
        size = max(1, CHUNK_ELEMENTS // self.topology.world_size)
        for start in range(0, count, size):
            part = slice(start, start + size)
            totals = sums(part)
            if self._cached:
                self._share_caches(totals, caches(part))
            short = self._short(totals) & (True if touched is None else touched[part])
            for i in np.flatnonzero(short.any(axis=1)).tolist():
                _put_longest(totals[i], entries(start + i), np.flatnonzero(short[i]).tolist())
            times.append(simulate(self.graph(totals), plans=len(totals)).iteration_ms)
        return np.concatenate(times) if times else np.zeros(0)


def _changed(totals: Array, base: Entries, change: Mapping[int, _Entry]) -> Array:
    after = totals.copy()
    for index, entry in change.items():
        before = base[index]
        after[before.group] -= before.load
        if (after[before.group, :, Load.SHARDS] < 0.5).all():
            after[before.group] = 0.0  # no rounding residue of a lookup that is gone
        after[entry.group] += entry.load
    return after


def _put_longest(total: Array, entries: Entries, groups: Collection[int]) -> None:
    """Enter the longest latencies into the totals of some groups."""
    for group in groups:
        found = [entry.longest for entry in entries if entry.group == group]
        total[group, :, LONGEST] = reduce(np.maximum, found)


def _order(group: LookupGroup) -> tuple[object, ...]:
    return (
        group.module,
        group.sharding_type,
        group.data_type,
        group.pooling,
        group.weighted,
        group.optimizer,
        group.fused,
        group.cached_dim,
    )
