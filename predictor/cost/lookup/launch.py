"""From the summed loads of a rank to the time of its fused lookup.

Times of shards add up but for three things that only the launch as a whole decides: how many
tables share the L2, how many bits of the row numbers are sorted, and whether the longest chain of
latencies outlasts all the bytes. Each only adds to the sum of the shards: it is a lower bound.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from predictor.cost.loads import SHARED, Load, LookupGroup
from predictor.cost.lookup.embedding import SHARERS, sort_pass_ms, sort_passes
from predictor.hardware.loader import HardwareProfile

Array = NDArray[np.float64]


def forward_ms(load: Array) -> Array:
    """The forward of launches with summed loads ``[..., COLUMNS]``, floors apart."""
    time = load[..., Load.FORWARD_MS] + _sharing_ms(load)
    return np.maximum(time, load[..., Load.FORWARD_LONGEST_MS])


def backward_ms(load: Array, group: LookupGroup, hardware: HardwareProfile) -> Array:
    """The backward of launches with summed loads ``[..., COLUMNS]``, floors apart."""
    time = load[..., Load.BACKWARD_MS] + _sorting_ms(load, group, hardware)
    return np.maximum(time, load[..., Load.BACKWARD_LONGEST_MS])


def _sharing_ms(load: Array) -> Array:
    """What tables add by sharing the L2: linear in their number between 1, 2, 4, 8 and 16.

    A table's cost at each of these shares is tabulated once, so that the loads of tables still add
    up; which of them count follows from the number of tables on the rank.
    """
    found: Array = np.zeros(())
    for column, tables in enumerate(SHARERS, start=SHARED.start):
        added = load[..., column]
        if added.any():
            half = tables / 2
            found = found + added * np.clip((load[..., Load.SHARDS] - half) / half, 0.0, 1.0)
    return found


def _sorting_ms(load: Array, group: LookupGroup, hardware: HardwareProfile) -> Array:
    """Passes of the sort beyond those that the tables would need one by one."""
    one = sort_pass_ms(hardware, weighted=group.weighted, pooled=group.pooling != "none")
    passes = sort_passes(load[..., Load.ROWS], hardware)
    beyond = load[..., Load.IDS] * passes - load[..., Load.SORTED]
    return np.maximum(beyond, 0.0) * one
