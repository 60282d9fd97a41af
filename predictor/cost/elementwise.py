"""Kernels bound by memory traffic: activations, loss, concatenation, copies, optimizer steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from predictor import units
from predictor.hardware.schema import HardwareProfile

Array = NDArray[np.float64]


def memory_ms(hw: HardwareProfile, bytes_moved: ArrayLike) -> Array:
    """Return the time in ms of a kernel that reads and writes ``bytes_moved``, in their shape.

    ``t = floor + max((bytes - kept)/(efficiency BW), bytes/BW_l2) + ramp bytes/(bytes + half)``.
    The ramp is bandwidth that grows with size, as in the measured DRAM curves of Lin et al. 2022
    (ml_perf_model, analysis/utils.py), there in three disjoint pieces. Operands of a step are warm:
    what the L2 kept of the kernel before costs nothing, and small ones never leave it.
    """
    cost = hw.elementwise
    size = np.asarray(bytes_moved, dtype=np.float64)
    stream = np.maximum(size - units.mib(cost.kept_mib), 0.0) / hw.streaming
    if cost.l2_gb_s is not None:
        stream = np.maximum(stream, size / units.gb_per_s(cost.l2_gb_s))
    ramp = units.us(cost.ramp_us) * size / (size + units.MIB * cost.ramp_half_mib)
    return np.asarray(units.us(cost.floor_us) + stream + ramp)


def column_sums_ms(hw: HardwareProfile, rows: float, bytes_moved: float) -> float:
    """Return the time in ms of a kernel that sums a matrix over its rows, as for a bias's gradient.

    ``t = us + ns rows + bytes / (efficiency BW)``: the columns decide how many blocks there are,
    so each walks down more rows as the batch grows (`setReduceConfig` of aten's Reduce.cuh).
    """
    cost = hw.elementwise
    fixed = units.us(cost.column_sum_us + 1e-3 * cost.column_sum_ns_per_row * rows)
    return fixed + bytes_moved / hw.streaming


def columns_ms(hw: HardwareProfile, bytes_moved: ArrayLike) -> Array:
    """Return the time in ms of a kernel that copies columns of matrices, in the bytes' shape.

    It is `memory_ms` at the lower bandwidth of short stretches.
    """
    return memory_ms(hw, np.asarray(bytes_moved, dtype=np.float64) / hw.elementwise.columns)


def decode_ms(hw: HardwareProfile, bytes_moved: ArrayLike) -> Array:
    """Return the time in ms of a kernel that unpacks quantised groups, in the bytes' shape.

    It is `memory_ms` at the lower bandwidth of kernels that also shift and scale.
    """
    return memory_ms(hw, np.asarray(bytes_moved, dtype=np.float64) / hw.elementwise.decode)


def copy_h2d_ms(hw: HardwareProfile, bytes_moved: ArrayLike) -> Array:
    """Return the time in ms of a bulk copy from pinned host to device memory, in the bytes' shape.

    ``t = latency + bytes / BW`` of the host link. Source: Lin et al. 2022 (memcpy model).
    """
    size = np.asarray(bytes_moved, dtype=np.float64)
    return np.asarray(units.us(hw.memory.host_link_latency_us) + size / hw.memory.host_link)
