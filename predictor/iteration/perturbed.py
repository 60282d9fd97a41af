"""The predicted iteration time of many plans under many draws of the costs' errors, in one pass.

Plans times draws are the plans of one graph. Loads of tables are multiplied table by table, costs
of operations by resource and name. A timeline is homogeneous: all times twice as long make the
iteration twice as long. So the error of the host's times, which are constants of a compiled
timeline, divides all other costs and multiplies the result.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import HOST, CostErrors
from predictor.cost.load_sums import Selection
from predictor.cost.loads import KERNELS, LAUNCH, Load
from predictor.iteration.drawn_graph import costs_nothing, error_of
from predictor.iteration.graph import Graph, Op
from predictor.iteration.plan_scorer import PlanScorer
from predictor.iteration.steady_state import CompiledTimeline
from predictor.iteration.torchrec.dlrm import DlrmBuilder
from predictor.iteration.torchrec.sparse import Exchange

Array = NDArray[np.float64]
Ints = NDArray[np.intp]

CHUNK_ELEMENTS = 32768
"""Plans x draws x ranks simulated together."""
LOOKED_AT = [*KERNELS, Load.PREFETCH_MS, Load.IDS, *LAUNCH]
"""Columns of a load that the time of a lookup depends on."""


class PerturbedScorer:
    """Scores plans as `PlanScorer` does, under every draw of the errors.

    Args:
        scorer: numbers the plans; its costs are the nominal ones.
    """

    def __init__(self, scorer: PlanScorer, errors: CostErrors) -> None:
        self.scorer = scorer
        self.errors = errors
        self._programs: dict[tuple[bool, *tuple[int, ...]], CompiledTimeline] = {}

    def score_numbered(self, plans: Ints) -> Array:
        """Predicted iteration time in ms, ``[plans, draws]``, of plans ``[plans, tables]`` given by
        the numbers of their shardings."""
        draws = self.errors.draws
        times = np.zeros((len(plans), draws))
        size = max(1, CHUNK_ELEMENTS // (self.scorer.topology.world_size * draws))
        for first in range(0, len(plans), size):
            part = plans[first : first + size]
            times[first : first + size] = self._times(part).reshape(-1, draws)
        return times

    def _times(self, plans: Ints) -> Array:
        """Of some plans, ``[plans x draws]``."""
        used, draws = self.scorer.used_groups(plans), self.errors.draws
        loads = self.scorer.sum_loads(plans, used)
        drawn = self._drawn(plans, used, loads)

        class Drawn(Exchange):
            """Lookups differ from draw to draw; all else is the same until it is multiplied."""

            def _lookup(self, group: int, column: Load, floor_ms: float) -> Array:
                wide = copy(self)
                wide.loads = drawn
                return Exchange._lookup(wide, group, column, floor_ms)

            def pack_ms(self, group: int, *, backward: bool) -> Array:
                packed = super().pack_ms(group, backward=backward)
                return packed if packed.ndim == 1 else np.repeat(packed, draws, axis=0)

        groups = [self.scorer.groups[i] for i in used]
        built = DlrmBuilder(self.scorer.costs, groups, loads.transpose(3, 1, 2, 0), Drawn).build()
        graph = self._perturb(built, len(plans))
        whole = all(op.active is None or bool(op.active.all()) for op in graph.ops)
        key = whole, *used.tolist()
        if key not in self._programs:
            self._programs[key] = CompiledTimeline(graph, whole=whole)
        found = self._programs[key].iteration_ms(graph, len(plans) * draws)
        return found * np.tile(self.errors.shared(HOST), len(plans))

    def _drawn(self, plans: Ints, used: Ints, loads: Array) -> Array:
        """Summed loads with the errors of lookups, ``[plans x draws, groups, ranks, COLUMNS]``."""
        draws, tables = self.errors.draws, plans.shape[1]
        total = np.zeros((*loads.shape[:-1], loads.shape[-1] * draws))
        for column in LOOKED_AT:
            if loads[column].any():
                total[column] = np.repeat(loads[column], draws, axis=-1)
        chosen = Selection(plans.ravel(), np.repeat(np.arange(len(plans)), tables), None)
        place = np.zeros(len(self.scorer.groups), dtype=np.intp)
        place[used] = np.arange(len(used))
        factors = self._lookup_factors(plans)
        for way, column in enumerate(KERNELS):
            shape = len(used), len(plans)
            added = self.scorer.rows.added(column, chosen, place, shape, factors[:, way] - 1)
            total[column] += added.reshape(*added.shape[:2], -1)
        return total.transpose(3, 1, 2, 0)

    def _lookup_factors(self, plans: Ints) -> Array:
        """Of every table of every plan, ``[plans x tables, 2, draws]``."""
        numbers, first, place = np.unique(plans, return_index=True, return_inverse=True)
        groups = self.scorer.rows.group(numbers)
        found = [
            self.errors.lookup(table, self.scorer.groups[group].sharding_type)
            for table, group in zip((first % plans.shape[1]).tolist(), groups.tolist(), strict=True)
        ]
        return np.stack(found)[place.ravel()]

    def _perturb(self, graph: Graph, plans: int) -> Graph:
        """The graph with the costs of its operations multiplied, in units of the host's error."""
        return replace(graph, ops=[self._perturb_op(op, plans) for op in graph.ops])

    def _perturb_op(self, op: Op, plans: int) -> Op:
        draws = self.errors.draws
        active = None if op.active is None else np.repeat(op.active, draws)
        if costs_nothing(op):
            return op if active is None else replace(op, active=active)
        factor = error_of(op, self.errors, self.scorer.topology) / self.errors.shared(HOST)
        cost = np.atleast_2d(op.cost_ms)
        rows = plans if len(cost) == 1 else len(cost)
        many = rows == plans * draws
        cost = cost.reshape(-1, draws if many and draws > 1 else 1, cost.shape[-1])
        found = np.broadcast_to(cost * factor[:, None], (plans, draws, cost.shape[-1]))
        return replace(op, cost_ms=found.reshape(plans * draws, -1), active=active)
