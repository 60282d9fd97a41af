"""TorchRec's own planner, run on a workload: its plan, and how long it takes."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import check_plan
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from shardopt.extras import needs_torchrec
from shardopt.logs import silence_torchrec
from shardopt.torchrec.convert import from_torchrec
from shardopt.torchrec.read_module import parameter_constraints
from shardopt.training.loop import apply_sparse_optimizers
from shardopt.training.model import DLRM, build_model

with needs_torchrec():
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.planner.perf_models import NoopPerfModel
    from torchrec.distributed.planner.stats import NoopEmbeddingStats
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import (
        ParameterConstraints,
        PlannerError,
        ShardingOption,
    )


class TorchRecAnswer(NamedTuple):
    """The plan of TorchRec's planner, timed.

    Args:
        plan: under the workload's table keys; None where it found none that fits by its count.
        seconds: wall time of making the planner and of its `plan`; imports and the model, which
            its users have anyway, are not in it.
        rating_ms: its own cost of the plan: the largest sum of shard costs on a rank, which is no
            iteration time. None without a plan.
    """

    plan: ShardingPlan | None
    seconds: float
    rating_ms: float | None


def plan_with_torchrec(
    workload: Workload, topology: Topology, device: str = "cuda", **search: Any
) -> TorchRecAnswer:
    """Ask `EmbeddingShardingPlanner` for a plan of the workload.

    The model is built on the meta device with its optimizers in the backward, so that the planner
    counts their state; constraints carry the workload's real pooling factors. TorchRec knows no
    constraint on ranks or co-location, which are left out.

    Args:
        topology: caps after the reservation, so TorchRec reserves nothing more.
        device: type of the device to plan for; need not be present.
        search: further arguments of the planner, such as a ``proposer``. It looks at its
            ``timeout_seconds`` between proposals: enumeration and a dynamic program, which come
            before, are not cut short.

    Raises:
        InputError: the workload is not one that TorchRec can build or describe.
    """
    model, constraints = planner_inputs(workload)
    sharders: Any = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    with silence_torchrec():
        theirs = torchrec_topology(topology, device)
        rated = _RecordingPerfModel(theirs)
        start = time.perf_counter()
        planner = EmbeddingShardingPlanner(
            topology=theirs,
            batch_size=workload.batch_size,
            constraints=constraints,
            storage_reservation=FixedPercentageStorageReservation(0.0),
            performance_model=rated,
            # the report that it logs by default takes time and is not planning
            stats=NoopEmbeddingStats(),
            debug=False,
            **search,
        )
        try:
            torchrec_plan = planner.plan(model, sharders)
        except PlannerError:
            torchrec_plan = None
        seconds = time.perf_counter() - start
    if torchrec_plan is None:
        return TorchRecAnswer(None, seconds, None)
    plan = from_torchrec(
        torchrec_plan,
        model,
        world_size=topology.world_size,
        local_world_size=topology.local_world_size,
    )
    fitting = check_plan(plan, workload, where="TorchRec's plan")
    return TorchRecAnswer(fitting, seconds, rated.best_ms)


def planner_inputs(workload: Workload) -> tuple[DLRM, dict[str, ParameterConstraints]]:
    """The model and constraints that the planner gets; fails early where planning would."""
    constraints = parameter_constraints(workload)
    model = build_model(workload, "meta")
    apply_sparse_optimizers(model, workload)
    return model, constraints


class _RecordingPerfModel(NoopPerfModel):
    """TorchRec's default rating; remembers the best, which belongs to the plan it returns."""

    def __init__(self, topology: TorchRecTopology) -> None:
        super().__init__(topology)
        self.best_ms = math.inf

    def rate(self, plan: list[ShardingOption]) -> float:
        rating = super().rate(plan)
        self.best_ms = min(self.best_ms, rating)
        return rating


def torchrec_topology(topology: Topology, device: str = "cuda") -> TorchRecTopology:
    """The same ranks and caps in TorchRec's class, with its default bandwidths."""
    pods = topology.intra_group_size // topology.local_world_size
    theirs = TorchRecTopology(
        world_size=topology.world_size,
        local_world_size=topology.local_world_size,
        compute_device=device,
        **({"pod_size": pods} if pods > 1 else {}),
    )
    # not through custom_topology_data: with that the enumerator splits rows in proportion to the
    # caps, which training cannot run (its row blocks are all of one size)
    for rank in theirs.devices:
        rank.storage.ddr = topology.ddr_cap_bytes[rank.rank]
        rank.storage.hbm = topology.hbm_cap_bytes[rank.rank] if device != "cpu" else 0
    return theirs
