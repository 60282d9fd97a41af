"""All-reduces of dense gradients in buckets, as DistributedDataParallel sends them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.host_ops import HOST_OPS
from predictor.iteration.graph import Graph, Mask
from predictor.iteration.torchrec.sparse import Exchange

Array = NDArray[np.float64]


class GradientBuckets:
    """Sends gradients in the order in which the backward produces them.

    ``ops`` are the all-reduces sent so far; the optimizer waits for them. DDP's first bucket is
    smaller only if `bucket_cap_mb` is not given, but TorchRec gives it (model_parallel.py;
    `_BucketCapacityConfig` of torch/nn/parallel/distributed.py).
    """

    def __init__(self, graph: Graph, costs: FixedCosts) -> None:
        self.graph = graph
        self.costs = costs
        self.ops: list[int] = []

    def dense(self, size_bytes: int) -> None:
        """A bucket that the last operation has filled."""
        if self.costs.topology.whole.world_size > 1:
            cost = self.costs.all_ranks.all_reduce(np.float64(size_bytes), scope="world")
            self._send("dense gradients", np.asarray(cost), [len(self.graph.ops) - 1])

    def tables(self, exchange: Exchange, lookups: Sequence[int]) -> None:
        """Gradients of data-parallel tables, which have their own DDP.

        Args:
            lookups: the backward operations that produce them.
        """
        if self.costs.topology.whole.world_size > 1:
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
                host_ms=self.costs.host_ms(HOST_OPS.gradient_sync, kernels=1, collectives=1),
                deps=after,
                scope="world",
                active=active,
            )
        )
