"""The predicted iteration time of many plans at once: the objective that the search minimises.

It uses the graph builder of `predictor.predict` with a leading axis of plans, and the timeline as
`steady_state.CompiledTimeline`. Plans that use the same lookup groups share a graph. Plans with
rare sets of groups share one graph in which the operations that a plan does not use are inactive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.load_sums import CacheSums, Filled, LoadSums, Selection
from predictor.cost.loads import LONGEST, Load, ShardLoads, filling_column
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.graph import Graph
from predictor.iteration.steady_state import CompiledTimeline, compile_timeline
from predictor.iteration.torchrec.dlrm import DlrmBuilder
from predictor.model.lookup_group import LookupGroup, group_of
from predictor.model.plan import TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import Workload

Array = NDArray[np.float64]
Ints = NDArray[np.intp]

CHUNK_ELEMENTS = 8192
"""Plans x ranks simulated together; larger arrays leave the processor's cache."""
OWN_GRAPH = 32
"""Fewest plans with the same lookup groups that get a graph of their own."""


@dataclass(frozen=True)
class _Job:
    """Plans to score, given by how each differs from a base.

    Args:
        count: number of plans.
        owners, tables, numbers: plan, table and sharding of each entry, by ascending plan.
        base: shardings of the tables without an entry; None if every plan lists all tables.
    """

    count: int
    owners: Ints
    tables: Ints
    numbers: Ints
    base: Ints | None = None

    @property
    def chosen(self) -> Selection:
        """Shardings that the plans add to the base, and those that they replace."""
        if self.base is None:
            return Selection(self.numbers, self.owners, None)
        signs = np.repeat([1.0, -1.0], len(self.numbers))
        numbers = np.concatenate((self.numbers, self.base[self.tables]))
        return Selection(numbers, np.tile(self.owners, 2), signs)

    def whole(self, plans: Ints) -> Ints:
        """Return the shardings of all tables of some plans, ``[plans, tables]``."""
        if self.base is None:
            return self.numbers.reshape(self.count, -1)[plans]
        numbers = np.tile(self.base, (self.count, 1))
        numbers[self.owners, self.tables] = self.numbers
        return numbers[plans]

    def reorder(self, order: Ints) -> _Job:
        """Return the same plans in another order."""
        rank = np.empty(self.count, dtype=np.intp)
        rank[order] = np.arange(self.count)
        owners = rank[self.owners]
        by = np.argsort(owners, kind="stable")
        return _Job(self.count, owners[by], self.tables[by], self.numbers[by], self.base)

    def part(self, plans: slice) -> _Job:
        """Return a range of the plans."""
        entries = slice(*np.searchsorted(self.owners, (plans.start, plans.stop)))
        owners = self.owners[entries] - plans.start
        count = plans.stop - plans.start
        return _Job(count, owners, self.tables[entries], self.numbers[entries], self.base)


