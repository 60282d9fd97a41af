"""The predicted iteration time of many plans at once: the objective that the search minimises.

It runs the very graph builder and timeline of `predictor.predict` with a leading axis of plans.
Plans that use different sharding types share one graph; what a plan does not use is inactive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from predictor.costs import Costs
from predictor.dlrm import DlrmBuilder
from predictor.graph import Graph
from predictor.hardware import HardwareProfile
from predictor.loads import COLUMNS, Load, LookupGroup, ShardLoads, group_of
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
        self._tables: dict[tuple[int, TablePlan], tuple[int, Array]] = {}

    def group_index(self, index: int, plan: TablePlan) -> int:
        """Position of the lookup group that a table joins under a sharding."""
        group = group_of(self.workload.tables[index], plan, self.workload.train_pipeline)
        if group not in self._index:
            self._index[group] = len(self.groups)
            self.groups.append(group)
        return self._index[group]

    def table(self, index: int, plan: TablePlan) -> tuple[int, Array]:
        """Lookup group and load of one table's sharding, ``[ranks, COLUMNS]``."""
        key = (index, plan)
        if key not in self._tables:
            ranks, loads = self.shards.of_table(index, plan)
            per_rank = np.zeros((self.topology.world_size, COLUMNS))
            np.add.at(per_rank, ranks, loads)
            self._tables[key] = (self.group_index(index, plan), per_rank)
        return self._tables[key]

    def totals(self, candidate: Candidate) -> Array:
        """Summed loads of one plan, ``[groups, ranks, COLUMNS]``."""
        entries = [self.table(index, plan) for index, plan in enumerate(candidate)]
        total = np.zeros((len(self.groups), self.topology.world_size, COLUMNS))
        for group, load in entries:
            total[group] += load
        return total

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
        for candidate in candidates:
            for index, plan in enumerate(candidate):
                self.table(index, plan)
        return self._in_chunks(
            np.stack([self.totals(c) for c in candidates[part]])
            for part in self._chunks(len(candidates))
        )

    def score_neighbours(self, base: Candidate, changes: Sequence[Change]) -> Array:
        """Predicted iteration time in ms of ``base`` with each of the changes, ``[changes]``."""
        for change in changes:
            for index, plan in change.items():
                self.table(index, plan)
        before = self.totals(base)
        return self._in_chunks(
            np.stack([self._changed(before, base, change) for change in changes[part]])
            for part in self._chunks(len(changes))
        )

    def _changed(self, totals: Array, base: Candidate, change: Change) -> Array:
        after = totals.copy()
        for index, plan in change.items():
            group, load = self.table(index, base[index])
            after[group] -= load
            if not any(after[group, :, Load.SHARDS].round()):
                after[group] = 0.0  # no rounding residue of a lookup that is gone
            group, load = self.table(index, plan)
            after[group] += load
        return after

    def _chunks(self, count: int) -> list[slice]:
        size = max(1, CHUNK_ELEMENTS // self.topology.world_size)
        return [slice(start, start + size) for start in range(0, count, size)]

    def _in_chunks(self, totals: Iterator[Array]) -> Array:
        times = [simulate(self.graph(chunk), plans=len(chunk)).iteration_ms for chunk in totals]
        return np.concatenate(times) if times else np.zeros(0)


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
