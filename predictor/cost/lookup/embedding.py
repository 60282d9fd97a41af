"""The kernel model of embedding lookups that a profile's constants belong to."""

from __future__ import annotations

from predictor.cost.lookup.cpu import CpuLookups
from predictor.cost.lookup.cuda import CudaLookups
from predictor.cost.lookup.shard import LookupModel
from predictor.hardware.schema import CpuEmbedding, HardwareProfile


def lookup_model(hw: HardwareProfile) -> LookupModel:
    """FBGEMM on a CPU thread, or on a GPU."""
    if isinstance(hw.embedding, CpuEmbedding):
        return CpuLookups(hw, hw.embedding)
    return CudaLookups(hw, hw.embedding)