class PlanScorer:
    """Scorer of plans of one workload on one topology and profile.

    Loads of shards and tables are computed once and kept, so that neighbours are cheap to score.
    A plan is the sharding of every table, in the workload's order.

    Args:
        costs: of the same workload, topology and profile; None makes them.
        shards: loads of the same tables under the same batch size, pipeline, ranks and profile;
            None makes them.
    """

    def __init__(
        self,
        workload: Workload,
        topology: Topology,
        hardware: HardwareProfile,
        costs: FixedCosts | None = None,
        shards: ShardLoads | None = None,
    ) -> None:
        self.workload = workload
        self.topology = topology
        self.hardware = hardware
        self.costs = costs or FixedCosts(workload, topology, hardware)
        self.shards = shards or ShardLoads(workload, topology, hardware)
        self.groups: list[LookupGroup] = []
        self._index: dict[LookupGroup, int] = {}
        self.rows = LoadSums(self.shards)
        self._caches = CacheSums(self.shards)
        self._numbers: dict[tuple[int, TablePlan], int] = {}
        self._shardings: list[TablePlan] = []
        self._programs: dict[tuple[bool, *tuple[int, ...]], CompiledTimeline] = {}

    def group_index(self, index: int, plan: TablePlan) -> int:
        """Return the position of the lookup group that a table joins under a sharding."""
        group = group_of(self.workload.tables[index], plan, self.workload.train_pipeline)
        if group not in self._index:
            self._index[group] = len(self.groups)
            self.groups.append(group)
        return self._index[group]

    def number(self, index: int, plan: TablePlan) -> int:
        """Return the number that stands for one table's sharding in `score_numbered`."""
        number = self._numbers.get((index, plan))
        if number is None:
            number = len(self._numbers)
            group = self.group_index(index, plan)
            self.rows.append(index, plan, group)
            self._caches.append(number, index, plan, group)
            self._numbers[index, plan] = number
            self._shardings.append(plan)
        return number

    def sharding(self, number: int) -> TablePlan:
        """Return the sharding that a number stands for."""
        return self._shardings[number]

    def used_groups(self, plans: Ints) -> Ints:
        """Return the lookup groups that plans ``[plans, tables]`` use, in a graph's order."""
        return self._sort_groups(np.unique(self.rows.group(plans)))

    def totals(self, plans: Sequence[TablePlan]) -> Array:
        """Sum the loads of one plan, ``[groups, ranks, COLUMNS]``."""
        numbers = np.array([self.number(i, plan) for i, plan in enumerate(plans)])
        return self._whole(numbers)[..., 0].transpose(1, 2, 0)

    def graph(self, totals: Array) -> Graph:
        """Build the iteration graph of summed loads ``[plans, groups, ranks, COLUMNS]``."""
        used = self._groups_of(totals)
        return self.build(used, totals[:, used])

    def compile(self, totals: Array) -> tuple[Graph, CompiledTimeline]:
        """Build and compile the graph of one plan's loads ``[groups, ranks, COLUMNS]``."""
        used = self._groups_of(totals[None])
        graph = self.build(used, totals[None, used])
        return graph, self._program(graph, used, whole=True)

    def _program(self, graph: Graph, used: Ints, *, whole: bool) -> CompiledTimeline:
        key = whole, *used.tolist()
        if key not in self._programs:
            self._programs[key] = compile_timeline(graph, whole=whole)
        return self._programs[key]

    def _groups_of(self, totals: Array) -> Ints:
        return self._sort_groups(np.flatnonzero(totals[..., Load.SHARDS].any(axis=(0, 2))))

    def build(self, used: Ints, loads: Array) -> Graph:
        """Build the iteration graph of loads ``[plans, groups, ranks, COLUMNS]`` of some groups."""
        return DlrmBuilder(self.costs, [self.groups[i] for i in used], loads).build()

    def _sort_groups(self, groups: Ints) -> Ints:
        """Sort lookup groups in an order that does not depend on the calls before.

        The order within an exchange does not change the timeline, but it changes rounding.
        """
        return np.array(sorted(groups, key=self.groups.__getitem__), dtype=np.intp)

    def score(self, candidates: Sequence[Sequence[TablePlan]]) -> Array:
        """Predict the iteration time in ms of every plan, ``[plans]``."""
        numbers = [[self.number(i, plan) for i, plan in enumerate(c)] for c in candidates]
        tables = len(self.workload.tables)
        return self.score_numbered(np.array(numbers, dtype=np.intp).reshape(-1, tables))

    def score_numbered(self, plans: Ints) -> Array:
        """Score plans ``[plans, tables]`` given by the numbers of their shardings; see `score`."""
        return self._score(_job_of(plans))

    def score_changed(self, base: Ints, changes: Sequence[Mapping[int, int]]) -> Array:
        """Predict the iteration time in ms of a plan with each of several changes, ``[changes]``.

        Args:
            base: the plan, ``[tables]``, as numbers of shardings.
            changes: table -> number of its new sharding.
        """
        owners = np.repeat(np.arange(len(changes)), [len(change) for change in changes])
        tables = np.array([table for change in changes for table in change], dtype=np.intp)
        numbers = np.array([n for change in changes for n in change.values()], dtype=np.intp)
        return self._score(_Job(len(changes), owners, tables, numbers, base))

    def sum_loads(self, plans: Ints, used: Ints) -> Array:
        """Sum the loads of the lookup groups ``used``, ``[COLUMNS, groups, ranks, plans]``.

        Args:
            plans: numbers of shardings, ``[plans, tables]``.
        """
        return self._totals(_job_of(plans), used, None)

    def _score(self, job: _Job) -> Array:
        times = np.zeros(job.count)
        if not job.count:
            return times
        base = None
        if job.base is not None:
            base = _Base(self._whole(job.base), self._caches.sum_contents(job.base))
        sets = self._sets(job)
        order = np.concatenate([alike.plans for alike in sets])
        job, start = job.reorder(order), 0
        size = max(1, CHUNK_ELEMENTS // self.topology.world_size)
        for alike in sets:
            stop = start + len(alike.plans)
            for first in range(start, stop, size):
                part = slice(first, min(first + size, stop))
                times[order[part]] = self._times(job.part(part), alike, base)
            start = stop
        return times

    def _sets(self, job: _Job) -> list[_Alike]:
        """Group plans by the lookup groups that they use; those with rare sets share graphs."""
        present = self._used_groups(job)
        packed = np.packbits(present, axis=1)
        order = np.lexsort(packed.T)
        other = (packed[order[1:]] != packed[order[:-1]]).any(axis=1)
        sets, rare = [], []
        for plans in np.split(order, np.flatnonzero(other) + 1):
            if len(plans) >= OWN_GRAPH:
                used = self._sort_groups(np.flatnonzero(present[plans[0]]))
                sets.append(_Alike(used, plans, whole=True))
            else:
                rare.append(plans)
        if rare:
            sets += self._share_graphs(np.concatenate(rare), present)
        return sets

    def _share_graphs(self, plans: Ints, present: NDArray[np.bool_]) -> Iterator[_Alike]:
        """Group plans with rare sets of lookup groups.

        Plans of one graph average copies of tables of the same data types: the host time of that
        does not belong to single groups.

        Args:
            present: lookup groups that each plan uses, ``[plans, groups]``.
        """
        kinds = [g.data_type if self._averages and g.fused else "" for g in self.groups]
        names = sorted({*kinds} - {""})
        averaged = np.array([[kind == name for name in names] for kind in kinds], dtype=bool)
        uses = present[plans] @ averaged.reshape(len(kinds), len(names))
        for row in np.unique(uses, axis=0):
            shared = {"", *(names[i] for i in np.flatnonzero(row))}
            used = self._sort_groups(np.flatnonzero([kind in shared for kind in kinds]))
            yield _Alike(used, plans[(uses == row).all(axis=1)], whole=False)

    @property
    def _averages(self) -> bool:
        """True if tables have copies on other ranks of the job."""
        return self.topology.job is not None and self.workload.training

    def _used_groups(self, job: _Job) -> NDArray[np.bool_]:
        """Return the lookup groups that plans use, ``[plans, groups]``."""
        count, chosen = len(self.groups), job.chosen
        at = chosen.owners * count + self.rows.group(chosen.numbers)
        uses = np.bincount(at, chosen.signs, job.count * count).reshape(job.count, count)
        if job.base is not None:
            uses = uses + np.bincount(self.rows.group(job.base), minlength=count)
        return np.asarray(uses > 0.5)

    def _whole(self, numbers: Ints) -> Array:
        """Sum the loads of one plan, ``[COLUMNS, groups, ranks, 1]``."""
        owners = np.zeros(len(numbers), dtype=np.intp)
        chosen, place = Selection(numbers, owners, None), np.arange(len(self.groups))
        total = self.rows.totals(chosen, 1, place, len(place))
        self._caches.add_sharing(total[filling_column(self.workload)], chosen, place, {})
        self.rows.put_longest(total, chosen, place)
        return total

    def _times(self, job: _Job, alike: _Alike, base: _Base | None) -> Array:
        used = alike.used
        graph = self.build(used, self._totals(job, used, base).transpose(3, 1, 2, 0))
        return self._program(graph, used, whole=alike.whole).iteration_ms(graph, job.count)

    def _totals(self, job: _Job, used: Ints, base: _Base | None) -> Array:
        """Sum the loads of some lookup groups, ``[COLUMNS, groups, ranks, plans]``."""
        place, chosen = self._places(used), job.chosen
        total = self.rows.totals(chosen, job.count, place, len(used))
        column = total[filling_column(self.workload)]
        self._caches.add_sharing(column, chosen, place, {} if base is None else base.filled)
        if base is not None:
            total += base.total[:, used]
        self._put_longest(total, job, place, used, base)
        return total

    def _places(self, used: Ints) -> Ints:
        """Map each lookup group to its position in ``used``, or to ``len(used)`` if absent."""
        place = np.full(len(self.groups), len(used))
        place[used] = np.arange(len(used))
        return place

    def _put_longest(
        self, total: Array, job: _Job, place: Ints, used: Ints, base: _Base | None
    ) -> None:
        """Enter, in place, longest latencies where a lookup is short enough for them to count."""
        most = self.rows.most(used)[..., None, None]
        short = (total[Load.FORWARD_MS : Load.BACKWARD_MS + 1] < most).any(axis=0)
        short = (short & (total[Load.SHARDS] > 0)).any(axis=1)
        if base is not None:  # unchanged lookups already have those of the base
            touched = np.zeros((len(short) + 1, job.count), dtype=bool)
            chosen = job.chosen
            touched[place[self.rows.group(chosen.numbers)], chosen.owners] = True
            short &= touched[:-1]
        plans = np.flatnonzero(short.any(axis=0))
        if len(plans):
            numbers = job.whole(plans)
            at = place[self.rows.group(numbers)]
            affected = np.vstack((short, np.zeros(job.count, dtype=bool)))[at, plans[:, None]]
            groups, owners = np.nonzero(short)
            total[LONGEST][:, groups, :, owners] = 0.0
            owners = np.broadcast_to(plans[:, None], at.shape)[affected]
            self.rows.put_longest(total, Selection(numbers[affected], owners, None), place)


def _job_of(plans: Ints) -> _Job:
    """Make a job of plans ``[plans, tables]`` given by the numbers of their shardings."""
    count, tables = plans.shape
    owners = np.repeat(np.arange(count), tables)
    return _Job(count, owners, np.tile(np.arange(tables), count), plans.ravel())


class _Alike(NamedTuple):
    """Plans that share a graph: its lookup groups, and whether all plans use all of these."""

    used: Ints
    plans: Ints
    whole: bool


@dataclass(frozen=True)
class _Base:
    """Summed loads ``[COLUMNS, groups, ranks, 1]`` of a plan, and the contents of its caches."""

    total: Array
    filled: Filled
