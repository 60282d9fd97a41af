"""Embedding lookups on any hardware: picks the kernel model and calls it.

The kernel models are in `predictor.cost.lookup.cuda` (FBGEMM on a GPU) and
`predictor.cost.lookup.cpu` (FBGEMM on a CPU thread); a profile says which one its constants belong
to. Times of shards are marginal inside one fused launch and add up; the floors count once per
launch, and so does the longest of the latencies. `predictor.cost.loads` puts them together.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from predictor.cost.lookup.cpu import CpuLookups
from predictor.cost.lookup.cuda import CudaLookups
from predictor.cost.lookup.shard import (
    LookupModel,
    LookupShard,
)
from predictor.hardware.schema import CpuEmbedding, HardwareProfile
from predictor.model.plan import ComputeKernel

Array = NDArray[np.float64]

SHARERS = (2, 4, 8, 16)
"""Numbers of tables that share the L2 for which a forward is tabulated; the last holds for more."""


def lookup_model(hw: HardwareProfile) -> LookupModel:
    """The kernel model that a profile's embedding constants belong to."""
    if isinstance(hw.embedding, CpuEmbedding):
        return CpuLookups(hw, hw.embedding)
    return CudaLookups(hw, hw.embedding)


def forward_ms(shard: LookupShard, hw: HardwareProfile) -> float:
    """Marginal time of a shard in a fused forward; includes UVM fetches that nothing prefetched."""
    return lookup_model(hw).forward_ms(shard) if shard.ids > 0 else 0.0


def sharing_ms(shard: LookupShard, hw: HardwareProfile) -> tuple[float, ...]:
    """What a forward adds when 2, 4, 8, 16 tables share the L2, each beyond the one before; >= 0.

    Zero for more tables than the batch keeps in flight, and on a CPU, which has one thread.
    """
    model = lookup_model(hw)
    most = model.tables_in_flight(shard) if isinstance(model, CudaLookups) else 1.0
    if not isinstance(model, CudaLookups) or most == 1.0 or shard.ids <= 0:
        return (0.0,) * len(SHARERS)
    times = [model.forward_ms(shard, min(n, most)) for n in (1, *SHARERS)]
    return tuple(more - less for less, more in pairwise(times))


def forward_longest_ms(shard: LookupShard, hw: HardwareProfile) -> float:
    """Shortest forward of a launch with this shard, however few ids it has; 0 on a CPU."""
    model = lookup_model(hw)
    return model.forward_longest_ms(shard) if isinstance(model, CudaLookups) else 0.0


def backward_longest_ms(shard: LookupShard, hw: HardwareProfile) -> float:
    """Shortest backward of a launch with this shard, however few ids it has; 0 on a CPU."""
    model = lookup_model(hw)
    return model.backward_longest_ms(shard) if isinstance(model, CudaLookups) else 0.0


def sort_passes(rows: ArrayLike, hw: HardwareProfile) -> Array:
    """Passes over the ids when a launch sorts ``rows`` rows together; 0 on a CPU, where each table
    is sorted separately."""
    model = lookup_model(hw)
    if not isinstance(model, CudaLookups):
        return np.zeros(np.shape(rows))
    return model.sort_passes(rows)


def sort_pass_ms(hw: HardwareProfile, *, weighted: bool, pooled: bool) -> float:
    """One such pass over one id."""
    model = lookup_model(hw)
    if not isinstance(model, CudaLookups):
        return 0.0
    return model.sort_pass_ms(weighted=weighted, pooled=pooled)


def backward_ms(shard: LookupShard, hw: HardwareProfile) -> float:
    """Marginal time of a shard in a fused backward, with its optimizer step."""
    # a dense gradient is written for the whole shard, with or without ids on it
    works = shard.ids > 0 or shard.kernel is ComputeKernel.DENSE
    return lookup_model(hw).backward_ms(shard) if works else 0.0


def prefetch_ms(shard: LookupShard, hw: HardwareProfile) -> float:
    """Marginal time of a ``fused_uvm_caching`` shard in a prefetch, if no other table shared its
    cache; 0 for other kernels."""
    return lookup_model(hw).prefetch_ms(shard) if shard.ids > 0 else 0.0


def fetch_ms(shard: LookupShard, hw: HardwareProfile) -> float:
    """Time to fetch one row of a ``fused_uvm_caching`` shard into the cache; 0 on a CPU."""
    model = lookup_model(hw)
    return model.fetch_ms(shard) if isinstance(model, CudaLookups) else 0.0


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
    constants = hw.embedding
    return constants.kernels if isinstance(constants, CpuEmbedding) else constants.forward_kernels


def backward_kernels(hw: HardwareProfile) -> int:
    """Launches of one fused backward."""
    constants = hw.embedding
    return constants.kernels if isinstance(constants, CpuEmbedding) else constants.backward_kernels
