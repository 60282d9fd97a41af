"""Convex relaxation of the iteration time in summed loads, the basis of the lower bound.

Three steps, each of which can only lower the predicted time:

1. *Averaging.* All ranks run the same program on the same links, so renaming ranks (hosts, and
   positions within all hosts alike) does not change the time of a plan. The timeline is a maximum
   over sums of operation times, hence convex in them. The mean over all renamings gives every rank
   the average load, so the average load is not slower (Jensen).
2. *Convex costs.* Times that are not convex in bytes (bandwidth that grows with size) are replaced
   by their lower convex hull over the possible sizes: from the least option of an exchange if all
   plans use it, else from zero. A rank without shards does not pay the launch floor of a lookup or
   a prefetch, so floors count only where all ranks pay them.
3. *Critical cycles.* The period of the timeline is the largest mean over the cycles of its event
   graph. Any one cycle is a bound; with supporting lines instead of cost models it is linear in
   the loads, and valid for all loads.

The result is a set of linear cuts ``time >= constant + slope . load`` for plans that use some
exchanges and may use others; `search.bound.lower_bound` minimises over the plans. An optional
operation only passes on the end of its predecessors (on its stream and its dependencies) and takes
the part of its time that grows with its loads.

Why: docs/decisions/0026-bound.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.loads import COLUMNS, Load
from predictor.iteration.graph import Graph, Mask, Op
from predictor.iteration.steady_state import CompiledTimeline
from predictor.iteration.torchrec.dlrm import DlrmBuilder
from predictor.iteration.torchrec.sparse import HIERARCHICAL, CostModel, Exchange, Size
from predictor.model.lookup_group import LookupGroup
from predictor.model.plan import ShardingType
from search.bound.cycle import Users, compile_rank
from search.model.cycle_cut import CycleCut

Array = NDArray[np.float64]

SAMPLES = 8192
"""Number of samples of a cost; the staircase below them keeps the hull a lower bound."""
FEW_GO = 0.9
"""Remaining fraction of points in a vectorised pass above which the scalar algorithm takes over."""
SMALLEST_BYTES = 64.0
LOOKUPS = ("embedding_forward", "embedding_backward", "prefetch")
AVERAGING = "replica_sync"
OF_GROUPS = (*LOOKUPS, AVERAGING, "stash")
"""Phases whose operations occur only in plans that use a lookup group."""
OPTIMIZER = "optimizer"
ALIKE = ("dense_forward", "dense_backward", OPTIMIZER)
"""Phases of single ranks with equal times on all of them; the optimizer only if no rank has shards
with dense gradients of its own."""
UNIFORM = (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL)


class Hull:
    """Lower convex hull of a non-decreasing cost model over sizes from ``least`` to ``top``.

    Below ``least``, a size that no plan has, it is constant. If it is ``shared``, all ranks have
    the same size.
    """

    def __init__(
        self, model: CostModel, top: float, least: float = 0.0, *, shared: bool = False
    ) -> None:
        self.shared = shared
        # sizes are bytes: fractions of a byte do not matter
        start = max(least, min(SMALLEST_BYTES, top))
        samples = np.geomspace(start, top, SAMPLES) if top > max(1.0, start) else np.zeros(0)
        # samples of a narrow range may be out of order by their last digit
        sizes = np.sort(np.concatenate(([least], samples)))
        values = np.asarray(model(sizes), dtype=np.float64)
        # between two samples the cost is at least its value at the lower one
        self.x, self.y = _lower_hull(sizes, np.concatenate((values[:1], values[:-1])))

    def tangent(self, at: float) -> tuple[float, float]:
        """Return value and slope of a supporting line at a size."""
        if len(self.x) == 1 or at < self.x[0]:
            return float(self.y[0]), 0.0
        right = int(np.clip(np.searchsorted(self.x, at, side="right"), 1, len(self.x) - 1))
        slope = (self.y[right] - self.y[right - 1]) / (self.x[right] - self.x[right - 1])
        return float(self.y[right - 1] + slope * (at - self.x[right - 1])), float(slope)


def _lower_hull(x: Array, y: Array) -> tuple[Array, Array]:
    """Return the corners of the lower hull of points sorted by ``x`` (Andrew's monotone chain).

    A point on or above the line between its neighbours is no corner; vectorised passes remove most
    points first.
    """
    while len(x) > 2:
        left_width, full_width = x[1:-1] - x[:-2], x[2:] - x[:-2]
        above = (y[1:-1] - y[:-2]) * full_width >= (y[2:] - y[:-2]) * left_width
        is_corner = np.concatenate(([True], ~above, [True]))
        if is_corner.sum() > FEW_GO * len(x):
            break
        x, y = x[is_corner], y[is_corner]
    hull: list[tuple[float, float]] = []
    for point in zip(x.tolist(), y.tolist(), strict=True):
        while len(hull) > 1 and _above(hull[-2], hull[-1], point):
            hull.pop()
        if not hull or hull[-1][0] < point[0]:
            hull.append(point)
    corners = np.array(hull)
    return corners[:, 0], corners[:, 1]


def _above(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Return True if ``b`` lies on or above the line from ``a`` to ``c``."""
    return (b[0] - a[0]) * (c[1] - a[1]) <= (c[0] - a[0]) * (b[1] - a[1])


class Hulls:
    """Hulls of one exchange's costs, cached in the order in which the builder asks for them.

    A size shared by all ranks may be that of the busiest one; where each rank has its own, the
    mean of the costs counts. One rank may have the loads of all tables, so hulls must reach that
    far: a shorter hull can lie above the mean of a concave cost.

    Args:
        most: load ``[columns]`` that no plan exceeds on any rank.
        least: least loads ``[2, columns]`` of any plan, on average and of its longest shard.
    """

    def __init__(self, most: Array, least: Array) -> None:
        self.most = most[None, None]
        mean, longest = least
        # with many shards the longest one is below the mean rank's load
        peak = np.maximum(mean, longest)
        self.least = np.stack([peak, 2 * mean - peak])[None]
        """Loads of two ranks whose mean and maximum bound those of every plan from below."""
        self.in_order: list[Hull] = []

    def get(self, position: int, model: CostModel, size: Size) -> Hull:
        """Return the hull of the ``position``-th cost model."""
        if position == len(self.in_order):
            least = size(self.least)
            if least.shape[-1] == 1:
                # a busiest rank may have more than the mean
                top = float(np.max(size(self.most)))
                self.in_order.append(Hull(model, top, float(least.max()), shared=True))
            else:  # some rank may have nothing
                self.in_order.append(Hull(model, float(np.max(size(self.most)))))
        return self.in_order[position]


KnownHulls = dict[tuple[str, bool, tuple[LookupGroup, ...]], Hulls]
"""Hulls by exchange, whether every plan uses it, and its lookup groups."""


@dataclass(frozen=True)
class Cut:
    """Cut ``time >= constant + slope . load``, with the mean load of a rank ``[groups, columns]``.

    Args:
        segments: part of the slope that a single rank spends in lookups between two collectives of
            all ranks, ``[segments, groups, columns]``. These are exact slopes, not tangents, so
            they hold for any load of a rank.
        floors: launch floor of a group in a segment, where ranks without its tables do not pay it,
            ``[segments, groups]``.
        uneven: other slopes there that differ between ranks and are known only for the mean,
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
        """Return the cut for plans whose shards are placed on ranks."""
        segments = np.concatenate([self.segments + self.uneven, self.messages])
        floors = np.zeros(segments.shape[:2])
        floors[: len(self.floors)] = self.floors
        return CycleCut(self.constant, self.slope - segments.sum(axis=0), segments, floors)


@dataclass(frozen=True)
class _HullTerm:
    """Cost given by a hull over a size.

    Args:
        used: True if every plan has the exchange; else the cost is zero without loads.
        size: bytes per unit of load, ``[columns]``.
    """

    hull: Hull
    used: bool
    size: Array

    def tangent(self, at: float) -> tuple[float, float]:
        """Return value and slope of a supporting line."""
        value, slope = self.hull.tangent(at)
        return (value if self.used else min(value, slope * at)), slope


@dataclass(frozen=True)
class _Operations:
    """All operations of a rank, with costs ``constant + direct . load + hulled . hulls`` in ms.

    Args:
        program: compiled graph.
        origin: operation of the graph for each operation of the program.
        constant: cost without loads, ``[ops]``.
        direct: cost per unit of load, ``[ops, columns]``.
        terms: hulls, each over one size.
        sizes: bytes per unit of load of all terms, ``[hulls, columns]``.
        hulled: multiplicity of each term in an operation, ``[ops, hulls]``.
        floors: launch floors that only ranks with tables of a group pay, ``[groups, ops]``.
        optional: operations that some plans lack, ``[ops]``.
        meets: collectives of all ranks that all plans have, ``[ops]``.
        alike: operations with equal times on all ranks, since these share their sizes, ``[ops]``.
        collectives: collectives, ``[ops]``.
        phases: phase of every operation.
    """

    program: CompiledTimeline
    origin: NDArray[np.intp]
    constant: Array
    direct: Array
    terms: list[_HullTerm]
    sizes: Array
    hulled: Array
    floors: Array
    optional: NDArray[np.bool_]
    meets: NDArray[np.bool_]
    alike: NDArray[np.bool_]
    collectives: NDArray[np.bool_]
    phases: list[str]


@dataclass(frozen=True)
class _Lines:
    """Supporting lines of the costs of all operations at a load.

    Args:
        cost_ms: costs at that load, ``[ops]``.
        hull_slopes: slopes of the terms in ms per byte, ``[hulls]``.
        flat: operations whose cost counts as zero, ``[ops]``.
    """

    operations: _Operations
    cost_ms: Array
    hull_slopes: Array
    flat: NDArray[np.bool_]

    @classmethod
    def at(cls, operations: _Operations, load: Array) -> _Lines:
        """Return the lines that touch the costs at a load ``[columns]``."""
        ops = operations
        sizes = ops.sizes @ load
        tangents = [term.tangent(at) for term, at in zip(ops.terms, sizes.tolist(), strict=True)]
        values, slopes = np.array(tangents).reshape(-1, 2).T
        cost_ms = ops.constant + ops.direct @ load + ops.hulled @ values
        # a shared cache can make the cost of one lookup negative; it counts as zero
        lines = cls(ops, cost_ms, slopes, cost_ms < 0)
        # a plan without the operation spends no time on it
        at_least = np.where(ops.optional, np.minimum(cost_ms, lines.rise(load)), cost_ms)
        return replace(lines, cost_ms=np.maximum(0.0, at_least))

    def rise(self, load: Array) -> Array:
        """Return the increase of every cost by a load ``[columns]``, ``[ops]``."""
        ops = self.operations
        rise = ops.direct @ load + ops.hulled @ (self.hull_slopes * (ops.sizes @ load))
        return np.where(self.flat, 0.0, rise)

    def slopes(self, ops: NDArray[np.intp]) -> Array:
        """Return the slopes of the costs of some operations, ``[ops, columns]``."""
        operations = self.operations
        slopes = (
            operations.direct[ops] + (operations.hulled[ops] * self.hull_slopes) @ operations.sizes
        )
        slopes[self.flat[ops]] = 0.0
        return np.asarray(slopes)


class Relaxation:
    """Convex relaxation for plans that use some exchanges and may use some others.

    Args:
        groups: lookup groups that the options of these exchanges can form.
        ceiling: per group, the load that no plan exceeds on average, ``[groups, columns]``.
        most: per group, the load that no plan exceeds on any rank, ``[groups, columns]``.
        present: per group, whether every plan uses its exchange.
        certain: per group, whether every plan uses it.
        hulls: cache of hulls, shared by relaxations with the same loads.
        least: per group, least mean load and least peak of its options, ``[groups, 2, columns]``;
            0 where plans may lack its exchange, or if None.
        averaged: number of all-reduces of replicas that every plan has.
        offered: groups that a table can be in, for every table.
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
        offered: Collection[frozenset[int]] = (),
    ) -> None:
        self.offered = offered
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
        self.most_of_columns: Array = ceiling.ravel()[self.columns]  # on the mean rank

    def evaluate(
        self, load: Array, more: Array | None = None, *, launched: bool = False
    ) -> tuple[float, Cut]:
        """Return the relaxed time in ms at an average load ``[groups, columns]``, and a cut that is
        tight there.

        Args:
            more: assumed excess load of the slowest ranks. The cut then follows the cycle that is
                critical with it; any cycle is a valid bound.
            launched: follow the cycle of a rank that pays all launch floors.
        """
        operations = self._operations
        lines = _Lines.at(operations, load.ravel()[self.columns])
        extra = np.zeros(len(operations.constant))
        if more is not None:
            extra += lines.rise(more.ravel()[self.columns])
        if launched:
            extra += operations.floors.sum(axis=0)
        costs = (lines.cost_ms + extra)[operations.origin].tolist()
        cycle, length, iterations = operations.program.critical_cycle(costs)
        ops = operations.origin[cycle]
        slopes = lines.slopes(ops)
        slope = self._slope(slopes.sum(axis=0) / iterations)
        constant = (length - float(extra[ops].sum())) / iterations - float((slope * load).sum())
        busiest = (operations.alike & operations.collectives)[ops] & slopes.any(axis=1)
        messages = self._parts(slopes, np.flatnonzero(busiest)[:, None].tolist(), iterations)
        cut = Cut(constant, slope, *self._segments(ops, slopes, iterations), messages)
        return length / iterations, cut

    def _segments(
        self, ops: NDArray[np.intp], slopes: Array, iterations: int
    ) -> tuple[Array, Array, Array]:
        """Return segments, floors and uneven parts of the cut of a cycle.

        Args:
            ops: operations of the cycle.
            slopes: slopes of their costs, ``[ops, columns]``.
            iterations: iterations that the cycle spans.
        """
        operations = self._operations
        phases = [operations.phases[op] for op in ops]
        runs = _runs(operations.meets[ops])
        lookups = [[i for i in run if phases[i] in LOOKUPS] for run in runs]
        alone = [phase not in (*LOOKUPS, *self._alike) for phase in phases]
        alike = operations.alike[ops]
        uneven = [[i for i in run if alone[i] and not alike[i]] for run in runs]
        with_lookups = [i for i, run in enumerate(lookups) if slopes[run].any()]
        lookups, uneven = [lookups[i] for i in with_lookups], [uneven[i] for i in with_lookups]
        floors = [operations.floors[:, ops[run]].sum(axis=1) / iterations for run in lookups]
        return (
            self._parts(slopes, lookups, iterations),
            np.array(floors).reshape(-1, len(self.groups)),
            self._parts(slopes, uneven, iterations),
        )

    @cached_property
    def _alike(self) -> tuple[str, ...]:
        """Phases of operations on single ranks with equal times on all of them."""
        copies = ShardingType.DATA_PARALLEL
        own = any(not g.fused and g.sharding_type is not copies for g in self.groups)
        return tuple(phase for phase in ALIKE if phase != OPTIMIZER or not own)

    def _parts(self, slopes: Array, runs: list[list[int]], iterations: int) -> Array:
        """Return the summed slopes of each run of operations, ``[runs, groups, columns]``."""
        parts = [self._slope(slopes[run].sum(axis=0) / iterations) for run in runs]
        return np.array(parts).reshape(-1, *self.ceiling.shape)

    def _slope(self, columns: Array) -> Array:
        slope: Array = np.zeros(self.ceiling.shape)
        slope.flat[self.columns] = columns
        return slope

    @cached_property
    def _operations(self) -> _Operations:
        """Operations of one rank with their costs.

        They are read from one graph over probe plans: without loads, with the most of each column,
        with each launch floor, with only one group each, with only the certain groups, with one of
        each hull.
        """
        count, groups = len(self.columns), len(self.groups)
        last = 1 + count + 2 * groups
        terms: list[_HullTerm] = []
        self._build(last + 1, terms)  # counts the hulls
        plans, terms = last + 1 + len(terms), []
        graph, averages = self._build(plans, terms)
        costs = np.stack([np.broadcast_to(op.cost_ms.ravel(), plans) for op in graph.ops], axis=1)
        added = costs[1:] - costs[0]
        users = [self._users(op.active, slice(last - groups, last)) for op in graph.ops]
        optional = [groups_of_op is not None for groups_of_op in users]
        issued = self.averaged / averages if averages else 1.0
        graph.ops = [self._issued_surely(op, last, issued) for op in graph.ops]
        program, origin = compile_rank(graph, users, self.offered)
        return _Operations(
            program,
            np.array(origin),
            costs[0],
            added[:count].T / self.most_of_columns,
            terms,
            np.array([term.size for term in terms]).reshape(-1, count),
            added[last:].T,
            added[count : count + groups],
            np.array(optional),
            np.array([op.scope == "world" for op in graph.ops]) & ~np.array(optional),
            self._alike_on_ranks(terms, added[:count], added[last:]),
            np.array([op.resource == "collectives" for op in graph.ops]),
            [op.phase for op in graph.ops],
        )

    def _users(self, active: Mask | None, of_groups: slice) -> Users:
        """Return the groups of which a plan uses one if it has an operation; None if all have it.

        Args:
            active: probe plans that have it.
            of_groups: probe plans with one group each.
        """
        if active is None or active[0]:
            return None
        users = frozenset(np.flatnonzero(active[of_groups]).tolist())
        return None if any(groups <= users for groups in self.offered) else users

    @staticmethod
    def _alike_on_ranks(
        terms: Sequence[_HullTerm], direct: Array, hulled: Array
    ) -> NDArray[np.bool_]:
        """Return a mask of the operations whose costs depend only on sizes shared by all ranks."""
        own = [not term.hull.shared for term in terms]
        return np.asarray(~(direct.any(axis=0) | hulled[own].any(axis=0)))

    def _build(self, plans: int, terms: list[_HullTerm]) -> tuple[Graph, int]:
        """Return the graph over the probe plans, and the number of all-reduces of replicas."""
        count, groups = len(self.columns), len(self.groups)
        loads = np.zeros((plans, groups, 1, COLUMNS))
        loads.reshape(plans, -1)[np.arange(1, count + 1), self.columns] = self.most_of_columns
        loads[..., Load.SHARDS] = np.array(self.present)[:, None]
        alone = 1 + count + groups + np.arange(groups)
        loads[alone, ..., Load.SHARDS] = np.eye(groups)[..., None]
        loads[1 + count + 2 * groups, :, 0, Load.SHARDS] = self.certain
        paid = np.zeros((plans, groups, 1))
        paid[1 + count + np.arange(groups), np.arange(groups)] = 1.0
        builder = self._builder(loads, paid, terms)
        return builder.build(), len(builder.averaged)

    @staticmethod
    def _issued_surely(op: Op, certain: int, issued: float) -> Op:
        """Return the operation with the host time that every plan has.

        Args:
            certain: index of the probe plan with only the certain groups.
            issued: fraction of the all-reduces of replicas that every plan has.
        """
        host_ms = op.host_ms
        if op.phase in OF_GROUPS and op.active is not None and not op.active[certain]:
            host_ms = 0.0
        if op.phase == AVERAGING:
            host_ms *= issued
        return replace(op, host_ms=host_ms)

    def _builder(self, loads: Array, paid: Array, terms: list[_HullTerm]) -> DlrmBuilder:
        """Make the builder of a rank's operations.

        Args:
            loads: loads of the probe plans, ``[plans, groups, 1, columns]``; each of the last plans
                has one of the hulls.
            paid: fraction of the launch floors that count, ``[plans, groups, 1]``, where not all
                ranks of all plans pay them.
            terms: list that receives the hulls.
        """
        hulls, least, certain = self.hulls, self.least, self.certain
        present, most = self.present, self.most
        columns, tops = slice(1, 1 + len(self.columns)), self.most_of_columns
        first = 1 + len(self.columns) + 2 * len(self.groups) + 1

        class Relaxed(Exchange):
            """Exchange whose costs are hulls, appended to `terms`."""

            position = 0

            def cost(self, model: CostModel, size: Size) -> Array:
                mine = list(self.members)
                used = all(present[m] for m in mine)
                key = self.name, used, tuple(self.groups[m] for m in mine)
                if key not in hulls:
                    hulls[key] = Hulls(most[mine].sum(axis=0), least[mine].min(axis=0))
                hull = hulls[key].get(self.position, model, size)
                self.position += 1
                marker = np.zeros((len(loads), 1))
                marker[first + len(terms) :][:1] = 1.0
                terms.append(_HullTerm(hull, used, size(self.total)[columns, 0] / tops))
                return marker

            def _lookup(self, group: int, column: Load, floor_ms: float) -> Array:
                everywhere = certain[group] and self._everywhere
                floor = floor_ms if everywhere else floor_ms * paid[:, group]
                return np.asarray(floor + self.loads[:, group, :, column])

            @property
            def _everywhere(self) -> bool:
                """True if its lookups run on all ranks or on none."""
                kind, groups = self.sharding_type, self.topology.groups
                return kind in UNIFORM or (kind in HIERARCHICAL and groups == 1)

        return DlrmBuilder(self.costs, self.groups, loads, Relaxed)


def _runs(meets: NDArray[np.bool_]) -> list[list[int]]:
    """Split a cycle at the collectives of all ranks; return the positions of each run between.

    Within a run a cycle may stay on one rank, whichever ranks it meets.

    Args:
        meets: True for a collective of all ranks, for the cycle's operations in order.
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
