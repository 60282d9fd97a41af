"""TorchRec's own estimate as an objective: rating and memory of any plan.

The rating is that of `NoopPerfModel.rate` (planner/perf_models.py): the largest sum of shard costs
on a rank. Memory is what `EmbeddingStorageEstimator` (planner/shard_estimators.py) counts with its
default pipeline type. Both are for options that TorchRec does not enumerate, too: its estimator
takes shards of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from predictor.model.memory.ranks import MemoryRules, ShardMemory, shard_memory
from predictor.model.plan import TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from search.baselines.torchrec_planner import Bandwidths, CostModel
from search.space.option import Option, Space


class TorchRecObjective:
    """Rates plans of one workload.

    Args:
        topology: caps after the reservation.
        bandwidths: TorchRec's defaults if None.
    """

    def __init__(
        self,
        workload: Workload,
        topology: Topology,
        device: str = "cuda",
        bandwidths: Bandwidths | None = None,
    ) -> None:
        self.workload = replace(workload, train_pipeline="base")
        self.topology = topology
        self.device = device
        self._model = CostModel(self.workload, topology, device, bandwidths or Bandwidths())
        self._caps = np.array([topology.hbm_cap_bytes, topology.ddr_cap_bytes], dtype=np.float64)

    def cost_ms(self, option: Option) -> float:
        """Cost of each shard of an option; it does not depend on the rank."""
        return self._model.shard_perf(option).total

    def memory(self, option: Option) -> tuple[ShardMemory, ...]:
        """What every shard of an option needs on its rank."""
        return tuple(
            shard_memory(
                self.workload.tables[option.table],
                self.workload,
                self.topology,
                option.sharding_type,
                option.compute_kernel,
                option.sizes,
                option.cache_load_factor,
                device=self.device,
                rules=MemoryRules.TORCHREC,
            )
        )

    def with_torchrec_memory(self, space: Space) -> Space:
        """The same options with their memory as TorchRec counts it."""
        options = tuple(
            tuple(replace(option, memory=self.memory(option)) for option in table)
            for table in space.options
        )
        return replace(space, options=options)

    def rating_ms(self, plan: Sequence[TablePlan]) -> float:
        """Rating of a plan; ``plan`` has a table each in the workload's order."""
        loads = np.zeros(self.topology.world_size)
        for option, ranks in _placed(plan):
            np.add.at(loads, list(ranks), self.cost_ms(option))
        return float(loads.max())

    def fits(self, plan: Sequence[TablePlan]) -> bool:
        """Every rank has room for its shards by TorchRec's count."""
        used = np.zeros_like(self._caps)
        for option, ranks in _placed(plan):
            _add(used, self.memory(option), ranks)
        return bool((used <= self._caps).all())


def _placed(plan: Sequence[TablePlan]) -> list[tuple[Option, tuple[int, ...]]]:
    """Every table's option, made from its shards, and their ranks."""
    return [
        (
            Option(
                index,
                table.sharding_type,
                table.compute_kernel,
                tuple(shard.size for shard in table.shards),
                tuple(shard.offset for shard in table.shards),
                module=table.module,
                cache_load_factor=table.cache_load_factor,
            ),
            tuple(table.ranks),
        )
        for index, table in enumerate(plan)
    ]


def _add(used: NDArray[np.float64], memory: Sequence[ShardMemory], ranks: Sequence[int]) -> None:
    for rank, need in zip(ranks, memory, strict=True):
        used[0, rank] += need.hbm_bytes
        used[1, rank] += need.ddr_bytes
