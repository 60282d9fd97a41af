"""shardopt's objective for TorchRec's own planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from predictor.hardware.schema import HardwareProfile
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.plan_check import match_plan
from predictor.model.workload import Workload
from shardopt.extras import needs_torchrec
from shardopt.torchrec.logs import logger
from shardopt.torchrec.module.read_module import read_workload, tell_device_groups
from shardopt.torchrec.module.read_table import UserInputs, check_pooling_factor
from shardopt.torchrec.plan.options import TableKey, to_plan
from shardopt.torchrec.planning.left_over import describe_reasons, reasons_of
from shardopt.torchrec.planning.machine import check_bandwidths, detect_hardware, read_topology

with needs_torchrec():
    from torch import nn
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.planner.perf_models import NoopPerfModel
    from torchrec.distributed.planner.types import ParameterConstraints, PerfModel, ShardingOption
    from torchrec.distributed.types import ModuleSharder


class ShardoptPerfModel(PerfModel):
    """Rates proposals by predicted iteration time, in ms.

    TorchRec still proposes and places by its own estimates, so it may miss what
    `ShardoptPlanner` finds; of what it does propose, the fastest wins. TorchRec's rating of tables
    that shardopt has no model for is added, and they are logged once.

    Args:
        topology: ranks; its bandwidths are not used.
        module, sharders: as `EmbeddingShardingPlanner.plan` gets them.
        batch_size: samples per rank.
        hardware, constraints, model, default_pooling_factor: as in `ShardoptPlanner`.

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
        default_pooling_factor: float | None = None,
    ) -> None:
        check_bandwidths(topology)
        check_pooling_factor(default_pooling_factor)
        tell_device_groups(module, constraints or {}, topology.compute_device)
        self._hardware = detect_hardware(hardware, topology.compute_device)
        self._topology = topology
        self._request = (module, sharders)
        self._facts = UserInputs(
            batch_size,
            constraints or {},
            model,
            default_pooling_factor,
            device=topology.compute_device,
        )
        self._left: dict[TableKey, str] | None = None
        self._batch: PlanScorer | None = None

    def rate(self, plan: list[ShardingOption]) -> float:
        """Predicted iteration time of placed options, one a table."""
        if self._left is None:
            self._left = reasons_of(plan, self._topology, self._request[1])
            if self._left:
                logger.warning(
                    "rated by TorchRec's own estimate, which is not validated: %s",
                    describe_reasons(self._left),
                )
        mine = [option for option in plan if (option.path, option.name) not in self._left]
        theirs = [option for option in plan if (option.path, option.name) in self._left]
        rating = float(NoopPerfModel(self._topology).rate(theirs))
        return rating + self._predict(mine) if mine else rating

    def _predict(self, plan: list[ShardingOption]) -> float:
        if self._batch is None:
            workload = read_workload(*self._request, plan, self._facts)
            ranks = read_topology(self._topology, self._hardware)
            self._batch = PlanScorer(workload, ranks, self._hardware)
        workload, ranks = self._batch.workload, self._batch.topology
        ours = to_plan(plan, workload, ranks.world_size, ranks.local_world_size)
        return float(self._batch.score([match_plan(workload, ranks, ours)])[0])
