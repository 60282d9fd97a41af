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

import numpy as np
from numpy.typing import NDArray

from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.loads import COLUMNS, Load, LookupGroup
from predictor.iteration.critical_path import critical_cycle
from predictor.iteration.graph import Graph, Op, Scope
from predictor.iteration.timeline import simulate
from predictor.iteration.torchrec.dlrm import DlrmBuilder
from predictor.iteration.torchrec.sparse import HIERARCHICAL, CostModel, Exchange, Size
from predictor.model.plan import ShardingType

Array = NDArray[np.float64]

SAMPLES = 8192
"""Points at which a cost is sampled; the staircase below them keeps the hull a lower bound."""
FEW_GO = 0.9
"""Share of a hull's points that are left when looking at all of them at once does no more good."""
SMALLEST_BYTES = 64.0
BUSIEST = 4.0
"""Multiple of the most that a mean rank can have, up to which messages of the busiest count."""
LOOKUPS = ("embedding_forward", "embedding_backward", "prefetch")
AVERAGING = "replica_sync"
OF_GROUPS = (*LOOKUPS, AVERAGING)
"""Phases whose operations only plans have that use a lookup group."""
ALIKE = ("dense_forward", "dense_backward", "optimizer")
"""Phases of operations on single ranks that take as long on every rank."""
UNIFORM = (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL)


class Hull:
    """Lower convex hull of a non-decreasing cost model over sizes from ``least`` to ``top``.

    Below ``least``, where no plan is, it stays at its value there.
    """

    def __init__(self, model: CostModel, top: float, least: float = 0.0) -> None:
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

    A size that all ranks share, a mean or a maximum, is at least what the mean rank has, so its
    hull may end at the largest mean. Of a size that each rank has its own of, the mean of a cost
    over the ranks is what counts, and one rank may have the loads of all tables: such a hull has
    to reach that far, or it lies above the mean of a concave cost.

    Args:
        ceiling: load ``[columns]`` that no plan exceeds on average over the ranks.
        most: load ``[columns]`` that no plan exceeds on any rank.
        least: loads ``[2, columns]`` that every plan has on average, and on its busiest rank.
        reach: multiple of the ceiling's sizes up to which hulls of shared sizes lie below the
            costs.
    """

    def __init__(self, ceiling: Array, most: Array, least: Array, reach: float) -> None:
        self.ceiling = ceiling[None, None]
        self.most = most[None, None]
        mean, peak = least
        self.least = np.stack([peak, 2 * mean - peak])[None]
        """As of two ranks: a mean or a maximum over them is what every plan has at least."""
        self.reach = reach
        self.known: list[Hull] = []

    def get(self, position: int, model: CostModel, size: Size) -> Hull:
        """The hull of the ``position``-th cost model."""
        if position == len(self.known):
            least = size(self.least)
            if least.shape[-1] == 1:
                top = self.reach * float(np.max(size(self.ceiling)))
                self.known.append(Hull(model, top, float(least.max())))
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
        messages: parts of the slope that a collective of all ranks takes for its busiest rank, as
            long as that rank's sizes are below ``reach`` times ``ceiling`` of `Relaxation`,
            ``[messages, groups, columns]``.
    """

    constant: float
    slope: Array
    segments: Array
    floors: Array
    uneven: Array
    messages: Array


@dataclass(frozen=True)
class _Lines:
    """Supporting lines of all operations of a rank.

    Args:
        graph: the operations at the load where the lines touch.
        slopes: of their costs, ``[columns, ops]``.
        floors: what a launch adds that only ranks with tables of a group pay, ``[groups, ops]``.
        scopes: which ranks meet in them, ``[ops]``.
    """

    graph: Graph
    slopes: Array
    floors: Array
    scopes: list[Scope | None]


