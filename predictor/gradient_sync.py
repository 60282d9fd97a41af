"""All-reduces of dense gradients in buckets, as DistributedDataParallel sends them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from predictor.costs import Costs
from predictor.graph import Graph
from predictor.sparse import BUCKET_BYTES, Exchange

Array = NDArray[np.float64]

FIRST_BUCKET_BYTES = 1024 * 1024
"""DDP's `_DEFAULT_FIRST_BUCKET_BYTES`: the first gradients leave early."""
OPS_SYNC = 2
GRADIENT_BYTES = 4


class GradientSync:
    """Gathers gradients in the order in which the backward produces them.

    ``ops`` are the all-reduces sent so far; the optimizer waits for them.
    """

    def __init__(self, graph: Graph, costs: Costs) -> None:
        self.graph = graph
        self.costs = costs
        self.bytes = 0.0
        self.cap = FIRST_BUCKET_BYTES
        self.ops: list[int] = []

    def add(self, parameters: int) -> None:
        """Gradients that the operation added last has produced; a full bucket leaves at once."""
        self.bytes += GRADIENT_BYTES * parameters
        if self.bytes >= self.cap:
            self.flush()

    def flush(self) -> None:
        """Send what is gathered."""
        if self.bytes and self.costs.topology.world_size > 1:
            cost = self.costs.collectives.all_reduce(np.float64(self.bytes), scope="world")
            self._send("dense gradients", np.asarray(cost))
        self.bytes, self.cap = 0.0, BUCKET_BYTES

    def tables(self, exchange: Exchange) -> None:
        """Gradients of data-parallel tables, which have a DDP of their own."""
        if self.costs.topology.world_size > 1:
            self._send(f"{exchange.name} gradients", exchange.gradient_sync_ms(), exchange)

    def _send(self, name: str, cost_ms: Array, exchange: Exchange | None = None) -> None:
        self.ops.append(
            self.graph.add(
                f"all-reduce {name}",
                phase="all_reduce",
                resource="collectives",
                stream="comm",
                cost_ms=cost_ms,
                host_ms=self.costs.host_ms(OPS_SYNC, kernels=1, collectives=1),
                deps=[len(self.graph.ops) - 1],
                scope="world",
                active=None if exchange is None else exchange.active,
            )
        )
