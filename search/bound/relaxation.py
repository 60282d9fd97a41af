"""The iteration time relaxed to a convex function of summed loads: the ground of the lower bound.

Three steps, each of which can only lower the predicted time:

1. *Averaging.* All ranks run the same program on the same links, so renaming ranks (hosts, and
   positions within all hosts alike) does not change the time of a plan. The timeline is a maximum
   over sums of operation times, hence convex in them; the mean over all renamings, which gives
   every rank the average load, is therefore not slower (Jensen).
2. *Convex costs.* Times that are not convex in bytes (bandwidth that grows with size) are replaced
   by their lower convex hull over the sizes that any plan can have: where all plans use an
   exchange, none below its least option. The launch floor of a lookup or
   a prefetch, which a rank without shards does not pay, is left out, but where all ranks pay it.
3. *Critical cycles.* The period of the timeline is the largest mean over the cycles of its event
   graph. Any one cycle is a bound; with supporting lines instead of cost models it is linear in
   the loads, and valid for all loads.

What remains are linear cuts ``time >= constant + slope . load`` for plans that use some exchanges
and may use others; `search.bound.lower_bound` minimises over the plans. An operation that a plan
may do without only passes on what came before it on its stream, and what it would have waited for,
and takes the part of its time that grows with its loads.

Why: docs/decisions/0026-bound.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.loads import COLUMNS, Load
from predictor.iteration.graph import Graph, Op
from predictor.iteration.steady_state import CompiledTimeline
from predictor.iteration.torchrec.dlrm import DlrmBuilder
from predictor.iteration.torchrec.sparse import HIERARCHICAL, CostModel, Exchange, Size
from predictor.model.lookup_group import LookupGroup
from predictor.model.plan import ShardingType
from search.bound.cycle import compile_rank
from search.model.cut_model import CycleCut

Array = NDArray[np.float64]

SAMPLES = 8192
"""Points at which a cost is sampled; the staircase below them keeps the hull a lower bound."""
FEW_GO = 0.9
"""Share of a hull's points that are left when looking at all of them at once does no more good."""
SMALLEST_BYTES = 64.0
LOOKUPS = ("embedding_forward", "embedding_backward", "prefetch")
AVERAGING = "replica_sync"
OF_GROUPS = (*LOOKUPS, AVERAGING, "stash")
"""Phases whose operations only plans have that use a lookup group."""
OPTIMIZER = "optimizer"
ALIKE = ("dense_forward", "dense_backward", OPTIMIZER)
"""Phases of operations on single ranks that take as long on every rank; the optimizer's if no rank
has shards with dense gradients of its own."""
UNIFORM = (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL)


class Hull:
    """Lower convex hull of a non-decreasing cost model over sizes from ``least`` to ``top``.

    Below ``least``, where no plan is, it stays at its value there. Is it ``shared``, all ranks have
    the same size.
    """

    def __init__(
        self, model: CostModel, top: float, least: float = 0.0, *, shared: bool = False
    ) -> None:
        self.shared = shared
        # sizes are bytes: fractions of one do not matter
        start = max(least, min(SMALLEST_BYTES, top))
        samples = np.geomspace(start, top, SAMPLES) if top > max(1.0, start) else np.zeros(0)
        # samples of a narrow range may be out of order by their last digit
        sizes = np.sort(np.concatenate(([least], samples)))
        values = np.asarray(model(sizes), dtype=np.float64)
        # between two samples the cost is at least its value at the first of them
        self.x, self.y = _lower_hull(sizes, np.concatenate((values[:1], values[:-1])))

    def tangent(self, at: float) -> tuple[float, float]:
        """Value and slope of a supporting line at a size."""
        if len(self.x) == 1 or at < self.x[0]:
            return float(self.y[0]), 0.0
        right = int(np.clip(np.searchsorted(self.x, at, side="right"), 1, len(self.x) - 1))
        slope = (self.y[right] - self.y[right - 1]) / (self.x[right] - self.x[right - 1])
        return float(self.y[right - 1] + slope * (at - self.x[right - 1])), float(slope)


