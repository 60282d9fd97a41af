"""Averaging the copies of tables: `DMPCollection.sync` of TorchRec 1.7 to 1.9.

The training loop calls it behind the optimizer step (torchrec/distributed/model_parallel.py). It
averages in place, one ``allreduce_coalesced`` a data type of weights, then one a data type of
optimizer states (all fp32), each over the replica group and each waited for before the next. So
nothing of the rank's compute overlaps with it, and it needs no memory.

Tables under ``data_parallel`` are not part of it: their gradients are all-reduced over all ranks.

Under ``ShardingStrategy.FULLY_SHARDED`` it is not called. Each launch's weights are averaged behind
its forward by a reduce-scatter on a stream of its own, and gathered before its backward, which the
compute stream waits for (`ShardedBatchedFusedEmbeddingBag` in batched_embedding_kernel.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.loads import Load, LookupGroup
from predictor.errors import InputError
from predictor.iteration.graph import Mask
from predictor.iteration.torchrec.sparse import CostModel, Exchange, Size

Array = NDArray[np.float64]


class ReplicaSync:
    """Costs of one call under many plans, a share of them per step.

    Args:
        groups, loads: all lookup groups and what they load, as of `Exchange`.
        make_exchange: `Exchange`, or a subclass with other cost models.
    """

    def __init__(
        self,
        costs: FixedCosts,
        groups: Sequence[LookupGroup],
        loads: Array,
        make_exchange: type[Exchange] = Exchange,
    ) -> None:
        assert costs.workload.replica_groups is not None
        self.steps = costs.workload.replica_groups.sync_interval
        self._copies = costs.copies
        fused = [i for i, group in enumerate(groups) if group.fused]
        self._reduced = []
        for data_type in dict.fromkeys(groups[i].data_type for i in fused):
            of = [i for i in fused if groups[i].data_type == data_type]
            weights = make_exchange(costs, groups, of, loads, f"{data_type} weights")
            self._reduced.append((weights, Load.SYNCED_WEIGHTS))
        if fused:
            states = make_exchange(costs, groups, fused, loads, "optimizer states")
            self._reduced.append((states, Load.SYNCED_STATES))

    @property
    def collectives(self) -> int:
        """All-reduces of one call."""
        return len(self._reduced)

    @property
    def active(self) -> Mask:
        """Plans ``[plans]`` with a table to average."""
        return np.asarray(np.any([e.active for e, _ in self._reduced], axis=0))

    def cost_ms(self) -> Array:
        """Of one call divided by the steps between calls, ``[plans, ranks]``."""
        parts = (tables.cost(self._average_ms, _of(column)) for tables, column in self._reduced)
        return np.asarray(sum(parts, np.zeros((1, 1))))

    def _average_ms(self, size: Array) -> Array:
        """A rank without such tensors starts no collective, nor do its copies."""
        return np.where(size > 0, self._copies.all_reduce(size), 0.0) / self.steps


class ScatteredCopies:
    """Costs of averaging the weights of every launch in each step, under many plans.

    Args:
        groups, loads, make_exchange: as of `ReplicaSync`.

    Raises:
        InputError: the ranks have no GPU.
    """

    def __init__(
        self,
        costs: FixedCosts,
        groups: Sequence[LookupGroup],
        loads: Array,
        make_exchange: type[Exchange] = Exchange,
    ) -> None:
        if costs.hardware.device == "cpu":
            raise InputError(
                "replica_groups.sharding_strategy is fully_sharded, which TorchRec runs on CUDA "
                "streams and ranks on CPUs cannot; give default, or a profile of GPUs"
            )
        self._copies = costs.copies
        self._launches = {
            i: make_exchange(costs, groups, [i], loads, f"copies {i}")
            for i, group in enumerate(groups)
            if group.fused
        }

    def __contains__(self, group: int) -> bool:
        return group in self._launches

    def scatter_ms(self, group: int) -> Array:
        """Of the reduce-scatter of a launch's weights, ``[plans, ranks]``."""
        return self._ms(group, self._copies.reduce_scatter)

    def gather_ms(self, group: int) -> Array:
        """Of gathering them again, ``[plans, ranks]``."""
        return self._ms(group, self._copies.all_gather)

    def _ms(self, group: int, collective: CostModel) -> Array:
        """A rank without such tables starts no collective, nor do its copies."""

        def model(size: Array) -> Array:
            return np.where(size > 0, collective(size), 0.0)

        return self._launches[group].cost(model, _of(Load.SYNCED_WEIGHTS))


def _of(column: Load) -> Size:
    return lambda load: load[..., column]
