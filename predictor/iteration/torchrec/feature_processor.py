"""What a feature processor adds to an iteration: weights by position before and behind lookups.

Why: docs/decisions/0073.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.host_ops import HOST_OPS
from predictor.cost.loads import Load
from predictor.cost.ops.position_weights import (
    OPS,
    PREPARE_BYTES,
    RANGE_BYTES,
    READ_BACK_BYTES,
    SPREAD_OPS,
    ids_ms,
    spread_ms,
)
from predictor.iteration.graph import COMPUTE, Dep, Graph
from predictor.iteration.torchrec.sparse import LENGTH_BYTES, Exchange
from predictor.units import us

Array = NDArray[np.float64]


class FeatureProcessors:
    """Adds the ops of feature processors to a graph, where a module has one."""

    def __init__(self, graph: Graph, costs: FixedCosts) -> None:
        self.graph = graph
        self.costs = costs
        self.hardware = costs.hardware

    def weigh(self, exchange: Exchange, after: list[Dep], *, backward: bool) -> list[Dep]:
        """The weights of the ids that an exchange looks up, or the way back to the parameters.

        Returns:
            What the lookup waits for; of a module without a processor what was given.
        """
        if not exchange.processed:
            return after
        way = " backward" if backward else ""
        host_ms = self.costs.layer_host_ms(HOST_OPS.op, 1)
        self.graph.add(
            f"{exchange.name} issue position weights{way}",
            phase="input_dist",
            resource="overheads",
            stream="host",
            cost_ms=self._per_op(exchange, host_ms, backward=backward),
            active=exchange.active,
        )
        floor_ms = us(self.hardware.elementwise.floor_us)
        cost_ms = self._ids_ms(exchange, backward=backward)
        cost_ms = cost_ms + self._per_op(exchange, floor_ms, backward=backward)
        weighed = self.graph.add(
            f"{exchange.name} position weights{way}",
            phase="input_dist",
            resource="elementwise",
            stream=COMPUTE,
            cost_ms=cost_ms,
            deps=after,
            active=exchange.active,
        )
        return [Dep(weighed)]

    def _ids_ms(self, exchange: Exchange, *, backward: bool) -> Array:
        """What grows with the ids, ``[plans, ranks]``."""
        hw = self.hardware
        found = exchange.cost(lambda n: ids_ms(hw, n, backward=backward), _ids)
        if backward:
            return found
        # what is not sent out is prepared here as well
        more = READ_BACK_BYTES - RANGE_BYTES + PREPARE_BYTES * exchange.is_local
        return found + exchange.prepared * exchange.cost(lambda n: more * n / hw.streaming, _ids)

    def _per_op(self, exchange: Exchange, each_ms: float, *, backward: bool) -> Array:
        """``each_ms`` for every op, ``[plans, ranks]``; a rank without features has none."""
        a_rank, a_feature = OPS[backward]
        world = 1 if exchange.is_replicated else self.costs.topology.world_size
        of_feature = LENGTH_BYTES * self.costs.workload.batch_size * world
        return exchange.cost(
            lambda size: each_ms * (a_feature * size / of_feature + a_rank * (size > 0)),
            lambda load: LENGTH_BYTES * load[..., Load.BAGS],
        )

    def spread(self, module: str, *, backward: bool) -> tuple[float, float]:
        """Device and host time of the parameters' sum on a module's outputs; none without one."""
        workload = self.costs.workload
        if module not in workload.processed:
            return 0.0, 0.0
        tables = [t for t in workload.tables if t.module == module]
        outputs = workload.batch_size * sum(t.outputs_per_sample * t.embedding_dim for t in tables)
        ops = SPREAD_OPS[backward]
        host_ms = self.costs.layer_host_ms(HOST_OPS.op * ops, ops)
        return spread_ms(self.hardware, outputs, backward=backward), host_ms


def _ids(load: Array) -> Array:
    return np.asarray(load[..., Load.IDS])
