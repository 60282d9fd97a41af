"""Loads of shards under one draw of the costs' errors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import CostErrors
from predictor.cost.loads import KERNELS, ShardLoads
from predictor.model.plan import Shard, TablePlan

Array = NDArray[np.float64]


class DrawnLoads(ShardLoads):
    """Loads whose lookups have errors of their own, by table, direction and sharding type.

    What lookups share, such as a cache or the longest latencies, is as predicted; the errors that
    all lookups have in common are on the operations.

    Args:
        loads: as predicted; computed once for many draws.
        errors: one draw.
    """

    def __init__(self, loads: ShardLoads, errors: CostErrors) -> None:
        super().__init__(loads.workload, loads.topology, loads.hardware)
        self.loads = loads
        self.errors = errors

    @property
    def without_errors(self) -> ShardLoads:
        """The loads as predicted."""
        return self.loads

    def of_shard(self, index: int, plan: TablePlan, shard: Shard) -> Array:
        """As `ShardLoads.of_shard`, with the errors."""
        load = self.loads.of_shard(index, plan, shard).copy()
        load[[*KERNELS]] *= self.errors.lookup(index, plan.sharding_type)[:, 0]
        return load

    def cache_of_shard(self, index: int, plan: TablePlan, shard: Shard) -> Array | None:
        """As `ShardLoads.cache_of_shard`."""
        return self.loads.cache_of_shard(index, plan, shard)
