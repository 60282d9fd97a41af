"""All-reduces of dense gradients in buckets, as DistributedDataParallel sends them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from predictor.costs import Costs
from predictor.graph import Graph, Mask
from predictor.sparse import Exchange

Array = NDArray[np.float64]

FIRST_BUCKET_BYTES = 1024 * 1024
"""DDP's `_DEFAULT_FIRST_BUCKET_BYTES`: the first gradients leave early."""
BUCKET_BYTES = 25 * 1024 * 1024
"""DDP's `bucket_cap_mb`, which TorchRec leaves at its default of 25 (model_parallel.py)."""
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
            self._send("dense gradients", np.asarray(cost), [len(self.graph.ops) - 1])
        self.bytes, self.cap = 0.0, BUCKET_BYTES

    def tables(self, exchange: Exchange, lookups: Sequence[int]) -> None:
        """Gradients of data-parallel tables, which have a DDP of their own.

        Args:
            lookups: the backward operations that produce them.
        """
        if self.costs.topology.world_size > 1:
            cost = exchange.gradient_sync_ms()
            self._send(f"{exchange.name} gradients", cost, lookups, exchange.active)

    def _send(
        self, name: str, cost_ms: Array, after: Sequence[int], active: Mask | None = None
    ) -> None:
        self.ops.append(
            self.graph.add(
                f"all-reduce {name}",
                phase="all_reduce",
                resource="collectives",
                stream="comm",
                cost_ms=cost_ms,
                host_ms=self.costs.host_ms(OPS_SYNC, kernels=1, collectives=1),
                deps=after,
                scope="world",
                active=active,
            )
        )