class Relaxation:
    """The convex relaxation for plans that use some exchanges, and may use some others.

    Args:
        groups: lookup groups that the options of these exchanges can form.
        ceiling: per group, the load that no plan exceeds on average, ``[groups, columns]``.
        most: per group, the load that no plan exceeds on any rank, ``[groups, columns]``.
        present: per group, whether every plan uses its exchange.
        certain: per group, whether every plan uses it.
        hulls: what was asked for before; relaxations with the same loads and reach share them.
        least: per group, the loads that its least option has, mean and largest shard,
            ``[groups, 2, columns]``; 0 where plans may do without its exchange, or if None.
        reach: multiple of the ceiling up to which hulls of sizes that all ranks share hold: above
            1 they do for a busiest rank with more than the mean, and are lower.
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
        reach: float = 1.0,
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
        self.reach = reach
        self.least = np.zeros((len(self.groups), 2, COLUMNS)) if least is None else least
        self.columns = np.flatnonzero(ceiling.ravel() > 0)

    def evaluate(
        self, load: Array, more: Array | None = None, *, launched: bool = False
    ) -> tuple[float, Cut | None]:
        """Relaxed time in ms at an average load ``[groups, columns]``, and the cut that is tight
        there (None if the timeline has no critical cycle among the iterations kept).

        Args:
            more: beyond the load, what the ranks that set the pace are thought to have. The cut is
                then of the cycle that is critical with it; a cycle bounds the time at any costs.
            launched: the cycle is that of a rank that pays the floors of all launches, likewise.
        """
        lines = self._linearised(load)
        graph, slopes, scopes = lines.graph, lines.slopes, lines.scopes
        extra = np.zeros(len(graph.ops))
        if more is not None:
            extra += more.ravel()[self.columns] @ slopes
        if launched:
            extra += lines.floors.sum(axis=0)
        graph.ops = [
            replace(op, cost_ms=op.cost_ms + ms)
            for op, ms in zip(graph.ops, extra.tolist(), strict=True)
        ]
        timeline = simulate(graph, keep_steps=True)
        found = critical_cycle(graph, timeline)
        if found is None:
            return float(timeline.iteration_ms[0]), None
        ops, length, iterations = found
        slope = self._slope(slopes[:, ops].sum(axis=1) / iterations)
        constant = (length - float(extra[ops].sum())) / iterations - float((slope * load).sum())
        met = [[op] for op in ops if scopes[op] == "world" and slopes[:, op].any()]
        messages = self._parts(slopes, met, iterations)
        cut = Cut(constant, slope, *self._segments(lines, ops, iterations), messages)
        return length / iterations, cut

    def _segments(
        self, lines: _Lines, ops: list[int], iterations: int
    ) -> tuple[Array, Array, Array]:
        """Segments, floors and what is uneven in the cut of a cycle."""
        phases = [op.phase for op in lines.graph.ops]
        runs = _runs(ops, lines.scopes)
        lookups = [[op for op in run if phases[op] in LOOKUPS] for run in runs]
        others = [[op for op in run if phases[op] not in (*LOOKUPS, *ALIKE)] for run in runs]
        kept = [i for i, run in enumerate(lookups) if lines.slopes[:, run].any()]
        lookups, others = [lookups[i] for i in kept], [others[i] for i in kept]
        floors = [lines.floors[:, run].sum(axis=1) / iterations for run in lookups]
        return (
            self._parts(lines.slopes, lookups, iterations),
            np.array(floors).reshape(-1, len(self.groups)),
            self._parts(lines.slopes, others, iterations),
        )

    def _parts(self, slopes: Array, runs: list[list[int]], iterations: int) -> Array:
        """Slopes of some operations together, ``[runs, groups, columns]``."""
        parts = [self._slope(slopes[:, run].sum(axis=1) / iterations) for run in runs]
        return np.array(parts).reshape(-1, *self.ceiling.shape)

    def _slope(self, columns: Array) -> Array:
        slope: Array = np.zeros(self.ceiling.shape)
        slope.flat[self.columns] = columns
        return slope

    def _linearised(self, load: Array) -> _Lines:
        """The operations of one rank at ``load``, and what they cost at others."""
        base = load.ravel()
        count, groups = len(self.columns), len(self.groups)
        probes = np.repeat(base[None], count + groups + 2, axis=0)
        probes[np.arange(1, count + 1), self.columns] += 1.0
        loads = probes.reshape(len(probes), groups, 1, COLUMNS)
        loads[..., Load.SHARDS] = np.array(self.present)[:, None]
        loads[-1, :, 0, Load.SHARDS] = self.certain  # shows what a plan may do without
        paid = np.zeros((len(probes), groups, 1))
        paid[np.arange(groups) + count + 1, np.arange(groups)] = 1.0
        builder = self._builder(loads, paid)
        many = builder.build()
        averages = len(builder.averaged)
        costs = np.stack(
            [np.broadcast_to(op.cost_ms.reshape(-1), len(probes)) for op in many.ops], axis=1
        )
        # a shared cache can make the cost of one lookup negative; it counts as zero
        slopes = np.where(costs[0] < 0, 0.0, costs[1 : count + 1] - costs[0])
        gone = [op.active is not None and not op.active[0] for op in many.ops]
        # a plan without an operation takes no time for it
        at = np.where(gone, np.minimum(costs[0], base[self.columns] @ slopes), costs[0])
        one = Graph(1, 1, many.inline_streams, many.launch_latency_ms)
        issued = self.averaged / averages if averages else 1.0
        single = [
            self._single(op, ms, issued) for op, ms in zip(many.ops, at.tolist(), strict=True)
        ]
        one.ops, origin = _pass_by(single, gone)
        floors = costs[count + 1 : -1] - costs[0]
        scopes = [None if gone[i] else many.ops[i].scope for i in origin]
        return _Lines(one, slopes[:, origin], floors[:, origin], scopes)

    def _builder(self, loads: Array, paid: Array) -> DlrmBuilder:
        """The builder of a rank's operations.

        Args:
            loads: ``[plans, groups, 1, columns]``.
            paid: share of the launch floors that count, ``[plans, groups, 1]``, where not all ranks
                of all plans pay them.
        """
        known, ceiling, least, certain = self.hulls, self.ceiling, self.least, self.certain
        present, most, reach = self.present, self.most, self.reach

        class Relaxed(Exchange):
            """Costs are supporting lines at the loads of the first of the plans."""

            asked = 0

            def cost(self, model: CostModel, size: Size) -> Array:
                mine = list(self.members)
                used = all(present[m] for m in mine)
                key = self.name, used, tuple(self.groups[m] for m in mine)
                if key not in known:
                    tops = ceiling[mine].sum(axis=0), most[mine].sum(axis=0)
                    known[key] = Hulls(*tops, least[mine].min(axis=0), reach)
                hull = known[key].get(self.asked, model, size)
                self.asked += 1
                sizes = size(self.total)
                at = float(sizes[0].max())
                value, slope = hull.tangent(at)
                if not used:  # without loads it takes no time
                    value = min(value, slope * at)
                return np.asarray(value + slope * (sizes - at))

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

    def _single(self, op: Op, cost_ms: float, issued: float) -> Op:
        """The operation for one average rank; a collective of one starts when it is ready.

        Args:
            issued: share of the all-reduces of copies that every plan has.
        """
        host_ms = op.host_ms
        if op.phase in OF_GROUPS and op.active is not None and not op.active[-1]:
            host_ms = 0.0
        if op.phase == AVERAGING:
            host_ms *= issued
        return replace(
            op, cost_ms=np.array([max(0.0, cost_ms)]), host_ms=host_ms, scope=None, active=None
        )


def _runs(ops: Sequence[int], scopes: Sequence[Scope | None]) -> list[list[int]]:
    """A cycle's operations parted at the collectives of all ranks, without them. Where some ranks
    meet others in between, such parts cannot be assigned to one rank and are left out."""
    runs: list[list[int]] = [[]]
    for op in ops:
        if scopes[op] == "world":
            runs.append([])
        else:
            runs[-1].append(op)
    if len(runs) > 1:  # the cycle is closed
        runs[0] = runs.pop() + runs[0]
    return [run for run in runs if run and all(scopes[op] is None for op in run)]


def _pass_by(ops: Sequence[Op], gone: Sequence[bool]) -> tuple[list[Op], list[int]]:
    """Operations of which plans may do without some, and which one each of them stands for.

    Without an operation its stream and its host go on as they were, and what depends on it waits
    for what it would have waited for (`predictor.iteration.timeline`). With it, either takes its
    time. So it becomes two, neither of which waits for what the other does: one on its stream, and
    one on its own, which has its dependencies and its dependants.
    """
    found: list[Op] = []
    origin: list[int] = []
    place: list[int] = []
    for index, (op, without) in enumerate(zip(ops, gone, strict=True)):
        if without:
            alone = f"{op.name} {index} alone"
            bare = replace(op, host_ms=0.0, kernels=1, blocks_host=False, fills=None)
            found += [replace(bare, deps=()), replace(bare, stream=alone, thread=alone)]
        else:
            found.append(op)
        origin += [index] * (len(found) - len(origin))
        place.append(len(found) - 1)
    moved = [
        replace(op, deps=tuple(replace(dep, op=place[dep.op]) for dep in op.deps)) for op in found
    ]
    return moved, origin
