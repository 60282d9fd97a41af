"""shardopt's objective for TorchRec's own planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from predictor.hardware.loader import HardwareProfile
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.plan_check import match_plan
from predictor.model.workload import Workload
from shardopt.extras import needs_torchrec
from shardopt.torchrec.module.read_module import check_device_groups, read_workload
from shardopt.torchrec.module.read_table import UserInputs
from shardopt.torchrec.plan.options import to_plan
from shardopt.torchrec.planning.machine import check_bandwidths, detect_hardware, read_topology

with needs_torchrec():
    from torch import nn
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.planner.types import ParameterConstraints, PerfModel, ShardingOption
    from torchrec.distributed.types import ModuleSharder


class ShardoptPerfModel(PerfModel):
    """Rates proposals by predicted iteration time, in ms.

    TorchRec still proposes and places by its own estimates, so it may miss what
    `ShardoptPlanner` finds; of what it does propose, the fastest wins.

    Args:
        topology: ranks; its bandwidths are not used.
        module, sharders: as `EmbeddingShardingPlanner.plan` gets them.
        batch_size: samples per rank.
        hardware, constraints, model: as in `ShardoptPlanner`.

    Raises:
        InputError: as `ShardoptPlanner.plan` does, for missing facts on the first proposal.
    """

    def __init__(
        self,
        topology: TorchRecTopology,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[nn.Module]],
        batch_size: int,
        *,
        hardware: str | HardwareProfile | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        model: Workload | None = None,
    ) -> None:
        check_bandwidths(topology)
        check_device_groups(module, constraints or {}, topology.compute_device)
        self._hardware = detect_hardware(hardware, topology.compute_device)
        self._topology = read_topology(topology, self._hardware)
        self._request = (module, sharders)
        self._facts = UserInputs(
            batch_size, constraints or {}, model, device=topology.compute_device
        )
        self._batch: PlanScorer | None = None

    def rate(self, plan: list[ShardingOption]) -> float:
        """Predicted iteration time of placed options, one a table."""
        ranks = self._topology
        if self._batch is None:
            workload = read_workload(*self._request, plan, self._facts)
            self._batch = PlanScorer(workload, ranks, self._hardware)
        workload = self._batch.workload
        ours = to_plan(plan, workload, ranks.world_size, ranks.local_world_size)
        return float(self._batch.score([match_plan(workload, ranks, ours)])[0])
