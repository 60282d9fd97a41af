"""Memory that shards cannot use: the dense part, the input batch and a margin.

The rules are those of `HeuristicalStorageReservation` in TorchRec's
planner/storage_reservations.py, re-derived and tested against it. Activations are not counted
one by one; the margin stands for them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from predictor.errors import InfeasibleError
from predictor.model.captured import CapturedDense
from predictor.model.topology import Topology
from predictor.model.workload import DATA_TYPE_BYTES, INDEX_BYTES, DcnV2, MeasuredDense, Workload

PARAMETER_MULTIPLIER = 6
"""Weight, gradient, optimizer state and DDP buffers per dense parameter, as TorchRec reserves."""
KJT_COPIES = 20
"""Two pipelined batches with ten internal copies each, as TorchRec reserves."""


def dense_parameters(workload: Workload) -> int:
    """Parameters of bottom MLP, interaction and top MLP, biases included."""
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
        count = len(vectors) + 1
        width = bottom + count * (count - 1) // 2
    layers = ((dense.in_features, *dense.bottom_mlp), (width, *dense.top_mlp))
    return cross + sum((i + 1) * o for dims in layers for i, o in pairwise(dims))


def dense_parameter_bytes(workload: Workload) -> int:
    """Bytes of the dense part's parameters."""
    if isinstance(workload.dense, MeasuredDense):
        return workload.dense.gradient_bytes
    if isinstance(workload.dense, CapturedDense):
        return workload.dense.program(workload).gradient_bytes
    return dense_parameters(workload) * DATA_TYPE_BYTES[workload.dlrm.data_type]


def reserved_bytes(workload: Workload, hbm_bytes: int, reserve: float = 0.15) -> int:
    """Device memory of a rank that shards cannot use.

    TorchRec's `HeuristicalStorageReservation`: a share of the memory as margin, six times the
    dense parameters (weights, gradients, optimizer, DDP buffers), twenty copies of the ids.
    """
    percentage = hbm_bytes - int((1 - reserve) * hbm_bytes)
    return percentage + _dense_and_kjt_bytes(workload)


def _dense_and_kjt_bytes(workload: Workload) -> int:
    dense = PARAMETER_MULTIPLIER * dense_parameter_bytes(workload)
    # num_poolings is left out, as TorchRec does
    ids = sum(f.pooling_factor for t in workload.tables for f in t.features) * workload.batch_size
    return dense + math.ceil(ids * INDEX_BYTES) * KJT_COPIES


def reserve_topology(
    workload: Workload, topology: Topology, reserve: float = 0.15, device: str = "cuda"
) -> Topology:
    """The topology whose caps are what is left for shards.

    Raises:
        InfeasibleError: nothing is left on some rank.
    """
    if device == "cpu":
        taken = _dense_and_kjt_bytes(workload)
        return replace(topology, ddr_cap_bytes=tuple(c - taken for c in topology.ddr_cap_bytes))
    left = tuple(c - reserved_bytes(workload, c, reserve) for c in topology.hbm_cap_bytes)
    if min(left) < 0:
        raise InfeasibleError("nothing is left for shards on some rank")
    return replace(topology, hbm_cap_bytes=left)
