"""Embedding lookups: one entry for every kind of hardware.

The laws are in `embedding_cuda` (FBGEMM on a GPU) and `embedding_cpu` (FBGEMM on a CPU thread);
a profile says which one its constants belong to. Times of shards are marginal inside one fused
launch and add up; the floors count once per launch.
"""

from __future__ import annotations

from predictor.kernels.embedding_cpu import CpuLookups
from predictor.kernels.embedding_cuda import CudaLookups
from predictor.kernels.lookup_shard import (
    LookupModel,
    LookupShard,
    optimizer_state_bytes,
    state_row_bytes,
)
from predictor.plan import ComputeKernel
from predictor.profile_groups import CpuEmbedding
from predictor.profile_schema import HardwareProfile

__all__ = [
    "LookupModel",
    "LookupShard",
    "backward_floor_ms",
    "backward_kernels",
    "backward_ms",
    "forward_floor_ms",
    "forward_kernels",
    "forward_ms",
    "lookup_model",
    "optimizer_state_bytes",
    "prefetch_floor_ms",
    "prefetch_ms",
    "state_row_bytes",
]


def lookup_model(hw: HardwareProfile) -> LookupModel:
    """The law that a profile's embedding constants belong to."""
    law = hw.embedding
    return CpuLookups(hw, law) if isinstance(law, CpuEmbedding) else CudaLookups(hw, law)


def forward_ms(shard: LookupShard, hw: HardwareProfile) -> float:
    """Marginal time of a shard in a fused forward; includes UVM fetches that nothing prefetched."""
    return lookup_model(hw).forward_ms(shard) if shard.ids > 0 else 0.0


def backward_ms(shard: LookupShard, hw: HardwareProfile) -> float:
    """Marginal time of a shard in a fused backward, with its optimizer step."""
    # a dense gradient is written for the whole shard, whatever ids fall on it
    works = shard.ids > 0 or shard.kernel is ComputeKernel.DENSE
    return lookup_model(hw).backward_ms(shard) if works else 0.0


def prefetch_ms(shard: LookupShard, hw: HardwareProfile) -> float:
    """Marginal time of a ``fused_uvm_caching`` shard in a prefetch; other kernels have none."""
    return lookup_model(hw).prefetch_ms(shard) if shard.ids > 0 else 0.0


def forward_floor_ms(hw: HardwareProfile) -> float:
    """Shortest fused forward, once per launch."""
    return lookup_model(hw).forward_floor_ms()


def backward_floor_ms(hw: HardwareProfile) -> float:
    """Shortest fused backward, once per launch."""
    return lookup_model(hw).backward_floor_ms()


def prefetch_floor_ms(hw: HardwareProfile) -> float:
    """Shortest cache prefetch, once per launch with ``fused_uvm_caching`` tables."""
    return lookup_model(hw).prefetch_floor_ms()


def forward_kernels(hw: HardwareProfile) -> int:
    """Launches of one fused forward."""
    law = hw.embedding
    return law.kernels if isinstance(law, CpuEmbedding) else law.forward_kernels


def backward_kernels(hw: HardwareProfile) -> int:
    """Launches of one fused backward."""
    law = hw.embedding
    return law.kernels if isinstance(law, CpuEmbedding) else law.backward_kernels
