"""TorchRec's default plan, and the memory reserved from it for the dense part, the input batch and
a margin.

The rules are those of `HeuristicalStorageReservation` in TorchRec's
planner/storage_reservations.py, re-derived and tested against it. Activations are not counted
one by one; the margin stands for them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from predictor.errors import InfeasibleError, ShardoptError
from predictor.model.captured import CapturedDense
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from predictor.model.workload import DATA_TYPE_BYTES, INDEX_BYTES, DcnV2, MeasuredDense, Workload
from search.baselines.torchrec_planner import torchrec_plan

PARAMETER_MULTIPLIER = 6
"""Weight, gradient, optimizer state and DDP buffers per dense parameter, as TorchRec reserves."""
KJT_COPIES = 20
"""Two pipelined batches with ten internal copies each, as TorchRec reserves."""


def dense_parameters(workload: Workload) -> int:
    """Count the parameters of bottom MLP, interaction and top MLP, with biases."""
    dense = workload.dlrm
    if dense.linears:
        return sum((i + 1) * o for i, o in dense.linears)
    bottom = dense.bottom_mlp[-1] if dense.bottom_mlp else dense.in_features
    vectors = [t.embedding_dim for t in workload.tables for _ in t.features]
    width, cross = bottom + sum(vectors), 0
    if isinstance(dense.interaction, DcnV2):
        low_rank = dense.interaction.low_rank_dim
        cross = dense.interaction.layers * (2 * width * low_rank + width)
    elif dense.interaction == "dot":
        width = dense.joined_width(bottom, len(vectors) + 1)
    layers = ((dense.in_features, *dense.bottom_mlp), (width, *dense.top_mlp))
    return cross + sum((i + 1) * o for dims in layers for i, o in pairwise(dims))


def _dense_and_kjt_bytes(workload: Workload) -> int:
    """Return the bytes of six times the dense parameters and twenty copies of the ids."""
    if isinstance(workload.dense, MeasuredDense):
        dense = workload.dense.gradient_bytes
    elif isinstance(workload.dense, CapturedDense):
        dense = workload.dense.program(workload).gradient_bytes
    else:
        dense = dense_parameters(workload) * DATA_TYPE_BYTES[workload.dlrm.data_type]
    # num_poolings is left out, as TorchRec does
    ids = sum(f.pooling_factor for t in workload.tables for f in t.features) * workload.batch_size
    return PARAMETER_MULTIPLIER * dense + math.ceil(ids * INDEX_BYTES) * KJT_COPIES


def reserve_topology(
    workload: Workload, topology: Topology, reserve: float = 0.15, device: str = "cuda"
) -> Topology:
    """Return the topology with caps less the reservation.

    Args:
        reserve: margin, as a share of the device memory.

    Raises:
        InfeasibleError: nothing is left on some rank.
    """
    reserved_bytes = _dense_and_kjt_bytes(workload)
    if device == "cpu":
        return replace(
            topology, ddr_cap_bytes=tuple(c - reserved_bytes for c in topology.ddr_cap_bytes)
        )
    caps = tuple(int((1 - reserve) * cap) - reserved_bytes for cap in topology.hbm_cap_bytes)
    if min(caps) < 0:
        raise InfeasibleError("nothing is left for shards on some rank")
    return replace(topology, hbm_cap_bytes=caps)


def torchrec_default_plan(
    workload: Workload, machine: Topology, device: str
) -> tuple[Topology, ShardingPlan]:
    """Return the plan of TorchRec's default planner, and the topology that it planned for.

    Raises:
        ShardoptError: it finds no plan that fits.
    """
    topology = reserve_topology(workload, machine, device=device)
    default_plan = torchrec_plan(workload, topology, device)
    if default_plan is None:
        raise ShardoptError("TorchRec's planner finds no plan that fits")
    tables = dict(zip(workload.keys, default_plan.tables, strict=True))
    return topology, ShardingPlan(tables, machine.world_size, machine.local_world_size)