def _lower_hull(x: Array, y: Array) -> tuple[Array, Array]:
    """Corners of the lower hull of points sorted by ``x`` (Andrew's monotone chain).

    A point that does not lie below the line between its neighbours is no corner, so most go at
    once.
    """
    while len(x) > 2:
        left, right = x[1:-1] - x[:-2], x[2:] - x[:-2]
        above = (y[1:-1] - y[:-2]) * right >= (y[2:] - y[:-2]) * left
        kept = np.concatenate(([True], ~above, [True]))
        if kept.sum() > FEW_GO * len(x):
            break
        x, y = x[kept], y[kept]
    hull: list[tuple[float, float]] = []
    for point in zip(x.tolist(), y.tolist(), strict=True):
        while len(hull) > 1 and _above(hull[-2], hull[-1], point):
            hull.pop()
        if not hull or hull[-1][0] < point[0]:
            hull.append(point)
    corners = np.array(hull)
    return corners[:, 0], corners[:, 1]


def _above(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """``b`` does not lie below the line from ``a`` to ``c``."""
    return (b[0] - a[0]) * (c[1] - a[1]) <= (c[0] - a[0]) * (b[1] - a[1])


class Hulls:
    """Hulls of one exchange's costs, remembered in the order in which the builder asks for them.

    Where all ranks share a size, it may be that of the busiest one; where each has its own, the
    mean of the costs counts. One rank may have the loads of all tables: hulls have to reach that
    far, or they lie above the mean of a concave cost.

    Args:
        most: load ``[columns]`` that no plan exceeds on any rank.
        least: loads ``[2, columns]`` that every plan has on average, and in its longest shard.
    """

    def __init__(self, most: Array, least: Array) -> None:
        self.most = most[None, None]
        mean, longest = least
        # of many shards, even the longest has less than the mean rank
        peak = np.maximum(mean, longest)
        self.least = np.stack([peak, 2 * mean - peak])[None]
        """As of two ranks: a mean or a maximum over them is what every plan has at least."""
        self.known: list[Hull] = []

    def get(self, position: int, model: CostModel, size: Size) -> Hull:
        """The hull of the ``position``-th cost model."""
        if position == len(self.known):
            least = size(self.least)
            if least.shape[-1] == 1:
                # a busiest rank may have more than the mean
                top = float(np.max(size(self.most)))
                self.known.append(Hull(model, top, float(least.max()), shared=True))
            else:  # some rank may have nothing
                self.known.append(Hull(model, float(np.max(size(self.most)))))
        return self.known[position]


KnownHulls = dict[tuple[str, bool, tuple[LookupGroup, ...]], Hulls]
"""Hulls by exchange, whether every plan uses it, and its lookup groups."""


@dataclass(frozen=True)
class Cut:
    """``time >= constant + slope . load``, of the mean load of a rank ``[groups, columns]``.

    Args:
        segments: parts of the slope that one rank passes in lookups between two collectives of all
            ranks, whichever rank it is, ``[segments, groups, columns]``. These are no tangents:
            they hold for any load of a rank.
        floors: what a launch of a group in a segment takes beyond that, where ranks without its
            tables do not pay it, ``[segments, groups]``.
        uneven: what else differs between ranks there, of which nothing is known for one rank,
            ``[segments, groups, columns]``.
        messages: parts of the slope that a collective takes for its busiest rank,
            ``[messages, groups, columns]``.
    """

    constant: float
    slope: Array
    segments: Array
    floors: Array
    uneven: Array
    messages: Array

    def of_ranks(self) -> CycleCut:
        """The cut for plans whose shards lie on ranks."""
        segments = np.concatenate([self.segments + self.uneven, self.messages])
        floors = np.zeros(segments.shape[:2])
        floors[: len(self.floors)] = self.floors
        return CycleCut(self.constant, self.slope - segments.sum(axis=0), segments, floors)


@dataclass(frozen=True)
class _HullTerm:
    """A cost that is the hull of a size.

    Args:
        used: every plan has the exchange; without loads the cost of any other takes no time.
        size: bytes per unit of load, ``[columns]``.
    """

    hull: Hull
    used: bool
    size: Array

    def tangent(self, at: float) -> tuple[float, float]:
        """Value and slope of a supporting line."""
        value, slope = self.hull.tangent(at)
        return (value if self.used else min(value, slope * at)), slope


@dataclass(frozen=True)
class _Operations:
    """All operations of a rank, their costs ``constant + direct . load + hulled . hulls`` in ms.

    Args:
        program: of the graph, and which operation each of its own stands for.
        direct: ``[ops, columns]``.
        terms: the hulls, each of one size.
        sizes: of all terms, ``[hulls, columns]``.
        hulled: how often an operation has each of the terms, ``[ops, hulls]``.
        floors: what a launch adds that only ranks with tables of a group pay, ``[groups, ops]``.
        gone: operations that some plans may do without.
        meets: all ranks of all plans meet in them.
        alike: they take as long on all ranks, which share their sizes.
        collectives: ranks meet in them.
        phases: of all operations.
    """

    program: CompiledTimeline
    origin: NDArray[np.intp]
    constant: Array
    direct: Array
    terms: list[_HullTerm]
    sizes: Array
    hulled: Array
    floors: Array
    gone: NDArray[np.bool_]
    meets: NDArray[np.bool_]
    alike: NDArray[np.bool_]
    collectives: NDArray[np.bool_]
    phases: list[str]


@dataclass(frozen=True)
class _Lines:
    """Supporting lines of the costs of all operations at a load.

    Args:
        cost_ms: at that load, ``[ops]``.
        hull_slopes: of the terms, per byte, ``[hulls]``.
        flat: operations whose cost counts as zero, ``[ops]``.
    """

    operations: _Operations
    cost_ms: Array
    hull_slopes: Array
    flat: NDArray[np.bool_]

    @classmethod
    def at(cls, operations: _Operations, load: Array) -> _Lines:
        """The lines that touch the costs at a load ``[columns]``."""
        of = operations
        sizes = of.sizes @ load
        tangents = [term.tangent(at) for term, at in zip(of.terms, sizes.tolist(), strict=True)]
        values, slopes = np.array(tangents).reshape(-1, 2).T
        cost_ms = of.constant + of.direct @ load + of.hulled @ values
        # a shared cache can make the cost of one lookup negative; it counts as zero
        lines = cls(of, cost_ms, slopes, cost_ms < 0)
        # a plan without an operation takes no time for it
        gone = np.where(of.gone, np.minimum(cost_ms, lines.rise(load)), cost_ms)
        return replace(lines, cost_ms=np.maximum(0.0, gone))

    def rise(self, load: Array) -> Array:
        """What a load ``[columns]`` adds to every cost, ``[ops]``."""
        of = self.operations
        rise = of.direct @ load + of.hulled @ (self.hull_slopes * (of.sizes @ load))
        return np.where(self.flat, 0.0, rise)

    def slopes(self, ops: NDArray[np.intp]) -> Array:
        """Of the costs of some operations, ``[ops, columns]``."""
        of = self.operations
        found = of.direct[ops] + (of.hulled[ops] * self.hull_slopes) @ of.sizes
        found[self.flat[ops]] = 0.0
        return np.asarray(found)


class Relaxation:
    """The convex relaxation for plans that use some exchanges, and may use some others.

    Args:
        groups: lookup groups that the options of these exchanges can form.
        ceiling: per group, the load that no plan exceeds on average, ``[groups, columns]``.
        most: per group, the load that no plan exceeds on any rank, ``[groups, columns]``.
        present: per group, whether every plan uses its exchange.
        certain: per group, whether every plan uses it.
        hulls: what was asked for before; relaxations with the same loads share them.
        least: per group, the loads that its least option has, mean and largest shard,
            ``[groups, 2, columns]``; 0 where plans may do without its exchange, or if None.
        averaged: all-reduces of copies that every plan has, where tables are copied.
    """

    def __init__(
        self,
        costs: FixedCosts,
        groups: Sequence[LookupGroup],
        ceiling: Array,
        most: Array,
        present: Sequence[bool],
        certain: Sequence[bool],
        hulls: KnownHulls,
        least: Array | None = None,
        averaged: int = 0,
    ) -> None:
        self.costs = costs
        self.groups = list(groups)
        self.ceiling = ceiling
        self.most = most
        self.averaged = averaged
        self.present = list(present)
        self.certain = list(certain)
        self.hulls = hulls
        self.least = np.zeros((len(self.groups), 2, COLUMNS)) if least is None else least
        self.columns = np.flatnonzero(ceiling.ravel() > 0)

    def evaluate(
        self, load: Array, more: Array | None = None, *, launched: bool = False
    ) -> tuple[float, Cut]:
        """Relaxed time in ms at an average load ``[groups, columns]``, and the cut that is tight
        there.

        Args:
            more: beyond the load, what the ranks that set the pace are thought to have. The cut is
                then of the cycle that is critical with it; a cycle bounds the time at any costs.
            launched: the cycle is that of a rank that pays the floors of all launches, likewise.
        """
        of = self._operations
        lines = _Lines.at(of, load.ravel()[self.columns])
        extra = np.zeros(len(of.constant))
        if more is not None:
            extra += lines.rise(more.ravel()[self.columns])
        if launched:
            extra += of.floors.sum(axis=0)
        costs = (lines.cost_ms + extra)[of.origin].tolist()
        cycle, length, iterations = of.program.critical_cycle(costs)
        ops = of.origin[cycle]
        slopes = lines.slopes(ops)
        slope = self._slope(slopes.sum(axis=0) / iterations)
        constant = (length - float(extra[ops].sum())) / iterations - float((slope * load).sum())
        busiest = (of.alike & of.collectives)[ops] & slopes.any(axis=1)
        messages = self._parts(slopes, np.flatnonzero(busiest)[:, None].tolist(), iterations)
        cut = Cut(constant, slope, *self._segments(ops, slopes, iterations), messages)
        return length / iterations, cut

    def _segments(
        self, ops: NDArray[np.intp], slopes: Array, iterations: int
    ) -> tuple[Array, Array, Array]:
        """Segments, floors and what is uneven in the cut of a cycle.

        Args:
            ops: of the cycle, with the slopes of their costs.
        """
        of = self._operations
        phases = [of.phases[op] for op in ops]
        runs = _runs(of.meets[ops])
        lookups = [[i for i in run if phases[i] in LOOKUPS] for run in runs]
        alone = [phase not in (*LOOKUPS, *self._alike) for phase in phases]
        alike = of.alike[ops]
        others = [[i for i in run if alone[i] and not alike[i]] for run in runs]
        kept = [i for i, run in enumerate(lookups) if slopes[run].any()]
        lookups, others = [lookups[i] for i in kept], [others[i] for i in kept]
        floors = [of.floors[:, ops[run]].sum(axis=1) / iterations for run in lookups]
        return (
            self._parts(slopes, lookups, iterations),
            np.array(floors).reshape(-1, len(self.groups)),
            self._parts(slopes, others, iterations),
        )

    @cached_property
    def _alike(self) -> tuple[str, ...]:
        """Phases of operations on single ranks that take as long on every rank."""
        copies = ShardingType.DATA_PARALLEL
        own = any(not g.fused and g.sharding_type is not copies for g in self.groups)
        return tuple(phase for phase in ALIKE if phase != OPTIMIZER or not own)

    def _parts(self, slopes: Array, runs: list[list[int]], iterations: int) -> Array:
        """Slopes of some operations together, ``[runs, groups, columns]``."""
        parts = [self._slope(slopes[run].sum(axis=0) / iterations) for run in runs]
        return np.array(parts).reshape(-1, *self.ceiling.shape)

    def _slope(self, columns: Array) -> Array:
        slope: Array = np.zeros(self.ceiling.shape)
        slope.flat[self.columns] = columns
        return slope

    @property
    def _most_of_columns(self) -> Array:
        """What no plan exceeds on average, ``[columns]``."""
        return np.asarray(self.ceiling.ravel()[self.columns])

    @cached_property
    def _operations(self) -> _Operations:
        """What the operations of one rank cost. The builder is asked once: its plans have nothing,
        the most of each column, each launch floor, what is certain, and one of each hull."""
        count, groups = len(self.columns), len(self.groups)
        last = 1 + count + groups
        terms: list[_HullTerm] = []
        self._build(last + 1, terms)  # says how many hulls there are
        plans, terms = last + 1 + len(terms), []
        graph, averages = self._build(plans, terms)
        costs = np.stack([np.broadcast_to(op.cost_ms.ravel(), plans) for op in graph.ops], axis=1)
        added = costs[1:] - costs[0]
        gone = [op.active is not None and not op.active[0] for op in graph.ops]
        issued = self.averaged / averages if averages else 1.0
        graph.ops = [self._issued_surely(op, last, issued) for op in graph.ops]
        program, origin = compile_rank(graph, gone)
        return _Operations(
            program,
            np.array(origin),
            costs[0],
            added[:count].T / self._most_of_columns,
            terms,
            np.array([term.size for term in terms]).reshape(-1, count),
            added[last:].T,
            added[count : count + groups],
            np.array(gone),
            np.array([op.scope == "world" for op in graph.ops]) & ~np.array(gone),
            self._alike_on_ranks(terms, added[:count], added[last:]),
            np.array([op.resource == "collectives" for op in graph.ops]),
            [op.phase for op in graph.ops],
        )

    @staticmethod
    def _alike_on_ranks(
        terms: Sequence[_HullTerm], direct: Array, hulled: Array
    ) -> NDArray[np.bool_]:
        """Operations whose whole cost is of sizes that all ranks share."""
        own = [not term.hull.shared for term in terms]
        return np.asarray(~(direct.any(axis=0) | hulled[own].any(axis=0)))

    def _build(self, plans: int, terms: list[_HullTerm]) -> tuple[Graph, int]:
        """The operations under so many plans, and how many all-reduces of copies there are."""
        count, groups = len(self.columns), len(self.groups)
        loads = np.zeros((plans, groups, 1, COLUMNS))
        loads.reshape(plans, -1)[np.arange(1, count + 1), self.columns] = self._most_of_columns
        loads[..., Load.SHARDS] = np.array(self.present)[:, None]
        loads[1 + count + groups, :, 0, Load.SHARDS] = self.certain
        paid = np.zeros((plans, groups, 1))
        paid[1 + count + np.arange(groups), np.arange(groups)] = 1.0
        builder = self._builder(loads, paid, terms)
        return builder.build(), len(builder.averaged)

    @staticmethod
    def _issued_surely(op: Op, certain: int, issued: float) -> Op:
        """The operation with the host time that every plan has.

        Args:
            certain: the plan that has what is certain.
            issued: share of the all-reduces of copies that every plan has.
        """
        host_ms = op.host_ms
        if op.phase in OF_GROUPS and op.active is not None and not op.active[certain]:
            host_ms = 0.0
        if op.phase == AVERAGING:
            host_ms *= issued
        return replace(op, host_ms=host_ms)

    def _builder(self, loads: Array, paid: Array, terms: list[_HullTerm]) -> DlrmBuilder:
        """The builder of a rank's operations.

        Args:
            loads: ``[plans, groups, 1, columns]``; of the last plans each has one of the hulls.
            paid: share of the launch floors that count, ``[plans, groups, 1]``, where not all ranks
                of all plans pay them.
            terms: gets the hulls.
        """
        known, least, certain = self.hulls, self.least, self.certain
        present, most = self.present, self.most
        columns, tops = slice(1, 1 + len(self.columns)), self._most_of_columns
        first = 1 + len(self.columns) + len(self.groups) + 1

        class Relaxed(Exchange):
            """Costs are the hulls that `terms` names."""

            asked = 0

            def cost(self, model: CostModel, size: Size) -> Array:
                mine = list(self.members)
                used = all(present[m] for m in mine)
                key = self.name, used, tuple(self.groups[m] for m in mine)
                if key not in known:
                    known[key] = Hulls(most[mine].sum(axis=0), least[mine].min(axis=0))
                hull = known[key].get(self.asked, model, size)
                self.asked += 1
                found = np.zeros((len(loads), 1))
                found[first + len(terms) :][:1] = 1.0
                terms.append(_HullTerm(hull, used, size(self.total)[columns, 0] / tops))
                return found

            def _lookup(self, group: int, column: Load, floor_ms: float) -> Array:
                everywhere = certain[group] and self._everywhere
                floor = floor_ms if everywhere else floor_ms * paid[:, group]
                return np.asarray(floor + self.loads[:, group, :, column])

            @property
            def _everywhere(self) -> bool:
                """Its lookups run on all ranks or on none."""
                kind, groups = self.sharding_type, self.topology.groups
                return kind in UNIFORM or (kind in HIERARCHICAL and groups == 1)

        return DlrmBuilder(self.costs, self.groups, loads, Relaxed)


def _runs(meets: NDArray[np.bool_]) -> list[list[int]]:
    """Positions in a cycle, parted at the collectives of all ranks, without them. In between a
    cycle may stay on one rank, whichever ranks that one meets.

    Args:
        meets: all ranks meet, of the cycle's operations in their order.
    """
    runs: list[list[int]] = [[]]
    for i, together in enumerate(meets.tolist()):
        if together:
            runs.append([])
        else:
            runs[-1].append(i)
    if len(runs) > 1:  # the cycle is closed
        runs[0] = runs.pop() + runs[0]
    return [run for run in runs if run]
