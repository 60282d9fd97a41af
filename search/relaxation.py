"""The iteration time relaxed to a convex function of summed loads: the ground of the lower bound.

Three steps, each of which can only lower the predicted time:

1. *Averaging.* All ranks run the same program on the same links, so renaming ranks (hosts, and
   positions within all hosts alike) does not change the time of a plan. The timeline is a maximum
   over sums of operation times, hence convex in them; the mean over all renamings, which gives
   every rank the average load, is therefore not slower (Jensen).
2. *Convex laws.* Times that are not convex in bytes (bandwidth that grows with size) are replaced
   by their lower convex hull over the sizes that any plan can have. The launch floor of a lookup,
   which a rank without shards does not pay, is left out.
3. *Critical cycles.* The period of the timeline is the largest mean over the cycles of its event
   graph. Any one cycle is a bound; with supporting lines in the place of the laws it is linear in
   the loads, and valid for all loads.

What remains is a family of linear cuts ``time >= constant + slope . load`` for one set of
exchanges; `search.bounds` minimises over the plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from predictor.costs import Costs
from predictor.critical_path import critical_cycle
from predictor.dlrm import DlrmBuilder
from predictor.graph import Graph, Op
from predictor.loads import COLUMNS, Load, LookupGroup
from predictor.sparse import Exchange, Law, Size
from predictor.timeline import simulate

Array = NDArray[np.float64]

SAMPLES = 1024
"""Points at which a law is sampled; the staircase below them keeps the hull a lower bound."""
SMALLEST_BYTES = 64.0


class Hull:
    """Lower convex hull of a non-decreasing law over sizes from 0 to ``top``."""

    def __init__(self, law: Law, top: float) -> None:
        samples = np.geomspace(min(SMALLEST_BYTES, top), top, SAMPLES) if top > 0 else np.zeros(0)
        sizes = np.concatenate(([0.0], samples))
        values = np.asarray(law(sizes), dtype=np.float64)
        # between two samples the law is at least its value at the first of them
        self.x, self.y = _lower_hull(sizes, np.concatenate((values[:1], values[:-1])))

    def tangent(self, at: float) -> tuple[float, float]:
        """Value and slope of a supporting line at a size."""
        if len(self.x) == 1:
            return float(self.y[0]), 0.0
        right = int(np.clip(np.searchsorted(self.x, at, side="right"), 1, len(self.x) - 1))
        slope = (self.y[right] - self.y[right - 1]) / (self.x[right] - self.x[right - 1])
        return float(self.y[right - 1] + slope * (at - self.x[right - 1])), float(slope)


def _lower_hull(x: Array, y: Array) -> tuple[Array, Array]:
    """Corners of the lower hull of points sorted by ``x`` (Andrew's monotone chain)."""
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
    """Hulls of one exchange's laws, remembered in the order in which the builder asks for them.

    Args:
        ceiling: load ``[1, 1, columns]`` that no plan exceeds on average over the ranks.
    """

    def __init__(self, ceiling: Array) -> None:
        self.ceiling = ceiling
        self.known: list[Hull] = []

    def get(self, position: int, law: Law, size: Size) -> Hull:
        """The hull of the ``position``-th law."""
        if position == len(self.known):
            self.known.append(Hull(law, float(np.max(size(self.ceiling)))))
        return self.known[position]


@dataclass(frozen=True)
class Cut:
    """``time >= constant + slope . load``, of the mean load of a rank ``[groups, columns]``."""

    constant: float
    slope: Array


class Relaxation:
    """The convex relaxation for plans that use exactly a given set of exchanges.

    Args:
        groups: lookup groups that the options of these exchanges can form.
        ceiling: per group, the load that no plan exceeds on average, ``[groups, columns]``.
        hulls: exchange name -> hulls; relaxations of one problem share them.
    """

    def __init__(
        self,
        costs: Costs,
        groups: Sequence[LookupGroup],
        ceiling: Array,
        hulls: dict[str, Hulls],
    ) -> None:
        self.costs = costs
        self.groups = list(groups)
        self.ceiling = ceiling
        self.hulls = hulls
        self.columns = np.flatnonzero(ceiling.ravel() > 0)

    def evaluate(self, load: Array) -> tuple[float, Cut | None]:
        """Relaxed time in ms at an average load ``[groups, columns]``, and the cut that is tight
        there (None if the timeline has no critical cycle among the iterations kept)."""
        graph, slopes = self._linearised(load)
        timeline = simulate(graph, keep_steps=True)
        found = critical_cycle(graph, timeline)
        if found is None:
            return float(timeline.iteration_ms[0]), None
        ops, length, iterations = found
        slope: Array = np.zeros(self.ceiling.shape)
        slope.flat[self.columns] = slopes[:, ops].sum(axis=1) / iterations
        constant = length / iterations - float((slope * load).sum())
        return length / iterations, Cut(constant, slope)

    def _linearised(self, load: Array) -> tuple[Graph, Array]:
        """Graph of one rank at ``load``, and the slopes ``[columns, ops]`` of its costs."""
        base = load.ravel()
        probes = np.repeat(base[None], len(self.columns) + 1, axis=0)
        probes[np.arange(1, len(probes)), self.columns] += 1.0
        loads = probes.reshape(len(probes), len(self.groups), 1, COLUMNS)
        loads[..., Load.SHARDS] = 1.0
        many = self._builder(loads).build()
        costs = np.stack(
            [np.broadcast_to(op.cost_ms.reshape(-1), len(probes)) for op in many.ops], axis=1
        )
        one = Graph(1, 1, many.inline_streams, many.launch_latency_ms)
        one.ops = [self._single(op, costs[0, i]) for i, op in enumerate(many.ops)]
        return one, costs[1:] - costs[0]

    def _builder(self, loads: Array) -> DlrmBuilder:
        known, ceiling = self.hulls, self.ceiling

        class Relaxed(Exchange):
            """Costs are supporting lines at the loads of the first plan of the batch."""

            asked = 0

            def cost(self, law: Law, size: Size) -> Array:
                if self.name not in known:
                    top = ceiling[list(self.members)].sum(axis=0)
                    known[self.name] = Hulls(top[None, None])
                hull = known[self.name].get(self.asked, law, size)
                self.asked += 1
                sizes = size(self.total)
                at = float(sizes[0].max())
                value, slope = hull.tangent(at)
                return np.asarray(value + slope * (sizes - at))

            def _lookup(self, group: int, column: Load, floor_ms: float) -> Array:
                return np.asarray(self.loads[:, group, :, column])

        return DlrmBuilder(self.costs, self.groups, loads, Relaxed)

    def _single(self, op: Op, cost_ms: float) -> Op:
        """The operation for one average rank; a collective of one starts when it is ready."""
        host_ms = op.host_ms
        if op.phase in ("embedding_forward", "embedding_backward", "prefetch"):
            # with several lookup groups in an exchange a plan may do without this one
            host_ms = 0.0 if len(self.groups) > len(self._exchange_names()) else host_ms
        return replace(
            op, cost_ms=np.array([max(0.0, cost_ms)]), host_ms=host_ms, scope=None, active=None
        )

    def _exchange_names(self) -> set[tuple[str, str]]:
        return {(g.module, g.sharding_type) for g in self.groups}
