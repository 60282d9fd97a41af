"""The predicted iteration time of many plans under many draws of the costs' errors, in one pass.

Plans times draws are the plans of one graph. Loads of tables are multiplied table by table, costs
of operations by resource and name. A timeline is homogeneous: all times twice as long make the
iteration twice as long. So the error of the host's times, which are constants of a compiled
timeline, divides all other costs and multiplies the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import EllipsisType
from typing import cast

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import OVERHEADS, CostErrors
from predictor.cost.load_sums import Selection
from predictor.cost.loads import KERNELS, Load
from predictor.iteration.graph import Op, costs_nothing, error_of
from predictor.iteration.plan_scorer import PlanScorer
from predictor.iteration.steady_state import CompiledTimeline, compile_timeline
from predictor.iteration.torchrec.dlrm import DlrmBuilder
from predictor.iteration.torchrec.sparse import Exchange

Array = NDArray[np.float64]
Ints = NDArray[np.intp]

CHUNK_ELEMENTS = 32768
"""Plans x draws x ranks simulated together."""


class PerturbedScorer:
    """Scorer of plans under every draw of the errors.

    Args:
        scorer: numbers the plans; its costs are the nominal ones.
    """

    def __init__(self, scorer: PlanScorer, errors: CostErrors) -> None:
        self.scorer = scorer
        self.errors = errors
        self._programs: dict[tuple[bool, *tuple[int, ...]], CompiledTimeline] = {}

    def score_numbered(self, plans: Ints) -> Array:
        """Predict iteration times in ms, ``[plans, draws]``.

        Args:
            plans: numbers of shardings, ``[plans, tables]``.
        """
        draws = self.errors.draws
        times = np.zeros((len(plans), draws))
        size = max(1, CHUNK_ELEMENTS // (self.scorer.topology.world_size * draws))
        for first in range(0, len(plans), size):
            part = plans[first : first + size]
            times[first : first + size] = self._times(part).reshape(draws, -1).T
        return times

    def _times(self, plans: Ints) -> Array:
        """Predict the iteration times of some plans in ms, ``[draws x plans]``."""
        used, draws = self.scorer.used_groups(plans), self.errors.draws
        loads = self.scorer.sum_loads(plans, used)
        kernels = self._kernels(plans, used, loads)

        class Drawn(Exchange):
            """Exchange whose lookups differ from draw to draw; other costs are multiplied later."""

            def load_of(self, group: int) -> Array:
                drawn = {column: wide[group] for column, wide in kernels.items()}
                return cast(Array, _Columns(super().load_of(group), drawn))

            def _lookup(self, group: int, column: Load, floor_ms: float) -> Array:
                time = super()._lookup(group, column, floor_ms)
                return time.reshape(-1, time.shape[-1])

            def pack_ms(self, group: int, *, backward: bool) -> Array:
                packed = super().pack_ms(group, backward=backward)
                return packed if packed.ndim == 1 else np.tile(packed.T, draws).T

        groups = [self.scorer.groups[i] for i in used]
        built = DlrmBuilder(self.scorer.costs, groups, loads.transpose(3, 1, 2, 0), Drawn).build()
        graph = replace(built, ops=[self._perturb_op(op, len(plans)) for op in built.ops])
        whole = all(op.active is None or bool(op.active.all()) for op in graph.ops)
        key = whole, *used.tolist()
        if key not in self._programs:
            self._programs[key] = compile_timeline(graph, whole=whole)
        times = self._programs[key].iteration_ms(graph, len(plans) * draws)
        return times * np.repeat(self.errors.shared(OVERHEADS), len(plans))

    def _kernels(self, plans: Ints, used: Ints, loads: Array) -> dict[Load, Array]:
        """Sum lookups with their errors: column -> ``[groups, draws, plans, ranks]`` in ms."""
        count, tables = plans.shape
        chosen = Selection(plans.ravel(), np.repeat(np.arange(count), tables), None)
        place = np.zeros(len(self.scorer.groups), dtype=np.intp)
        place[used] = np.arange(len(used))
        factors, kinds = self._lookup_factors(plans)
        shape = len(used), count
        added = self.scorer.rows.added(KERNELS, chosen, place, shape, factors - 1, kinds)
        return {
            column: (loads[column][:, :, None] + more).transpose(0, 2, 3, 1)
            for column, more in zip(KERNELS, added, strict=True)
        }

    def _lookup_factors(self, plans: Ints) -> tuple[Array, Ints]:
        """Return the factors of lookups by kind of sharding, and the kinds that plans use.

        Returns:
            Factors ``[2, draws, kinds]``, and kinds ``[plans x tables]``.
        """
        numbers, first, kinds = np.unique(plans, return_index=True, return_inverse=True)
        tables = (first % plans.shape[1]).tolist()
        factors = [
            self.errors.lookup(table, self.scorer.sharding(number))
            for table, number in zip(tables, numbers.tolist(), strict=True)
        ]
        return np.stack(factors, axis=-1), kinds.ravel()

    def _perturb_op(self, op: Op, plans: int) -> Op:
        """Multiply the cost of an operation by its error, in units of the host's error."""
        draws = self.errors.draws
        active = None if op.active is None else np.tile(op.active, draws)
        if costs_nothing(op):
            return op if active is None else replace(op, active=active)
        factor = error_of(op, self.errors, self.scorer.topology) / self.errors.shared(OVERHEADS)
        # a lookup has a cost per draw and plan, others per plan or one; ranks come first in memory
        cost = np.atleast_2d(op.cost_ms).T
        ranks, width = cost.shape
        cost = cost.reshape(ranks, draws if width == plans * draws else 1, -1)
        perturbed = np.broadcast_to(cost * factor[:, None], (ranks, draws, plans))
        return replace(op, cost_ms=perturbed.reshape(ranks, -1).T, active=active)


class _Columns:
    """Loads of a lookup by column, some of which differ from draw to draw.

    Args:
        load: ``[plans, ranks, columns]``.
        drawn: column -> ``[draws, plans, ranks]``.
    """

    def __init__(self, load: Array, drawn: Mapping[Load, Array]) -> None:
        self.load, self.drawn = load, drawn

    def __getitem__(self, key: tuple[EllipsisType, Load]) -> Array:
        return self.drawn[key[1]] if key[1] in self.drawn else self.load[key]
